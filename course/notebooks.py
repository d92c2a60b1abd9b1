"""Notebook files: read them, write them, and see whether a learner has worked in one."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from course import files

Cell = Any  # nbformat's NotebookNode: a dict whose keys are attributes too
Notebook = Any

KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
LANGUAGE = {"name": "python"}  # without the version, which differs from machine to machine


def read_notebook(path: Path) -> Notebook:
    """A notebook, whatever minor version of the format it has."""
    return nbformat.read(path, 4)


def as_text(nb: Notebook) -> str:
    """What the file of a notebook holds."""
    nb.nbformat_minor = 5
    return str(nbformat.writes(nb)) + "\n"


def write_notebook(path: Path, text: str) -> None:
    """Write a notebook's file at once or not at all."""
    path.parent.mkdir(exist_ok=True)
    files.write(path, text)


def notebook_of(text: str) -> Notebook:
    """The notebook that a file with this text holds."""
    return nbformat.reads(text, 4)


def new_cell(kind: str, source: str, cell_id: str, metadata: dict[str, Any]) -> Cell:
    """A cell, "code" or "markdown"."""
    make = new_code_cell if kind == "code" else new_markdown_cell
    return make(source, id=cell_id, metadata=metadata)


def notebook_from(cells: list[Cell]) -> Notebook:
    """A notebook of these cells that remembers how it was built."""
    course = {"fingerprint": fingerprint(cells)}
    metadata = {"kernelspec": KERNEL, "language_info": LANGUAGE, "course": course}
    return new_notebook(cells=cells, metadata=metadata)


def fingerprint(cells: list[Cell]) -> str:
    """Of the sources alone: outputs do not count as work."""
    text = "\0".join(f"{cell.cell_type}:{cell.source}" for cell in cells)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_edited(nb: Notebook) -> bool:
    """Whether a cell was changed, added or removed since the notebook was built."""
    return bool(fingerprint(nb.cells) != nb.metadata.get("course", {}).get("fingerprint"))


def source_id(source: str) -> str:
    """The id that a build gives to a cell of text or of other code."""
    return hashlib.sha1(source.encode()).hexdigest()[:10]


def is_own(cell: Cell) -> bool:
    """Whether the learner added the cell, or changed it since the notebook was built."""
    return "course" not in cell.metadata and not cell.id.startswith(source_id(cell.source))


def merge(mine: Notebook, new: Notebook) -> Notebook:
    """`new` with the learner's work of `mine` in it: answers in the build cells, and the cells of
    their own below those that they stood below."""
    known = {cell.id for cell in new.cells}
    answers = {cell.id: cell for cell in mine.cells if "build" in cell.metadata.get("course", {})}
    own: dict[str, list[Cell]] = {}
    above = ""
    for cell in mine.cells:
        if is_own(cell):
            own.setdefault(above, []).append(cell)
        elif cell.id in known:
            above = cell.id
    cells = list(own.get("", []))
    for cell in new.cells:
        cells += [answers.get(cell.id, cell), *own.get(cell.id, [])]
    new.cells = cells
    return new


def is_executed(nb: Notebook) -> bool:
    """Whether every code cell has been run."""
    return all(cell.execution_count for cell in nb.cells if cell.cell_type == "code")


def same_source(old: list[Cell], new: list[Cell]) -> bool:
    """Whether two lists of cells are equal in all but their outputs."""
    return [plain(cell) for cell in old] == [plain(cell) for cell in new]


def plain(cell: Cell) -> tuple[Any, ...]:
    """What of a cell comes from the lesson; frontends add metadata of their own."""
    metadata = {key: cell.metadata.get(key) for key in ("course", "tags")}
    return cell.get("id"), cell.cell_type, cell.source, metadata


def keep_outputs(old: list[Cell], new: list[Cell]) -> None:
    """Where only prose has changed, what the code printed still holds."""
    old = [cell for cell in old if cell.cell_type == "code"]
    new = [cell for cell in new if cell.cell_type == "code"]
    if [cell.source for cell in old] == [cell.source for cell in new]:
        for before, after in zip(old, new):
            after.outputs, after.execution_count = before.outputs, before.execution_count
