"""Rules of the plain torch operations, each against a sum done by hand or in float64.

The tests with an `exercise` mark are checks of notebook 05; what a failed assert says is the hint
a learner reads.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from device_watch import question_of

from minivllm import ops
from minivllm.model_config import RopeConfig


def rounded(x: Tensor) -> Any:
    """The numbers as lists, with three digits behind the point."""
    return json.loads(json.dumps(x.tolist()), parse_float=lambda text: round(float(text), 3))


# The operations on lists: what a failed check prints can be read, and typed into a cell.


def rms_norm(x: Any, weight: Any, eps: float, dtype: torch.dtype = torch.float32) -> Any:
    return rounded(ops.rms_norm(torch.tensor(x, dtype=dtype), torch.tensor(weight).to(dtype), eps))


def silu_mul(gate_up: Any) -> Any:
    return rounded(ops.silu_mul(torch.tensor(gate_up).float()))


def apply_rope(x: Any, cos: Any, sin: Any) -> Any:
    return rounded(ops.apply_rope(*(torch.tensor(values).float() for values in (x, cos, sin))))


def prefill_attention(q: Any, k: Any, v: Any, scale: float) -> Any:
    q, k, v = (torch.tensor(values).float() for values in (q, k, v))
    return rounded(ops.prefill_attention(q, k, v, scale))


# -- layers --


@pytest.mark.exercise("ops.rms_norm")
def test_rms_norm_has_root_mean_square_one_before_the_weight() -> None:
    """[3, -3] has root mean square 3; the weight scales what is left."""
    assert rms_norm([[3, -3]], [1, 10], 0) == [[1, -10]], (
        "[3, -3] has the mean square 9: do you take the mean, and its root?"
    )


@pytest.mark.exercise("ops.rms_norm")
def test_rms_norm_subtracts_no_mean() -> None:
    """[3, 4] has root mean square 3.54, and keeps its direction."""
    assert rms_norm([[3, 4]], [1, 1], 0) == [[0.849, 1.131]], (
        "[3, 4] keeps its direction: do you subtract the mean, as LayerNorm does?"
    )


@pytest.mark.exercise("ops.rms_norm")
def test_rms_norm_adds_eps_to_the_mean_square() -> None:
    """With eps 3 and a mean square of 1 the divisor is 2, and zeros stay zeros."""
    assert rms_norm([[1, -1], [0, 0]], [1, 1], 3) == [[0.5, -0.5], [0, 0]], (
        "the root of 1 + 3 is 2: is eps below the root?"
    )


@pytest.mark.exercise("ops.rms_norm")
def test_rms_norm_works_on_each_vector() -> None:
    """The last axis alone is normalised: every head of every token by itself."""
    x = [[[3, -3], [0.5, 0.5]], [[-6, 6], [0, 0]]]
    assert rms_norm(x, [1, 1], 0.0001) == [[[1, -1], [1, 1]], [[-1, 1], [0, 0]]], (
        "each vector by itself: over which axis do you take the mean?"
    )


@pytest.mark.exercise("ops.rms_norm")
def test_rms_norm_computes_in_float32() -> None:
    """300 squared overflows float16, but not float32; the result is float16 again."""
    assert rms_norm([[300, -300]], [1, 1], 0, torch.float16) == [[1, -1]], (
        "300 squared is infinite in float16: do you compute in float32?"
    )


@pytest.mark.exercise("ops.rms_norm")
def test_rms_norm_keeps_the_dtype() -> None:
    """What comes in as bfloat16 goes out as bfloat16."""
    x, weight = torch.ones(1, 2).bfloat16(), torch.ones(2).bfloat16()
    assert ops.rms_norm(x, weight, 0.0).dtype == torch.bfloat16, (
        "the dtype of x comes back: where do you leave float32?"
    )


@pytest.mark.exercise("ops.rms_norm")
def test_rms_norm_rounds_before_the_weight_as_llama_does() -> None:
    """[3, 4] is 0.8485 and 1.1314, in bfloat16 0.84765625 and 1.1328125; only then comes the
    weight 1.5, and 1.271484375 is rounded to 1.2734375 (unrounded, 1.2728 gives the same), but
    1.69921875 to 1.703125 (unrounded, 1.6971 gives 1.6953125)."""
    assert rms_norm([[3, 4]], [1.5, 1.5], 0, torch.bfloat16) == [[1.273, 1.703]], (
        "1.1328 times 1.5: do you round to bfloat16 before the weight, or after it?"
    )


@pytest.mark.exercise("ops.rms_norm")
def test_rms_norm_only_reads_its_arguments() -> None:
    """The stream goes on, past the norm."""
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 10.0])
    ops.rms_norm(x, weight, 0.0)
    assert x.tolist() == [[3, 4]], "x is only read: in float32, is x.float() a copy?"
    assert weight.tolist() == [1, 10], "the weight is only read: do you write into it?"


def test_linear_multiplies_by_the_transposed_weight_and_adds_the_bias() -> None:
    """The weight's rows are outputs, as checkpoints store them."""
    x, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert ops.linear(x, weight).tolist() == [[1.0, 2.0, 3.0]]
    assert ops.linear(x, weight, torch.tensor([10.0, 0.0, 0.0])).tolist() == [[11.0, 2.0, 3.0]]


@pytest.mark.exercise("ops.silu_mul")
def test_silu_mul_gates_the_second_half_by_the_first() -> None:
    """Gates 0 and 2, ups 5 and 3: silu(2) * 3 = 5.285; a gate of 0 lets nothing through."""
    assert silu_mul([[0, 2, 5, 3]]) == [[0, 5.285]], (
        "the gates are 0 and 2, the ups 5 and 3: which half goes through silu?"
    )
    assert silu_mul([[0, 2, 0, 5, 3, 1]]) == [[0, 5.285, 0]], "three gates, then three ups"


@pytest.mark.exercise("ops.silu_mul")
def test_silu_is_the_gate_times_its_sigmoid() -> None:
    """silu(2) = 2 / (1 + e^-2) = 1.762, and silu(-1) = -0.269."""
    assert silu_mul([[2, 1], [-1, 1]]) == [[1.762], [-0.269]], (
        "silu(2) is 2 times the sigmoid of 2: do both factors stand there?"
    )


@pytest.mark.exercise("ops.silu_mul")
def test_silu_mul_keeps_the_dtype_and_its_argument() -> None:
    """bfloat16 in, bfloat16 out; what came in is still there."""
    gate_up = torch.tensor([[0.0, 2.0, 5.0, 3.0]]).bfloat16()
    out = ops.silu_mul(gate_up)
    assert (out.shape, out.dtype) == ((1, 2), torch.bfloat16)
    assert gate_up.tolist() == [[0, 2, 5, 3]], "gate_up is only read: do you write into it?"


@pytest.mark.exercise("ops.silu_mul")
def test_silu_is_a_number_at_both_ends() -> None:
    """e^100 is more than float32 holds; silu(100) is 100, and silu(-100) is 0."""
    assert silu_mul([[100, -100, 1, 1]]) == [[100, 0]], (
        "e^100 is infinite in float32: does infinity divided by infinity stand there?"
    )


def test_embed_takes_one_row_per_id() -> None:
    """Ids may repeat and come in any order."""
    assert ops.embed(torch.tensor([2, 0, 2]), torch.tensor([[1.0], [2.0], [3.0]])).tolist() == [
        [3.0],
        [1.0],
        [3.0],
    ]


# -- rotary position embedding --


def test_rope_table_holds_position_times_frequency() -> None:
    """Head size 4 and theta 10000: frequencies 1 and 0.01; position 0 does not turn."""
    cos, sin = ops.rope_table(RopeConfig(theta=10000.0), head_dim=4, max_len=4)
    assert cos.shape == sin.shape == (4, 2) and cos.dtype == torch.float32
    assert cos[0].tolist() == [1.0, 1.0] and sin[0].tolist() == [0.0, 0.0]
    torch.testing.assert_close(cos[3], torch.tensor([math.cos(3), math.cos(0.03)]))
    torch.testing.assert_close(sin[3], torch.tensor([math.sin(3), math.sin(0.03)]))


def test_linear_scaling_slows_every_pair() -> None:
    """With factor 4, position 12 has the angles that position 3 has without."""
    plain, _ = ops.rope_table(RopeConfig(), 8, 16)
    slow, _ = ops.rope_table(RopeConfig(kind="linear", factor=4.0), 8, 16)
    torch.testing.assert_close(slow[12], plain[3])


def test_llama3_scaling_keeps_fast_pairs_and_slows_the_slow_ones() -> None:
    """Pairs with 4 turns or more in the original context stay, with 1 or fewer are divided."""
    rope = RopeConfig(
        theta=10000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position=64,
    )  # fmt: skip
    plain, scaled = ops.rope_frequencies(RopeConfig(), 16), ops.rope_frequencies(rope, 16)
    turns = 64 * plain / (2 * math.pi)  # 10.2, 3.22, 1.02, 0.32, ...
    assert turns[0] >= 4 and 1 < turns[1] < 4 and 1 < turns[2] < 4 and turns[3] < 1
    assert scaled[0] == plain[0]
    torch.testing.assert_close(scaled[3:], plain[3:] / 8)
    kept = (turns[1] - 1) / 3
    torch.testing.assert_close(scaled[1], kept * plain[1] + (1 - kept) * plain[1] / 8)


def test_unknown_rope_kind_is_refused_by_name() -> None:
    """No scaling is guessed."""
    with pytest.raises(ValueError, match="yarn"):
        ops.rope_table(RopeConfig(kind="yarn"), 8, 4)


@pytest.mark.exercise("ops.apply_rope")
def test_apply_rope_turns_counterclockwise() -> None:
    """By 90 degrees [1, 0] becomes [0, 1], and [0, 1] becomes [-1, 0]."""
    assert apply_rope([[[1, 0]], [[0, 1]]], cos=[[0], [0]], sin=[[1], [1]]) == [
        [[0, 1]],
        [[-1, 0]],
    ], "a quarter turn takes [1, 0] to [0, 1]: has each sine its sign?"


@pytest.mark.exercise("ops.apply_rope")
def test_apply_rope_pairs_element_i_with_i_plus_half() -> None:
    """A quarter turn of pair 0 alone moves element 0 to element 2 of a head of 4."""
    assert apply_rope([[[1, 2, 3, 4]]], cos=[[0, 1]], sin=[[1, 0]]) == [[[-3, 2, 1, 4]]], (
        "element 0 turns with element 2, half a head away: do you pair neighbours?"
    )


@pytest.mark.exercise("ops.apply_rope")
def test_apply_rope_turns_both_elements_from_where_they_were() -> None:
    """By cos 0.6, sin 0.8, [1, 1] becomes [-0.2, 1.4]."""
    assert apply_rope([[[1, 1]]], cos=[[0.6]], sin=[[0.8]]) == [[[-0.2, 1.4]]], (
        "both elements turn at once: is the first one changed already when you need it?"
    )


@pytest.mark.exercise("ops.apply_rope")
def test_apply_rope_turns_each_token_by_its_own_angle_and_all_heads_alike() -> None:
    """Token 0 stays, both heads of token 1 turn by 90 degrees."""
    heads = [[1, 0], [0, 1]]
    assert apply_rope([heads, heads], cos=[[1], [0]], sin=[[0], [1]]) == [
        heads,
        [[0, 1], [-1, 0]],
    ], "token 0 stays, both heads of token 1 turn: does the angle go by token or by head?"


@pytest.mark.exercise("ops.apply_rope")
def test_apply_rope_only_reads_its_arguments() -> None:
    """Queries and keys are views of one product."""
    x, cos, sin = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[0.6]]), torch.tensor([[0.8]])
    out = ops.apply_rope(x, cos, sin)
    assert x.tolist() == [[[1, 2]]], "x is only read: is x.float() a copy in float32?"
    assert out.shape == (1, 1, 2), "the shape of x comes back"


@pytest.mark.exercise("ops.apply_rope")
def test_rotated_dot_products_depend_on_the_distance_alone() -> None:
    """Query at 9, key at 4 score as query at 5, key at 0."""
    q, k = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    cos, sin = ops.rope_table(RopeConfig(), 8, 16)

    def score(at_q: int, at_k: int) -> float:
        turned_q = ops.apply_rope(q, cos[at_q : at_q + 1], sin[at_q : at_q + 1])
        turned_k = ops.apply_rope(k, cos[at_k : at_k + 1], sin[at_k : at_k + 1])
        return round((turned_q * turned_k).sum().item(), 3)

    assert score(9, 4) == score(5, 0), "5 tokens apart is 5 tokens apart, wherever they are"
    assert score(9, 4) != score(9, 3), "distance counts: does anything turn?"


@pytest.mark.exercise("ops.apply_rope")
def test_apply_rope_keeps_bfloat16_and_rounds_once() -> None:
    """The products are float32; only the result is rounded."""
    x = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    cos, sin = ops.rope_table(RopeConfig(), 8, 5)
    out = ops.apply_rope(x, cos, sin)
    assert out.dtype == torch.bfloat16, "the dtype of x comes back: where do you leave float32?"
    exact = ops.apply_rope(x.float(), cos, sin).bfloat16()
    assert torch.equal(out, exact), "the products are float32: do you round cos and sin?"


# -- attention of one request --


@pytest.mark.exercise("ops.prefill_attention")
def test_attention_averages_by_softmax() -> None:
    """Keys that score 0 and log 3 weigh 1/4 and 3/4: values 0 and 4 give 3."""
    assert prefill_attention([[[1]]], [[[0]], [[math.log(3)]]], [[[0]], [[4]]], scale=1) == [
        [[3]]
    ], "scores 0 and log 3 weigh 1/4 and 3/4: is the softmax over the keys?"


@pytest.mark.exercise("ops.prefill_attention")
def test_scores_are_multiplied_by_the_scale() -> None:
    """With scale 0.5, log 9 counts as log 3."""
    k = [[[0]], [[math.log(9)]]]
    assert prefill_attention([[[1]]], k, [[[0]], [[4]]], scale=0.5) == [[[3]]], (
        "0.5 times log 9 is log 3: is the scale of the argument in the score?"
    )


@pytest.mark.exercise("ops.prefill_attention")
def test_a_token_sees_itself_and_what_came_before() -> None:
    """Three tokens with equal scores and values 2, 4, 9: means of 1, 2 and 3 of them."""
    q, v = [[[0]], [[0]], [[0]]], [[[2]], [[4]], [[9]]]
    assert prefill_attention(q, q, v, scale=1) == [[[2]], [[3]], [[5]]], (
        "token 0 sees itself alone, token 2 all three: what hides the later ones?"
    )


@pytest.mark.exercise("ops.prefill_attention")
def test_the_newest_tokens_see_the_earlier_ones() -> None:
    """Two new tokens after two old ones: they are positions 2 and 3."""
    q, v = [[[0]]] * 2, [[[2]], [[4]], [[9]], [[1]]]
    assert prefill_attention(q, [[[0]]] * 4, v, scale=1) == [[[5]], [[4]]], (
        "the two newest of four tokens are positions 2 and 3: does your mask begin at 0?"
    )


@pytest.mark.exercise("ops.prefill_attention")
def test_neighbouring_query_heads_share_a_key_head() -> None:
    """Four query heads, two KV heads with values 10 and 20: 0 and 1 read the first."""
    assert prefill_attention([[[0]] * 4], [[[0]] * 2], [[[10], [20]]], scale=1) == [
        [[10], [10], [20], [20]]
    ], "heads 0 and 1 read KV head 0, heads 2 and 3 head 1: h // 2 or h % 2?"


@pytest.mark.exercise("ops.prefill_attention")
def test_attention_is_that_of_one_query_and_one_head_at_a_time() -> None:
    """5 new tokens of 9, six heads on two, against float64."""
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, heads, 8, generator=make) for n, heads in ((5, 6), (9, 2), (9, 2)))
    expected = torch.empty(5, 6, 8)
    for i in range(5):
        for h in range(6):
            seen, head = slice(0, 4 + i + 1), h // 3
            weights = torch.softmax(k[seen, head].double() @ q[i, h].double() * 0.3, dim=0)
            expected[i, h] = (weights @ v[seen, head].double()).float()
    out = ops.prefill_attention(q, k, v, 0.3)
    assert (out.shape, out.dtype) == ((5, 6, 8), torch.float32), "tokens first, then heads"
    assert (out - expected).abs().max() < 1e-5, "not that of one query and one head at a time"


@pytest.mark.exercise("ops.prefill_attention")
def test_prefill_attention_keeps_dtype_and_arguments() -> None:
    """bfloat16 in, bfloat16 out; queries, keys and values are only read."""
    q, k, v = torch.ones(1, 1, 2), torch.ones(2, 1, 2), torch.ones(2, 1, 2)
    ops.prefill_attention(q, k, v, 0.5)
    assert (q == 1).all() and (k == 1).all() and (v == 1).all(), (
        "q, k and v are only read: do you multiply the scale into one of them in place?"
    )
    out = ops.prefill_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), 0.5)
    assert out.dtype == torch.bfloat16, "the dtype of q comes back: where do you leave float32?"


# -- paged cache --


@pytest.mark.exercise("ops.slot_mapping")
def test_slot_is_block_id_times_block_size_plus_offset() -> None:
    """Positions 15 and 16 are in different blocks."""
    table, owners = torch.tensor([[7, 3] + [0] * 14], dtype=torch.int32), torch.tensor([0, 0, 0])
    slots = ops.slot_mapping(table, owners, torch.tensor([0, 15, 16]), 16).tolist()
    assert slots == [112, 127, 48], (
        "position 15 is the last of block 7, and 16 the first of block 3: which of // and %"
        " chooses the entry of the table?"
    )


@pytest.mark.exercise("ops.slot_mapping")
def test_each_token_looks_in_its_owners_table() -> None:
    """Position 17 of two requests: two slots."""
    tables = torch.tensor([[7, 3], [2, 5]], dtype=torch.int32)
    slots = ops.slot_mapping(tables, torch.tensor([1, 0]), torch.tensor([17, 17]), 16)
    assert slots.tolist() == [81, 49], (
        "token 0 belongs to the request in row 1: does it look into that row of block_tables?"
    )


@pytest.mark.exercise("ops.slot_mapping")
def test_slots_past_two_to_the_31_are_right() -> None:
    """Block ids are int32, but the slot is computed in 64 bits."""
    tables = torch.tensor([[2**31 - 1]], dtype=torch.int32)
    slots = ops.slot_mapping(tables, torch.tensor([0]), torch.tensor([15]), 16)
    slot, dtype = slots.item(), slots.dtype
    assert slot == 2**35 - 1, (
        "block ids are int32: is the product with the block size computed in 64 bits?"
    )
    assert dtype == torch.int64, "slots are int64: does a float, or int32, come back?"


@pytest.mark.exercise("ops.slot_mapping")
def test_slots_are_computed_where_the_tensors_are() -> None:
    """A question to the device would wait for all that runs there."""
    tables, owners = torch.tensor([[7, 3], [2, 5]], dtype=torch.int32), torch.tensor([1, 0])
    question = question_of(ops.slot_mapping, tables, owners, torch.tensor([17, 3]), 16)
    assert question is None, "do you read a number of a tensor on the host (int, tolist, a loop)?"


def test_store_kv_writes_its_slots_and_no_other() -> None:
    """Two tokens into slots 5 and 0 of three blocks of two; keys and values are not mixed up."""
    k_cache, v_cache = torch.zeros(3, 2, 1, 1), torch.zeros(3, 2, 1, 1)
    k, v = torch.tensor([1.0, 2.0]).view(2, 1, 1), torch.tensor([3.0, 4.0]).view(2, 1, 1)
    ops.store_kv(k, v, k_cache, v_cache, torch.tensor([5, 0]))
    assert k_cache.flatten().tolist() == [2, 0, 0, 0, 0, 1]
    assert v_cache.flatten().tolist() == [4, 0, 0, 0, 0, 3]


def test_gather_blocks_returns_positions_in_the_order_of_the_table() -> None:
    """Blocks 2 and 0 of size 2, three tokens: both slots of block 2, the first of block 0."""
    cache = torch.arange(6.0).view(3, 2, 1, 1)
    table = torch.tensor([[2, 0, 1], [1, 2, 0]], dtype=torch.int32)
    assert ops.gather_blocks(cache, table, 3).flatten(1).tolist() == [[4, 5, 0], [2, 3, 4]]
    assert ops.gather_blocks(cache, table[:, :2], 4).flatten(1).tolist() == [
        [4, 5, 0, 1],
        [2, 3, 4, 5],
    ]


# -- attention --


def attend_alone(
    q: list[float], k: list[list[float]], v: list[list[float]], seq_lens: list[int], **more: float
) -> list[float]:
    """`decode_attention` with head size 1 and blocks of two: `k[n]` and `v[n]` are what is in
    the blocks of request n, which are in no order; `q` has one number for each head of each."""
    num_requests, width = len(k), len(k[0]) // 2
    table = torch.arange(num_requests * width).flip(0).view(num_requests, width)
    caches = [torch.zeros(num_requests * width, 2, 1, 1) for _ in range(2)]
    for cache, content in zip(caches, (k, v)):
        cache[table.flatten()] = torch.tensor(content).view(-1, 2, 1, 1)
    queries = torch.tensor(q).view(num_requests, -1, 1)
    longest = int(more.get("max_seq_len", max(seq_lens)))
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    scale = more.get("scale", 1.0)
    out = ops.decode_attention(queries, *caches, table.int(), lens, longest, scale)
    return [round(number, 3) for number in out.flatten().tolist()]


LN3 = math.log(3)


@pytest.mark.exercise("ops.decode_attention")
def test_what_is_seen_stays_a_number() -> None:
    """0 times infinity is none."""
    out = attend_alone([1.0, 1.0], [[0.0, LN3, 0.0, 0.0]] * 2, [[8.0, 4.0, 0.0, 0.0]] * 2, [2, 3])
    assert out[0] == out[0], "the result is NaN: is something multiplied by infinity where it is 0?"


@pytest.mark.exercise("ops.decode_attention")
def test_a_query_weighs_the_values_of_its_request() -> None:
    """Keys 0 and ln 3: weights 1/4 and 3/4; the other request has the same keys in other order."""
    out = attend_alone([1.0, 1.0], [[0.0, LN3], [LN3, 0.0]], [[8.0, 4.0], [8.0, 4.0]], [2, 2])
    assert out == [5.0, 7.0], "weights 1/4 and 3/4 of 8 and 4: softmax(query . keys) times values"


@pytest.mark.exercise("ops.decode_attention")
def test_scores_of_a_decode_are_multiplied_by_the_scale() -> None:
    """Keys 0 and 2 ln 3 at scale 1/2 are as good as 0 and ln 3."""
    out = attend_alone([1.0], [[0.0, 2 * LN3]], [[8.0, 4.0]], [2], scale=0.5)
    assert out == [5.0], "the products are multiplied by scale before the softmax"


@pytest.mark.exercise("ops.decode_attention")
def test_nothing_behind_the_last_position_is_seen() -> None:
    """One of two slots is written, and one of two requests is shorter than the longest."""
    assert attend_alone([1.0], [[0.0, 50.0]], [[8.0, 4.0]], [1], max_seq_len=2) == [8.0], (
        "sequence length 1, and the longest is 2: is the second slot masked?"
    )
    keys, values = [[0.0, LN3, 0.0, 50.0], [0.0, LN3, 50.0, 50.0]], [[8.0, 4.0, 8.0, 99.0]] * 2
    assert attend_alone([1.0, 1.0], keys, values, [3, 2])[1] == 5.0, (
        "the second request has 2 positions, the first one 3: is each masked at its own length?"
    )


@pytest.mark.exercise("ops.decode_attention")
def test_neighbouring_heads_share_keys() -> None:
    """Four query heads and two key heads: heads 0 and 1 read key head 0."""
    caches = torch.zeros(1, 2, 2, 1), torch.tensor([8.0, 4.0, 8.0, 4.0]).view(1, 2, 2, 1)
    lens, table = torch.tensor([2], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    out = ops.decode_attention(torch.zeros(1, 4, 1), *caches, table, lens, 2, 1.0)
    assert out.shape == (1, 4, 1), "one result for each query head"
    assert out.flatten().tolist() == [8.0, 8.0, 4.0, 4.0], (
        "4 query heads, 2 key heads: do heads 0 and 1 share the first, and 2 and 3 the second?"
    )


@pytest.mark.exercise("ops.decode_attention")
def test_attention_asks_the_device_nothing() -> None:
    """The host knows how long the longest request is."""
    q, cache = torch.zeros(2, 6, 8), torch.zeros(5, 4, 2, 8)
    table, lens = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([3, 9], dtype=torch.int32)
    question = question_of(ops.decode_attention, q, cache, cache, table, lens, 9, 0.5)
    assert question is None, (
        "do you ask for a maximum (max_seq_len is known), loop over the lengths, or make a tensor"
        " elsewhere (device=q.device)?"
    )


@pytest.mark.exercise("ops.decode_attention")
def test_decode_attention_keeps_dtype_and_arguments() -> None:
    """bfloat16 in, bfloat16 out; the queries are only read."""
    q, cache = torch.ones(1, 1, 2), torch.ones(1, 2, 1, 2)
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    ops.decode_attention(q, cache, cache, table, lens, 2, 0.5)
    assert (q == 1).all(), "q is only read: do you multiply the scale into it in place?"
    low = q.bfloat16(), cache.bfloat16(), cache.bfloat16()
    out = ops.decode_attention(*low, table, lens, 2, 0.5)
    assert out.dtype == torch.bfloat16, "the dtype of q comes back: where do you leave float32?"


BLOCK = 4


class Paged:
    """Requests of given lengths with random keys and values in scrambled blocks."""

    def __init__(self, lens: list[int], kv_heads: int, head_dim: int, seed: int = 0) -> None:
        make = torch.Generator().manual_seed(seed)
        self.lens, width = lens, max(lens) // BLOCK + 2
        order = torch.randperm(len(lens) * width + 1, generator=make)
        self.table = torch.zeros(len(lens), width, dtype=torch.int32)
        # What was never written is large: reading it gives a result that is far off.
        shape = (len(order), BLOCK, kv_heads, head_dim)
        self.k_cache, self.v_cache = torch.full(shape, 50.0), torch.full(shape, 50.0)
        self.k, self.v = [], []
        for n, length in enumerate(lens):
            num_blocks = -(-length // BLOCK)
            self.table[n, :num_blocks] = order[n * width : n * width + num_blocks]
            self.k.append(torch.randn(length, kv_heads, head_dim, generator=make))
            self.v.append(torch.randn(length, kv_heads, head_dim, generator=make))
            slots = ops.slot_mapping(
                self.table, torch.full((length,), n), torch.arange(length), BLOCK
            )
            ops.store_kv(self.k[n], self.v[n], self.k_cache, self.v_cache, slots)

    def run(self, q: Tensor, query_lens: list[int], num_decodes: int, scale: float) -> Tensor:
        """`ops.attention` in the dtype of `q`."""
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        k_cache, v_cache = self.k_cache.to(q.dtype), self.v_cache.to(q.dtype)
        lens = torch.tensor(self.lens, dtype=torch.int32)
        metadata = ops.AttentionMetadata(
            self.table, starts, lens, num_decodes, max(query_lens), max(self.lens)
        )
        return ops.attention(q, k_cache, v_cache, metadata, scale)

    def expected(self, q: Tensor, query_lens: list[int], scale: float) -> Tensor:
        """One query and one head at a time, in float64."""
        rows: list[Tensor] = []
        for n, count in enumerate(query_lens):
            group = q.shape[1] // self.k[n].shape[1]
            for position in range(self.lens[n] - count, self.lens[n]):
                heads = []
                for h, query in enumerate(q[len(rows)].double()):
                    keys = self.k[n][: position + 1, h // group].double()
                    weights = torch.softmax(keys @ query * scale, dim=0)
                    heads.append(weights @ self.v[n][: position + 1, h // group].double())
                rows.append(torch.stack(heads))
        return torch.stack(rows)


MIXES = {  # key lengths, query lengths, number of decodes
    "decodes around the block boundary": ([3, 4, 5, 8, 1], [1, 1, 1, 1, 1], 5),
    "whole prompts around the block boundary": ([3, 4, 5, 8, 1], [3, 4, 5, 8, 1], 0),
    "chunks that start in and at a block": ([9, 8, 7], [3, 4, 6], 0),
    "decodes and prompts in one step": ([5, 13, 6, 9], [1, 1, 6, 2], 2),
    "a chunk of one token isn't a decode": ([6, 7], [1, 1], 1),
}


@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (6, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("mix", MIXES)
def test_attention_equals_the_naive_loop(mix: str, heads: tuple[int, int]) -> None:
    """Groups of 1, 3 and 8 query heads per key head, decodes and prompts, all block borders."""
    lens, query_lens, num_decodes = MIXES[mix]
    paged = Paged(lens, kv_heads=heads[1], head_dim=8)
    q = torch.randn(sum(query_lens), heads[0], 8, generator=torch.Generator().manual_seed(1))
    out = paged.run(q, query_lens, num_decodes, scale=0.5)
    expected = paged.expected(q, query_lens, scale=0.5)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_attention_equals_the_naive_loop_on_random_batches(seed: int) -> None:
    """Random lengths, chunks and group sizes; head sizes that are not a power of two."""
    pick = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=pick))

    num_decodes, prompts = number(0, 4), number(1, 3)
    lens = [number(1, 21) for _ in range(num_decodes + prompts)]
    query_lens = [1] * num_decodes + [number(1, length) for length in lens[num_decodes:]]
    kv_heads, head_dim = number(1, 3), (6, 8, 20)[number(0, 2)]
    q = torch.randn(sum(query_lens), kv_heads * number(1, 4), head_dim, generator=pick)
    paged = Paged(lens, kv_heads, head_dim, seed)
    out = paged.run(q, query_lens, num_decodes, scale=0.3)
    expected = paged.expected(q, query_lens, scale=0.3)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mix", MIXES)
def test_attention_in_bfloat16_is_float32_up_to_rounding(mix: str) -> None:
    """Unit-scale inputs: no element is off by more than a few of bfloat16's 2^-8 steps."""
    lens, query_lens, num_decodes = MIXES[mix]
    paged = Paged(lens, kv_heads=2, head_dim=8)
    q = torch.randn(sum(query_lens), 6, 8, generator=torch.Generator().manual_seed(1))
    out = paged.run(q.bfloat16(), query_lens, num_decodes, scale=0.5)
    assert out.dtype == torch.bfloat16
    expected = paged.expected(q, query_lens, scale=0.5)
    torch.testing.assert_close(out.double(), expected, atol=0.03, rtol=0.02)


def test_what_was_not_written_changes_nothing() -> None:
    """Slots past a request's length, and blocks of no request, may hold any finite number."""
    paged = Paged([5, 2, 4], kv_heads=1, head_dim=4)
    make = torch.Generator().manual_seed(2)
    prompts, decodes = torch.randn(6, 2, 4, generator=make), torch.randn(3, 2, 4, generator=make)
    before = paged.run(prompts, [3, 1, 2], 0, 0.5), paged.run(decodes, [1, 1, 1], 3, 0.5)
    untouched = paged.k_cache == 50.0
    paged.k_cache[untouched], paged.v_cache[untouched] = -1e4, 1e4
    assert torch.equal(paged.run(prompts, [3, 1, 2], 0, 0.5), before[0])
    assert torch.equal(paged.run(decodes, [1, 1, 1], 3, 0.5), before[1])
