"""The commands behind `python -m course`. Each is a few lines: the work is done elsewhere."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from course import exercises as ex

Arguments = argparse.Namespace

ABOUT = """\
The course from a terminal. What you build goes into minivllm/ itself, so `git diff` shows your
engine against ours, and scripts and tests run on it.
"""

# -- for learners ------------------------------------------------------------------------------


def check(args: Arguments) -> int:
    """Run the tests of exercises on your code, as %check does in a notebook.

    An exercise is named in full (block_manager.BlockPool.allocate) or by its last part where that
    is unique (blocks_for). Without a name: everything that is yours. The tests see your code in
    minivllm/, with limits on time and memory.
    """
    from course.verdict import check

    mine = [name for name, word in ex.states().items() if word in ex.MINE]
    names = [ex.find_exercise(name).name for name in args.name] or mine
    if not names:
        print("Nothing is yours yet. Begin in notebooks/, or with: python -m course open NAME")
    failed = False
    for name in names:
        try:
            print(check(name))
        except ex.CourseError as error:
            failed = True
            print(error)
    return 1 if failed else 0


def open_(args: Arguments) -> int:
    """Take exercises out of the package, for work in an editor instead of a notebook.

    Writes a body that raises NotImplementedError into minivllm/<module>.py, under the signature
    and the docstring. Write yours there, save, then: python -m course check NAME. From now on
    whatever stands there counts as yours. Ours comes back with: python -m course restore NAME
    """
    for name in args.name:
        exercise = ex.find_exercise(name)
        ex.open_in_file(exercise)
        print(f"Open: {exercise.name} in minivllm/{exercise.module}.py")
    print(f"Write the body there, then: python -m course check {' '.join(args.name)}")
    return 0


def empty(args: Arguments) -> int:
    """Take every exercise that is not yours out of the package: an engine from nothing.

    The engine does not run again until you have built all of it. Each check passes as soon as the
    exercises up to its own are there. `--undo` puts ours back wherever a hole is left.
    """
    states = ex.states()
    wanted = "open" if args.undo else "borrowed"
    chosen = [exercise for name, exercise in ex.exercises().items() if states[name] == wanted]
    if args.undo:
        ex.lay({exercise.name: exercise.reference for exercise in chosen}, mine=False)
        print(f"Put back: {len(chosen)} exercises; the engine runs again.")
        return 0
    for exercise in chosen:
        ex.open_in_file(exercise)
    kept = [name for name, word in states.items() if word in ex.MINE]
    print(f"Taken out: {len(chosen)} exercises." + (f" Yours stay: {len(kept)}." if kept else ""))
    print("To put ours back where holes are left: python -m course empty --undo")
    return 0


def restore(args: Arguments) -> int:
    """Put our version of exercises back, as %restore does; %undo in a notebook brings yours back.

    Where a file no longer compiles, git takes it back: git checkout minivllm/<module>.py
    """
    for name in args.name:
        exercise = ex.find_exercise(name)
        ex.lay({exercise.name: exercise.reference}, mine=False)
        print(f"Restored {exercise.name}: the engine runs our version.")
    return 0


def update(args: Arguments) -> int:
    """Bring a new version of the course under your work.

    Puts your functions and the notebooks you worked in aside (.course/carry/), runs git pull, and
    lays your functions into the new package. Such a notebook is kept as NN_name.mine.ipynb beside
    the new one. If it is interrupted or git refuses, nothing is lost: run it again.
    Without git: unpack the new version into a folder of its own and use --from there.
    """
    from course.update import update, update_from

    for line in update_from(Path(args.old).resolve()) if args.old else update():
        print(line)
    return 0


def progress(args: Arguments) -> int:
    """Show the map: what is passed, yours but not checked, borrowed (ours), or open (a hole)."""
    from course.progress import progress_map

    print(progress_map(ex.states()))
    return 0


# -- for authors -------------------------------------------------------------------------------


def build(args: Arguments) -> int:
    """Write notebooks/ (with holes) and solutions/ (solved) from course/lessons/ and minivllm/.

    "same": nothing to do. "kept": somebody has worked in that notebook, so it is not overwritten;
    delete the file to have it written anew. Solutions whose code changed lose their outputs until
    `execute` runs them. Refuses while minivllm/ holds a learner's code.
    """
    from course.authoring.build import build

    for path, word in build(ex.HOME).items():
        print(f"{word:<8} {path.relative_to(ex.HOME)}")
    return 0


def execute(args: Arguments) -> int:
    """Run solution notebooks on a copy of the package and keep what they print and draw.

    Without a name: those that have not been run since their code changed. Timings of cells are
    not kept, and a notebook above 1 MB is refused.
    """
    from course.authoring.build import execute
    from course.notebooks import is_executed, read_notebook

    paths = chapter_paths(args.name)
    if not args.name and not args.all:
        paths = [path for path in paths if not is_executed(read_notebook(path))]
    for path in paths:
        start = time.perf_counter()
        execute(path)
        print(f"executed {path.relative_to(ex.HOME)} in {time.perf_counter() - start:.0f} s")
    if not paths:
        print("Every solution has been run. To run them again: python -m course execute --all")
    return 0


def chapter_paths(names: Sequence[str]) -> list[Path]:
    """The solution notebooks of chapters named as 03 or 03_block_manager; of all without names.
    Raises CourseError for a name that no chapter has."""
    paths = sorted((ex.HOME / "solutions").glob("*.ipynb"))
    for name in names:
        if not any(_is_called(path, name) for path in paths):
            known = ", ".join(path.stem for path in paths) or "none: python -m course build"
            raise ex.CourseError(f"No chapter is called {name!r}. There are: {known}")
    return [path for path in paths if not names or any(_is_called(path, name) for name in names)]


def _is_called(path: Path, name: str) -> bool:
    return path.stem == name or path.stem.startswith(f"{name}_")


def verify(args: Arguments) -> int:
    """Run the gates: what must hold of a chapter before others may learn from it.

    1 regenerating changes nothing          5 no exercise needs a later one
    2 solved cells rebuild the package      6 no answers in notebooks/, alt text, links
    3 the blank notebook runs through       7 the wheel installs and imports
    4 wrong answers are caught by name

    Each failure says how to repair it. Skips while minivllm/ holds a learner's code.
    """
    from course.authoring.build import learner_code_now
    from course.authoring.gates import GATES, rebuilds_cells, rest_of_staircase

    if mine := learner_code_now():
        print(f"skipped: minivllm/ holds code of yours ({', '.join(mine)}); the gates test ours")
        return 0
    chapters = [path.stem for path in chapter_paths(args.name)]
    failed = False
    gates = GATES | ({2: rebuilds_cells} if args.after_nbval else {})
    wanted = args.gate or list(gates)
    if 2 in wanted:
        gates |= {5: rest_of_staircase}
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
    from course.authoring.scaffold import new_chapter

    for path in new_chapter(args.number, args.name, args.module, ex.HOME):
        print(f"written  {path.relative_to(ex.HOME)}")
    return 0


# -- the command line --------------------------------------------------------------------------

COMMANDS = {
    "check": check,
    "open": open_,
    "restore": restore,
    "empty": empty,
    "progress": progress,
    "update": update,
    "build": build,
    "execute": execute,
    "verify": verify,
    "new-chapter": new_chapter,
}


def parser() -> argparse.ArgumentParser:
    """One subcommand for each entry of COMMANDS; its docstring is its help."""
    out = argparse.ArgumentParser(
        "python -m course", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    subparsers = out.add_subparsers(dest="command", required=True, metavar="COMMAND")
    sub = {name: add_command(subparsers, name) for name in COMMANDS}
    for name in ("check", "execute", "verify"):
        sub[name].add_argument("name", nargs="*", help="all that apply without it")
    for name in ("open", "restore"):
        sub[name].add_argument("name", nargs="+", help="of an exercise, as in blocks_for")
    sub["empty"].add_argument("--undo", action="store_true", help="put ours back into the holes")
    sub["update"].add_argument("--from", dest="old", metavar="FOLDER", help="the old version")
    sub["execute"].add_argument("--all", action="store_true", help="also those already run")
    verify_options = sub["verify"]
    verify_options.add_argument("--gate", type=int, action="append", choices=range(1, 8))
    verify_options.add_argument(
        "--after-nbval", action="store_true", help="do not run whole solutions: pytest has"
    )
    sub["new-chapter"].add_argument("number", help="two digits, as in 04")
    sub["new-chapter"].add_argument("name", help="of the chapter, as in prefix_cache")
    sub["new-chapter"].add_argument("module", help="of the package that it builds")
    return out


def add_command(subparsers: argparse._SubParsersAction, name: str) -> argparse.ArgumentParser:  # type: ignore[type-arg]
    """A subcommand: the first line of its docstring in the list, all of it in its own help."""
    lines = (COMMANDS[name].__doc__ or "").splitlines()
    text = "\n".join(line.removeprefix("    ") for line in lines)
    made: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=lines[0].replace("%", "%%"),
        description=text.replace("%", "%%"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; an error of the course is shown as its text alone."""
    args = parser().parse_args(arguments)
    try:
        return COMMANDS[args.command](args)
    except ex.CourseError as error:
        print(error, file=sys.stderr)
        return 1
