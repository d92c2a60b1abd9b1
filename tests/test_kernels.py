"""Every kernel of a step against its twin in `ops`: on a GPU if there is one, else in Triton's
interpreter."""

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
from paged_batch import far_memory

from minivllm import kernels, ops
from minivllm.model_config import RopeConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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


# -- slot mapping --


def test_slot_is_block_id_times_block_size_plus_offset() -> None:
    """Positions 15 and 16 lie in different blocks; each token looks in its owner's row."""
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
    """Widths that are no power of two, views of merged rows, slots in any order; bit for bit."""
    num_heads, head_dim = heads
    rows = random(5, 3 * num_heads, head_dim).to(DEVICE)  # queries, keys, values
    k, v = rows[:, num_heads : 2 * num_heads], rows[:, 2 * num_heads :]
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
    """Sizes that are no power of two, one row, each head by itself."""
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
    """Sizes that are no power of two, one row."""
    check("add_rms_norm", random(*shape), random(*shape, seed=2), random(shape[1], seed=1), 1e-5)


def test_add_rms_norm_normalises_the_sum_as_it_is_stored() -> None:
    """2048 + 1 is 2048 in float16: the norm of [2048, 0] is [1.414, 0] times the weight."""
    x, y = on_device([[2048.0, 0.0]], torch.float16), on_device([[1.0, 0.0]], torch.float16)
    weight = torch.full((2,), 1024.0, dtype=torch.float16, device=DEVICE)
    total, out = kernels.add_rms_norm(x, y, weight, eps=0.0)
    assert total.tolist() == [[2048.0, 0.0]] and out.tolist() == [[1448.0, 0.0]]


def test_silu_mul_gates_the_second_half_by_the_first() -> None:
    """silu(2) * 3 = 2 / (1 + e^-2) * 3 = 5.2848; a gate of 0 lets nothing through."""
    out = kernels.silu_mul(on_device([[0.0, 2.0, 5.0, 3.0]]))
    torch.testing.assert_close(out.cpu(), torch.tensor([[0.0, 5.284782]]))


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
    """Head sizes that are no power of two, all group sizes, different weights for q and k."""
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
