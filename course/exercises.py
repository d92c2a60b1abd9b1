"""Which definitions are exercises, whose code the package holds now, and how it gets there.

An exercise is a definition of the package that a notebook builds. Its states:
    open      the package has a hole
    borrowed  the package has our version
    yours     the learner's version, not checked since its last change
    passed    the learner's version, and its check passed
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from course import files, splice
from course.files import BuildError, CourseError, module_path, read, root, write
from course.ledger import Book, digest, entry_of, ledger

HISTORY_LIMIT = 50  # earlier texts kept for each exercise
MINE = ("yours", "passed")  # the states in which the package has the learner's version


@dataclass(frozen=True)
class Exercise:
    """One definition that the learner builds."""

    name: str  # block_manager.BlockPool.allocate
    notebook: str  # 03_block_manager
    reference: str  # our source, at column 0

    @property
    def module(self) -> str:
        """block_manager"""
        return self.name.split(".", 1)[0]

    @property
    def inner(self) -> str:
        """BlockPool.allocate"""
        return self.name.split(".", 1)[1]


def exercises() -> dict[str, Exercise]:
    """Every exercise in course order; the reference is the source in the solution notebook."""
    out: dict[str, Exercise] = {}
    for path in sorted((files.HOME / "solutions").glob("*.ipynb")):
        for exercise in _of_notebook(path, path.stat().st_mtime_ns):
            out[exercise.name] = exercise
    return out


@lru_cache
def _of_notebook(path: Path, changed_ns: int) -> list[Exercise]:
    """The exercises of one solution; kept, because figures make these files large."""
    out = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        body = "".join(cell["source"]).partition("\n")[2]
        for name in cell["metadata"].get("course", {}).get("build", []):
            reference = definition(body, name)
            if reference is None:
                raise CourseError(
                    f"{path.name} says that a cell builds {name}, but it is not there"
                )
            out.append(Exercise(name, path.stem, reference))
    return out


def definition(cell: str, name: str) -> str | None:
    """The source of an exercise in a build cell, where methods stand without their class."""
    inner = name.split(".", 1)[1]
    return splice.take_all(cell, inner) or splice.take_all(cell, inner.rsplit(".", 1)[-1])


def find_exercise(name: str) -> Exercise:
    """The exercise of a full name, or of its last parts where they are unique.

    Raises CourseError, with names like it, for any other.
    """
    known = exercises()
    hits = [n for n in known if n == name] or [n for n in known if n.endswith("." + name)]
    if len(hits) == 1:
        return known[hits[0]]
    last = {n.rsplit(".", 1)[-1]: n for n in known}
    near = hits or difflib.get_close_matches(name, known, 3, 0.6)
    near = near or [last[n] for n in difflib.get_close_matches(name.rsplit(".", 1)[-1], last, 1)]
    hint = f" Did you mean {' or '.join(near)}?" if near else " %progress lists them all."
    raise CourseError(f"No exercise is called {name!r}.{hint}")


def current(name: str) -> str:
    """The source of an exercise as the package has it now. Raises CourseError, with the way back,
    where the file cannot be read or has no such definition."""
    file, remedy = _way_back(name)
    try:
        text = splice.take_all(module_text(name), name.split(".", 1)[1])
    except SyntaxError as error:
        raise CourseError(
            f"{file} does not compile, line {error.lineno}: {error.msg}.\n"
            f"It was edited outside a build cell. Repair that line, or {remedy}"
        ) from None
    if text is None:
        raise CourseError(
            f"{name} is gone from {file}; git diff minivllm shows the change. You can {remedy}"
        )
    return text


def module_text(name: str) -> str:
    """The text of the module that an exercise belongs to. Raises CourseError, with the way back,
    for a file that was deleted or saved in another encoding than UTF-8."""
    file, remedy = _way_back(name)
    try:
        return read(module_path(name))
    except (OSError, UnicodeDecodeError) as error:
        raise CourseError(f"{file} cannot be read ({error}). You can {remedy}") from None


def _way_back(name: str) -> tuple[str, str]:
    file = f"minivllm/{module_path(name).name}"
    remedy = f"get the file back with: git checkout {file} (this also removes what you built in it)"
    return file, remedy


def state(exercise: Exercise, book: Book) -> str:
    """'open', 'borrowed', 'yours' or 'passed'."""
    text, entry = current(exercise.name), book.get(exercise.name, {})
    spans = splice.find(text, exercise.inner.rsplit(".", 1)[-1])
    if splice.is_hole(spans[-1].node):
        return "open"
    # Our code is borrowed unless the learner wrote it: one-liners come out the same. A formatter
    # that an editor runs on save changes the text, and not whose it is.
    marks = marks_of(text)
    is_ours = splice.code_of(text) == splice.code_of(exercise.reference)
    if is_ours and entry.get("mine") not in ("opened", *marks):
        return "borrowed"
    return "passed" if entry.get("passed") in marks else "yours"


def marks_of(text: str) -> tuple[str, str]:
    """What the ledger may say of a text: the digest of its code, or, in ledgers of before
    2026-12, of the text itself."""
    return digest(splice.code_of(text)), digest(text)


def states(notebook: str | None = None) -> dict[str, str]:
    """The state of every exercise, or of every one of a notebook, in course order."""
    with ledger() as book:
        return {
            name: state(exercise, book)
            for name, exercise in exercises().items()
            if notebook in (None, exercise.notebook)
        }


def learner_exercises() -> list[str]:
    """Names of the exercises that are not borrowed: the learner's, and open ones."""
    return [name for name, word in states().items() if word != "borrowed"]


def spliced(folder: Path, sources: Mapping[str, str]) -> dict[Path, str]:
    """The texts of the modules below `folder` with these definitions in place; writes nothing.

    Raises BuildError where the result would not compile.
    """
    texts: dict[Path, str] = {}
    for name, source in sources.items():
        path = folder / "minivllm" / f"{name.split('.', 1)[0]}.py"
        try:
            texts[path] = splice.put(texts.get(path) or read(path), name.split(".", 1)[1], source)
        except SyntaxError as error:
            raise BuildError(
                f"Not written: with it line {error.lineno} of {path.name} does not compile: "
                f"{error.msg}"
            ) from None
        except ValueError as error:
            raise BuildError(f"Not written: {error}") from None
    return texts


def lay(sources: Mapping[str, str], mine: bool) -> list[str]:
    """Write definitions into the package, all or none; returns the names that changed.

    `mine`: the learner wrote them. What stood there before goes into the history.
    """
    with ledger() as book:
        before = {name: current(name) for name in sources}
        _write_all(spliced(root(), sources))
        for name, source in sources.items():
            entry = entry_of(book, name)
            if before[name] != source:
                entry["history"].append({"text": before[name], "mine": entry["mine"]})
                del entry["history"][:-HISTORY_LIMIT]
            entry["mine"] = marks_of(source)[0] if mine else None
    return [name for name, text in before.items() if text != sources[name]]


def step_back(name: str) -> int | None:
    """Put the version before the last change back; how many more there are, None if none was."""
    with ledger() as book:
        entry = entry_of(book, name)
        if not entry["history"]:
            return None
        earlier = entry["history"][-1]
        _write_all(spliced(root(), {name: earlier["text"]}))
        entry["history"].pop()
        entry["mine"] = earlier["mine"]
        return len(entry["history"])


def open_in_file(exercise: Exercise) -> None:
    """Take an exercise out of the package, for work in an editor.

    From then on the code there is the learner's, even if it is identical to ours.
    """
    lay({exercise.name: splice.blank(exercise.reference, raising_hole(exercise))}, mine=True)
    with ledger() as book:
        book[exercise.name]["mine"] = "opened"


def raising_hole(exercise: Exercise) -> str:
    """The line in place of a body that isn't written yet."""
    return f'raise NotImplementedError("notebook {exercise.notebook}: {exercise.name}")'


def _write_all(texts: dict[Path, str]) -> None:
    """Write several files; if one fails, the others get their old text back."""
    before = {path: read(path) for path in texts}
    written = []
    try:
        for path, text in texts.items():
            if text != before[path]:
                write(path, text)
                written.append(path)
    except BaseException:
        for path in written:
            write(path, before[path])
        raise
