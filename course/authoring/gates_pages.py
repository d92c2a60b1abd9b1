"""Gate 6: what can be seen wrong in the notebooks without running them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from course import exercises as ex
from course import files, splice
from course.notebooks import read_notebook

PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
MIN_LINE = 20  # characters: shorter lines of an answer occur in many texts by chance

FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`\n]*`")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)[^)]*\)")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)[^)]*\)")
TAG = re.compile(r"<(img|svg)\b[^>]*>", re.IGNORECASE)
ATTRIBUTE = re.compile(r"\b(?:href|src)=[\"']([^\"']+)[\"']")
NAMED = re.compile(r"\b(?:alt|aria-label)=[\"']\s*[^\"'\s]", re.IGNORECASE)


def page_problems(chapters: list[str]) -> list[str]:
    """All of gate 6 for some chapters and the pages around them."""
    problems = []
    for chapter in chapters:
        for folder in ("notebooks", "solutions"):
            path = files.HOME / folder / f"{chapter}.ipynb"
            nb = read_notebook(path)
            name = f"{folder}/{path.name}"
            problems += [f"{name}: {p}" for cell in nb.cells for p in cell_problems(cell, path)]
            if folder == "notebooks":
                problems += [f"{name}: {p}" for p in answers(nb)]
    for page in PAGES:
        if (path := files.HOME / page).exists():
            problems += [f"{page}: {p}" for p in text_problems(path.read_text("utf-8"), path)]
    return problems


# -- answers -----------------------------------------------------------------------------------


def answers(nb: Any) -> Iterator[str]:
    """Exercises whose answer is in a blank notebook."""
    text = squeezed("\n".join(cell.source for cell in nb.cells))
    text += squeezed("\n".join(str(o) for cell in nb.cells for o in cell.get("outputs", ())))
    for exercise in ex.exercises().values():
        if any(piece in text for piece in telling_pieces(exercise.reference)):
            yield (
                f"the answer of {exercise.name} is in it. In the lesson, give the shape of the"
                " answer in words, or other names and numbers"
            )


def telling_pieces(reference: str) -> list[str]:
    """Two neighbouring lines of the body, each pair; of a body with one line, that line."""
    kept = set(splice.blank(reference).split("\n"))
    lines = [line.strip() for line in reference.split("\n") if line not in kept]
    lines = [squeezed(line) for line in lines if line and not line.startswith("#")]
    pairs = [first + second for first, second in zip(lines, lines[1:])] or lines
    return [piece for piece in pairs if len(piece) >= MIN_LINE]


def squeezed(text: str) -> str:
    """Without white space, which says nothing about where code comes from."""
    return re.sub(r"\s+", "", text)


# -- pictures and links ------------------------------------------------------------------------


def cell_problems(cell: Any, path: Path) -> Iterator[str]:
    """Pictures without words, and links that lead nowhere, in one cell."""
    if cell.cell_type == "markdown":
        yield from text_problems(cell.source, path)
    for output in cell.get("outputs", ()):
        yield from output_problems(output, cell)


def output_problems(output: Any, cell: Any) -> Iterator[str]:
    """Pictures that a cell has drawn, without alt text in the metadata of the output."""
    first = cell.source.split("\n")[0]
    for mime in output.get("data", ()):
        metadata = output.get("metadata", {})
        if mime.startswith("image/"):
            if not (metadata.get(mime, {}).get("alt") or metadata.get("alt")):
                yield (
                    f"the figure of the cell `{first}` has no alt text. Show it through the"
                    " figures module, which stores one, or with display(figure, metadata="
                    f'{{"{mime}": {{"alt": "..."}}}})'
                )
        elif mime == "text/html":
            yield from (f"in the output of `{first}`, {p}" for p in tags(output.data[mime]))


def text_problems(text: str, path: Path) -> Iterator[str]:
    """The same for Markdown; code in it is left out."""
    for pattern in (FENCE, CODE, COMMENT):
        text = pattern.sub("", text)
    for alt, target in IMAGE.findall(text):
        if not alt.strip():
            yield f"the picture {target} has no alt text: ![what it shows]({target})"
    yield from tags(text)
    targets = [target for _, target in IMAGE.findall(text)]
    for target in targets + LINK.findall(text) + ATTRIBUTE.findall(text):
        if not leads_somewhere(target, path.parent):
            yield (
                f"the link {target} leads nowhere. Links are relative to the folder of the page:"
                f" {path.parent.name or '.'}/"
            )


def tags(html: str) -> Iterator[str]:
    """<img> and <svg> that nothing describes."""
    for match in TAG.finditer(html):
        titled = match[1].lower() == "svg" and "<title>" in html[match.end() : match.end() + 200]
        if not (NAMED.search(match[0]) or titled):
            yield f"{match[0][:60]} has no alt text: add alt=... (of an svg: aria-label=...)"


def leads_somewhere(target: str, folder: Path) -> bool:
    """Whether a relative link has a file at its end; others are not ours to know."""
    if re.match(r"[a-z][a-z0-9+.-]*:|#|//", target, re.IGNORECASE):
        return True
    return (folder / unquote(re.split(r"[#?]", target)[0])).exists()
