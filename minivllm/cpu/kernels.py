"""Kernels for a CPU, compiled by numba: what plain torch does slowly with few rows.

Each kernel names the torch line that it replaces; `cpu.ops` calls them and falls back to torch
where numba is missing. Arrays are numpy views of float32 tensors, contiguous unless said
otherwise. Leaves out every other type. Given (no notebook builds it).

Letters: T tokens, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from minivllm.cpu.vectors import (
    COLUMNS,
    GROUP,
    ROWS,
    dot_4_bits,
    dot_8_bits,
    float_of_bits,
    multiply_rows,
    unpack_4_bits,
    unpack_8_bits,
)

# Sums may be taken in any order (or no loop of a dot product could use vectors); a division by
# zero is infinity, not an exception; the compiled code is kept for the next start.
FAST: dict[str, Any] = {"fastmath": True, "error_model": "numpy", "cache": True}
# Numba keeps compiled code for as long as the file it is in stays the same, whatever becomes of
# the files it calls: the digest of `cpu/vectors.py` here makes an edit there one of this file, as
# `KERNELS` in `cpu.layers` does for this one. A test says what to write.
VECTORS = "415a358b"
TILE = 8 * ROWS  # rows of a weight whose results are written at once
LOG2_E, LN_2 = np.float32(1.442695041), np.float32(0.693147181)

# -- products ----------------------------------------------------------------------------------


@njit(**FAST)
def _dot_tile(x0, x1, x2, x3, w0, w1):
    """The eight dot products of four vectors with two: `x0 @ w0, ..., x3 @ w0, x0 @ w1, ...`.

    Six loads for eight multiplications of whole vectors: the registers hold all eight sums.
    """
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
    for i in range(len(w0)):
        a0 += x0[i] * w0[i]
        a1 += x1[i] * w0[i]
        a2 += x2[i] * w0[i]
        a3 += x3[i] * w0[i]
        b0 += x0[i] * w1[i]
        b1 += x1[i] * w1[i]
        b2 += x2[i] * w1[i]
        b3 += x3[i] * w1[i]
    return a0, a1, a2, a3, b0, b1, b2, b3


@njit(**FAST)
def _multiply(x, weight, out, first):
    """out[:, first : first + len(weight)] = x @ weight.T, for few rows of weight."""
    last_x, last_w = len(x) - 1, len(weight) - 1
    for t in range(0, len(x), 4):
        # Past the end the last row is computed again: dearer than nothing, simpler than a rest.
        t1, t2, t3 = min(t + 1, last_x), min(t + 2, last_x), min(t + 3, last_x)
        for j in range(0, len(weight), 2):
            j1 = min(j + 1, last_w)
            sums = _dot_tile(x[t], x[t1], x[t2], x[t3], weight[j], weight[j1])
            a, b = first + j, first + j1
            out[t, a], out[t1, a], out[t2, a], out[t3, a] = sums[:4]
            out[t, b], out[t1, b], out[t2, b], out[t3, b] = sums[4:]


@njit(**FAST)
def _unpack_rows(codes, scales, bits, out):
    """`out [m, n]` = rows of a packed matrix as float32; see `cpu.packed` for the format.

    By addresses: each view of an array would cost numba two counts of its users.
    """
    codes_at, scales_at, out_at = codes.ctypes.data, scales.ctypes.data, out.ctypes.data
    for _ in range(len(codes)):
        if bits == 4:
            unpack_4_bits(codes_at, scales_at, out_at, scales.shape[1])
        else:
            unpack_8_bits(codes_at, scales_at, out_at, scales.shape[1])
        codes_at += codes.strides[0]
        scales_at += scales.strides[0]
        out_at += out.strides[0]


@njit(parallel=True, **FAST)
def unpack(codes, scales, bits, out):
    """`out [m, n]` = the packed matrix as float32."""
    for row in prange(len(codes)):
        rows = slice(row, row + 1)
        _unpack_rows(codes[rows], scales[rows], bits, out[rows])


@njit(**FAST)
def _columns_of(x):
    """`x [T, n]` as the columns of matrices `[T / 16, n, 16]`, zeros past the last; without a rest
    of at most 8 rows, which is not worth a matrix."""
    count = (len(x) + COLUMNS // 2 - 1) // COLUMNS
    columns = np.zeros((count, x.shape[1], COLUMNS), np.float32)
    for p in range(count):
        rows, target = x[p * COLUMNS : (p + 1) * COLUMNS], columns[p]
        for i in range(x.shape[1]):
            for t in range(len(rows)):
                target[i, t] = rows[t, i]
    return columns


@njit(**FAST)
def _multiply_columns(columns, weight, sums):
    """`sums[p, :6] = weight @ columns[p]` for six rows of weight."""
    for p in range(len(columns)):
        multiply_rows(
            columns[p].ctypes.data, weight.ctypes.data, sums[p].ctypes.data, weight.shape[1]
        )


@njit(**FAST)
def _write_sums(sums, count, out, first):
    """The first `count` rows of each of `sums [T / 16, TILE, 16]` into columns of `out [T, m]`."""
    for t in range(len(out)):
        column = sums[t // COLUMNS, :, t % COLUMNS]
        for j in range(count):
            out[t, first + j] = column[j]


@njit(parallel=True, **FAST)
def packed_product(x, codes, scales, bits, out, parts):
    """`F.linear(x, weight)` for 2 or more rows of `x [T, n]`: `out [T, m]`.

    Six rows of the weight at a time are unpacked into the first cache (with 576 columns 14 KiB)
    and multiplied with all of x. `parts` is the number of threads.
    """
    columns = _columns_of(x)
    past, num_tiles = min(len(x), len(columns) * COLUMNS), -(-len(codes) // TILE)
    for part in prange(parts):
        weight = np.empty((ROWS, x.shape[1]), np.float32)
        sums = np.empty((len(columns), TILE, COLUMNS), np.float32)
        for index in range(num_tiles * part // parts, num_tiles * (part + 1) // parts):
            first, end = index * TILE, min(index * TILE + TILE, len(codes))
            for row in range(first, end, ROWS):
                count = min(ROWS, end - row)
                rows = slice(row, row + count)
                _unpack_rows(codes[rows], scales[rows], bits, weight)
                _multiply_columns(columns, weight, sums[:, row - first :])
                _multiply(x[past:], weight[:count], out[past:], row)
            # A few at a time: the rows of `out` are so far apart that they contend for the same
            # places in the cache.
            _write_sums(sums, end - first, out[:past], first)


@njit(parallel=True, **FAST)
def packed_vector_product(x, codes, scales, bits, out):
    """`F.linear(x, weight)` for one vector `x [n]`: `out [m]`; no weight leaves a register."""
    for row in prange(len(codes)):
        places = x.ctypes.data, codes[row].ctypes.data, scales[row].ctypes.data
        if bits == 4:
            out[row] = dot_4_bits(places[0], places[1], places[2], scales.shape[1])
        else:
            out[row] = dot_8_bits(places[0], places[1], places[2], scales.shape[1])


@njit(parallel=True, **FAST)
def dense_product(x, weight, out, parts):
    """`F.linear(x, weight)` for 2 or more rows of `x [T, n]`, weight `[m, n]`: `out [T, m]`."""
    columns = _columns_of(x)
    past, num_tiles = min(len(x), len(columns) * COLUMNS), -(-len(weight) // TILE)
    for part in prange(parts):
        last = np.zeros((ROWS, x.shape[1]), np.float32)
        sums = np.empty((len(columns), TILE, COLUMNS), np.float32)
        for index in range(num_tiles * part // parts, num_tiles * (part + 1) // parts):
            first, end = index * TILE, min(index * TILE + TILE, len(weight))
            for row in range(first, end, ROWS):
                rows = weight[row : min(row + ROWS, end)]
                _multiply(x[past:], rows, out[past:], row)
                if len(rows) < ROWS:
                    copy_heads(rows, last)
                    rows = last
                _multiply_columns(columns, rows, sums[:, row - first :])
            _write_sums(sums, end - first, out[:past], first)


# -- packing -----------------------------------------------------------------------------------


@njit(**FAST)
def _steps_of_grid(group, max_steps, tolerance, scratch):
    """Into how many equal steps the group's range can be cut so that every weight lies on a
    cut, at most `max_steps`; 0 if into none. `tolerance` is relative to the largest weight."""
    low, high = np.float64(group.min()), np.float64(group.max())
    if low == high:
        return 1
    for i in range(GROUP):
        scratch[i] = (group[i] - low) / (high - low)
    allowed = tolerance * max(abs(low), abs(high)) / (high - low)
    for steps in range(max_steps, 0, -1):  # most groups use the whole range of codes
        fits = allowed * steps < 0.125  # else the grid is so fine that anything fits
        for share in scratch:
            fits = fits and abs(share * steps - np.rint(share * steps)) <= allowed * steps
            if not fits:
                break
        if fits:
            return steps
    return 0


@njit(parallel=True, **FAST)
def pack(weight, bits, tolerance, codes, scales):
    """Fill `codes, scales` with the packed `weight [m, n]`; False if it does not lie on a grid."""
    misfits = 0
    for row in prange(len(weight)):
        scratch = np.empty(GROUP, np.float64)
        for g in range(scales.shape[1]):
            group = weight[row, g * GROUP : (g + 1) * GROUP]
            steps = _steps_of_grid(group, 2**bits - 1, tolerance, scratch)
            if steps == 0:
                misfits += 1
                break
            low = group.min()
            step = (np.float64(group.max()) - low) / steps
            scales[row, g, 0], scales[row, g, 1] = step, low
            for i in range(GROUP):
                code = int(np.rint((group[i] - low) / step)) if step > 0 else 0
                # Eight numbers of four codes; see `cpu.vectors`.
                place = (g * GROUP + i % 8 * 4 + i // 8) * bits
                codes[row, place // 8] |= code << place % 8
    return misfits == 0


# -- layers ------------------------------------------------------------------------------------


@njit(**FAST)
def exp(x):
    """e^x to a relative error of 2e-7, for x from -87 to 88 (beyond: as at these ends).

    e^x = 2^whole * e^rest with |rest| <= ln(2) / 2, where Taylor's sum of eight terms is enough;
    unlike the library's, it is computed for eight numbers at a time.
    """
    x = min(max(x, np.float32(-87)), np.float32(88))
    whole = np.floor(x * LOG2_E + np.float32(0.5))
    rest = x - whole * LN_2
    total = np.float32(1)
    for k in (7, 6, 5, 4, 3, 2, 1):
        total = np.float32(1) + total * rest * np.float32(1 / k)
    return total * float_of_bits(np.int32((np.int32(whole) + 127) << 23))


@njit(parallel=True, **FAST)
def silu_mul(gate_up, out):
    """`F.silu(gate) * up` for `gate_up [T, 2I]`: `out [T, I]`."""
    size = out.shape[1]
    for t in prange(len(gate_up)):
        gate, up, row = gate_up[t, :size], gate_up[t, size:], out[t]
        for i in range(size):
            row[i] = gate[i] * up[i] / (np.float32(1) + exp(-gate[i]))


@njit(**FAST)
def rms_norm(x, weight, eps, out):
    """`x * rsqrt(mean(x ** 2) + eps) * weight` for rows of `x [T, n]`."""
    for t in range(len(x)):
        row, target = x[t], out[t]
        total = np.float32(0)
        for i in range(len(row)):
            total += row[i] * row[i]
        scale = np.float32(1 / np.sqrt(total / len(row) + eps))
        for i in range(len(row)):
            target[i] = row[i] * scale * weight[i]


@njit(**FAST)
def apply_rope(x, cos, sin, out):
    """Turn the heads `x [T, H, D]` by `cos, sin [T, D/2]`; only x's last axis is contiguous."""
    half = cos.shape[1]
    for t in range(x.shape[0]):
        c, s = cos[t], sin[t]
        for h in range(x.shape[1]):
            first, second = x[t, h, :half], x[t, h, half:]
            turned, other = out[t, h, :half], out[t, h, half:]
            for i in range(half):
                turned[i] = first[i] * c[i] - second[i] * s[i]
                other[i] = second[i] * c[i] + first[i] * s[i]


@njit(**FAST)
def copy_heads(source, target):
    """`target[:] = source` for heads `[K, D]`; numba needs seconds to compile the short form."""
    for h in range(source.shape[0]):
        for i in range(source.shape[1]):
            target[h, i] = source[h, i]


@njit(**FAST)
def store_kv(k, v, k_cache, v_cache, slots):
    """`cache.flatten(0, 1)[slots] = k, v`; `k, v [T, K, D]`, contiguous in the last axis only."""
    block_size = k_cache.shape[1]
    for t in range(len(slots)):
        block, offset = slots[t] // block_size, slots[t] % block_size
        copy_heads(k[t], k_cache[block, offset])
        copy_heads(v[t], v_cache[block, offset])
