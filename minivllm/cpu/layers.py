"""A decoder layer as two calls, for a CPU and few tokens: all that comes before the attention,
and all that comes after it.

With few tokens, calling an operation from Python costs as much as the operation; here numba's
kernels call each other. Leaves out biases, norms of heads (Qwen3) and weights on no grid:
`cpu.packed.FusedLayer` says when these kernels can be used. Given (no notebook builds it).

Letters as in `cpu.kernels`. A packed matrix is a tuple (codes, scales, bits); see
`cpu.packed.Grid`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from minivllm.cpu.kernels import (
    FAST,
    apply_rope,
    copy_heads,
    packed_product,
    packed_vector_product,
    rms_norm,
    silu_mul,
)

KERNELS = "8248fa0c"  # digest of `cpu/kernels.py`; see `VECTORS` there


@njit(**FAST)
def product(x, matrix, parts):
    """`F.linear(x, weight)` for few rows of `x [T, n]`."""
    codes, scales, bits = matrix
    out = np.empty((len(x), len(codes)), np.float32)
    if len(x) == 1:
        packed_vector_product(x[0], codes, scales, bits, out[0])
    else:
        packed_product(x, codes, scales, bits, out, parts)
    return out


@njit(**FAST)
def normalised(x, norm):
    """`rms_norm(x, weight, eps)` for norm = (weight, eps)."""
    out = np.empty_like(x)
    rms_norm(x, norm[0], norm[1], out)
    return out


@njit(**FAST)
def add(x, y, out):
    """`out[:] = x + y`; numba needs seconds to compile the short form."""
    for t in range(x.shape[0]):
        for i in range(x.shape[1]):
            out[t, i] = x[t, i] + y[t, i]


@njit(**FAST)
def before_attention(x, norm, qkv_proj, cos, sin, q, k, v, parts):
    """`q, k, v = split_heads(qkv_proj(rms_norm(x)))`, then `apply_rope` to q and k.

    `x [T, hidden]` -> `q [T, H, D]`, `k, v [T, K, D]`, all contiguous.
    """
    num_heads, end = q.shape[1], q.shape[1] + k.shape[1]
    qkv = product(normalised(x, norm), qkv_proj, parts)
    heads = qkv.reshape((len(x), end + v.shape[1], q.shape[2]))
    apply_rope(heads[:, :num_heads], cos, sin, q)
    apply_rope(heads[:, num_heads:end], cos, sin, k)
    for t in range(len(x)):
        copy_heads(heads[t, end:], v[t])


@njit(**FAST)
def after_attention(x, attended, o_proj, norm, gate_up_proj, down_proj, out, parts):
    """`out = x + o_proj(attended); out += down_proj(silu_mul(gate_up_proj(rms_norm(out))))`.

    `x, out [T, hidden]`, `attended [T, H * D]`.
    """
    add(x, product(attended, o_proj, parts), out)
    gate_up = product(normalised(out, norm), gate_up_proj, parts)
    gated = np.empty((len(x), gate_up.shape[1] // 2), np.float32)
    silu_mul(gate_up, gated)
    add(out, product(gated, down_proj, parts), out)
