"""The operations of `ops` for a CPU: the same names and signatures, with numba's kernels where
they are faster and torch where they are not.

The kernels are for float32. Other types and a missing numba go to `ops`, one by one. Leaves
out the products, which are fast only with weights laid out for them: `cpu.packed` changes a loaded
model to such. Given (no notebook builds it).

Tensor letters: T tokens, N requests, H query heads, K key/value heads, G = H // K, D head
dimension, B block size, S key positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from minivllm import ops
from minivllm.ops import (
    AttentionMetadata,
    embed,
    linear,
    rope_table,
    slot_mapping,
)
from minivllm.waiting import waiting

try:
    import numba

    from minivllm.cpu import attention as cpu_attention
    from minivllm.cpu import kernels as cpu_kernels
    from minivllm.cpu import layers as cpu_layers
except ImportError:  # numba is an extra: everything works without it, only slower
    cpu_attention = cpu_kernels = cpu_layers = None  # type: ignore[assignment]

__all__ = [
    "add_rms_norm",
    "apply_rope",
    "attention",
    "embed",
    "has_kernels",
    "linear",
    "norm_rope",
    "num_threads",
    "rms_norm",
    "rope_table",
    "silu_mul",
    "slot_mapping",
    "store_kv",
    "warm_up",
]

QUERY_CHUNK = 128  # queries of a prompt that attend at a time


def has_kernels(x: Tensor) -> bool:
    """Whether numba's kernels can take tensors like `x`."""
    return cpu_kernels is not None and x.dtype == torch.float32 and x.device.type == "cpu"


def num_threads() -> int:
    """Threads of a kernel: as many as torch uses, which numba is told here."""
    _start_pool()
    most = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    count = min(torch.get_num_threads(), most)
    if numba.get_num_threads() != count:
        numba.set_num_threads(count)
    return count


@functools.cache
def _start_pool() -> None:
    """Start numba's threads without a change to torch's.

    Both may stand on one OpenMP, whose number of threads numba sets to that of the cores: with
    OMP_NUM_THREADS=1 on a busy machine, threads would then wait for each other.
    """
    before = torch.get_num_threads()
    numba.get_num_threads()
    torch.set_num_threads(before)


def warm_up() -> None:
    """Run every kernel once, so that no later step waits for the compiler; says on stderr how far
    it is unless an earlier start has left the compiled code in numba's cache."""
    if cpu_kernels is None:
        return
    first, *rest = [*_layer_calls(), *_product_calls()]
    with waiting("loading the CPU kernels"):
        first()
        if not cpu_kernels.rms_norm.stats.cache_misses:
            for call in rest:
                call()
            return
    with waiting("compiling the CPU kernels, once") as come_to:
        for number, call in enumerate(rest, start=1):
            come_to(f"{number} of {len(rest) + 1}")
            call()


def _layer_calls() -> list[Callable[[], object]]:
    """A call of each kernel of a layer, on the smallest tensors of every layout that it meets;
    `rms_norm` is the first."""
    x, cos, slots = torch.ones(2, 32), torch.ones(2, 8), torch.arange(2)
    part, heads = torch.ones(2, 6, 16)[:, 4:], torch.ones(2, 2, 16)  # of a product; of its own
    keys, values = torch.zeros(2, 2, 16, 2, 16)
    return [
        partial(rms_norm, x, x[0], 1e-5),
        partial(silu_mul, x),
        partial(apply_rope, part, cos, cos),
        partial(store_kv, heads, part, keys, values, slots),
        partial(store_kv, heads, heads, keys, values, slots),
        partial(
            decode_attention, heads, keys, values, slots[:, None].int(), slots.int() + 1, 2, 1.0
        ),
    ]


def _product_calls() -> list[Callable[[], object]]:
    """The same for products and for what has them inside. One matrix [96, 32] serves as every
    product of a layer with 2 heads of 16."""
    x, cos, weight = (np.ones(size, np.float32) for size in ((2, 32), (2, 8), (96, 32)))
    out, threads = np.empty((2, 96), np.float32), num_threads()
    codes, scales = np.zeros((96, 16), np.uint8), np.zeros((96, 1, 2), np.float32)
    matrix, norm = (codes, scales, 4), (x[0], 1e-5)
    square, merged = (codes[:32], scales[:32], 4), (codes[:64], scales[:64], 4)
    q, k, v = (np.ones((2, 2, 16), np.float32) for _ in range(3))
    before = (x, norm, matrix, cos, cos, q, k, v, threads)
    after = (x, x, square, norm, merged, square, x.copy(), threads)
    return [
        partial(cpu_kernels.pack, weight, 4, 1e-6, codes, scales),
        partial(cpu_kernels.unpack, *matrix, weight),
        partial(cpu_kernels.packed_vector_product, x[0], *matrix, out[0]),
        partial(cpu_kernels.packed_product, x, *matrix, out, threads),
        partial(cpu_kernels.dense_product, x, weight, out, threads),
        partial(cpu_layers.before_attention, *before),
        partial(cpu_layers.after_attention, *after),
    ]


# -- layers --


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ops.rms_norm`; a composite of seven torch operations on a CPU, one kernel here."""
    if not has_kernels(x):
        return ops.rms_norm(x, weight, eps)
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(rows)
    cpu_kernels.rms_norm(rows.numpy(), weight.numpy(), eps, out.numpy())
    return out.view(x.shape)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `ops.add_rms_norm`."""
    total = x + y
    return total, rms_norm(total, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `ops.silu_mul`."""
    if not has_kernels(gate_up):
        return ops.silu_mul(gate_up)
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    cpu_kernels.silu_mul(gate_up.numpy(), out.numpy())
    return out


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `ops.apply_rope`."""
    if not has_kernels(x):
        return ops.apply_rope(x, cos, sin)
    out = torch.empty(x.shape)
    cpu_kernels.apply_rope(x.numpy(), cos.numpy(), sin.numpy(), out.numpy())
    return out


def norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """See `ops.norm_rope`."""
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin)


# -- paged key/value cache --


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `ops.store_kv`."""
    if not has_kernels(k):
        ops.store_kv(k, v, k_cache, v_cache, slot_mapping)
        return
    tensors = k, v, k_cache, v_cache, slot_mapping
    cpu_kernels.store_kv(*(tensor.numpy() for tensor in tensors))


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """See `ops.attention`."""
    return ops.attention(
        q, k_cache, v_cache, metadata, scale, decode=decode_attention, prefill=prefill_attention
    )


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
) -> Tensor:
    """See `ops.decode_attention`; without gathering the keys and values into one place first."""
    if not has_kernels(q) or q.shape[2] % 16 != 0:
        return ops.decode_attention(q, k_cache, v_cache, block_table, seq_lens, max_seq_len, scale)
    out = torch.empty_like(q)
    arrays = [t.numpy() for t in (q, k_cache, v_cache, block_table, seq_lens)]
    # A request is one piece of work if there are enough of them for all threads.
    shares = 1 if len(q) >= num_threads() else k_cache.shape[2]
    cpu_attention.decode_attention(*arrays, scale, out.numpy(), shares)
    return out


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """See `ops.prefill_attention`; in portions of queries, each with the keys up to its end, so
    that about half of the products with keys nobody may see are never done."""
    out, past = torch.empty_like(q), len(k) - len(q)
    for start in range(0, len(q), QUERY_CHUNK):
        end = min(start + QUERY_CHUNK, len(q))
        keys, values = k[: past + end], v[: past + end]
        out[start:end] = ops.prefill_attention(q[start:end], keys, values, scale)
    return out
