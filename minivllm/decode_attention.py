"""Paged attention of one new token per request, in Triton. Notebook 07.

FlashAttention's idea (Dao et al. 2022: softmax over tiles of keys, never the whole row of
scores) on a paged cache (Kwon et al. 2023), and split over the keys (Dao et al. 2023,
"Flash-Decoding"), so that a few long requests use the device as well as many short ones.
The split is planned on the device: the launches are the same for any lengths, so a step can be
captured. Tested against `ops.decode_attention`.

Tensor letters as in `kernels`; W work items.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.kernels import refuse_interpreted_bfloat16, slots_of

LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) = 2 ** (x * LOG2_E); 2 ** x is one instruction

KEYS = 64  # keys of a tile
STAGES = 3  # tiles of keys loaded ahead
WARPS = 4
MIN_SIDE = 16  # smallest side of a tile in `tl.dot`: groups of heads and short heads are padded


# -- planning: which program reads which keys ---------------------------------------------------


def num_items(num_requests: int) -> int:
    """Return the number of work items of a step: enough to fill a large device, and one more for
    each request.

    With few requests fewer items are better: further splits only add work to combine them.
    """
    return num_requests + (64 if num_requests <= 48 else 128)


@triton.jit(do_not_specialize=["num_requests", "max_items"])
def _plan_kernel(
    seq_lens, item_request, first_item, chunk_size, num_requests, max_items,
    TARGET: tl.constexpr, KEYS: tl.constexpr, REQUESTS: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """Split the keys of all requests into chunks of one size, about TARGET chunks in all."""
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
    # 3. The inverse: an item's request is the number of requests whose items end before it.
    for start in range(0, max_items, ITEMS):
        items = start + tl.arange(0, ITEMS)
        request = tl.sum((ends[None, :] <= items[:, None]).to(tl.int32), axis=1)
        tl.store(item_request + items, request, mask=items < max_items)


class Plan:
    """How a step's keys are split: `item_request [W]` int32 (N or more: no work), `first_item [N]`
    int32, `chunk_size [1]` int32 (keys)."""

    def __init__(self, seq_lens: Tensor) -> None:
        num_requests = len(seq_lens)
        device = seq_lens.device
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
    """Return one head's rows of a cache `[slots, K * D]`: `[KEYS, DIMS]`, zero where masked."""
    dims = tl.arange(0, DIMS)
    places = slots[:, None] * WIDTH + head * D + dims[None, :]
    return tl.load(cache + places, mask=mask[:, None] & (dims < D)[None, :], other=0.0)


@triton.jit
def softmax_step(scores, values, best, total, acc, PRECISION: tl.constexpr):
    """Add one tile of keys to a running softmax in powers of two; return the new state.

    `scores [Q, KEYS]`, -inf for keys that a query does not see (it sees at least one), `values
    [KEYS, D]`. The state is float32: `best [Q]`, the largest score so far, `total [Q]`, the sum of
    2^(score - best), and `acc [Q, D]`, the sum of 2^(score - best) * value; at first -inf, 0, 0.
    Example: scores 1 1 of values 2 4 give (1, 2, 6); then score 3 of value 5 gives (3, 1.5, 6.5).
    Source: Milakov and Gimelshein 2018, arXiv 1805.02867.
    """
    # A larger score scales everything before it down by one factor.
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
    """Add the keys and values at `positions` of one request to a running softmax.

    `queries [Q, DIMS]` see a key only where `seen [1 or Q, KEYS]` is not 0. A score is the dot
    product of query and key times `scale`, as a power of two: times LOG2_E. `table` and `mask` are
    those of `slots_of`, `head`, WIDTH, D and DIMS those of `load_tile`. Returns `best, total, acc`.
    """
    slots = slots_of(table, positions, mask, BLOCK_SIZE)
    keys = load_tile(k_cache, slots, mask, head, WIDTH, D, DIMS)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * (scale * LOG2_E)
    scores = tl.where(seen, scores, float("-inf"))
    values = load_tile(v_cache, slots, mask, head, WIDTH, D, DIMS)
    return softmax_step(scores, values, best, total, acc, PRECISION)


@triton.jit
def attend_keys(
    queries, k_cache, v_cache, table, start, end, head, scale,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr,
    DIMS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the running softmax `best, total, acc` of `queries [QUERIES, DIMS]` over the keys of
    one request at positions `start` to `end` - 1, KEYS at a time.

    Each of these keys is read once, by all queries, and no other key counts. `end` need not be a
    multiple of KEYS away from `start`. The other arguments are those of `attend_tile`; STAGES tiles
    are loaded ahead: `tl.range(..., num_stages=STAGES)`. Source: Dao et al. 2022, arXiv 2205.14135.
    """
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIMS], tl.float32)
    for first in tl.range(start, end, KEYS, num_stages=STAGES):
        positions = first + tl.arange(0, KEYS)
        mask = positions < end
        best, total, acc = attend_tile(
            queries, k_cache, v_cache, table, positions, mask, mask[None, :], head, scale,
            best, total, acc, BLOCK_SIZE, WIDTH, D, DIMS, PRECISION,
        )  # fmt: skip
    return best, total, acc


@triton.jit
def merge_parts(best, total, acc, part_best, part_total, part_acc):
    """Merge two parts of one softmax, computed from different keys; return the state of all keys.

    A part is the state of `softmax_step` for one query: two numbers and a vector `[D]`. The first
    part may have no keys: -inf, 0, 0. Example: (1, 2, 6) and (3, 1, 5) give (3, 1.5, 6.5).
    Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
    """
    new_best = tl.maximum(best, part_best)
    shrink = tl.exp2(best - new_best)
    part_shrink = tl.exp2(part_best - new_best)
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
    head = tl.program_id(0)
    item = tl.program_id(1)
    request = tl.load(item_request + item)
    if request >= num_requests:
        return
    # 1. Which keys.
    num_keys = tl.load(seq_lens + request)
    size = tl.load(chunk_size)
    start = (item - tl.load(first_item + request)) * size
    end = tl.minimum(start + size, num_keys)
    # 2. The queries of the group.
    group = tl.arange(0, QUERIES)
    dims = tl.arange(0, DIMS)
    heads = head * G + group
    seen = (group < G)[:, None] & (dims < D)[None, :]
    places = heads[:, None] * D + dims[None, :]
    queries = tl.load(q + request.to(tl.int64) * q_stride + places, mask=seen, other=0.0)
    # 3. The keys.
    table = block_table + request.to(tl.int64) * table_stride
    best, total, acc = attend_keys(
        queries, k_cache, v_cache, table, start, end, head, scale,
        BLOCK_SIZE, K * D, D, QUERIES, DIMS, KEYS, PRECISION, STAGES,
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
    """Merge the parts of request n and head h; program (n, h). Always in the order of the splits,
    so that the sum is the same in every run."""
    request = tl.program_id(0)
    head = tl.program_id(1)
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
        largest = tl.load(part_best + part)
        weight = tl.load(part_total + part)
        best, total, acc = merge_parts(best, total, acc, largest, weight, values)
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
    """Compute attention of one query per request: `q [N, H, D]` -> `[N, H, D]`; see
    `ops.decode_attention`. `plan` is the same for all layers of a step. `max_seq_len` is not used:
    the lengths are read on the device."""
    refuse_interpreted_bfloat16(q)
    plan = plan if plan is not None else Plan(seq_lens)
    num_requests, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    dims = max(MIN_SIDE, triton.next_power_of_2(head_dim))
    out = q.new_empty(q.shape)
    num_parts = plan.num_items * num_heads
    part_acc = torch.empty(num_parts, head_dim, device=q.device)
    part_best = torch.empty(num_parts, device=q.device)
    part_total = torch.empty(num_parts, device=q.device)
    _attend_kernel[(num_kv_heads, plan.num_items)](
        q, k_cache, v_cache, block_table, seq_lens,
        plan.item_request, plan.first_item, plan.chunk_size,
        out, part_acc, part_best, part_total, scale, num_requests,
        block_table.stride(0), q.stride(0),
        BLOCK_SIZE=block_size, K=num_kv_heads, G=group, D=head_dim,
        QUERIES=max(MIN_SIDE, triton.next_power_of_2(group)), DIMS=dims, KEYS=KEYS,
        # "ieee" keeps float32 exact: tensor cores would round it to 10 bits.
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    _combine_kernel[(num_requests, num_heads)](
        out, part_acc, part_best, part_total, seq_lens, plan.first_item, plan.chunk_size,
        H=num_heads, D=head_dim, DIMS=dims,
    )  # fmt: skip
    return out
