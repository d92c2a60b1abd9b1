"""Which program of a Triton kernel touches which memory, and that it touches no other.

Triton's interpreter reads and writes real memory: a kernel with a wrong mask changes numbers that
belong to another tensor, and nothing is said. Within `watch` every access is written down, and one
outside of the given tensors raises before it happens. Without the interpreter (on a GPU) nothing
is watched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

Program = tuple[int, int, int]
GARBAGE = 77  # fits every type, and changes every sum


@dataclass(frozen=True)
class Access:
    """One load or store of one program in one tensor: the places that its mask lets through."""

    program: Program
    kind: str  # "load" or "store"
    tensor: str
    places: tuple[int, ...]  # counted in numbers from the tensor's first one
    num_masked: int  # places of the block that the mask keeps out


class OutsideMemory(IndexError):
    """A kernel was about to read or write memory outside of the given tensors."""


@contextmanager
def watch(strict: bool = True, **tensors: Tensor) -> Iterator[list[Access]]:
    """Write down every access to `tensors`, which are all that the kernels within may touch;
    with `strict=False` they may touch others, which are not written down.

    Raises OutsideMemory, with program, tensor and place, for an access that no tensor has. What a
    masked load without `other=` gives is garbage here: a GPU promises nothing else.
    """
    from triton.runtime import interpreter

    log: list[Access] = []
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def note(program: Program, kind: str, pointers: Any, mask: Any) -> None:
        access = _access(tensors, program, kind, pointers, mask, strict)
        if strict or access.places:
            log.append(access)

    def watched_load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any) -> Any:
        note(self.grid_idx, "load", ptrs.data, mask.data)
        loaded = load(self, ptrs, mask, other, *rest)
        if other is None and strict:
            loaded.data[~np.broadcast_to(mask.data, loaded.data.shape).astype(bool)] = GARBAGE
        return loaded

    def watched_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        note(self.grid_idx, "store", ptrs.data, mask.data)
        return store(self, ptrs, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = watched_load, watched_store
    try:
        yield log
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store


def _access(
    tensors: dict[str, Tensor], program: Program, kind: str, pointers: Any, mask: Any, strict: bool
) -> Access:
    pointers, mask = np.broadcast_arrays(pointers, mask)
    addresses = pointers[mask.astype(bool)].astype(np.int64)
    num_masked = int(mask.size - len(addresses))
    if len(addresses) == 0:
        return Access(program, kind, "", (), num_masked)
    name = _owner(tensors, int(addresses[0]))
    tensor, span = tensors[name], _span(tensors[name])
    places = [int(x) for x in (addresses - tensor.data_ptr()) // tensor.element_size()]
    outside = [place for place in places if not 0 <= place < span]
    if outside and strict:
        word = "reads" if kind == "load" else "writes to"
        number = program[0] if not any(program[1:]) else program
        raise OutsideMemory(
            f"program {number} {word} place {outside[0]} of `{name}`, which has the places 0 to"
            f" {span - 1}: is it masked?"
        )
    return Access(program, kind, name, () if outside else tuple(places), num_masked)


def _owner(tensors: dict[str, Tensor], address: int) -> str:
    """The tensor that contains an address, or else the one nearest to it."""

    def distance(name: str) -> int:
        start = tensors[name].data_ptr()
        end = start + _span(tensors[name]) * tensors[name].element_size()
        return max(start - address, address - end + 1, 0)

    return min(tensors, key=distance)


def _span(tensor: Tensor) -> int:
    """Numbers from a tensor's first to its last one, gaps included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
