"""Cells that need Triton are skipped where it is missing; all others run."""

import pytest

from course.needs import NEEDS_LINUX, SkipCells


def skipped(skip: SkipCells, source: str) -> bool:
    """Whether a cell is replaced by a line that says so."""
    lines = source.splitlines(keepends=True)
    return skip(lines) != lines


def test_a_cell_that_imports_triton_says_why_it_is_skipped() -> None:
    """With the remedy, also when IPython looks at the cell twice."""
    for _ in range(2):
        (line,) = SkipCells()(["import triton\n", "x = 1\n"])
        assert line == f"print({f'Skipped: this cell {NEEDS_LINUX}.'!r})\n"


def test_what_depends_on_a_skipped_cell_is_skipped() -> None:
    """Through several cells: imports, functions and values."""
    skip = SkipCells()
    assert skipped(skip, "import triton\nfrom minivllm import kernels as k\n")
    assert skipped(skip, "def run():\n    return k.rms_norm\n")
    assert skipped(skip, "answer = run()\n")
    assert skipped(skip, "answer\n")


@pytest.mark.parametrize(
    "source", ["answer = 2\n", "other\n", "%%build kernels.tile_places\n", "%check a\n", "1 +\n"]
)
def test_what_does_not_depend_on_one_runs(source: str) -> None:
    """Magics answer for themselves, and Python explains its own errors."""
    skip = SkipCells()
    assert skipped(skip, "import triton\nanswer = 1\n")
    assert not skipped(skip, source)


def test_a_name_that_is_defined_again_is_there() -> None:
    """A later cell gives it a value without Triton."""
    skip = SkipCells()
    assert skipped(skip, "import triton\nnames = triton\n")
    assert not skipped(skip, "names = ['a']\nnames\n")
    assert not skipped(skip, "names\n")
