"""Paged attention of one new token per request, in Triton. Notebook 07.

FlashAttention's idea (Dao et al. 2022: softmax over tiles of keys, never the whole row of
scores) on a paged cache (Kwon et al. 2023), and split over the keys (Dao et al. 2023,
"Flash-Decoding"), so that a few long requests fill the device as well as many short ones.
How the keys are split is planned on the device: its launches are the same for any lengths, so
a step can be captured. Oracle: `ops.decode_attention`.

Tensor letters as in `kernels`; W work items, S splits of a request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.kernels import refuse_interpreted_bfloat16, slots_of

LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) = 2 ** (x * LOG2_E); 2 ** x is one instruction

KEYS = 64  # of a tile
STAGES = 3  # tiles of keys that are on their way at a time
WARPS = 4
MIN_SIDE = 16  # of a tile in a product: a group of heads, and a short head, are padded to it


# -- planning: who reads which keys -------------------------------------------------------------


def num_items(num_requests: int) -> int:
    """Work items of a step: enough to fill a large device, and one more for each request.

    Fewer are wanted with few requests: more splits than that only cost their combination.
    """
    return num_requests + (64 if num_requests <= 48 else 128)


@triton.jit(do_not_specialize=["num_requests", "max_items"])
def _plan_kernel(
    seq_lens, item_request, first_item, chunk_size, num_requests, max_items,
    TARGET: tl.constexpr, KEYS: tl.constexpr, REQUESTS: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """Cut every request's keys into chunks of one size, about TARGET chunks in all."""
    requests = tl.arange(0, REQUESTS)
    lens = tl.load(seq_lens + requests, mask=requests < num_requests, other=0)
    # 1. The size: a whole number of tiles.
    size = tl.maximum(tl.cdiv(tl.sum(lens, axis=0), TARGET), 1)
    size = tl.cdiv(size, KEYS) * KEYS
    tl.store(chunk_size, size)
    # 2. Request n has the items from first_item[n] on.
    num_splits = tl.cdiv(lens, size)
    ends = tl.cumsum(num_splits, axis=0)
    tl.store(first_item + requests, ends - num_splits, mask=requests < num_requests)
    # 3. The other way round: an item's request is the number of requests that end before it.
    for start in range(0, max_items, ITEMS):
        items = start + tl.arange(0, ITEMS)
        request = tl.sum((ends[None, :] <= items[:, None]).to(tl.int32), axis=1)
        tl.store(item_request + items, request, mask=items < max_items)


class Plan:
    """How a step's keys are split: `item_request [W]` int32 (N or more where there is no
    work), `first_item [N]` int32, `chunk_size [1]` int32 (keys)."""

    def __init__(self, seq_lens: Tensor) -> None:
        num_requests, device = len(seq_lens), seq_lens.device
        self.num_items = num_items(num_requests)
        self.item_request = torch.empty(self.num_items, dtype=torch.int32, device=device)
        self.first_item = torch.empty(num_requests, dtype=torch.int32, device=device)
        self.chunk_size = torch.empty(1, dtype=torch.int32, device=device)
        _plan_kernel[(1,)](
            seq_lens, self.item_request, self.first_item, self.chunk_size,
            num_requests, self.num_items, TARGET=self.num_items - num_requests, KEYS=KEYS,
            REQUESTS=triton.next_power_of_2(num_requests), ITEMS=32,
        )  # fmt: skip


# -- the helpers of attention ---------------------------------------------------------------------


@triton.jit
def load_tile(cache, slots, mask, head, WIDTH: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr):
    """One head's rows of a cache `[slots, K * D]`: `[KEYS, DIMS]`, zero where masked."""
    dims = tl.arange(0, DIMS)
    places = slots[:, None] * WIDTH + head * D + dims[None, :]
    return tl.load(cache + places, mask=mask[:, None] & (dims < D)[None, :], other=0.0)


@triton.jit
def softmax_step(scores, values, best, total, acc, PRECISION: tl.constexpr):
    """Take one more tile of keys into a running softmax, in powers of two.

    `scores [Q, KEYS]` (-inf: not seen; each query sees a key), `values [KEYS, D]`. So far:
    `best [Q]` the largest score, `total [Q]` the sum of 2^(score - best), `acc [Q, D]` the sum of
    2^(score - best) * value, all float32. Returns the three with the tile taken in; nothing so
    far is -inf, 0, 0. Scores 1 1 of values 2 4, then score 3 of value 5: best 1, total 2, acc 6,
    then best 3, total 2/4 + 1 = 1.5, acc 6/4 + 5 = 6.5.
    Products of tiles: `tl.dot(a, b, c, input_precision=PRECISION)` is a @ b + c, with a and b of
    one type. Source: Milakov and Gimelshein 2018, arXiv 1805.02867.
    """
    # A larger score found now makes all that came before smaller by one factor.
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    shrink = tl.exp2(best - new_best)
    weights = tl.exp2(scores - new_best[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    return new_best, total, acc


@triton.jit
def attend_tile(
    queries, k_cache, v_cache, table, positions, mask, seen, head, scale, best, total, acc,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the keys and values at `positions` of one request into a running softmax.

    `queries [Q, DIMS]`; `table`, `mask` as in `slots_of`, `head`, WIDTH, D, DIMS as in
    `load_tile`. A score is query * key * scale * LOG2_E, and -inf where `seen [1 or Q, KEYS]` is
    0. Returns `best`, `total`, `acc` as `softmax_step` does.
    """
    slots = slots_of(table, positions, mask, BLOCK_SIZE)
    keys = load_tile(k_cache, slots, mask, head, WIDTH, D, DIMS)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * (scale * LOG2_E)
    scores = tl.where(seen, scores, float("-inf"))
    values = load_tile(v_cache, slots, mask, head, WIDTH, D, DIMS)
    return softmax_step(scores, values, best, total, acc, PRECISION)


@triton.jit
def merge_parts(best, total, acc, part_best, part_total, part_acc):
    """Put two parts of one softmax together, which were made of different keys.

    Each is the largest score, the sum of 2^(score - largest), and the sum of that times value
    (`[D]`), as from `softmax_step`; the first may be of no key: -inf, 0, 0. Returns the three of
    all keys. Parts (1, 2, 6) and (3, 1, 5) are (3, 1.5, 6.5).
    Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
    """
    new_best = tl.maximum(best, part_best)
    shrink, part_shrink = tl.exp2(best - new_best), tl.exp2(part_best - new_best)
    total = total * shrink + part_total * part_shrink
    acc = acc * shrink + part_acc * part_shrink
    return new_best, total, acc


@triton.jit(do_not_specialize=["num_requests"])
def _attend_kernel(
    q, k_cache, v_cache, block_table, seq_lens, item_request, first_item, chunk_size,
    out, part_acc, part_best, part_total, scale, num_requests, table_stride, q_stride,
    BLOCK_SIZE: tl.constexpr, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    QUERIES: tl.constexpr, DIMS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One work item and one key/value head: the group's G queries over a chunk of the keys."""
    head, item = tl.program_id(0), tl.program_id(1)
    request = tl.load(item_request + item)
    if request >= num_requests:
        return
    # 1. Which keys.
    num_keys = tl.load(seq_lens + request)
    size, split = tl.load(chunk_size), item - tl.load(first_item + request)
    start, end = split * size, tl.minimum(split * size + size, num_keys)
    # 2. The queries, pre-scaled so that powers of two can be used.
    group, dims = tl.arange(0, QUERIES), tl.arange(0, DIMS)
    heads = head * G + group
    seen = (group < G)[:, None] & (dims < D)[None, :]
    places = heads[:, None] * D + dims[None, :]
    queries = tl.load(q + request.to(tl.int64) * q_stride + places, mask=seen, other=0.0)
    # 3. The keys, tile by tile.
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIMS], tl.float32)
    table = block_table + request.to(tl.int64) * table_stride
    for first in tl.range(start, end, KEYS, num_stages=STAGES):
        positions = first + tl.arange(0, KEYS)
        mask = positions < end
        best, total, acc = attend_tile(
            queries, k_cache, v_cache, table, positions, mask, mask[None, :], head, scale,
            best, total, acc, BLOCK_SIZE, K * D, D, DIMS, PRECISION,
        )  # fmt: skip
    # 4. The answer, or this split's part of it.
    if num_keys <= size:
        row = out + request.to(tl.int64) * (K * G * D)
        tl.store(row + places, acc / total[:, None], mask=seen)
    else:
        part = item * (K * G) + heads
        tl.store(part_acc + part[:, None].to(tl.int64) * D + dims[None, :], acc, mask=seen)
        tl.store(part_best + part, best, mask=group < G)
        tl.store(part_total + part, total, mask=group < G)


@triton.jit
def _combine_kernel(
    out, part_acc, part_best, part_total, seq_lens, first_item, chunk_size,
    H: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Put the parts of one request and head together; program (n, h). In the order of the
    splits, so that the sum is the same in every run."""
    request, head = tl.program_id(0), tl.program_id(1)
    num_splits = tl.cdiv(tl.load(seq_lens + request), tl.load(chunk_size))
    if num_splits <= 1:
        return
    dims = tl.arange(0, DIMS)
    first = tl.load(first_item + request)
    best = -float("inf")
    total = 0.0
    acc = tl.zeros([DIMS], tl.float32)
    for split in range(num_splits):
        part = (first + split) * H + head
        values = tl.load(part_acc + part.to(tl.int64) * D + dims, mask=dims < D, other=0.0)
        part_max, part_sum = tl.load(part_best + part), tl.load(part_total + part)
        best, total, acc = merge_parts(best, total, acc, part_max, part_sum, values)
    row = out + (request.to(tl.int64) * H + head) * D
    tl.store(row + dims, acc / total, mask=dims < D)


# -- the operation --------------------------------------------------------------------------------


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    plan: Plan | None = None,
) -> Tensor:
    """Attention of one query per request: `q [N, H, D]` -> `[N, H, D]`; see
    `ops.decode_attention`. `plan` is the same in all layers of a step; the lengths are read on
    the device, so `max_seq_len` is not needed."""
    refuse_interpreted_bfloat16(q)
    plan = plan if plan is not None else Plan(seq_lens)
    num_requests, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    out, num_parts = q.new_empty(q.shape), plan.num_items * num_heads
    part_acc = torch.empty(num_parts, head_dim, device=q.device)
    part_best, part_total = (torch.empty(num_parts, device=q.device) for _ in range(2))
    dims, group = max(MIN_SIDE, triton.next_power_of_2(head_dim)), num_heads // num_kv_heads
    _attend_kernel[(num_kv_heads, plan.num_items)](
        q, k_cache, v_cache, block_table, seq_lens,
        plan.item_request, plan.first_item, plan.chunk_size,
        out, part_acc, part_best, part_total, scale, num_requests,
        block_table.stride(0), q.stride(0),
        BLOCK_SIZE=block_size, K=num_kv_heads, G=group, D=head_dim,
        QUERIES=max(MIN_SIDE, triton.next_power_of_2(group)), DIMS=dims, KEYS=KEYS,
        # float32 stays float32: the tensor cores would round it to 10 bits.
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    _combine_kernel[(num_requests, num_heads)](
        out, part_acc, part_best, part_total, seq_lens, plan.first_item, plan.chunk_size,
        H=num_heads, D=head_dim, DIMS=dims,
    )  # fmt: skip
    return out
