"""Attention of one query per request over the paged cache, for a CPU, compiled by numba.

It is as fast as memory sends the keys and values: each is read once, and asked for before it is
needed. Leaves out prompts (torch does them) and every type but float32. Given (no notebook
builds it).

Letters: N requests, H query heads, K key/value heads, G = H // K, D head dimension, B block size,
S key positions.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from minivllm.cpu.kernels import FAST, exp
from minivllm.cpu.vectors import add_rows, score_keys

KERNELS = "8248fa0c"  # digest of `cpu/kernels.py`; see `VECTORS` there


@njit(**FAST)
def _softmax(scores):
    """Turn scores into weights that add up to 1, in place."""
    highest, total = scores.max(), np.float32(0)
    for i in range(len(scores)):
        scores[i] = exp(scores[i] - highest)
        total += scores[i]
    for i in range(len(scores)):
        scores[i] /= total


@njit(**FAST)
def _score_block(queries, keys, ahead, scale, scores):
    """`scores [G, s] = queries [G, D] @ keys [s, D].T * scale`, and up to three more columns; the
    next keys lie `ahead` bytes behind these."""
    last_key, last_query, stride = len(keys) - 1, len(queries) - 1, keys.strides[0]
    keys_at, queries_at, scores_at = keys.ctypes.data, queries.ctypes.data, scores.ctypes.data
    for s in range(0, last_key + 1, 4):
        for g in range(0, last_query + 1, 3):
            score_keys(
                queries_at + g * queries.strides[0], queries.strides[0], last_query - g,
                keys_at + s * stride, stride, last_key - s, ahead, keys.shape[1] // 8, scale,
                scores_at + g * scores.strides[0] + 4 * s, scores.strides[0],
            )  # fmt: skip


@njit(**FAST)
def _add_block(weights, values, ahead, result):
    """`result [G, D] += weights [G, s] @ values [s, D]`; the next values lie `ahead` bytes behind
    these."""
    last = len(result) - 1
    for g in range(0, last + 1, 3):
        add_rows(
            result.ctypes.data + g * result.strides[0], result.strides[0],
            weights.ctypes.data + g * weights.strides[0], weights.strides[0], last - g,
            values.ctypes.data, values.strides[0], ahead, len(values), values.shape[1] // 16,
        )  # fmt: skip


@njit(parallel=True, **FAST)
def decode_attention(q, k_cache, v_cache, block_table, seq_lens, scale, out, shares):
    """`softmax(q @ k.T * scale) @ v` of one query per request, straight from the blocks.

    `q, out [N, H, D]`, caches `[num_blocks, B, K, D]`, D a multiple of 16. The work of a request
    is cut into `shares` pieces (1 or K) by key/value heads. A piece reads each of its keys and
    values once for all G query heads, and with one piece whole blocks, as they lie in memory.
    """
    block_size, num_heads = k_cache.shape[1], k_cache.shape[2] // shares
    size = q.shape[1] // k_cache.shape[2]
    for piece in prange(len(q) * shares):
        n, first = piece // shares, piece % shares * num_heads
        length, blocks = seq_lens[n], block_table[n]
        queries = q[n, first * size : (first + num_heads) * size]
        result = out[n, first * size : (first + num_heads) * size]
        scores = np.empty((num_heads * size, length + 3), np.float32)
        last = (length - 1) // block_size
        for j in range(last + 1):
            start, end = j * block_size, min((j + 1) * block_size, length)
            keys = k_cache[blocks[j], : end - start, first : first + num_heads]
            following = k_cache[blocks[j + 1]] if j < last else v_cache[blocks[0]]
            ahead = following[0, first:].ctypes.data - keys.ctypes.data
            for h in range(num_heads):
                group = slice(h * size, (h + 1) * size)
                _score_block(queries[group], keys[:, h], ahead, scale, scores[group, start:])
        for row in range(len(scores)):
            _softmax(scores[row, :length])
        result[:] = 0
        for j in range(last + 1):
            start, end = j * block_size, min((j + 1) * block_size, length)
            values = v_cache[blocks[j], : end - start, first : first + num_heads]
            following = v_cache[blocks[min(j + 1, last)]]
            ahead = following[0, first:].ctypes.data - values.ctypes.data
            for h in range(num_heads):
                group = slice(h * size, (h + 1) * size)
                _add_block(scores[group, start:], values[:, h], ahead, result[group])
