"""Paged attention of one new token per request against float64: on a GPU if there is one, else in
Triton's interpreter.

The tests with an `exercise` mark are checks of notebook 07; what a failed assert says is the hint
a learner reads.
"""

from __future__ import annotations

import math
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
if find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton; Linux only)", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))
from kernel_calls import DEVICE, attend_keys, attend_tile, merge_parts, softmax_step
from paged_batch import PagedBatch, exact_attention, far_memory

from minivllm import ops
from minivllm.decode_attention import KEYS, Plan, decode_attention, num_items

INF = math.inf

# -- the helpers: a running softmax --


@pytest.mark.exercise("decode_attention.softmax_step")
def test_the_first_tile_stands_for_itself() -> None:
    """Nothing so far is -inf, 0, 0."""
    assert softmax_step([1.0, 1.0], [2.0, 4.0], -INF, 0.0, 0.0) == (1.0, 2.0, 6.0), (
        "two scores of 1: each weighs 2^(1 - 1) = 1, so the total is 2 and acc 2 + 4"
    )
    assert softmax_step([3.0, 1.0], [8.0, 4.0], -INF, 0.0, 0.0) == (3.0, 1.25, 9.0), (
        "score 1 weighs 2^(1 - 3) = 1/4 next to score 3: powers of two, relative to the largest"
    )


@pytest.mark.exercise("decode_attention.softmax_step")
def test_a_larger_score_shrinks_what_came_before() -> None:
    """From best 1 to best 3: total and acc become a quarter."""
    assert softmax_step([3.0], [5.0], 1.0, 2.0, 6.0) == (3.0, 1.5, 6.5), (
        "the best score rises by 2: 2 / 4 + 1 and 6 / 4 + 5. Do total and acc both shrink?"
    )


@pytest.mark.exercise("decode_attention.softmax_step")
def test_a_smaller_score_leaves_the_best() -> None:
    """Score 1 next to best 3 weighs a quarter."""
    assert softmax_step([1.0], [8.0], 3.0, 1.0, 4.0) == (3.0, 1.25, 6.0), (
        "the best score so far is 3, and the tile's is 1: which of them is the new best?"
    )


@pytest.mark.exercise("decode_attention.softmax_step")
def test_each_query_has_a_best_of_its_own() -> None:
    """One tile: for the first query larger, for the second smaller than what came before."""
    state = softmax_step([[3.0], [1.0]], [8.0], [1.0, 2.0], [2.0, 1.0], [4.0, 4.0])
    assert state == ([3.0, 2.0], [1.5, 1.5], [9.0, 8.0]), (
        "two queries, one row each: along which axis do you take the largest and the sum?"
    )


@pytest.mark.exercise("decode_attention.softmax_step")
def test_large_scores_give_no_infinity() -> None:
    """2^1000 is beyond float32; 2^(1000 - 1000) is not."""
    assert softmax_step([1000.0], [3.0], 990.0, 1.0, 2.0) == (1000.0, 1.001, 3.002), (
        "2^1000 is infinite: is every power relative to the best score?"
    )


@pytest.mark.exercise("decode_attention.softmax_step")
def test_values_may_have_fewer_bits_than_weights() -> None:
    """Values in float16, the state in float32."""
    state = softmax_step([3.0], [5.0], 1.0, 2.0, 6.0, dtype=torch.float16)
    assert state == (3.0, 1.5, 6.5), "tl.dot wants both tiles in one type: that of the values"


# -- the helpers: a tile of a paged cache --

LN_3 = math.log(3.0)  # e^LN_3 is 3: such a key weighs three times as much as a key 0


@pytest.mark.exercise("decode_attention.attend_tile")
def test_scores_are_powers_of_e() -> None:
    """Weights 1 and 3 of the values 0 and 4."""
    assert attend_tile([1.0], [0.0, LN_3], [0.0, 4.0], [2], 2) == [3.0], (
        "weights e^0 = 1 and e^1.0986 = 3 of the values 0 and 4: softmax_step takes powers of two"
    )
    assert attend_tile([1.0], [0.0, 4 * LN_3], [0.0, 4.0], [2], 2, scale=0.25) == [3.0], (
        "every score is multiplied by `scale`"
    )


@pytest.mark.exercise("decode_attention.attend_tile")
def test_keys_are_found_through_the_block_table() -> None:
    """Positions 0 and 1 are in block 2, position 2 in block 0; equal keys give the mean."""
    assert attend_tile([1.0], [0.0] * 3, [0.0, 1.0, 2.0], [2, 0], 2) == [1.0], (
        "the mean of the values 0, 1, 2, in blocks 2 and 0: do you read slots, or positions?"
    )
    assert attend_tile([1.0], [0.0, LN_3], [0.0, 4.0], [1], 2, head=1) == [3.0], (
        "the second head's keys lie behind the first one's"
    )


@pytest.mark.exercise("decode_attention.attend_tile")
def test_a_key_that_is_not_seen_weighs_nothing() -> None:
    """Two queries: the first sees two keys, the second all three."""
    out = attend_tile(
        [1.0, 1.0], [0.0] * 3, [0.0, 1.0, 5.0], [2, 0], 2, seen=[[1, 1, 0], [1, 1, 1]]
    )
    assert out == [0.5, 2.0], (
        "(0 + 1) / 2 and (0 + 1 + 5) / 3: which score has a weight of 0? It is not 0"
    )


@pytest.mark.exercise("decode_attention.attend_tile")
def test_a_tile_goes_on_where_the_last_one_ended() -> None:
    """One key of score 0 and value 0 came before."""
    assert attend_tile([1.0], [LN_3], [4.0], [0], 2, before=(0.0, 1.0, 0.0)) == [3.0], (
        "weight 1 of the value 0 came before, now weight 3 of the value 4: is the state handed on?"
    )


# -- the helpers: the loop over tiles --

EQUAL = [0.0] * 40  # keys of equal weight
POSITIONS = [float(position) for position in range(40)]  # values


@pytest.mark.exercise("decode_attention.attend_keys")
def test_every_tile_counts() -> None:
    """32 keys in two tiles of 16."""
    assert attend_keys(EQUAL, POSITIONS, 0, 32) == 15.5, (
        "32 equal keys with the values 0 to 31, in two tiles: 7.5 is the mean of the first tile"
        " alone, 23.5 that of the last"
    )


@pytest.mark.exercise("decode_attention.attend_keys")
def test_the_last_tile_may_be_partly_empty() -> None:
    """Keys after the end are garbage."""
    assert attend_keys(EQUAL, POSITIONS, 0, 37) == 18.0, (
        "37 keys in tiles of 16, then garbage: which keys of the third tile are real?"
    )
    assert attend_keys(EQUAL, POSITIONS, 0, 1) == 0.0, "one key, of value 0"


@pytest.mark.exercise("decode_attention.attend_keys")
def test_a_part_begins_where_it_is_told_to() -> None:
    """Keys before the start belong to another program."""
    assert attend_keys(EQUAL, POSITIONS, 16, 40) == 27.5, (
        "the values 16 to 39: is a key before `start` read?"
    )
    assert attend_keys(EQUAL, POSITIONS, 21, 40) == 30.0, (
        "the values 21 to 39: do the tiles begin at `start`?"
    )


@pytest.mark.exercise("decode_attention.attend_keys")
def test_a_later_tile_may_have_the_best_score() -> None:
    """Weights 1 and 3: sixteen values 0, then sixteen values 4."""
    keys = [0.0] * 16 + [LN_3] * 16
    assert attend_keys(keys, [0.0] * 16 + [4.0] * 16, 0, 32) == 3.0, (
        "one tile of weight 1 and value 0, one of weight 3 and value 4: (0 + 12) / 4"
    )


@pytest.mark.exercise("decode_attention.attend_keys")
def test_tiles_have_the_size_that_is_asked_for() -> None:
    """32 keys at a time instead of 16."""
    assert attend_keys(EQUAL, POSITIONS, 3, 40, tile=32) == 21.0, (
        "the values 3 to 39 with KEYS = 32: how far does the loop go in one step?"
    )


# -- the helpers: parts --


@pytest.mark.exercise("decode_attention.merge_parts")
def test_two_parts_are_what_one_pass_gives() -> None:
    """Scores 1 1 of values 2 4 in one part, score 3 of value 5 in the other."""
    assert merge_parts((1.0, 2.0, 6.0), (3.0, 1.0, 5.0)) == (3.0, 1.5, 6.5), (
        "the best of both is 3: the first part shrinks by 2^(1 - 3), to 2 / 4 and 6 / 4"
    )
    assert merge_parts((3.0, 1.0, 5.0), (1.0, 2.0, 6.0)) == (3.0, 1.5, 6.5), (
        "now the second part has the smaller best: does it shrink, too?"
    )


@pytest.mark.exercise("decode_attention.merge_parts")
def test_a_part_of_no_key_changes_nothing() -> None:
    """-inf, 0, 0 is where the sum begins."""
    assert merge_parts((-INF, 0.0, 0.0), (3.0, 1.0, 5.0)) == (3.0, 1.0, 5.0)


@pytest.mark.exercise("decode_attention.merge_parts")
def test_parts_with_large_scores_give_no_infinity() -> None:
    """Their powers are relative to the larger best."""
    assert merge_parts((1000.0, 1.0, 3.0), (990.0, 1.0, 2.0)) == (1000.0, 1.001, 3.002), (
        "2^1000 is infinite: is every power relative to the best of both?"
    )


# -- the plan --

LENS = {  # requests of these lengths
    "one": [1],
    "one, long": [5000],
    "around a tile": [KEYS - 1, KEYS, KEYS + 1, 2 * KEYS],
    "one long, many short": [9000] + [3] * 40,
    "padding": [700, 1, 1, 1],
    "more than 48": list(range(1, 62)),
}


@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
def test_every_key_belongs_to_one_item(lens: list[int]) -> None:
    """A request's items lie one after the other, chunk by chunk; the rest is unused."""
    plan = Plan(torch.tensor(lens, dtype=torch.int32, device=DEVICE))
    size = plan.chunk_size.item()
    assert size > 0 and size % KEYS == 0
    num_splits = [-(-length // size) for length in lens]
    owners = [n for n, count in enumerate(num_splits) for _ in range(count)]
    assert len(owners) <= plan.num_items, "there is an item for every split"
    items = plan.item_request.tolist()
    assert items[: len(owners)] == owners
    assert all(request >= len(lens) for request in items[len(owners) :])
    assert plan.first_item.tolist() == [sum(num_splits[:n]) for n in range(len(lens))]


@pytest.mark.parametrize("num_requests", [1, 2, 48, 49, 256])
def test_a_plan_has_room_for_any_lengths(num_requests: int) -> None:
    """Each request wastes less than one chunk, so a chunk's share of all keys and one item for
    each request suffice; with the worst lengths: just over a chunk each."""
    for extra in (1, 700):
        lens = [4 * KEYS + 1] * (num_requests - 1) + [extra * KEYS + 1]
        plan = Plan(torch.tensor(lens, dtype=torch.int32, device=DEVICE))
        size = plan.chunk_size.item()
        assert sum(-(-length // size) for length in lens) <= num_items(num_requests)


def test_long_requests_are_split_to_fill_the_device() -> None:
    """A single request of 64 tiles becomes 64 items."""
    plan = Plan(torch.tensor([64 * KEYS], dtype=torch.int32, device=DEVICE))
    assert plan.chunk_size.item() == KEYS
    assert plan.item_request.tolist().count(0) == 64


# -- attention --


def check(batch: PagedBatch, num_heads: int, scale: float) -> None:
    """The newest token of every request."""
    q = batch.queries(len(batch.lens), num_heads)
    expected = batch.expected(q.cpu(), [1] * len(batch.lens), scale)
    there = [x.to(DEVICE) for x in (batch.k_cache, batch.v_cache, batch.table, batch.seq_lens)]
    given = decode_attention(merged(q), *there, max(batch.lens), scale)
    assert given.dtype == q.dtype and given.shape == q.shape
    torch.testing.assert_close(given.cpu().double(), expected, atol=2e-5, rtol=0)


def merged(q: Tensor) -> Tensor:
    """The queries on the device, as a view into wider rows."""
    rows = torch.full((len(q), q.shape[1] + 3, q.shape[2]), 1e4, device=DEVICE)
    rows[:, : q.shape[1]] = q.to(DEVICE)
    return rows[:, : q.shape[1]]


SHAPES = [  # query heads, key/value heads, head size, block size
    (2, 2, 64, 16),
    (9, 3, 64, 64),
    (3, 1, 96, 16),
    (4, 2, 128, 32),
    (8, 1, 256, 16),
    (6, 2, 80, 16),
    (17, 1, 16, 1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_attention_is_exact(shape: tuple[int, int, int, int]) -> None:
    """All group sizes, head sizes and block sizes; requests in one chunk and in several."""
    num_heads, num_kv_heads, head_dim, block_size = shape
    lens = [1, block_size + 1, KEYS + 1, 150]
    batch = PagedBatch(lens, num_kv_heads, head_dim, block_size)
    check(batch, num_heads, head_dim**-0.5)


BATCHES = {
    "one request": [7],
    "around every border": [1, 15, 16, 17, KEYS - 1, KEYS, KEYS + 1, 2 * KEYS],
    "more keys than items for chunks of one tile": [64 * KEYS + 5, 3],
}


@pytest.mark.parametrize("lens", BATCHES.values(), ids=BATCHES.keys())
def test_decode_attention_is_exact_for_any_lengths(lens: list[int]) -> None:
    """Blocks of 16; two heads share a key."""
    check(PagedBatch(lens, 1, 16), 2, 0.25)


def test_decode_attention_is_the_plain_one() -> None:
    """The twin in `ops`, with the same arguments."""
    batch = PagedBatch([5, 33, 100, 16], 2, 64)
    q = batch.queries(4, 4)
    rest = (batch.k_cache, batch.v_cache, batch.table, batch.seq_lens)
    expected = ops.decode_attention(q, *rest, 100, 0.125)
    given = decode_attention(q.to(DEVICE), *(x.to(DEVICE) for x in rest), 100, 0.125)
    torch.testing.assert_close(given.cpu(), expected, atol=1e-5, rtol=0)


def test_equal_scores_give_the_mean_of_the_values() -> None:
    """Two blocks of two: position p has the value p, in blocks 2 and 0; three keys: (0+1+2)/3."""
    k_cache = torch.zeros(3, 2, 1, 16, device=DEVICE)
    v_cache = torch.tensor([2.0, 99, 99, 99, 0, 1], device=DEVICE).view(3, 2, 1, 1)
    v_cache = v_cache.expand(3, 2, 1, 16).contiguous()
    table, lens = torch.tensor([[2, 0]]).int().to(DEVICE), torch.tensor([3]).int().to(DEVICE)
    q = torch.ones(1, 1, 16, device=DEVICE)
    assert decode_attention(q, k_cache, v_cache, table, lens, 3, 1.0).tolist() == [[[1.0] * 16]]


def test_what_was_not_written_changes_no_bit() -> None:
    """Slots past a request's length, and blocks of no request, may hold any finite number."""
    batch = PagedBatch([5, 70, 16, 130], 2, 64)
    q = batch.queries(4, 4).to(DEVICE)

    def run() -> Tensor:
        rest = (batch.k_cache, batch.v_cache, batch.table, batch.seq_lens)
        return decode_attention(q, *(x.to(DEVICE) for x in rest), 130, 0.125)

    before = run()
    batch.spoil()
    assert torch.equal(run(), before) and before.any()


def test_large_scores_do_not_overflow() -> None:
    """Scores of some hundreds, whose exponentials are beyond float32, in chunks that are put
    together."""
    batch = PagedBatch([150, 4], 1, 16)
    q = 100 * batch.queries(2, 2)
    rest = (batch.k_cache, batch.v_cache, batch.table, batch.seq_lens)
    given = decode_attention(q.to(DEVICE), *(x.to(DEVICE) for x in rest), 150, 1.0)
    expected = batch.expected(q, [1, 1], 1.0)
    torch.testing.assert_close(given.cpu().double(), expected, atol=1e-3, rtol=0)


def test_a_plan_serves_every_layer() -> None:
    """Made once from the lengths; other keys and queries give what a new plan gives."""
    batches = [PagedBatch([5, 150, 64], 1, 16, seed=seed) for seed in (0, 1)]
    plan = Plan(batches[0].seq_lens.to(DEVICE))
    for batch in batches:
        q = batch.queries(3, 2)
        rest = (batch.k_cache, batch.v_cache, batch.table, batch.seq_lens)
        there = [q.to(DEVICE), *(x.to(DEVICE) for x in rest), 150, 0.25]
        expected = batch.expected(q, [1, 1, 1], 0.25)
        given = decode_attention(*there, plan)
        torch.testing.assert_close(given.cpu().double(), expected, atol=2e-5, rtol=0)
        assert torch.equal(given, decode_attention(*there))


def test_padding_rows_change_no_other_row() -> None:
    """Rows of length 1, all in the padding block."""
    batch = PagedBatch([70, 9], 1, 16)
    table = torch.cat((batch.table, batch.table[1:, -1:].expand(3, batch.table.shape[1])))
    lens = torch.tensor([70, 9, 1, 1, 1], dtype=torch.int32)
    q = batch.queries(5, 2)
    rest = (batch.k_cache, batch.v_cache, table, lens)
    given = decode_attention(q.to(DEVICE), *(x.to(DEVICE) for x in rest), 128, 0.25)
    expected = batch.expected(q[:2], [1, 1], 0.25)
    torch.testing.assert_close(given[:2].cpu().double(), expected, atol=2e-5, rtol=0)


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu has it, with real memory")
def test_keys_past_two_to_the_31_numbers_are_found(tmp_path: Path) -> None:
    """Heads of 64 numbers in blocks of 16: block 2^21 + 1 lies behind number 2^31."""
    (k_near, k_far), (v_near, v_far) = (
        far_memory(tmp_path / name, 3 * 1024, torch.float32) for name in "kv"
    )
    make = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(n, 1, 64, generator=make) for n in (20, 20, 1))
    # Positions 0 to 15 in block 2^21 + 1, the others in block 1.
    for near, far, values in ((k_near, k_far, k), (v_near, v_far, v)):
        far[1024:2048], near[1024 : 1024 + 4 * 64] = values[:16].flatten(), values[16:].flatten()
    caches = (near.view(3, 16, 1, 64) for near in (k_near, v_near))
    table = torch.tensor([[2**21 + 1, 1]], dtype=torch.int32)
    lens = torch.tensor([20], dtype=torch.int32)
    given = decode_attention(q, *caches, table, lens, 20, 0.125)
    torch.testing.assert_close(given.double(), exact_attention(q, k, v, 0.125), atol=2e-5, rtol=0)
