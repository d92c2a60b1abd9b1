"""The operations of `ops` for a CPU: the same names and signatures, with numba's kernels where
they are faster and torch where they are not.

The kernels are for float32. Other types and a missing numba go to `ops`, one by one. Leaves
out the products, which are fast only with weights laid out for them: `packed` changes a loaded
model to such. Given (no notebook builds it).

Tensor letters: T tokens, N requests, H query heads, K key/value heads, G = H // K, D head
dimension, B block size, S key positions.
"""

from __future__ import annotations

import functools
import sys

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

try:
    import numba

    from minivllm import cpu_attention, cpu_kernels, cpu_layers
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
    """Run every kernel once, so that no later step waits for the compiler; says so on stderr
    unless an earlier start has left the compiled code in numba's cache."""
    if cpu_kernels is None:
        return
    x, cos, slots = torch.ones(2, 32), torch.ones(2, 8), torch.arange(2)
    rms_norm(x, x[0], 1e-5)
    if cpu_kernels.rms_norm.stats.cache_misses:
        print("compiling the CPU kernels (once, about 30 s)", file=sys.stderr, flush=True)
    silu_mul(x)
    q, k, v = torch.ones(2, 6, 16).split(2, dim=1)
    q, k = apply_rope(q, cos, cos), apply_rope(k, cos, cos)
    cache = torch.zeros(2, 2, 16, 2, 16)
    for values in (v, v.contiguous()):
        store_kv(k, values, cache[0], cache[1], slots)
    decode_attention(q, cache[0], cache[1], slots[:, None].int(), slots.int() + 1, 2, 1.0)
    _warm_up_products(x.numpy(), cos.numpy(), q.numpy())


def _warm_up_products(x: np.ndarray, cos: np.ndarray, heads: np.ndarray) -> None:
    # One matrix [96, 32] serves as every product of a layer with 2 heads of 16.
    weight, out, threads = (
        np.ones((96, 32), np.float32),
        np.empty((2, 96), np.float32),
        num_threads(),
    )
    codes, scales = np.zeros((96, 16), np.uint8), np.zeros((96, 1, 2), np.float32)
    cpu_kernels.pack(weight, 4, 1e-6, codes, scales)
    matrix, norm = (codes, scales, 4), (x[0], 1e-5)
    cpu_kernels.unpack(*matrix, weight)
    cpu_kernels.packed_vector_product(x[0], *matrix, out[0])
    cpu_kernels.packed_product(x, *matrix, out, threads)
    cpu_kernels.dense_product(x, weight, out, threads)
    q, k, v = heads, heads.copy(), heads.copy()
    cpu_layers.before_attention(x, norm, matrix, cos, cos, q, k, v, threads)
    square = (codes[:32], scales[:32], 4)
    merged = (codes[:64], scales[:64], 4)
    cpu_layers.after_attention(x, x, square, norm, merged, square, x.copy(), threads)


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
