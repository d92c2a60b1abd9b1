"""Accesses to memory in Triton's interpreter are written down, and strange ones are stopped."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
if find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton; Linux only)", allow_module_level=True)

import triton
import triton.language as tl

from course.props.memory_watch import GARBAGE, Access, OutsideMemory, watch

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="there is a GPU, and no interpreter"
)


@triton.jit
def _copy(x, out, size, shift, TILE: tl.constexpr):
    places = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = places < size
    tl.store(out + shift + places, tl.load(x + places, mask=mask, other=0.0), mask=mask)


@triton.jit
def _no_other(x, out, TILE: tl.constexpr):
    places = tl.arange(0, TILE)
    tl.store(out + places, tl.load(x + places, mask=places < 2))


def error_of(call):
    """What a kernel ends with: the interpreter wraps it."""
    with pytest.raises(Exception) as caught:
        call()
    return caught.value.__cause__ or caught.value


def test_every_access_is_written_down_with_its_program():
    """Two programs of four places, six of them real."""
    x, out = torch.arange(6.0), torch.zeros(6)
    with watch(x=x, out=out) as log:
        _copy[(2,)](x, out, 6, 0, TILE=4)
    assert log == [
        Access((0, 0, 0), "load", "x", (0, 1, 2, 3), 0),
        Access((0, 0, 0), "store", "out", (0, 1, 2, 3), 0),
        Access((1, 0, 0), "load", "x", (4, 5), 2),
        Access((1, 0, 0), "store", "out", (4, 5), 2),
    ]
    assert out.tolist() == x.tolist(), "watching changes nothing"


@pytest.mark.parametrize(("shift", "place"), [(1, 6), (-1, -1)])
def test_an_access_outside_raises_before_it_happens(shift, place):
    """Behind the end, before the start; the neighbour's memory stays."""
    memory = torch.full((8,), -5.0)
    x, out = torch.arange(6.0), memory[1:7]
    with watch(x=x, out=out):
        error = error_of(lambda: _copy[(2,)](x, out, 6, shift, TILE=4))
    assert isinstance(error, OutsideMemory)
    assert f"writes to place {place} of `out`, which has the places 0 to 5" in str(error)
    assert memory[0] == memory[7] == -5


def test_a_masked_load_without_other_gives_garbage():
    """A GPU promises nothing for such places; the interpreter's zeros would hide it."""
    x, out = torch.ones(2), torch.zeros(4)
    with watch(x=x, out=out):
        _no_other[(1,)](x, out, TILE=4)
    assert out.tolist() == [1, 1, GARBAGE, GARBAGE]


def test_not_strict_leaves_other_tensors_alone():
    """Within an engine only some tensors are of interest."""
    x, out = torch.arange(4.0), torch.zeros(4)
    with watch(strict=False, out=out) as log:
        _copy[(1,)](x, out, 4, 0, TILE=4)
    assert log == [Access((0, 0, 0), "store", "out", (0, 1, 2, 3), 0)]


def test_a_view_has_the_places_of_its_memory():
    """Every second column: the last place is that of its last number."""
    x, out = torch.arange(12.0).view(3, 4)[:, ::2], torch.zeros(12)
    with watch(x=x, out=out) as log:
        _copy[(1,)](x, out, 11, 0, TILE=16)
    assert log[0].places == tuple(range(11))
    with watch(x=x, out=out):
        error = error_of(lambda: _copy[(1,)](x, out, 12, 0, TILE=16))
    assert "place 11 of `x`, which has the places 0 to 10" in str(error)


def test_afterwards_nothing_is_watched():
    """Also after an error."""
    x, out = torch.arange(4.0), torch.zeros(4)
    with watch(x=x):
        error_of(lambda: _copy[(1,)](x, out, 4, 0, TILE=4))
    _copy[(1,)](x, out, 4, 0, TILE=4)
    assert out.tolist() == x.tolist()
