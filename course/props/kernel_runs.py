"""What lesson 07 brings to its experiments: a count of torch's traffic, small kernels around the
learner's helpers, and a judge of work lists. Needs Triton."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minivllm import decode_attention, kernels


class Traffic(TorchDispatchMode):
    """Counts torch's launches and the bytes that go into and out of them."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.num_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        self.launches += 1
        self.num_bytes += sum(x.nbytes for x in (*args, out) if isinstance(x, Tensor))
        return out


@triton.jit
def _tiles_kernel(places, masks, size, TILE: tl.constexpr):
    found, mask = kernels.tile_places(tl.program_id(0), size, TILE)
    line = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(places + line, found)
    tl.store(masks + line, mask.to(tl.int32))


def tiles(size: int, tile: int) -> list[tuple[list[int], list[int]]]:
    """Return the places and the mask of each tile, from the learner's `tile_places`."""
    num_tiles = triton.cdiv(size, tile)
    places, masks = torch.zeros(2, num_tiles, tile, dtype=torch.int32)
    _tiles_kernel[(num_tiles,)](places, masks, size, TILE=tile)
    return list(zip(places.tolist(), masks.tolist()))


@triton.jit
def _softmax_kernel(scores, values, states, TILES: tl.constexpr, KEYS: tl.constexpr):
    one = tl.arange(0, 1)
    keys = tl.arange(0, KEYS)
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, 1], tl.float32)
    for tile in range(TILES):
        score = tl.load(scores + tile * KEYS + keys)[None, :]
        value = tl.load(values + tile * KEYS + keys)[:, None]
        best, total, acc = decode_attention.softmax_step(score, value, best, total, acc, "ieee")
        tl.store(states + 3 * tile + one, best)
        tl.store(states + 3 * tile + 1 + one, total)
        tl.store(states + 3 * tile + 2 + one[:, None], acc)


def running(scores: Tensor, values: Tensor, keys: int) -> Tensor:
    """Return the state of a running softmax after each tile of `keys` keys: rows of best, total
    and acc, from the learner's `softmax_step`."""
    states = torch.zeros(len(scores) // keys, 3)
    _softmax_kernel[(1,)](scores, values, states, TILES=len(states), KEYS=keys)
    return states


@triton.jit
def _merge_kernel(parts, order, out, NUM: tl.constexpr):
    best, total, acc = float("-inf"), 0.0, 0.0
    for n in range(NUM):
        part = parts + 3 * tl.load(order + n)
        best, total, acc = decode_attention.merge_parts(
            best, total, acc, tl.load(part), tl.load(part + 1), tl.load(part + 2)
        )
    tl.store(out, best)
    tl.store(out + 1, total)
    tl.store(out + 2, acc)


def merged(parts: Tensor, order: Sequence[int]) -> Tensor:
    """Return the state of all parts, merged in this order by the learner's `merge_parts`."""
    out = torch.zeros(3)
    _merge_kernel[(1,)](parts, torch.tensor(order), out, NUM=len(order))
    return out


# -- work lists --------------------------------------------------------------------------------

Item = tuple[int, int, int]  # request, first key, end


def even_items(lens: Sequence[int], size: int) -> list[Item]:
    """Return each request's keys in chunks of `size`."""
    return [
        (request, start, min(start + size, length))
        for request, length in enumerate(lens)
        for start in range(0, length, size)
    ]


def judge_items(
    lens: Sequence[int], items: Sequence[Item], tile: int = 64, processors: int = 32
) -> dict[str, float]:
    """Return what a work list costs on a device with `processors` programs at a time.

    Time is counted in keys: an item takes as many as its tiles have places, and 128 more to start;
    merging takes 32 for each part. Raises ValueError if a key is missing or read twice.
    """
    covered = sorted((request, key) for request, start, end in items for key in range(start, end))
    if covered != [(request, key) for request, n in enumerate(lens) for key in range(n)]:
        raise ValueError("each key of each request must be in exactly one item")
    busy = [0.0] * processors
    padded = 0
    for _, start, end in items:
        places = -(-(end - start) // tile) * tile
        padded += places - (end - start)
        heapq.heapreplace(busy, busy[0] + 128 + places)
    counts = [sum(item[0] == request for item in items) for request in range(len(lens))]
    num_parts = sum(count for count in counts if count > 1)
    return {
        "time (keys)": max(busy) + 32 * max(counts) * (max(counts) > 1),
        "parts to merge": num_parts,
        "masked places": padded,
    }
