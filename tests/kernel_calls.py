"""The helpers and small kernels of notebook 07, called like functions: numbers in, numbers out.

A `@triton.jit` helper can be called from a kernel alone, so each has a small kernel here. In the
interpreter every access to memory is watched: one outside of the tensors raises OutsideMemory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from course.props.memory_watch import watch
from minivllm import decode_attention, kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
QUERIES, KEYS, DIMS = 16, 32, 16  # of a tile; as different as products of tiles allow
DIGITS = 4  # of what comes back
GARBAGE = 1e4  # must not be read


def watched(**tensors: Tensor) -> AbstractContextManager[Any]:
    """See `watch`; on a GPU nothing is watched."""
    return watch(**tensors) if INTERPRETED else nullcontext()


def numbers(values: Any, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def rounded(values: Any) -> Any:
    """Lists of numbers with a few digits, for comparing and for reading."""
    if isinstance(values, Tensor):
        values = values.tolist()
    return [rounded(v) for v in values] if isinstance(values, list) else round(values, DIGITS)


# -- kernels --


@triton.jit
def _tile_places_kernel(places, mask, tile, size, TILE: tl.constexpr):
    found, real = kernels.tile_places(tile, size, TILE)
    line = tl.arange(0, TILE)
    tl.store(places + line, found)
    tl.store(mask + line, real.to(tl.int32))


def tile_places(tile: int, size: int, TILE: int) -> tuple[list[int], list[int]]:
    """The places, and the mask as 0 and 1."""
    places, mask = torch.full((2, TILE), -1, dtype=torch.int32, device=DEVICE)
    with watched(places=places, mask=mask):
        _tile_places_kernel[(1,)](places, mask, tile, size, TILE=TILE)
    return places.tolist(), mask.tolist()


@triton.jit
def _slots_of_kernel(
    slots,
    table,
    positions,
    num,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PER_ROW: tl.constexpr,
):
    line = tl.arange(0, TILE)
    mask = line < num
    # PER_ROW: a pointer for each position, into rows of that many entries.
    rows = table + line * PER_ROW
    # Where the mask is 0 the position is far behind every table.
    position = tl.load(positions + line, mask=mask, other=10_000)
    found = kernels.slots_of(rows if PER_ROW > 0 else table, position, mask, BLOCK_SIZE)
    tl.store(slots + line, found, mask=mask)


def slots_of(table: Sequence[Any], positions: Sequence[int], block_size: int) -> list[int]:
    """Of one table for all positions, or of a table of tables, one for each."""
    tables, where = numbers(table, torch.int32), numbers(positions, torch.int32)
    slots = torch.full((len(positions),), -1, dtype=torch.int64, device=DEVICE)
    with watched(table=tables, positions=where, slots=slots):
        _slots_of_kernel[(1,)](
            slots, tables, where, len(positions), BLOCK_SIZE=block_size, TILE=8,
            PER_ROW=tables.shape[1] if tables.dim() == 2 else 0,
        )  # fmt: skip
    return slots.tolist()


def slot_mapping_kernel(
    tables: Any, owners: Sequence[int], positions: Sequence[int], block_size: int, TILE: int = 4
) -> list[int]:
    """Launched with as many programs of TILE tokens as there must be; -1: nothing written."""
    tables = tables if isinstance(tables, Tensor) else numbers(tables, torch.int32)
    who, where = (numbers(values, torch.int64) for values in (owners, positions))
    slots = torch.full_like(where, -1)
    with watched(block_tables=tables, owners=who, positions=where, slots=slots):
        kernels.slot_mapping_kernel[(triton.cdiv(len(positions), TILE),)](
            tables, who, where, slots, len(positions), tables.stride(0), BLOCK_SIZE=block_size,
            TILE=TILE,
        )  # fmt: skip
    return slots.tolist()


def rms_norm_kernel(
    x: Any, weight: Any, eps: float, TILE: int = 4, dtype: torch.dtype = torch.float32
) -> list[Any]:
    """Rows `x` -> rows."""
    rows, scale = numbers(x, dtype), numbers(weight, dtype)
    out = torch.full_like(rows, -GARBAGE)
    with watched(x=rows, weight=scale, out=out):
        kernels.rms_norm_kernel[(len(rows),)](rows, scale, out, eps, SIZE=rows.shape[1], TILE=TILE)
    return rounded(out)


# -- attention --


@triton.jit
def _softmax_step_kernel(
    scores, values, best, total, acc,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    rows, keys, dims = tl.arange(0, QUERIES), tl.arange(0, KEYS), tl.arange(0, DIMS)
    many = acc + rows[:, None] * DIMS + dims[None, :]
    new_best, new_total, new_acc = decode_attention.softmax_step(
        tl.load(scores + rows[:, None] * KEYS + keys[None, :]),
        tl.load(values + keys[:, None] * DIMS + dims[None, :]),
        tl.load(best + rows), tl.load(total + rows), tl.load(many), "ieee",
    )  # fmt: skip
    tl.store(best + rows, new_best)
    tl.store(total + rows, new_total)
    tl.store(many, new_acc)


def softmax_step(
    scores: Sequence[Any], values: Sequence[float], best: Any, total: Any, acc: Any,
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Scores of one query (lists: of several), a value of one number for each key."""
    several = isinstance(best, list)
    rows = scores if several else [scores]
    tile = torch.full((QUERIES, KEYS), -torch.inf, device=DEVICE)
    tile[:, 0] = 0.0  # unused rows
    for n, row in enumerate(rows):
        tile[n] = -torch.inf
        tile[n, : len(row)] = numbers(row, torch.float32)
    wide = torch.zeros(KEYS, DIMS, dtype=dtype, device=DEVICE)
    wide[: len(values)] = numbers(values, dtype)[:, None]
    state = [torch.zeros(QUERIES, device=DEVICE) for _ in range(2)]
    state.append(torch.zeros(QUERIES, DIMS, device=DEVICE))
    for tensor, given in zip(state, (best, total, acc), strict=True):
        one = numbers(given if several else [given], torch.float32)
        tensor[: len(rows)] = one if tensor.dim() == 1 else one[:, None]
    with watched(scores=tile, values=wide, best=state[0], total=state[1], acc=state[2]):
        _softmax_step_kernel[(1,)](tile, wide, *state, QUERIES=QUERIES, KEYS=KEYS, DIMS=DIMS)
    assert (state[2] == state[2][:, :1]).all(), "all dimensions of a value are treated alike"
    best, total, acc = (rounded(x[: len(rows)]) for x in (state[0], state[1], state[2][:, 0]))
    return (best, total, acc) if several else (best[0], total[0], acc[0])


@triton.jit
def _attend_tile_kernel(
    queries, k_cache, v_cache, table, seen, best, total, acc, scale, head, num_keys,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    rows, keys, dims = tl.arange(0, QUERIES), tl.arange(0, KEYS), tl.arange(0, DIMS)
    many = rows[:, None] * DIMS + dims[None, :]
    visible = tl.load(seen + rows[:, None] * KEYS + keys[None, :]) != 0
    new_best, new_total, new_acc = decode_attention.attend_tile(
        tl.load(queries + many), k_cache, v_cache, table, keys, keys < num_keys, visible, head,
        scale, tl.load(best + rows), tl.load(total + rows), tl.load(acc + many),
        BLOCK_SIZE, WIDTH, D, DIMS, "ieee",
    )  # fmt: skip
    tl.store(best + rows, new_best)
    tl.store(total + rows, new_total)
    tl.store(acc + many, new_acc)


def attend_tile(
    queries: Sequence[float], keys: Sequence[float], values: Sequence[float], table: Sequence[int],
    block_size: int, scale: float = 1.0, head: int = 0, seen: Any = None, num_blocks: int = 3,
    before: tuple[float, float, float] = (-torch.inf, 0.0, 0.0),
) -> list[float]:  # fmt: skip
    """The answers to `queries` over `keys`, which are in the blocks of `table`.

    Queries, keys and values have one number in two dimensions: the second is 0. A second head
    and all slots that hold none of the keys are full of garbage.
    """
    caches = torch.full((2, num_blocks * block_size, 2, 2), GARBAGE, device=DEVICE)
    caches[1] *= -1
    for position, (key, value) in enumerate(zip(keys, values, strict=True)):
        slot = table[position // block_size] * block_size + position % block_size
        caches[0, slot, head] = numbers([key, 0.0], torch.float32)
        caches[1, slot, head] = numbers([value, 0.0], torch.float32)
    many = torch.zeros(QUERIES, DIMS, device=DEVICE)
    many[: len(queries), 0] = numbers(queries, torch.float32)
    visible = torch.zeros(QUERIES, KEYS, dtype=torch.int32, device=DEVICE)
    visible[:, : len(keys)] = 1
    if seen is not None:
        visible[: len(queries), : len(keys)] = numbers(seen, torch.int32)
    best, total = (torch.full((QUERIES,), x, device=DEVICE) for x in before[:2])
    acc = torch.zeros(QUERIES, DIMS, device=DEVICE)
    acc[:, 0] = before[2]
    where = numbers(table, torch.int32)
    with watched(
        queries=many, k_cache=caches[0], v_cache=caches[1], table=where, seen=visible, best=best,
        total=total, acc=acc,
    ):  # fmt: skip
        _attend_tile_kernel[(1,)](
            many, caches[0], caches[1], where, visible, best, total, acc, scale, head, len(keys),
            BLOCK_SIZE=block_size, WIDTH=4, D=2, QUERIES=QUERIES, KEYS=KEYS, DIMS=DIMS,
        )  # fmt: skip
    return rounded((acc[:, 0] / total)[: len(queries)])


@triton.jit
def _attend_keys_kernel(
    queries, k_cache, v_cache, table, out, start, end,
    BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    rows, dims = tl.arange(0, QUERIES), tl.arange(0, DIMS)
    many = rows[:, None] * DIMS + dims[None, :]
    _, total, acc = decode_attention.attend_keys(
        tl.load(queries + many), k_cache, v_cache, table, start, end, 0, 1.0,
        BLOCK_SIZE, 2, 2, QUERIES, DIMS, KEYS, "ieee", 2,
    )  # fmt: skip
    tl.store(out + many, acc / total[:, None])


def attend_keys(
    keys: Sequence[float], values: Sequence[float], start: int, end: int, tile: int = 16
) -> float:
    """The answer to the query 1 over the keys from `start` to `end`, in blocks of 4 in reverse
    order; all other slots are full of garbage."""
    num_blocks = (len(keys) + tile) // 4 + 1  # a careless last tile finds garbage, not the end
    table = [num_blocks - 1 - index for index in range(num_blocks)]
    caches = torch.full((2, num_blocks * 4, 1, 2), GARBAGE, device=DEVICE)
    for position in range(start, end):
        slot = table[position // 4] * 4 + position % 4
        caches[0, slot, 0] = numbers([keys[position], 0.0], torch.float32)
        caches[1, slot, 0] = numbers([values[position], 0.0], torch.float32)
    queries = torch.zeros(QUERIES, DIMS, device=DEVICE)
    queries[:, 0] = 1.0
    out = torch.zeros(QUERIES, DIMS, device=DEVICE)
    where = numbers(table, torch.int32)
    with watched(queries=queries, k_cache=caches[0], v_cache=caches[1], table=where, out=out):
        _attend_keys_kernel[(1,)](
            queries, caches[0], caches[1], where, out, start, end,
            BLOCK_SIZE=4, QUERIES=QUERIES, KEYS=tile, DIMS=DIMS,
        )  # fmt: skip
    return float(rounded(out[0, 0]))


@triton.jit
def _merge_parts_kernel(parts, out, DIMS: tl.constexpr):
    dims = tl.arange(0, DIMS)
    best, total, acc = decode_attention.merge_parts(
        tl.load(parts), tl.load(parts + 1), tl.load(parts + 2) + 0.0 * dims,
        tl.load(parts + 3), tl.load(parts + 4), tl.load(parts + 5) + 0.0 * dims,
    )  # fmt: skip
    tl.store(out, best)
    tl.store(out + 1, total)
    tl.store(out + 2 + dims, acc)


def merge_parts(*parts: tuple[float, float, float]) -> tuple[float, ...]:
    """Two parts of values of one number -> best, total, acc."""
    given = numbers([x for part in parts for x in part], torch.float32)
    out = torch.full((2 + DIMS,), GARBAGE, device=DEVICE)
    with watched(parts=given, out=out):
        _merge_parts_kernel[(1,)](given, out, DIMS=DIMS)
    assert (out[2:] == out[2]).all(), "all dimensions of a value are treated alike"
    return tuple(rounded(out[:3]))
