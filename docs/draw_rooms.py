"""Draw the rooms of the package and their imports: `python docs/draw_rooms.py` writes rooms.svg.

Layers and notebook numbers are those of the table in tests/test_architecture.py; arrows and the
texts of the rooms are read from the code. Only the places of the boxes are chosen here.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import test_architecture as rules  # noqa: E402

LAYERS = ("the vocabulary", "the control plane, without torch", "the data plane", "the assembly")
# Boxes: left edge, top edge, width, height. Layers are on the left, rooms next to their layer.
PLACES = {
    "cli": (662, 56, 206, 66),
    "layer 3": (20, 142, 360, 176),
    "output": (420, 142, 212, 66),
    "measure": (662, 197, 206, 66),
    "assembly": (420, 252, 212, 66),
    "layer 2": (20, 350, 360, 312),
    "cpu": (420, 350, 212, 66),
    "gpu": (420, 432, 212, 66),
    "distributed": (420, 514, 212, 66),
    "checkpoint": (420, 596, 212, 66),
    "layer 1": (20, 694, 360, 118),
    "text": (420, 717, 212, 66),
    "layer 0": (20, 842, 360, 66),
    "pictures": (662, 842, 206, 66),
}
LEGEND = (
    "An arrow is an import; imports that follow from others are not drawn.",
    "The number is the notebook that builds the modules of its line.",
)
WIDTH = 890
HEIGHT = 932
GUTTER = 14  # from the right edge of a column to the arrows that pass a box

Edge = tuple[str, str]  # importer, imported

STYLE = """
    .ground { fill: #f6f8fa; stroke: #b4bcc7 }
    .layer { fill: #dfe9f6; stroke: #2f6db5; stroke-width: 1.2 }
    .room { fill: #ffffff; stroke: #22272e; stroke-width: 1.2 }
    .name { font-size: 13px; font-weight: bold; fill: #22272e }
    .what { font-size: 10.5px; fill: #22272e }
    .module { font-size: 12px; fill: #22272e }
    .notebook { font-size: 10.5px; fill: #4a5361 }
    .arrow { fill: none; stroke: #22272e; stroke-width: 1.4 }
"""
MARKERS = """
    <marker id="to" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7"
      orient="auto-start-reverse"><path d="M0 0 10 5 0 10z" fill="#22272e"/></marker>
"""


# -- what there is -----------------------------------------------------------------------------


def box_of(row: str) -> str | None:
    """The box that a row of the table is drawn in: "ops" in "layer 2", "cpu" in its own."""
    if row in rules.ROOMS:
        return row
    return f"layer {rules.LAYER[row]}" if row in rules.LAYER else None


def imports() -> dict[str, set[str]]:
    """Each box, and the other boxes that its modules import."""
    found: dict[str, set[str]] = {box: set() for box in PLACES}
    for row, imported in rules.actual_imports().items():
        if (box := box_of(row)) is not None:
            found[box] |= {other for other in map(box_of, imported) if other not in (box, None)}
    return found


def arrows(found: dict[str, set[str]]) -> list[Edge]:
    """The imports without those that follow from others.

    Example: of a -> b, b -> c and a -> c the last one is left out.
    """
    reached = {box: rules.reachable(box, found) for box in found}

    def detours(box: str, imported: str) -> set[str]:
        # Boxes that lead to `imported` and not back to `box`.
        steps = found[box] - {imported}
        return {to for to in steps if imported in reached[to] and box not in reached[to]}

    def follows(box: str, imported: str) -> bool:
        mutual = {to for to in found[box] - {imported} if box in reached[to]}
        return any(detours(start, imported) for start in (box, *mutual))

    return [(box, to) for box in found for to in sorted(found[box]) if not follows(box, to)]


def summary(room: str) -> str:
    """The first line of a room's docstring."""
    text = (rules.PACKAGE / room / "__init__.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]


def num_modules(room: str) -> int:
    """How many modules the room has."""
    return sum(path.name != "__init__.py" for path in (rules.PACKAGE / room).glob("*.py"))


def chapters(layer: int) -> list[tuple[str, str]]:
    """The notebooks of a layer, and the modules that each of them builds."""
    rows = [row for row in rules.MODULES if row[1] == layer]
    found = []
    for notebook, group in groupby(rows, key=lambda row: row[2]):
        label = "" if notebook is None else f"{notebook:02d}"
        found.append((label, " · ".join(name for name, *_ in group)))
    return found


# -- how it is drawn ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels."""

    x: int
    y: int
    width: int
    height: int

    @property
    def right(self) -> int:
        return self.x + self.width

    @property
    def bottom(self) -> int:
        return self.y + self.height

    @property
    def middle(self) -> tuple[int, int]:
        return self.x + self.width // 2, self.y + self.height // 2


BOXES = {name: Box(*place) for name, place in PLACES.items()}


def route(importer: Box, imported: Box) -> list[tuple[int, int]]:
    """The corners of the arrow between two boxes, with its ends on their edges."""
    if importer.x == imported.x:
        return route_in_column(importer, imported)
    y = common_height(importer, imported)
    if importer.x > imported.x and y is not None:
        return [(importer.x, y), (imported.right, y)]
    if y is not None:
        return [(importer.right, y), (imported.x, y)]
    # Down, and then to the side.
    x, _ = importer.middle
    y = imported.y + imported.height // 4
    return [(x, importer.bottom), (x, y), (imported.right if x > imported.x else imported.x, y)]


def common_height(one: Box, other: Box) -> int | None:
    """The middle of the smaller of two boxes next to each other, else None."""
    small, large = sorted((one, other), key=lambda box: box.height)
    _, y = small.middle
    return y if large.y < y < large.bottom else None


def route_in_column(upper: Box, lower: Box) -> list[tuple[int, int]]:
    """Straight down to the next box of the column, around the others."""
    x, _ = upper.middle
    between = [box for box in BOXES.values() if box.x == upper.x and upper.y < box.y < lower.y]
    if not between:
        return [(x, upper.bottom), (x, lower.y)]
    _, start = upper.middle
    _, end = lower.middle
    gutter = upper.right + GUTTER
    return [(upper.right, start), (gutter, start), (gutter, end), (lower.right, end)]


def draw_arrow(importer: str, imported: str, both: bool) -> str:
    """The line of an import, with a second head if it goes both ways."""
    corners = route(BOXES[importer], BOXES[imported])
    path = "M" + " L".join(f"{x} {y}" for x, y in corners)
    start = ' marker-start="url(#to)"' if both else ""
    return f'<path class="arrow" d="{path}" marker-end="url(#to)"{start}/>'


def draw_rect(name: str, kind: str) -> str:
    """The outline of a box."""
    box = BOXES[name]
    size = f'x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}"'
    return f'<rect class="{kind}" {size} rx="6"/>'


def draw_text(kind: str, x: int, y: int, text: str) -> str:
    """A line of text that begins at x."""
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>'


def draw_room(room: str) -> list[str]:
    """A room: its name, how many modules it has, and what it is for."""
    box = BOXES[room]
    count = num_modules(room)
    lines = [draw_rect(room, "room"), draw_text("name", box.x + 10, box.y + 18, f"{room}/")]
    modules = "1 module" if count == 1 else f"{count} modules"
    lines.append(draw_text("notebook", box.right - 68, box.y + 18, modules))
    for number, line in enumerate(textwrap.wrap(summary(room), 32)):
        lines.append(draw_text("what", box.x + 10, box.y + 34 + 13 * number, line))
    return lines


def draw_layer(layer: int) -> list[str]:
    """A layer: its modules, with the notebooks that build them."""
    name = f"layer {layer}"
    box = BOXES[name]
    lines = [draw_rect(name, "layer")]
    lines.append(draw_text("name", box.x + 12, box.y + 20, f"{name}: {LAYERS[layer]}"))
    for number, (notebook, modules) in enumerate(chapters(layer)):
        y = box.y + 44 + 20 * number
        if notebook:
            lines.append(draw_text("notebook", box.x + 12, y, notebook))
        lines.append(draw_text("module", box.x + 40, y, modules))
    return lines


def description(found: dict[str, set[str]]) -> str:
    """The drawing in words."""
    layers = "; ".join(
        f"layer {number}, {LAYERS[number]}: {', '.join(modules for _, modules in chapters(number))}"
        for number in range(len(LAYERS))
    ).replace(" · ", ", ")
    lines = [f"{box} imports {', '.join(sorted(found[box]))}" for box in found if found[box]]
    return f"Modules by layer: {layers}. Imports: {'; '.join(lines)}."


def draw() -> str:
    """The whole picture as SVG."""
    found = imports()
    edges = arrows(found)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        f' height="{HEIGHT}" role="img" aria-labelledby="t d"'
        ' font-family="Verdana, DejaVu Sans, sans-serif">',
        '<title id="t">The rooms of minivllm and what they import</title>',
        f'<desc id="d">{escape(description(found))}</desc>',
        f"<defs>{MARKERS}</defs>",
        f"<style>{STYLE}</style>",
        # A ground of its own, so that it reads on light and on dark pages.
        f'<rect class="ground" x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="12"/>',
        draw_text("name", 20, 30, "The rooms of minivllm"),
        *(draw_text("what", 20, 48 + 14 * n, line) for n, line in enumerate(LEGEND)),
    ]
    for importer, imported in edges:
        both = (imported, importer) in edges
        if not both or importer < imported:
            lines.append(draw_arrow(importer, imported, both))
    for layer in reversed(range(len(LAYERS))):
        lines += draw_layer(layer)
    for room in rules.ROOMS:
        lines += draw_room(room)
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "rooms.svg").write_text(draw(), encoding="utf-8")
