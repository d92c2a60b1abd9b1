"""Lessons and package -> notebooks/ (with holes) and solutions/ (solved, then executed).

`course/lessons/NN_name.md` holds prose, experiments and the names of what is built; the code
of an exercise is in the package alone. Ids and bytes depend on nothing but these two, so
that regenerating changes no file. Outputs change through `execute` only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from course import exercises as ex
from course import files, sandbox, splice
from course.ledger import learner_code, ledger
from course.notebooks import (
    LANGUAGE,
    Cell,
    as_text,
    is_edited,
    keep_outputs,
    new_cell,
    notebook_from,
    notebook_of,
    read_notebook,
    same_source,
    source_id,
    write_notebook,
)

MAX_BYTES = 1_000_000  # of a notebook with its outputs


# -- a lesson becomes cells --------------------------------------------------------------------


def lesson_cells(lesson: Path, package: Path, solved: bool) -> list[Cell]:
    """The cells of a lesson: build cells with the functions of `package`, or with holes."""
    import jupytext

    seen: dict[str, int] = {}
    cells = []
    for raw in jupytext.read(lesson, fmt="md").cells:
        source, course = raw.source, course_metadata(raw)
        if names := course.get("build"):
            source = f"{source.rstrip()}\n{build_source(names, package, solved, lesson.name)}"
        metadata = {"tags": raw.metadata["tags"]} if "tags" in raw.metadata else {}
        metadata |= {"course": course} if course else {}
        key = cell_id(raw.source, course, seen)
        cells.append(new_cell(raw.cell_type, source, key, metadata))
    return cells


def course_metadata(raw: Cell) -> dict[str, list[str]]:
    """{"build": names} for a build cell, {"check": names} for a check, {} for all others."""
    match = re.match(r"%%(build)\s+(.*)|%(check)\s+(.*)", raw.source)
    if raw.cell_type != "code" or not match:
        return {}
    kind, names = (match[1], match[2]) if match[1] else (match[3], match[4])
    return {kind: names.split()}


def cell_id(source: str, course: dict[str, list[str]], seen: dict[str, int]) -> str:
    """A name that is the same in every build: of the exercise, or else of the text."""
    kind, names = next(iter(course.items()), ("", []))
    key = f"{kind}-{names[0]}" if names else source_id(source)
    key = re.sub(r"[^a-zA-Z0-9_-]", "-", key)[:56]  # nbformat allows 64 of these characters
    seen[key] = seen.get(key, 0) + 1
    return key if seen[key] == 1 else f"{key}-{seen[key]}"


def build_source(names: list[str], package: Path, solved: bool, lesson: str) -> str:
    """The definitions that a build cell names, as in the package or with holes, two lines apart."""
    short = [name.rsplit(".", 1)[-1] for name in names]
    if len(set(short)) < len(short):
        raise files.CourseError(
            f"{lesson}: `%%build {' '.join(names)}` defines two functions of the same name in one"
            " cell. Give each a cell of its own."
        )
    return "\n\n\n".join(part for name in names for part in definitions(name, package, solved))


def definitions(name: str, package: Path, solved: bool) -> list[str]:
    """The source of one exercise: one text, or several for overloads and property setters."""
    module, _, inner = name.partition(".")
    path = package / f"{module}.py"
    text = files.read(path).replace("\r\n", "\n") if path.exists() else ""
    sources = [splice.take(text, span) for span in splice.find(text, inner)] if inner else []
    if not sources:
        raise files.CourseError(
            f"The lesson builds {name}, but minivllm/{path.name} has no {inner or 'such function'}."
            " Correct the name in the lesson, or write the function."
        )
    return sources if solved else [splice.blank(source) for source in sources]


# -- cells become files ------------------------------------------------------------------------


def renew(path: Path, cells: list[Cell], solved: bool) -> str:
    """Bring one notebook up to date: "same", "written", or "kept" where a learner has worked."""
    if path.exists():
        old = read_notebook(path)
        if is_edited(old):
            return "kept"
        if same_source(old.cells, cells):
            return "same"
        if solved:
            keep_outputs(old.cells, cells)
    write_notebook(path, as_text(notebook_from(cells)))
    return "written"


def generated(home: Path) -> Iterator[tuple[Path, list[Cell], bool]]:
    """(path, cells, solved) of every notebook that the lessons and the package give."""
    for lesson in sorted((home / "course" / "lessons").glob("*.md")):
        for folder, solved in (("notebooks", False), ("solutions", True)):
            cells = lesson_cells(lesson, home / "minivllm", solved)
            yield home / folder / f"{lesson.stem}.ipynb", cells, solved


def build(home: Path) -> dict[Path, str]:
    """Write both notebooks of every lesson; what became of each."""
    refuse_learner_code("build")
    return {path: renew(path, cells, solved) for path, cells, solved in generated(home)}


def learner_code_now() -> list[str]:
    """Exercises that the ledger calls the learner's and that do not hold our text (again)."""
    with ledger() as book:
        known = ex.exercises()
        mine = [known[name] for name in learner_code(book) if name in known]
        return [exercise.name for exercise in mine if ex.state(exercise, book) != "borrowed"]


def refuse_learner_code(command: str) -> None:
    """Our solutions are made from the package, so it must hold our code when they are made."""
    if mine := learner_code_now():
        raise files.CourseError(
            f"minivllm/ holds code of yours, and `{command}` would make it the reference:"
            f" {', '.join(mine)}.\nPut ours back first (%undo brings yours back):"
            f" python -m course restore {' '.join(mine)}"
        )


# -- solutions get their outputs ---------------------------------------------------------------


def execute(path: Path) -> None:
    """Run a solution on a copy of the package and keep what it prints and draws."""
    refuse_learner_code("execute")
    nb = read_notebook(path)
    with sandbox.temporary() as folder:
        sandbox.run_notebook(nb, folder, path.parent)
    nb.metadata["language_info"] = LANGUAGE
    text = as_text(nb)
    for place in (folder, files.HOME):  # paths of this machine say nothing to a reader
        text = text.replace(str(place), ".")
    refuse_large(path.name, text)
    write_notebook(path, as_text(notebook_of(text)))


def refuse_large(name: str, text: str) -> None:
    """A notebook of many megabytes loads slowly, and stays in every clone."""
    if len(text.encode()) > MAX_BYTES:
        raise files.CourseError(
            f"{name} would have {len(text.encode()):,} bytes, {MAX_BYTES:,} are allowed."
            " Draw fewer or smaller figures (figures.DPI), or print less."
        )
