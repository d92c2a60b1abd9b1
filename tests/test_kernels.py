"""Every kernel of a step against its twin in `ops`: on a GPU if there is one, else in Triton's
interpreter.

The tests with an `exercise` mark are checks of notebook 07; what a failed assert says is the hint
a learner reads.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
if find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton; Linux only)", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))
from kernel_calls import (
    DEVICE,
    rms_norm_kernel,
    rounded,
    slot_mapping_kernel,
    slots_of,
    tile_places,
)
from paged_batch import far_memory

from minivllm import kernels, ops
from minivllm.model_config import RopeConfig


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check(name: str, *arguments: Any) -> None:
    """Run both twins on the same numbers, the oracle on the CPU."""
    expected = getattr(ops, name)(*arguments)
    there = [x.to(DEVICE) if isinstance(x, Tensor) else x for x in arguments]
    given = getattr(kernels, name)(*there)
    pairs = (
        zip(given, expected, strict=True) if isinstance(expected, tuple) else [(given, expected)]
    )
    for ours, theirs in pairs:
        assert theirs.any()
        torch.testing.assert_close(ours.cpu(), theirs, atol=1e-5, rtol=1e-5)


def on_device(values: Any, dtype: torch.dtype | None = None) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


# -- tiles and masks --


@pytest.mark.exercise("kernels.tile_places")
def test_a_tile_begins_where_the_one_before_it_ended() -> None:
    """Tiles of 4 begin at 0, 4, 8."""
    assert tile_places(0, 12, 4) == ([0, 1, 2, 3], [1, 1, 1, 1])
    assert tile_places(2, 12, 4) == ([8, 9, 10, 11], [1, 1, 1, 1]), (
        "tile 2 of 4 places each begins at place 8: what do tiles 0 and 1 have?"
    )
    assert tile_places(1, 99, 16)[0] == list(range(16, 32)), (
        "tile 1 of 16 places begins at place 16: is a tile size written into your code?"
    )


@pytest.mark.exercise("kernels.tile_places")
def test_the_mask_is_1_at_places_below_the_size() -> None:
    """Of 6 places the last is 5."""
    assert tile_places(1, 6, 4) == ([4, 5, 6, 7], [1, 1, 0, 0]), (
        "places 4 and 5 are below 6, places 6 and 7 are not: what do you compare with the size?"
    )
    assert tile_places(0, 6, 8) == (list(range(8)), [1, 1, 1, 1, 1, 1, 0, 0])
    assert tile_places(1, 4, 4)[1] == [0, 0, 0, 0], "a tile behind the end has no place"


# -- slot mapping --


@pytest.mark.exercise("kernels.slots_of")
def test_a_slot_is_block_id_times_block_size_plus_place() -> None:
    """Table [7, 3], blocks of 16: position 17 is place 1 of block 3."""
    assert slots_of([7, 3], [17], 16) == [49], (
        "position 17 is place 1 of block 3, and 3 blocks of 16 lie before it: slot 49"
    )
    assert slots_of([7, 3], [0, 15, 16], 16) == [112, 127, 48], (
        "position 15 is the last of the table's first block, 16 the first of its second"
    )
    assert slots_of([2, 0, 5], [0, 1, 4, 5], 2) == [4, 5, 10, 11], "blocks of 2, not of 16"


@pytest.mark.exercise("kernels.slots_of")
def test_each_position_may_have_a_table_of_its_own() -> None:
    """A block of pointers, one for each position."""
    assert slots_of([[7, 3], [2, 5]], [17, 17], 16) == [49, 81]


@pytest.mark.exercise("kernels.slots_of")
def test_a_slot_may_be_past_two_to_the_31() -> None:
    """Ids are 32 bits wide, and their product with the block size needs more."""
    assert slots_of([5, 2**31 - 1], [31], 16) == [(2**31 - 1) * 16 + 15], (
        "the product of id and block size needs 64 bits: is the id int64 before you multiply?"
    )


@pytest.mark.exercise("kernels.slots_of")
def test_no_entry_is_read_where_the_mask_is_0() -> None:
    """The 5 places behind these 3 positions have no entry in any table."""
    assert slots_of([7, 3], [0, 1, 2], 16) == [112, 113, 114]


@pytest.mark.exercise("kernels.slot_mapping_kernel")
def test_each_token_looks_into_its_owners_table() -> None:
    """Rows [7, 3] and [2, 5]; one program."""
    slots = slot_mapping_kernel([[7, 3], [2, 5]], [0, 0, 0, 1], [0, 15, 16, 17], 16)
    assert slots == [112, 127, 48, 81], (
        "token 3 is row 1's: how many entries lie between the first ones of two rows?"
    )


@pytest.mark.exercise("kernels.slot_mapping_kernel")
def test_each_program_does_the_tile_of_its_number() -> None:
    """8 tokens, 4 for each of 2 programs."""
    slots = slot_mapping_kernel([[1], [0]], [0, 1] * 4, [0, 0, 1, 1, 2, 2, 3, 3], 4)
    assert slots == [4, 0, 5, 1, 6, 2, 7, 3], (
        "-1: no program wrote there. Which tile does program 1 handle?"
    )


@pytest.mark.exercise("kernels.slot_mapping_kernel")
def test_nothing_behind_the_last_token_is_touched() -> None:
    """5 tokens in tiles of 4: the second program has 1 token and 3 masked places."""
    slots = slot_mapping_kernel([[1], [0]], [0, 1, 0, 1, 0], [0, 0, 1, 1, 2], 4)
    assert slots == [4, 0, 5, 1, 6]


@pytest.mark.exercise("kernels.slot_mapping_kernel")
def test_rows_of_the_block_tables_may_lie_apart() -> None:
    """Two columns of a table of three: the rows begin 3 entries apart."""
    tables = on_device([[7, 3, 90], [2, 5, 91]], torch.int32)[:, :2]
    assert slot_mapping_kernel(tables, [1, 1], [0, 16], 16) == [32, 80], (
        "rows may be wider than what is in use: `table_stride` says how far apart they begin"
    )


def test_slot_is_block_id_times_block_size_plus_offset() -> None:
    """Positions 15 and 16 are in different blocks; each token looks in its owner's row."""
    tables = on_device([[7, 3], [2, 5]], torch.int32)
    slots = kernels.slot_mapping(tables, on_device([0, 0, 0, 1]), on_device([0, 15, 16, 17]), 16)
    assert slots.tolist() == [112, 127, 48, 81] and slots.dtype == torch.int64


def test_slots_past_two_to_the_31_are_right() -> None:
    """Block ids are int32, but the slot is computed in 64 bits."""
    tables = on_device([[5, 2**31 - 1]], torch.int32)
    slots = kernels.slot_mapping(tables, on_device([0]), on_device([31]), 16)
    assert slots.tolist() == [(2**31 - 1) * 16 + 15]


@pytest.mark.parametrize("num_tokens", [1, kernels.TILE, kernels.TILE + 1])
@pytest.mark.parametrize("block_size", [16, 64])
def test_slot_mapping_is_the_plain_one(block_size: int, num_tokens: int) -> None:
    """Around the border of a tile; a table whose rows do not lie one after the other."""
    pick = torch.Generator().manual_seed(num_tokens)
    tables = torch.randint(10**6, (7, 12), generator=pick, dtype=torch.int32)[:, :9]
    owners = torch.randint(7, (num_tokens,), generator=pick)
    positions = torch.randint(9 * block_size, (num_tokens,), generator=pick)
    expected = ops.slot_mapping(tables, owners, positions, block_size)
    # Moved with its strides: the kernel is given the view.
    wide = torch.zeros(7, 12, dtype=torch.int32, device=DEVICE)
    wide[:, :9] = tables.to(DEVICE)
    given = kernels.slot_mapping(wide[:, :9], owners.to(DEVICE), positions.to(DEVICE), block_size)
    assert given.tolist() == expected.tolist()


# -- storing keys and values --


def test_store_kv_writes_its_slots_and_no_other() -> None:
    """Two tokens into slots 5 and 0 of three blocks of two; keys and values are not mixed up."""
    k_cache, v_cache = torch.zeros(2, 3, 2, 1, 1, device=DEVICE)
    k, v = on_device([1.0, 2.0]).view(2, 1, 1), on_device([3.0, 4.0]).view(2, 1, 1)
    kernels.store_kv(k, v, k_cache, v_cache, on_device([5, 0]))
    assert k_cache.flatten().tolist() == [2, 0, 0, 0, 0, 1]
    assert v_cache.flatten().tolist() == [4, 0, 0, 0, 0, 3]


HEADS = [(3, 64), (6, 96), (1, 80), (2, 128), (4, 256)]  # key/value heads, head size


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_store_kv_is_the_plain_one(heads: tuple[int, int]) -> None:
    """Widths that are not a power of two, keys by themselves and values as a view of merged rows,
    slots in any order; bit for bit."""
    num_heads, head_dim = heads
    rows = random(5, 3 * num_heads, head_dim).to(DEVICE)  # queries, keys, values
    k, v = rows[:, num_heads : 2 * num_heads].contiguous(), rows[:, 2 * num_heads :]
    slots = torch.tensor([17, 0, 5, 16, 31])
    caches = [torch.zeros(2, 2, 16, num_heads, head_dim, device=d) for d in (DEVICE, "cpu")]
    kernels.store_kv(k, v, caches[0][0], caches[0][1], slots.to(DEVICE))
    ops.store_kv(k.cpu(), v.cpu(), caches[1][0], caches[1][1], slots)
    assert caches[1][0].any() and torch.equal(caches[0].cpu(), caches[1])


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu has it, with real memory")
def test_store_kv_reaches_past_two_to_the_31_numbers(tmp_path: Path) -> None:
    """Slot 2^26 + 1 of 2 * 16 numbers each; bytes, since nothing is computed with them."""
    k_near, k_far = far_memory(tmp_path / "k", 256, torch.int8)
    v_near, v_far = far_memory(tmp_path / "v", 256, torch.int8)
    k, v = torch.arange(64).view(2, 2, 16).to(torch.int8), torch.full((2, 2, 16), -3).char()
    caches = (x[:256].view(1, 8, 2, 16) for x in (k_near, v_near))
    kernels.store_kv(k, v, *caches, torch.tensor([2**26 + 1, 2]))
    assert k_far[:96].tolist() == [0] * 32 + list(range(32)) + [0] * 32
    assert k_near[:128].tolist() == [0] * 64 + list(range(32, 64)) + [0] * 32
    assert v_far[:96].tolist() == [0] * 32 + [-3] * 32 + [0] * 32


# -- layers --


@pytest.mark.exercise("kernels.rms_norm_kernel")
def test_every_row_is_scaled_by_its_own_root_mean_square() -> None:
    """[3, 4] has root mean square 3.5355, [-30, 40] has 35.355."""
    rows = rms_norm_kernel([[3.0, 4.0], [-30.0, 40.0]], [1.0, 10.0], 0.0, TILE=2)
    assert rows == [[0.8485, 11.3137], [-0.8485, 11.3137]], (
        "3 / 3.5355 * 1 and 4 / 3.5355 * 10, for each row alone: which row does program 1 do?"
    )


@pytest.mark.exercise("kernels.rms_norm_kernel")
def test_masked_places_do_not_count() -> None:
    """Three numbers in a tile of four: the mean of their squares is 4, and not 3."""
    rows = rms_norm_kernel([[2.0, 2.0, -2.0]] * 2, [1.0, 1.0, 1.0], 0.0, TILE=4)
    assert rows == [[1.0, 1.0, -1.0]] * 2, (
        "SIZE is 3 and TILE is 4: does a masked place add to the sum, or to the count?"
    )


@pytest.mark.exercise("kernels.rms_norm_kernel")
def test_squares_are_summed_in_float32() -> None:
    """300 * 300 is more than float16 can hold."""
    rows = rms_norm_kernel([[300.0, 400.0]], [1.0, 1.0], 0.0, TILE=2, dtype=torch.float16)
    assert rows == [[0.8486, 1.1318]], (
        "300 * 300 is infinite in float16: is the row float32 before it is squared?"
    )


@pytest.mark.exercise("kernels.rms_norm_kernel")
def test_the_weight_comes_after_rounding() -> None:
    """1.13137 is 1159 / 1024 in float16: times 1.75 that is 1.9805, unrounded it is 1.9795."""
    rows = rms_norm_kernel([[3.0, 4.0]], [1.0, 1.75], 0.0, TILE=2, dtype=torch.float16)
    assert rows == [[0.8486, 1.9805]], (
        "one step of float16 off: is it rounded to the type of `out` before the weight?"
    )
    assert rms_norm_kernel([[1.0, -1.0]], [1.0, 1.0], 3.0, TILE=2) == [[0.5, -0.5]], (
        "eps is added to the mean square: 1 / sqrt(1 + 3)"
    )


def test_rms_norm_has_root_mean_square_one_before_the_weight() -> None:
    """[3, 4] has root mean square 3.5355; the weight scales what is left."""
    x = on_device([[3.0, 4.0], [-30.0, 40.0]])
    out = kernels.rms_norm(x, on_device([1.0, 10.0]), eps=0.0)
    expected = torch.tensor([[0.848528, 11.31371], [-0.848528, 11.31371]])
    torch.testing.assert_close(out.cpu(), expected)


def test_rms_norm_adds_eps_to_the_mean_square() -> None:
    """With eps 3 and a mean square of 1 the divisor is 2, and zeros stay zeros."""
    x = on_device([[1.0, -1.0], [0.0, 0.0]])
    out = kernels.rms_norm(x, torch.ones(2, device=DEVICE), eps=3.0)
    torch.testing.assert_close(out.cpu(), torch.tensor([[0.5, -0.5], [0.0, 0.0]]))


def test_rms_norm_rounds_before_the_weight_as_llama_does() -> None:
    """1.1313708 is 1159 / 1024 in float16, times 1.75 is 2028 / 1024; without, it is 2027."""
    x = on_device([[3.0, 4.0]], torch.float16)
    out = kernels.rms_norm(x, torch.full((2,), 1.75, dtype=torch.float16, device=DEVICE), eps=0.0)
    assert out.dtype == torch.float16 and out.tolist() == [[1521 / 1024, 2028 / 1024]]


@pytest.mark.parametrize("shape", [(1, 576), (7, 33), (5, 3, 64), (2, 1), (2, 1025)], ids=str)
def test_rms_norm_is_the_plain_one(shape: tuple[int, ...]) -> None:
    """Sizes that are not a power of two, one row, each head by itself."""
    check("rms_norm", random(*shape), random(shape[-1], seed=1), 1e-5)


def test_rms_norm_takes_heads_that_are_a_view() -> None:
    """The keys within a merged row of queries, keys and values."""
    heads = random(5, 9, 16)
    expected = ops.rms_norm(heads[:, 6:8], torch.ones(16), 1e-6)
    given = kernels.rms_norm(heads.to(DEVICE)[:, 6:8], torch.ones(16, device=DEVICE), 1e-6)
    torch.testing.assert_close(given.cpu(), expected)


def test_add_rms_norm_gives_the_sum_and_its_norm() -> None:
    """[1, 5] + [2, -1] = [3, 4], of root mean square 3.5355; neither summand is written to."""
    x, y = on_device([[1.0, 5.0]]), on_device([[2.0, -1.0]])
    total, out = kernels.add_rms_norm(x, y, on_device([1.0, 10.0]), eps=0.0)
    assert total.tolist() == [[3.0, 4.0]]
    torch.testing.assert_close(out.cpu(), torch.tensor([[0.848528, 11.31371]]))
    assert x.tolist() == [[1.0, 5.0]] and y.tolist() == [[2.0, -1.0]]


@pytest.mark.parametrize("shape", [(1, 576), (7, 33), (2, 1), (2, 1025)], ids=str)
def test_add_rms_norm_is_the_plain_one(shape: tuple[int, int]) -> None:
    """Sizes that are not a power of two, one row."""
    check("add_rms_norm", random(*shape), random(*shape, seed=2), random(shape[1], seed=1), 1e-5)


def test_add_rms_norm_normalises_the_sum_as_it_is_stored() -> None:
    """2048 + 1 is 2048 in float16: the norm of [2048, 1968] ends in 2007 / 2048; that of
    [2049, 1968] would end in 2006 / 2048."""
    x, y = on_device([[2048.0, 1968.0]], torch.float16), on_device([[1.0, 0.0]], torch.float16)
    total, out = kernels.add_rms_norm(x, y, torch.ones_like(x[0]), eps=0.0)
    assert total.tolist() == [[2048.0, 1968.0]]
    assert out.tolist() == [[2088 / 2048, 2007 / 2048]]


@pytest.mark.exercise("kernels.silu_mul")
def test_silu_mul_gates_the_second_half_by_the_first() -> None:
    """silu(2) * 3 = 2 / (1 + e^-2) * 3 = 5.2848; a gate of 0 lets nothing through."""
    given = on_device([[0.0, 2.0, 5.0, 3.0]])
    out = kernels.silu_mul(given)
    assert tuple(out.shape) == (1, 2), "gate and up together give one number for each pair"
    assert rounded(out) == [[0.0, 5.2848]], (
        "one row of two gates and two ups: how many programs did you launch?"
    )
    assert given.tolist() == [[0.0, 2.0, 5.0, 3.0]], "`gate_up` is unchanged"


@pytest.mark.exercise("kernels.silu_mul")
def test_silu_mul_has_a_program_for_each_row() -> None:
    """Three rows of one tile."""
    rows = random(3, 8)
    assert kernels.silu_mul(rows.to(DEVICE)).cpu().allclose(ops.silu_mul(rows), atol=1e-5), (
        "three rows of four places: which axis of the grid counts rows, and which counts tiles?"
    )


@pytest.mark.exercise("kernels.silu_mul")
def test_silu_mul_has_a_program_for_each_tile() -> None:
    """Rows of more than one tile, the last of them partly empty; and of none too many."""
    rows = random(2, 2200)
    assert kernels.silu_mul(rows.to(DEVICE)).cpu().allclose(ops.silu_mul(rows), atol=1e-5), (
        f"a tile has {kernels.TILE} places: how many tiles has a row of 1,100 places?"
    )


@pytest.mark.exercise("kernels.silu_mul")
def test_silu_mul_keeps_the_dtype() -> None:
    """float16 in, float16 out."""
    out = kernels.silu_mul(on_device([[0.0, 5.0]], torch.float16))
    assert out.dtype == torch.float16, "float16 in: which dtype comes out?"


@pytest.mark.parametrize("width", [1, 31, kernels.TILE, kernels.TILE + 1])
def test_silu_mul_is_the_plain_one(width: int) -> None:
    """Around the border of a tile; values to about 20 either way."""
    check("silu_mul", random(3, 2 * width) * 5)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # of e^200, which shall be infinite
def test_silu_mul_is_right_at_both_ends() -> None:
    """Gates far below zero let nothing through, far above everything; none becomes NaN."""
    gates = torch.tensor([-1e30, -200.0, -88.5, -20.0, -1e-8, 0.0, 20.0, 88.5, 200.0, 1e30])
    check("silu_mul", torch.cat((gates, torch.full((10,), 0.5)))[None])


def test_norm_rope_pairs_element_i_with_i_plus_half() -> None:
    """A quarter turn of pair 0 alone moves element 0 to element 2 of a head of 4."""
    x = on_device([[[1.0, 2.0, 3.0, 4.0]]])
    cos, sin = on_device([[0.0, 1.0]]), on_device([[1.0, 0.0]])
    q, k = kernels.norm_rope(x, 10 * x, None, None, cos, sin, 0.0)
    assert q.tolist() == [[[-3.0, 2.0, 1.0, 4.0]]] and k.tolist() == [[[-30.0, 20.0, 10.0, 40.0]]]


ROPE_SHAPES = [(2, 2, 64), (9, 3, 64), (4, 2, 96), (3, 1, 80), (8, 1, 128), (2, 1, 256)]


@pytest.mark.parametrize("shape", ROPE_SHAPES, ids=str)
@pytest.mark.parametrize("has_norm", [False, True], ids=["llama", "qwen3"])
def test_norm_rope_is_the_plain_one(has_norm: bool, shape: tuple[int, int, int]) -> None:
    """Head sizes that are not a power of two, all group sizes, different weights for q and k."""
    num_heads, num_kv_heads, head_dim = shape
    weights = (random(head_dim, seed=1), random(head_dim, seed=2)) if has_norm else (None, None)
    cos, sin = (table[20:] for table in ops.rope_table(RopeConfig(), head_dim, 23))
    q, k = random(3, num_heads, head_dim), random(3, num_kv_heads, head_dim, seed=3)
    check("norm_rope", q, k, *weights, cos, sin, 1e-5)


def test_norm_rope_takes_views_of_merged_rows_and_leaves_them() -> None:
    """Queries and keys as the model splits them; what it was given is not written to."""
    rows = random(4, 10, 16).to(DEVICE)
    before, weight = rows.clone(), random(16, seed=1)
    cos, sin = ops.rope_table(RopeConfig(), 16, 4)
    expected = ops.norm_rope(rows[:, :6].cpu(), rows[:, 6:8].cpu(), weight, weight, cos, sin, 1e-5)
    weight, cos, sin = weight.to(DEVICE), cos.to(DEVICE), sin.to(DEVICE)
    given = kernels.norm_rope(rows[:, :6], rows[:, 6:8], weight, weight, cos, sin, 1e-5)
    for ours, theirs in zip(given, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=1e-5, rtol=1e-5)
    assert torch.equal(rows, before)
