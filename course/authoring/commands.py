"""The commands of `python -m course` that only authors run."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from course import files
from course.authoring.build import build as build_notebooks
from course.authoring.build import execute as execute_notebook
from course.authoring.build import learner_code_now
from course.authoring.gates import GATES, rebuilds_cells
from course.authoring.scaffold import new_chapter as write_chapter
from course.commands import add_command
from course.notebooks import is_executed, read_notebook

Arguments = argparse.Namespace


def add_commands(subparsers: Any) -> None:
    """Add a subcommand for each."""
    for name, run in COMMANDS.items():
        sub = add_command(subparsers, name, run)
        if name in ("execute", "verify"):
            sub.add_argument("name", nargs="*", help="of a chapter; all that apply without it")
        if name == "execute":
            sub.add_argument("--all", action="store_true", help="also those already run")
        if name == "verify":
            sub.add_argument("--gate", type=int, action="append", choices=range(1, 8))
            help = "do not run whole solutions: pytest has"
            sub.add_argument("--after-nbval", action="store_true", help=help)
        if name == "new-chapter":
            sub.add_argument("number", help="two digits, as in 04")
            sub.add_argument("name", help="of the chapter, as in prefix_cache")
            sub.add_argument("module", help="of the package that it builds")


def build(args: Arguments) -> int:
    """Write notebooks/ (with holes) and solutions/ (solved) from course/lessons/ and minivllm/.

    "same": nothing to do. "kept": a learner has worked in that notebook, so it is not overwritten;
    delete the file to have it written anew. Solutions whose code changed lose their outputs until
    `execute` runs them. Refuses while minivllm/ holds a learner's code.
    """
    for path, word in build_notebooks(files.HOME).items():
        print(f"{word:<8} {path.relative_to(files.HOME)}")
    return 0


def execute(args: Arguments) -> int:
    """Run solution notebooks on a copy of the package and keep what they print and draw.

    Without a name: those that have not been run since their code changed. Timings of cells are
    not kept, and a notebook above 1 MB is refused.
    """
    paths = chapter_paths(args.name)
    if not args.name and not args.all:
        paths = [path for path in paths if not is_executed(read_notebook(path))]
    for path in paths:
        start = time.perf_counter()
        execute_notebook(path)
        print(f"executed {path.relative_to(files.HOME)} in {time.perf_counter() - start:.0f} s")
    if not paths:
        print("Every solution has been run. To run them again: python -m course execute --all")
    return 0


def chapter_paths(names: Sequence[str]) -> list[Path]:
    """The solution notebooks of chapters named as 03 or 03_block_manager; of all without names.
    Raises CourseError for a name that no chapter has."""
    paths = sorted((files.HOME / "solutions").glob("*.ipynb"))
    for name in names:
        if not any(_is_called(path, name) for path in paths):
            known = ", ".join(path.stem for path in paths) or "none: python -m course build"
            raise files.CourseError(f"No chapter is called {name!r}. There are: {known}")
    return [path for path in paths if not names or any(_is_called(path, name) for name in names)]


def _is_called(path: Path, name: str) -> bool:
    return path.stem == name or path.stem.startswith(f"{name}_")


def verify(args: Arguments) -> int:
    """Run the gates: what must hold of a chapter before it is published.

    1 regenerating changes nothing          5 no exercise needs a later one
    2 solved cells rebuild the package      6 no answers in notebooks/, alt text, links
    3 the blank notebook runs through       7 the wheel installs and imports
    4 wrong answers are caught by name

    Each failure says how to repair it. Skips while minivllm/ holds a learner's code.
    """
    if mine := learner_code_now():
        print(f"skipped: minivllm/ holds code of yours ({', '.join(mine)}); the gates test ours")
        return 0
    chapters = [path.stem for path in chapter_paths(args.name)]
    failed = False
    gates = GATES | ({2: rebuilds_cells} if args.after_nbval else {})
    wanted = args.gate or list(gates)
    for number in wanted:
        start = time.perf_counter()
        problems = gates[number](chapters)
        failed = failed or bool(problems)
        seconds = time.perf_counter() - start
        title = (gates[number].__doc__ or "").splitlines()[0]
        print(f"{'FAILED' if problems else 'ok':<7} gate {number} ({seconds:.0f} s): {title}")
        for problem in problems:
            print("  - " + problem.replace("\n", "\n    "))
    return 1 if failed else 0


def new_chapter(args: Arguments) -> int:
    """Write the skeleton of a chapter: course/lessons/NN_name.md and course/mistakes/NN_name.py.

    For example: new-chapter 04 prefix_cache prefix_cache. The module must exist, with its tests;
    its first public functions become the exercises. Fill in, then: build, execute, verify.
    """
    for path in write_chapter(args.number, args.name, args.module, files.HOME):
        print(f"written  {path.relative_to(files.HOME)}")
    return 0


COMMANDS = {"build": build, "execute": execute, "verify": verify, "new-chapter": new_chapter}
