"""Kernels for a CPU, compiled by numba: what plain torch does slowly with few rows.

Each kernel names the torch line that it replaces; `cpu.ops` and `cpu.packed` call them. Arrays are
numpy views of float32 or bfloat16 tensors (as int16, see `widen`), contiguous unless stated
otherwise; sums are float32. Does not handle other types. Not built in the course.

Letters: T tokens, N requests, H query heads, K key/value heads, G = H // K, D head dimension,
B block size.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding  # type: ignore[import-untyped]
import numpy as np
from numba import config, njit, prange, types
from numba.extending import overload

from minivllm.model import GROUP

# Rows of a weight that are multiplied side by side. All inner loops run over them, so that LLVM
# turns each into a few vector instructions: no sum has to be taken across a vector.
LANES = 64
LOG2_E = np.float32(1.442695041)
LN_2 = np.float32(0.693147181)


def use_wide_vectors() -> None:
    """Let LLVM use all of AVX-512: on Intel it prefers half of it, and products of 16 rows took 1.4
    times as long. The user's settings stay, and so does code that numba has compiled before."""
    features = llvmlite.binding.get_host_cpu_features()
    if config.CPU_FEATURES is None and features.get("avx512f"):  # type: ignore[attr-defined]
        config.CPU_FEATURES = f"{features.flatten()},-prefer-256-bit"  # type: ignore[attr-defined]


def can_cache() -> bool:
    """Return whether numba finds a writable directory for compiled code: next to this file, in the
    user's cache, or where NUMBA_CACHE_DIR says."""
    try:
        njit(cache=True)(can_cache)
    except RuntimeError:
        return False
    return True


use_wide_vectors()
# Sums may be taken in any order (or no loop of a dot product could use vectors); a division by
# zero is infinity, not an exception; compiled code is kept for the next start.
FAST: dict[str, Any] = {"fastmath": True, "error_model": "numpy", "cache": can_cache()}


# -- numbers -----------------------------------------------------------------------------------


def widen(number):
    """The float32 of a float32 or of the 16 bits of a bfloat16, which are its upper half."""


@overload(widen)
def _widen(number):
    if number == types.float32:
        return lambda number: number
    return lambda number: np.int32(np.int32(number) << 16).view(np.float32)


def put(row, i, number):
    """`row[i] = number`, rounded to the nearest bfloat16 (ties to even) if that is its type."""


@overload(put)
def _put(row, i, number):
    def put_float32(row, i, number):
        row[i] = number

    def put_bfloat16(row, i, number):
        bits = np.float32(number).view(np.int32)
        row[i] = np.int16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)

    return put_float32 if row.dtype == types.float32 else put_bfloat16


@njit(**FAST)
def exp(x):
    """e^x to a relative error of 2e-7, for x from -87 to 88 (beyond: as at these ends).

    e^x = 2^whole * e^rest with |rest| <= ln(2) / 2, where Taylor's sum of eight terms is enough;
    unlike the library's, it is computed for many numbers at a time.
    """
    x = min(max(x, np.float32(-87)), np.float32(88))
    whole = np.floor(x * LOG2_E + np.float32(0.5))
    rest = x - whole * LN_2
    total = np.float32(1)
    for k in (7, 6, 5, 4, 3, 2, 1):
        total = np.float32(1) + total * rest * np.float32(1 / k)
    return total * np.int32((np.int32(whole) + 127) << 23).view(np.float32)


# -- products ----------------------------------------------------------------------------------
#
# A packed matrix `[m, n]` is cut into tiles of LANES rows: `codes [tiles, n / 32, k * LANES]` uint8
# with k = 32 for 8-bit codes, 16 for 4-bit codes; `scales [tiles, n / 32, 2 * LANES]` float32, the
# scales and the minima. weight = code * scale + minimum. Of 4-bit codes, byte i of a row's group
# holds the codes of its weights i (lower half) and 16 + i (upper half). See `cpu.packed.lay_out`.
#
# Tiles of weights and sums are vectors too, place `i * LANES + r` for lane r: with distances that
# it knows, LLVM need not check before each loop which rows overlap.


@njit(**FAST)
def _number(code):
    """A code as float32; by way of int32, from which a CPU converts vectors."""
    return np.float32(np.int32(code))


@njit(**FAST)
def _unpack(codes, scales, weight, first, stride):
    """Write the weights i of one group, lane by lane, to `weight[first + i * stride]` and on."""
    if len(codes) == GROUP * LANES:
        for i in range(GROUP):
            target = first + i * stride
            for r in range(LANES):
                code = _number(codes[i * LANES + r])
                weight[target + r] = code * scales[r] + scales[LANES + r]
        return
    for i in range(GROUP // 2):
        lower = first + i * stride
        upper = first + (GROUP // 2 + i) * stride
        for r in range(LANES):
            code = codes[i * LANES + r]
            scale = scales[r]
            low = scales[LANES + r]
            weight[lower + r] = _number(code & 15) * scale + low
            weight[upper + r] = _number(code >> 4) * scale + low


@njit(parallel=True, **FAST)
def unpack(codes, scales, weight):
    """Write all weights to `weight [n * m]` float32, transposed; m is a multiple of LANES here."""
    num_tiles, num_groups = codes.shape[:2]
    stride = num_tiles * LANES
    # A group of all tiles is 32 whole rows; a tile's column would visit another page in each row.
    for g in prange(num_groups):
        for tile in range(num_tiles):
            first = g * GROUP * stride + tile * LANES
            _unpack(codes[tile, g], scales[tile, g], weight, first, stride)


@njit(**FAST)
def _add_products(x, weight, sums):
    """`sums [4 * LANES] += x [4, 32] @ weight [32 * LANES]`, four rows at once: four numbers of the
    weight are loaded for 16 multiplications."""
    for k in range(0, GROUP, 4):
        a0, a1, a2, a3 = x[0, k], x[0, k + 1], x[0, k + 2], x[0, k + 3]
        b0, b1, b2, b3 = x[1, k], x[1, k + 1], x[1, k + 2], x[1, k + 3]
        c0, c1, c2, c3 = x[2, k], x[2, k + 1], x[2, k + 2], x[2, k + 3]
        d0, d1, d2, d3 = x[3, k], x[3, k + 1], x[3, k + 2], x[3, k + 3]
        for r in range(LANES):
            w = k * LANES + r
            w0 = weight[w]
            w1 = weight[w + LANES]
            w2 = weight[w + 2 * LANES]
            w3 = weight[w + 3 * LANES]
            sums[r] += a0 * w0 + a1 * w1 + a2 * w2 + a3 * w3
            sums[LANES + r] += b0 * w0 + b1 * w1 + b2 * w2 + b3 * w3
            sums[2 * LANES + r] += c0 * w0 + c1 * w1 + c2 * w2 + c3 * w3
            sums[3 * LANES + r] += d0 * w0 + d1 * w1 + d2 * w2 + d3 * w3


@njit(parallel=True, **FAST)
def packed_product(x, codes, scales, out, threads):
    """`F.linear(x, weight)` for a few rows of `x [T, n]`: `out [T, m]`, all float32.

    Each group is unpacked into the first cache and multiplied with all rows.
    """
    num_tiles, num_groups = codes.shape[:2]
    num_rows = (len(x) + 3) // 4 * 4  # rows of zeros behind the last
    rows = np.zeros((num_rows, x.shape[1]), np.float32)
    rows[: len(x)] = x
    for thread in prange(threads):
        weight = np.empty(GROUP * LANES, np.float32)
        sums = np.empty(num_rows * LANES, np.float32)
        for tile in range(num_tiles * thread // threads, num_tiles * (thread + 1) // threads):
            sums[:] = 0
            for g in range(num_groups):
                _unpack(codes[tile, g], scales[tile, g], weight, 0, LANES)
                part = rows[:, g * GROUP : (g + 1) * GROUP]
                for t in range(0, num_rows, 4):
                    _add_products(part[t : t + 4], weight, sums[t * LANES :])
            first = tile * LANES
            for t in range(len(x)):
                for r in range(min(LANES, out.shape[1] - first)):
                    out[t, first + r] = sums[t * LANES + r]


@njit(**FAST)
def _add_codes(x, codes, sums):
    """`sums [LANES] += x [32] @ codes [32 * LANES]` for the codes of one group as numbers."""
    if len(codes) == GROUP * LANES:
        for i in range(0, GROUP, 4):
            x0, x1, x2, x3 = x[i], x[i + 1], x[i + 2], x[i + 3]
            for r in range(LANES):
                c = i * LANES + r
                sums[r] += (
                    x0 * _number(codes[c]) + x1 * _number(codes[c + LANES])
                    + x2 * _number(codes[c + 2 * LANES]) + x3 * _number(codes[c + 3 * LANES])
                )  # fmt: skip
        return
    for i in range(0, GROUP // 2, 4):
        x0, x1, x2, x3 = x[i], x[i + 1], x[i + 2], x[i + 3]
        y0, y1, y2, y3 = x[16 + i], x[17 + i], x[18 + i], x[19 + i]
        for r in range(LANES):
            c = i * LANES + r
            c0 = codes[c]
            c1 = codes[c + LANES]
            c2 = codes[c + 2 * LANES]
            c3 = codes[c + 3 * LANES]
            sums[r] += (
                x0 * _number(c0 & 15) + y0 * _number(c0 >> 4)
                + x1 * _number(c1 & 15) + y1 * _number(c1 >> 4)
                + x2 * _number(c2 & 15) + y2 * _number(c2 >> 4)
                + x3 * _number(c3 & 15) + y3 * _number(c3 >> 4)
            )  # fmt: skip


@njit(parallel=True, **FAST)
def packed_vector_product(x, codes, scales, out, threads):
    """`F.linear(x, weight)` for one row `x [1, n]`: `out [1, m]`, all float32.

    The sum over a group is scale * (x @ codes) + minimum * sum(x): no weight is ever computed.
    """
    num_tiles, num_groups = codes.shape[:2]
    for thread in prange(threads):
        sums = np.empty(LANES, np.float32)
        total = np.empty(LANES, np.float32)
        for tile in range(num_tiles * thread // threads, num_tiles * (thread + 1) // threads):
            total[:] = 0
            for g in range(num_groups):
                part = x[0, g * GROUP : (g + 1) * GROUP]
                sums[:] = 0
                _add_codes(part, codes[tile, g], sums)
                scale = scales[tile, g]
                sum_x = part.sum()
                for r in range(LANES):
                    total[r] += scale[r] * sums[r] + scale[LANES + r] * sum_x
            first = tile * LANES
            for r in range(min(LANES, out.shape[1] - first)):
                out[0, first + r] = total[r]


# -- layers ------------------------------------------------------------------------------------
#
# Starting threads costs as much as some rows, so each kernel has a form for few rows and one for
# many: two functions, since numba's cache would take one compiled in two ways for the same.


@njit(**FAST)
def _norm_row(row, weight, eps, out):
    """`row * rsqrt(mean(row ** 2) + eps) * weight`."""
    total = np.float32(0)
    for i in range(len(row)):
        total += widen(row[i]) * widen(row[i])
    scale = np.float32(1 / np.sqrt(total / len(row) + eps))
    for i in range(len(row)):
        put(out, i, widen(row[i]) * scale * widen(weight[i]))


@njit(**FAST)
def rms_norm(x, weight, eps, out):
    """`x * rsqrt(mean(x ** 2) + eps) * weight` for rows of `x [T, n]`."""
    for t in range(len(x)):
        _norm_row(x[t], weight, eps, out[t])


@njit(parallel=True, **FAST)
def rms_norm_many(x, weight, eps, out):
    """`rms_norm` on several threads."""
    for t in prange(len(x)):
        _norm_row(x[t], weight, eps, out[t])


@njit(**FAST)
def add_rms_norm(x, y, weight, eps, total, out):
    """`total = x + y` and `rms_norm(total, weight, eps)`."""
    for t in range(len(x)):
        row = x[t]
        other = y[t]
        target = total[t]
        for i in range(len(row)):
            put(target, i, widen(row[i]) + widen(other[i]))
        _norm_row(target, weight, eps, out[t])


@njit(parallel=True, **FAST)
def add_rms_norm_many(x, y, weight, eps, total, out):
    """`add_rms_norm` on several threads."""
    for t in prange(len(x)):
        r = slice(t, t + 1)
        add_rms_norm(x[r], y[r], weight, eps, total[r], out[r])


@njit(**FAST)
def silu_mul(gate_up, out):
    """`F.silu(gate) * up` for `gate_up [T, 2I]`: `out [T, I]`."""
    size = out.shape[1]
    for t in range(len(gate_up)):
        gate = gate_up[t, :size]
        up = gate_up[t, size:]
        row = out[t]
        for i in range(size):
            g = widen(gate[i])
            put(row, i, g * widen(up[i]) / (np.float32(1) + exp(-g)))


@njit(parallel=True, **FAST)
def silu_mul_many(gate_up, out):
    """`silu_mul` on several threads."""
    for t in prange(len(gate_up)):
        silu_mul(gate_up[t : t + 1], out[t : t + 1])


@njit(**FAST)
def _turn(x, cos, sin, out):
    """`apply_rope` of one head `x [D]`, `cos, sin [D/2]`."""
    half = len(cos)
    for i in range(half):
        first = widen(x[i])
        second = widen(x[half + i])
        put(out, i, first * cos[i] - second * sin[i])
        put(out, half + i, second * cos[i] + first * sin[i])


@njit(**FAST)
def apply_rope(q, k, cos, sin, q_out, k_out):
    """Turn the heads `q [T, H, D]` and `k [T, K, D]` by float32 `cos, sin [T, D/2]`; only the last
    axis of q and k is contiguous."""
    for t in range(len(q)):
        for h in range(q.shape[1]):
            _turn(q[t, h], cos[t], sin[t], q_out[t, h])
        for h in range(k.shape[1]):
            _turn(k[t, h], cos[t], sin[t], k_out[t, h])


@njit(parallel=True, **FAST)
def apply_rope_many(q, k, cos, sin, q_out, k_out):
    """`apply_rope` on several threads."""
    for t in prange(len(q)):
        r = slice(t, t + 1)
        apply_rope(q[r], k[r], cos[r], sin[r], q_out[r], k_out[r])


@njit(**FAST)
def store_kv(k, v, k_cache, v_cache, slots):
    """`cache.flatten(0, 1)[slots] = k, v`; `k, v [T, K, D]`, contiguous in the last axis only."""
    block_size = k_cache.shape[1]
    for t in range(len(slots)):
        block = slots[t] // block_size
        offset = slots[t] % block_size
        for h in range(k.shape[1]):
            for i in range(k.shape[2]):
                k_cache[block, offset, h, i] = k[t, h, i]
                v_cache[block, offset, h, i] = v[t, h, i]


@njit(**FAST)
def packed_mlp(x, gate_up_codes, gate_up_scales, down_codes, down_scales, out, threads):
    """`down(silu_mul(gate_up(x)))` for a few rows, with both weights packed; no bias."""
    width = down_scales.shape[1] * GROUP
    gate_up = np.empty((len(x), 2 * width), np.float32)
    gated = np.empty((len(x), width), np.float32)
    if len(x) == 1:
        packed_vector_product(x, gate_up_codes, gate_up_scales, gate_up, threads)
        silu_mul(gate_up, gated)
        packed_vector_product(gated, down_codes, down_scales, out, threads)
    else:
        packed_product(x, gate_up_codes, gate_up_scales, gate_up, threads)
        silu_mul_many(gate_up, gated)
        packed_product(gated, down_codes, down_scales, out, threads)


# -- attention ---------------------------------------------------------------------------------


@njit(**FAST)
def _score(queries, cache, block, first, group, start, count, scale, scores):
    """`scores[h, start + s] = queries[h] @ cache[block, s, k] * scale` for s below `count`; the
    heads are those of the key/value heads k from `first` on, `group` to each."""
    for h in range(len(queries)):
        k = first + h // group
        for s in range(count):
            total = np.float32(0)
            for i in range(queries.shape[1]):
                total += queries[h, i] * widen(cache[block, s, k, i])
            scores[h, start + s] = total * scale


@njit(**FAST)
def _add_values(scores, cache, block, first, group, start, count, result):
    """`result[h] += scores[h, start : start + count] @ cache[block, :count, k]`; k as above."""
    for h in range(len(result)):
        k = first + h // group
        for s in range(0, count - 3, 4):
            w0 = scores[h, start + s]
            w1 = scores[h, start + s + 1]
            w2 = scores[h, start + s + 2]
            w3 = scores[h, start + s + 3]
            for i in range(result.shape[1]):
                result[h, i] += (
                    w0 * widen(cache[block, s, k, i]) + w1 * widen(cache[block, s + 1, k, i])
                    + w2 * widen(cache[block, s + 2, k, i]) + w3 * widen(cache[block, s + 3, k, i])
                )  # fmt: skip
        for s in range(count // 4 * 4, count):
            for i in range(result.shape[1]):
                result[h, i] += scores[h, start + s] * widen(cache[block, s, k, i])


@njit(**FAST)
def _softmax(scores):
    """Turn scores into weights that add up to 1, in place."""
    highest = scores[0]
    for i in range(len(scores)):
        # max(highest, scores[i]), in a form that LLVM turns into vectors.
        highest += max(scores[i] - highest, np.float32(0))
    total = np.float32(0)
    for i in range(len(scores)):
        scores[i] = exp(scores[i] - highest)
        total += scores[i]
    for i in range(len(scores)):
        scores[i] /= total


@njit(parallel=True, **FAST)
def decode_attention(q, k_cache, v_cache, block_table, seq_lens, scale, out, shares):
    """`softmax(q @ k.T * scale) @ v` of one query per request, straight from the blocks.

    `q, out [N, H, D]`, caches `[num_blocks, B, K, D]`. The work of a request is cut into `shares`
    pieces (1 or K) by key/value heads. A piece reads each of its keys and values once for all G
    query heads, and with one piece it reads whole blocks, in the order of memory.
    """
    block_size, num_kv_heads, size = k_cache.shape[1:]
    group = q.shape[1] // num_kv_heads
    num_heads = num_kv_heads // shares * group  # query heads of a piece
    for piece in prange(len(q) * shares):
        n = piece // shares
        first = piece % shares * num_heads
        length = seq_lens[n]
        num_blocks = (length + block_size - 1) // block_size
        queries = np.empty((num_heads, size), np.float32)
        scores = np.empty((num_heads, length), np.float32)
        for h in range(num_heads):
            for i in range(size):
                queries[h, i] = widen(q[n, first + h, i])
        first_kv = first // group
        for j in range(num_blocks):
            start = j * block_size
            count = min(block_size, length - start)
            block = block_table[n, j]
            _score(queries, k_cache, block, first_kv, group, start, count, scale, scores)
        for h in range(num_heads):
            _softmax(scores[h])
        result = np.zeros((num_heads, size), np.float32)
        for j in range(num_blocks):
            start = j * block_size
            count = min(block_size, length - start)
            _add_values(scores, v_cache, block_table[n, j], first_kv, group, start, count, result)
        for h in range(num_heads):
            row = out[n, first + h]
            for i in range(size):
                put(row, i, result[h, i])
