"""The operations of `ops` for a CPU: the same names and signatures, with numba's kernels where
they are faster and torch where they are not.

The kernels are for float32 and bfloat16; other types and a missing numba go to `ops`, one by one.
Does not handle products, which are fast only with weights laid out for them: see `cpu.packed`.
Not built in the course.

Tensor letters: T tokens, N requests, H query heads, K key/value heads, G = H // K, D head
dimension, B block size, S key positions.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm import ops
from minivllm.ops import AttentionMetadata, embed, linear, rope_table, slot_mapping

try:
    import numba

    from minivllm.cpu import kernels as cpu_kernels
except ImportError:  # numba is an extra: everything works without it, only slower
    cpu_kernels = None  # type: ignore[assignment]

__all__ = [
    "add_rms_norm",
    "attention",
    "embed",
    "linear",
    "norm_rope",
    "rms_norm",
    "rope_table",
    "silu_mul",
    "slot_mapping",
    "store_kv",
]

QUERY_CHUNK = 128  # queries of a prompt that attend at a time
FEW_ROWS = 16  # from here on, several threads are worth starting for an operation on rows
TYPES = (torch.float32, torch.bfloat16)


def has_kernels(x: Tensor) -> bool:
    """Return whether numba's kernels can take tensors like `x`, which is on a CPU."""
    return cpu_kernels is not None and x.dtype in TYPES


def array_of(x: Tensor) -> np.ndarray:
    """A view of `x` as the kernels take it: numpy has no bfloat16, so its bits come as int16."""
    return x.view(torch.int16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


def num_threads() -> int:
    """Return the number of threads of a kernel, torch's, after telling it to numba."""
    _start_pool()
    count = torch.get_num_threads()
    if numba.get_num_threads() != count:
        most = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
        count = min(count, most)
        numba.set_num_threads(count)
    return count


def kernel_for(name: str, num_rows: int) -> Any:
    """The form of a kernel that is faster for this number of rows."""
    if num_rows < FEW_ROWS:
        return getattr(cpu_kernels, name)
    num_threads()
    return getattr(cpu_kernels, f"{name}_many")


@functools.cache
def _start_pool() -> None:
    """Start numba's threads without a change to torch's.

    Both may stand on one OpenMP, whose number of threads numba sets to that of the cores: with
    OMP_NUM_THREADS=1 on a busy machine, threads would then wait for each other.
    """
    before = torch.get_num_threads()
    numba.get_num_threads()
    torch.set_num_threads(before)


def warm_up(dtype: torch.dtype = torch.float32) -> None:
    """Run every kernel once on tensors of `dtype`, so that no later step waits for the compiler.

    Says so on stderr unless the compiled code is in numba's cache.
    """
    if cpu_kernels is None:
        return
    num_threads()
    x = torch.ones(2, 64, dtype=dtype)
    rms_norm(x, x[0], 1e-5)
    if not cpu_kernels.FAST["cache"]:
        print("compiling the CPU kernels (about 20 s), at every start: set NUMBA_CACHE_DIR to a"
              " directory that can be written to keep them", file=sys.stderr)  # fmt: skip
    elif cpu_kernels.rms_norm.stats.cache_misses:
        print("compiling the CPU kernels, once (about 20 s)", file=sys.stderr)
    for rows in (x, x.repeat(FEW_ROWS, 1)):
        rms_norm(rows, x[0], 1e-5)
        add_rms_norm(rows, rows, x[0], 1e-5)
        silu_mul(rows)
    k_cache, v_cache = torch.zeros(2, 2, 16, 1, 16, dtype=dtype)
    angles = torch.ones(FEW_ROWS, 8)
    # One row of a merged product is contiguous, its parts in several rows are not.
    for num_tokens in (1, 2, FEW_ROWS):
        q, k, v = x[:1].repeat(num_tokens, 1).view(-1, 4, 16).split([2, 1, 1], dim=1)
        q, k = norm_rope(q, k, None, None, angles, angles, 1e-5)
        store_kv(k, v, k_cache, v_cache, torch.arange(num_tokens) % 4)
    zeros = torch.zeros(2, 1, dtype=torch.int32)
    decode_attention(q[:2], k_cache, v_cache, zeros, zeros[:, 0] + 1, 1, 1.0)
    if dtype == torch.float32:
        packed = (np.zeros((1, 2, 1024), np.uint8), np.zeros((1, 2, 128), np.float32))
        down = (packed[0][:, :1].copy(), packed[1][:, :1].copy())
        for array in (x[:1].numpy(), x.numpy()):
            product = "packed_vector_product" if len(array) == 1 else "packed_product"
            getattr(cpu_kernels, product)(array, *packed, array.copy(), 1)
            cpu_kernels.packed_mlp(array, *packed, *down, array.copy(), 1)
        cpu_kernels.unpack(*packed, np.empty(64 * 64, np.float32))


# -- layers --


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ops.rms_norm`; a composite of seven torch operations on a CPU, one kernel here."""
    if not has_kernels(x):
        return ops.rms_norm(x, weight, eps)
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(rows)
    kernel = kernel_for("rms_norm", rows.shape[0])
    kernel(array_of(rows), array_of(weight), eps, array_of(out))
    return out.view(x.shape)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `ops.add_rms_norm`."""
    if not has_kernels(x):
        return ops.add_rms_norm(x, y, weight, eps)
    total = torch.empty_like(x)
    out = torch.empty_like(x)
    inputs = (array_of(x), array_of(y), array_of(weight), eps)
    kernel = kernel_for("add_rms_norm", x.shape[0])
    kernel(*inputs, array_of(total), array_of(out))
    return total, out


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `ops.silu_mul`."""
    if not has_kernels(gate_up):
        return ops.silu_mul(gate_up)
    num_rows, width = gate_up.shape
    out = gate_up.new_empty(num_rows, width // 2)
    kernel_for("silu_mul", num_rows)(array_of(gate_up), array_of(out))
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
    if not has_kernels(q):
        return ops.norm_rope(q, k, q_weight, k_weight, cos, sin, eps)
    if q_weight is not None and k_weight is not None:
        q = rms_norm(q, q_weight, eps)
        k = rms_norm(k, k_weight, eps)
    q_out = torch.empty(q.shape, dtype=q.dtype)
    k_out = torch.empty(k.shape, dtype=k.dtype)
    heads = (array_of(q), array_of(k), cos.numpy(), sin.numpy())
    kernel_for("apply_rope", q.shape[0])(*heads, array_of(q_out), array_of(k_out))
    return q_out, k_out


# -- paged key/value cache --


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `ops.store_kv`."""
    if not has_kernels(k):
        ops.store_kv(k, v, k_cache, v_cache, slot_mapping)
        return
    arrays = [array_of(x) for x in (k, v, k_cache, v_cache)]
    cpu_kernels.store_kv(*arrays, slot_mapping.numpy())


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """See `ops.attention`."""
    return ops.attend_with(
        decode_attention, prefill_attention, q, k_cache, v_cache, metadata, scale
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
    if not has_kernels(q):
        return ops.decode_attention(q, k_cache, v_cache, block_table, seq_lens, max_seq_len, scale)
    out = torch.empty_like(q)
    inputs = [array_of(x) for x in (q, k_cache, v_cache)]
    # A request is one piece of work if there are enough of them for all threads.
    shares = 1 if q.shape[0] >= num_threads() else k_cache.shape[2]
    cpu_kernels.decode_attention(
        *inputs, block_table.numpy(), seq_lens.numpy(), scale, array_of(out), shares
    )
    return out


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """See `ops.prefill_attention`; in portions of queries, each with the keys up to its end, so
    that about half of the products with masked keys are never computed."""
    out = torch.empty_like(q)
    past = len(k) - len(q)
    for start in range(0, len(q), QUERY_CHUNK):
        end = min(start + QUERY_CHUNK, len(q))
        keys, values = k[: past + end], v[: past + end]
        out[start:end] = ops.prefill_attention(q[start:end], keys, values, scale)
    return out
