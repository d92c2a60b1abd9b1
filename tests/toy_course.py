"""A small course of its own: one module, one lesson, three exercises, and our tooling.

Tests of the tooling change it, break it and build it without touching the real one. It lives in
a folder of its own, and commands run there as a learner runs them.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]

PACKAGE = '''\
"""Boxes of a shelf."""


def boxes_for(num_things: int, box_size: int) -> int:
    """Boxes that the things fill: `boxes_for(5, 4) == 2`."""
    # Rounding up: minus the floor of the negative.
    return -(-num_things // box_size)


class Shelf:
    """Boxes by number; `free` holds those without an owner."""

    def __init__(self, num_boxes: int) -> None:
        self.free = list(range(num_boxes))

    def take(self, num_boxes: int) -> list[int]:
        """Take boxes from the front; ValueError, and nothing taken, if too few are free."""
        if num_boxes > len(self.free):
            raise ValueError(f"{num_boxes} wanted, {len(self.free)} free")
        taken, self.free = self.free[:num_boxes], self.free[num_boxes:]
        return taken

    def give(self, boxes: list[int]) -> None:
        """Put boxes back to the end, in their order."""
        for box in boxes:
            self.free.append(box)


def pack(shelf: Shelf, num_things: int) -> list[int]:
    """Boxes of four for the things. Given."""
    return shelf.take(boxes_for(num_things, 4))
'''

LESSON = """\
# 01 · Boxes

The whole module is in [the package](../minivllm/boxes.py).

```python
%load_ext course
from minivllm.boxes import Shelf, boxes_for, pack
```

1. A box in part is a box.

```python
%%build boxes.boxes_for
```

```python
%check boxes.boxes_for
```

```python tags=["nbval-check-output"]
pack(Shelf(8), 9)
```

```python
%%build boxes.Shelf.take boxes.Shelf.give
```

```python
%check boxes.Shelf.take
```

```python
%check boxes.Shelf.give
```

```python
shelf = Shelf(4)
shelf.give(pack(shelf, 5))
shelf.free
```
"""

TESTS = '''\
import pytest

from minivllm.boxes import Shelf, boxes_for


@pytest.mark.exercise("boxes.boxes_for")
def test_a_box_in_part_counts():
    """Rounds up, and only then."""
    assert boxes_for(5, 4) == 2, "do you round down?"
    assert boxes_for(8, 4) == 2, "do you always add one?"


@pytest.mark.exercise("boxes.Shelf.take")
def test_takes_from_the_front():
    """The first boxes are taken, and are gone."""
    shelf = Shelf(3)
    assert shelf.take(2) == [0, 1], "which end is the front?"
    assert shelf.free == [2], "are the boxes still free?"


@pytest.mark.exercise("boxes.Shelf.give")
def test_gives_to_the_end():
    """Boxes come back behind the others."""
    shelf = Shelf(2)
    shelf.free = [1]
    shelf.give([0])
    assert shelf.free == [1, 0], "which end is the end?"
'''

MISTAKES = '''\
"""Wrong answers."""


@mistake("boxes.boxes_for", "do you round down?")
def boxes_for(num_things, box_size):
    return num_things // box_size


@mistake("boxes.boxes_for", "do you always add one?")
def boxes_for(num_things, box_size):
    return num_things // box_size + 1


@mistake("boxes.Shelf.take", "are the boxes still free?")
def take(self, num_boxes):
    return self.free[:num_boxes]


@mistake("boxes.Shelf.give", "which end is the end?")
def give(self, boxes):
    self.free = boxes + self.free
'''

# Right, and not our text.
ANSWERS = {
    "boxes.boxes_for": """\
def boxes_for(num_things: int, box_size: int) -> int:
    \"\"\"Mine.\"\"\"
    return (num_things + box_size - 1) // box_size""",
    "boxes.Shelf.take": """\
def take(self, num_boxes):
    if num_boxes > len(self.free):
        raise ValueError
    return [self.free.pop(0) for _ in range(num_boxes)]""",
    "boxes.Shelf.give": """\
def give(self, boxes):
    self.free += boxes""",
}

PYPROJECT = """\
[project]
name = "minivllm"
version = "0"
requires-python = ">=3.10"

[tool.pytest.ini_options]
testpaths = ["tests", "solutions"]
markers = ["exercise: of the course"]
"""


def make_toy(folder: Path, **changed: str) -> Path:
    """Write the toy into `folder`, not built yet; `lesson=...` and the like replace its parts."""
    skip = shutil.ignore_patterns("__pycache__", "lessons", "mistakes")
    shutil.copytree(HOME / "course", folder / "course", ignore=skip)
    shutil.copy(HOME / "conftest.py", folder)
    parts = {
        "pyproject.toml": PYPROJECT,
        "minivllm/__init__.py": "",
        "minivllm/boxes.py": changed.get("package", PACKAGE),
        "tests/test_boxes.py": changed.get("tests", TESTS),
        "course/lessons/01_boxes.md": changed.get("lesson", LESSON),
        "course/mistakes/01_boxes.py": changed.get("mistakes", MISTAKES),
        ".gitignore": ".course/\n__pycache__/\n.pytest_cache/\n*.mine.ipynb\n",
    }
    for name, text in parts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    return folder


def executed_toy(base: Path) -> Path:
    """The toy, built and executed and committed, once for all tests below `base`: copy it."""
    folder = base / "executed-toy"
    if not folder.exists():
        course(make_toy(folder), "build")
        course(folder, "execute")
        git(folder, "init", "-q", "-b", "main")
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", "one")
    return folder


def run(
    folder: Path, *command: str, code: int | None = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `python COMMAND...` in the toy, on its package; `code` is what it must exit with."""
    result = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert code is None or result.returncode == code, result.stdout + result.stderr
    return result


def course(folder: Path, *command: str, code: int | None = 0) -> str:
    """What `python -m course COMMAND...` prints in the toy."""
    result = run(folder, "-m", "course", *command, code=code)
    return result.stdout + result.stderr


def write_answer(folder: Path, name: str, source: str) -> None:
    """Lay a definition as a build cell does."""
    script = f"from course.exercises import lay; lay({{{name!r}: {source!r}}}, mine=True)"
    run(folder, "-c", script)


def git(folder: Path, *command: str) -> str:
    """Run git in a folder under a made-up name; what it prints."""
    who = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *who, *command], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout
