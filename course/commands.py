"""The commands behind `python -m course`; those of authors are in `authoring.commands`."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from course import exercises as ex
from course import files

Arguments = argparse.Namespace

ABOUT = """\
The course from a terminal. What you build goes into minivllm/ itself, so `git diff minivllm` shows
your engine against ours, and scripts and tests run on it.
"""


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
        except files.CourseError as error:
            failed = True
            print(error)
    return 1 if failed else 0


def open_(args: Arguments) -> int:
    """Take exercises out of the package, for work in an editor instead of a notebook.

    Writes a body that raises NotImplementedError into minivllm/<module>.py, under the signature
    and the docstring. Write yours there, save, then: python -m course check NAME. From now on
    any code in its place counts as yours. Ours comes back with: python -m course restore NAME
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
    print(f"Removed: {len(chosen)} exercises." + (f" Yours stay: {len(kept)}." if kept else ""))
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
    lays your functions into the new package. Such a notebook is kept as NN_name.mine.ipynb next to
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


# -- the command line --------------------------------------------------------------------------

COMMANDS = {
    "check": check,
    "open": open_,
    "restore": restore,
    "empty": empty,
    "progress": progress,
    "update": update,
}


def parser(with_authors: bool = True) -> argparse.ArgumentParser:
    """One subcommand for each command of learners, and of authors; its docstring is its help."""
    out = argparse.ArgumentParser(
        "python -m course", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    subparsers = out.add_subparsers(dest="command", required=True, metavar="COMMAND")
    sub = {name: add_command(subparsers, name, run) for name, run in COMMANDS.items()}
    sub["check"].add_argument("name", nargs="*", help="all that apply without it")
    for name in ("open", "restore"):
        sub[name].add_argument("name", nargs="+", help="of an exercise, as in blocks_for")
    sub["empty"].add_argument("--undo", action="store_true", help="put ours back into the holes")
    sub["update"].add_argument("--from", dest="old", metavar="FOLDER", help="the old version")
    if with_authors:
        from course.authoring.commands import add_commands

        add_commands(subparsers)
    return out


def add_command(
    subparsers: Any, name: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """A subcommand: the first line of its docstring in the list, all of it in its own help."""
    text = inspect.getdoc(run) or ""
    made: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=text.split("\n")[0].replace("%", "%%"),
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.set_defaults(run=run)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; an error of the course is shown as its text alone."""
    arguments = sys.argv[1:] if arguments is None else arguments
    is_learners = bool(arguments) and arguments[0] in COMMANDS
    args = parser(with_authors=not is_learners).parse_args(arguments)
    try:
        return int(args.run(args))
    except files.CourseError as error:
        print(error, file=sys.stderr)
        return 1
