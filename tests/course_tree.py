"""A small course of its own, on which the tests of the machinery run: package, tests, solution."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from course import files

PACKAGE = {
    "__init__": "",
    "block_manager": '''
"""Blocks, in small."""

from collections import deque

LIMIT = 8


def blocks_for(num_tokens, block_size=16):
    """Blocks that the tokens fill."""
    # Rounding up.
    return -(-num_tokens // block_size)


class BlockPool:
    """Blocks by number."""

    def __init__(self, num_blocks):
        self.free_ids = deque(range(num_blocks))
        self.counts = [0] * num_blocks

    def __repr__(self):
        return f"BlockPool({len(self.free_ids)} free)"

    @property
    def num_free(self):
        """Blocks without an owner."""
        return len(self.free_ids)

    def allocate(self, num_blocks):
        """Take blocks from the front."""
        if num_blocks > len(self.free_ids):
            raise ValueError("not enough blocks")
        ids = [self.free_ids.popleft() for _ in range(num_blocks)]
        for i in ids:
            self.counts[i] = 1
        return ids

    def free(self, block_ids):
        """Take one owner from each block."""
        for i in block_ids:
            self.counts[i] -= 1
            if self.counts[i] == 0:
                self.free_ids.append(i)

    def check(self):
        """Assert the invariant."""
        for i, count in enumerate(self.counts):
            assert (count == 0) == (i in self.free_ids), f"block {i}: count {count}"
''',
    "scheduler": '''
"""Asks for blocks."""

from minivllm.block_manager import BlockPool, blocks_for


class Scheduler:
    """Holds a pool."""

    def __init__(self, num_blocks):
        self.pool = BlockPool(num_blocks)

    def admit(self, num_tokens):
        """Blocks of a new request."""
        return self.pool.allocate(blocks_for(num_tokens))
''',
    "cpu/__init__": "from minivllm.cpu.ops import FACTOR\n",
    "cpu/ops": '''
"""A module in a room."""

from ..block_manager import blocks_for

FACTOR = 1


def need(num_tokens):
    """Twice the blocks."""
    return 2 * blocks_for(num_tokens)
''',
    "request": '''
"""Layer 0."""


class Request:
    """Stays the same class."""
''',
}

TESTS = """
import pytest

from minivllm.block_manager import BlockPool, blocks_for


@pytest.mark.exercise("block_manager.blocks_for")
def test_a_partial_block_counts_as_a_whole_one():
    assert blocks_for(33, 16) == 3, "the 33rd token needs a third block"


@pytest.mark.exercise("block_manager.blocks_for")
@pytest.mark.parametrize("num_tokens", [0, 32])
def test_a_full_block_needs_no_extra_one(num_tokens):
    assert blocks_for(num_tokens, 16) == num_tokens // 16, "nothing is left over"


@pytest.mark.exercise("block_manager.BlockPool.allocate")
def test_allocate_takes_from_the_front():
    pool = BlockPool(4)
    assert pool.allocate(2) == [0, 1], "blocks come from the front"
    assert pool.counts == [1, 1, 0, 0], "a block given away has one owner"


@pytest.mark.exercise("block_manager.BlockPool.allocate")
def test_allocate_is_all_or_nothing():
    pool = BlockPool(2)
    with pytest.raises(ValueError):
        pool.allocate(3)
    assert pool.num_free == 2, "a refused request must take nothing"
    pool.check()


@pytest.mark.exercise("block_manager.BlockPool.free")
def test_a_block_is_free_when_its_last_owner_left():
    pool = BlockPool(2)
    ids = pool.allocate(1)
    pool.counts[0] += 1
    pool.free(ids)
    assert not pool.num_free > 1, "one owner is left"
    pool.free(ids)
    assert pool.num_free == 2, "no owner is left"
    pool.check()
"""

BUILDS = [
    ["block_manager.blocks_for"],
    ["block_manager.BlockPool.allocate", "block_manager.BlockPool.free"],
]


def write_tree(folder: Path) -> Path:
    """Write package, tests and the solution notebook; returns the folder."""
    from course import splice

    for name, text in PACKAGE.items():
        put(folder / "minivllm" / f"{name}.py", text.lstrip("\n"))
    put(folder / "tests" / "test_block_manager.py", TESTS)
    put(folder / "pyproject.toml", "")
    cells = []
    for names in BUILDS:
        text = PACKAGE["block_manager"].lstrip("\n")
        parts = [splice.take_all(text, name.split(".", 1)[1]) for name in names]
        source = "%%build " + " ".join(names) + "\n" + "\n\n\n".join(map(str, parts))
        cells.append({"source": source, "metadata": {"course": {"build": names}}})
    put(folder / "solutions" / "01_blocks.ipynb", json.dumps({"cells": cells}))
    return folder


def put(path: Path, text: str) -> None:
    """Write a file, folders included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """The small course, found by `import minivllm` for the length of a test."""
    folder = write_tree(tmp_path.resolve() / "tree")
    saved = {name: sys.modules.pop(name) for name in list(sys.modules) if is_ours(name)}
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(files, "HOME", folder)
    yield folder
    for name in [name for name in sys.modules if is_ours(name)]:
        del sys.modules[name]
    sys.modules.update(saved)


def is_ours(name: str) -> bool:
    """Whether a module is the package or part of it."""
    return name == "minivllm" or name.startswith("minivllm.")
