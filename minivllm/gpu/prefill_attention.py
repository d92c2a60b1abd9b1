"""Paged attention of many new tokens per request, in Triton: prompts, chunks of prompts, and
what follows a prefix that was found in the cache. Not built in the course.

The same running softmax over tiles of keys as `decode_attention`, with tiles of queries and a
causal mask. Oracle: `ops.prefill_attention`. Tensor letters as in `kernels`; L new tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.decode_attention import MIN_SIDE, attend_tile
from minivllm.kernels import refuse_interpreted_bfloat16

QUERIES = 64  # rows of a tile: new tokens times the heads of a group
KEYS = 64  # of a tile
STAGES = 3  # tiles of keys that are on their way at a time
WARPS = 4


@triton.jit(do_not_specialize=["first_request"])
def _attend_kernel(
    q, k_cache, v_cache, block_table, query_starts, seq_lens, out, scale, first_request,
    table_stride, q_stride,
    BLOCK_SIZE: tl.constexpr, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    QUERIES: tl.constexpr, DIMS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one request and one key/value head; program (tile, head, request).

    A row is one query head of one token: row r is token r // G of the tile, head r % G of the
    group. So a key is loaded once for all heads that share it.
    """
    TOKENS: tl.constexpr = QUERIES // G
    tile, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2) + first_request
    start = tl.load(query_starts + request)
    num_new = tl.load(query_starts + request + 1) - start
    if tile * TOKENS >= num_new:
        return
    # 1. The queries; their positions are the last ones of the request.
    rows, dims = tl.arange(0, QUERIES), tl.arange(0, DIMS)
    tokens = tile * TOKENS + rows // G
    is_row = (rows < TOKENS * G) & (tokens < num_new)
    num_keys = tl.load(seq_lens + request)
    positions = num_keys - num_new + tokens
    heads = head * G + rows % G
    seen = is_row[:, None] & (dims < D)[None, :]
    token_ids = (start + tokens).to(tl.int64)
    queries = tl.load(
        q + token_ids[:, None] * q_stride + heads[:, None] * D + dims[None, :], mask=seen, other=0.0
    )
    # 2. The keys up to the tile's last query, tile by tile.
    end = tl.minimum(num_keys - num_new + (tile + 1) * TOKENS, num_keys)
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIMS], tl.float32)
    table = block_table + request.to(tl.int64) * table_stride
    for first in tl.range(0, end, KEYS, num_stages=STAGES):
        key_positions = first + tl.arange(0, KEYS)
        mask = key_positions < end
        # Every row sees key 0: none is all -inf, which would be NaN.
        causal = key_positions[None, :] <= positions[:, None]
        best, total, acc = attend_tile(
            queries, k_cache, v_cache, table, key_positions, mask, causal, head, scale,
            best, total, acc, BLOCK_SIZE, K * D, D, DIMS, PRECISION,
        )  # fmt: skip
    # 3. The answer.
    places = token_ids[:, None] * (K * G * D) + heads[:, None] * D + dims[None, :]
    tl.store(out + places, acc / total[:, None], mask=seen)


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    out: Tensor,
    first_request: int = 0,
) -> None:
    """Causal attention of the new tokens of all requests from `first_request` on, into their rows
    of `out [T, H, D]`.

    `q [T, H, D]`; request n has tokens `query_starts[n]` to `query_starts[n + 1]` (int32
    `[N + 1]`), at most `max_query_len` of them, and `seq_lens[n]` keys.
    """
    refuse_interpreted_bfloat16(q)
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    queries = max(QUERIES, triton.next_power_of_2(group))
    num_tiles = triton.cdiv(max_query_len, queries // group)
    _attend_kernel[(num_tiles, num_kv_heads, len(seq_lens) - first_request)](
        q, k_cache, v_cache, block_table, query_starts, seq_lens, out, scale, first_request,
        block_table.stride(0), q.stride(0),
        BLOCK_SIZE=block_size, K=num_kv_heads, G=group, D=head_dim,
        QUERIES=queries, DIMS=max(MIN_SIDE, triton.next_power_of_2(head_dim)), KEYS=KEYS,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
