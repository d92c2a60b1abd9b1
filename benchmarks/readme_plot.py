"""The plot of the README, from the result files that its tables name: tokens per second by batch.

    python benchmarks/readme_plot.py --write README.md

Writes docs/throughput.svg beside the page, and the picture with its text for those who do not see
it between `<!-- plot -->` and `<!-- end of plot -->`. The left panel is of the first file with one
engine, the right one of the first with several. SVG by hand: the same bytes on every machine.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import common
import readme_table

from minivllm import bench_results
from minivllm.figures import PALETTE

PICTURE = "docs/throughput.svg"
PLACE = re.compile(r"(<!-- plot -->\n).*?(<!-- end of plot -->)", re.DOTALL)
BATCH = re.compile(r"batch (\d+) x ")

WIDTH, HEIGHT = 700, 250  # pixels, as everything below
PANELS = (8, 358)  # where each begins
LABELS, BARS = 66, 200  # room for the words before the bars, and for the longest bar
TOP, ROWS = 58, 138  # where the rows begin, and how high all of them are
# Each series with its look: told apart without colour, too.
LOOKS = (f'fill="{PALETTE["decode"]}"', 'fill="url(#other)"')

Results = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Panel:
    """Bars of one run: for each row its label and a value (tokens per second) per engine."""

    title: str
    unit: str
    engines: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]
    source: str


def panel_of(results: Results) -> Panel:
    """The bars of a file: of one engine all batches and the mixed workload by output tokens, of
    several the batches by decoded tokens."""
    engines = tuple(dict.fromkeys(str(r.get("engine", "minivllm")) for r in results))
    name = "output_tokens_per_s" if len(engines) == 1 else "decode_tokens_per_s"
    rows = []
    for workload in dict.fromkeys(str(r["workload"]) for r in results):
        speeds = tuple(float(r.get(name) or 0) for r in results if r["workload"] == workload)
        if (label := label_of(workload)) and len(speeds) == len(engines):
            rows.append((label, speeds))
    one = results[0]
    unit = "output tokens per second" if len(engines) == 1 else "decoded tokens per second"
    torch = str(one["versions"]["torch"]).partition("+")[0]
    return Panel(
        f"{one['model']}, {one['dtype']}",
        f"{unit}, by requests at a time",
        engines,
        tuple(sorted(rows, key=lambda row: row[0] == "mixed")),
        f"{one.get('machine', one['device'])}; torch {torch}, {one['date']}",
    )


def label_of(workload: str) -> str | None:
    """ "batch 8 x 512 in, 256 out" -> "8"; requests of random lengths -> "mixed"; others none."""
    found = BATCH.match(workload)
    return found[1] if found else "mixed" if workload.startswith("mixed") else None


# -- drawing -----------------------------------------------------------------------------------


def draw(panels: Sequence[Panel]) -> str:
    """The picture as SVG."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        f' height="{HEIGHT}" role="img" font-family="Verdana, DejaVu Sans, sans-serif">',
        "  <title>Tokens per second, by requests at a time</title>",
        f"  <desc>{escape(alt_text(panels))}</desc>",
        '  <pattern id="other" width="5" height="5" patternUnits="userSpaceOnUse"'
        f' patternTransform="rotate(45)"><rect width="5" height="5" fill="{PALETTE["waiting"]}"/>'
        '<line x1="0" y1="0" x2="0" y2="5" stroke="#ffffff" stroke-width="2"/></pattern>',
        f'  <rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for panel, left in zip(panels, PANELS, strict=True):
        lines += [f"  {line}" for line in draw_panel(panel, left)]
    return "\n".join([*lines, "</svg>\n"])


def draw_panel(panel: Panel, left: int) -> Iterator[str]:
    """Title, grid, bars, and where the numbers are from."""
    yield text(left, 18, panel.title, 11, "bold")
    yield text(left, 33, panel.unit, 10)
    yield from draw_keys(panel.engines, left)
    most = max(value for _, values in panel.rows for value in values)
    base, height = left + LABELS, ROWS / len(panel.rows)
    for tick in ticks(most):
        x = base + BARS * tick / most
        yield (
            f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{TOP + ROWS}"'
            f' stroke="{PALETTE["grid"]}"/>'
        )
        yield text(x, TOP + ROWS + 13, f"{tick:,g}", 9, anchor="middle")
    for number, (label, values) in enumerate(panel.rows):
        y = TOP + height * number
        yield text(base - 6, y + height / 2 + 4, label, 10, anchor="end")
        thick = (height - 8) / len(values)
        for index, value in enumerate(values):
            yield from draw_bar(base, y + 4 + thick * index, BARS * value / most, thick, index)
            yield text(
                base + BARS * value / most + 4,
                y + 4 + thick * (index + 0.5) + 3.5,
                bench_results.speed(value),
                10,
            )
    yield text(left, HEIGHT - 12, panel.source, 9)


def draw_keys(engines: Sequence[str], left: int) -> Iterator[str]:
    """Which look is whose; nothing for a single engine."""
    x = float(left)
    for index, engine in enumerate(engines if len(engines) > 1 else ()):
        yield from draw_bar(x, 40, 18, 10, index)
        yield text(x + 23, 49, engine, 10)
        x += 40 + 7 * len(engine)


def draw_bar(x: float, y: float, width: float, height: float, index: int) -> Iterator[str]:
    """One bar in the look of its series."""
    yield (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        f' {LOOKS[index]} stroke="{PALETTE["ink"]}" stroke-width="0.6"/>'
    )


def text(
    x: float, y: float, words: str, size: int, weight: str = "normal", anchor: str = "start"
) -> str:
    """One line of text that begins, or has its middle or end, at x."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}"'
        f' text-anchor="{anchor}" fill="{PALETTE["ink"]}">{escape(words)}</text>'
    )


def ticks(most: float) -> list[float]:
    """Three to six round numbers from 0 on, none above `most`: 220 -> 0, 50, 100, 150, 200."""
    step = 10 ** math.floor(math.log10(most))
    step = next(step * share for share in (5, 2.5, 1, 0.5, 0.25) if most / (step * share) >= 2.5)
    return [step * number for number in range(int(most / step) + 1)]


def alt_text(panels: Sequence[Panel]) -> str:
    """The picture in words, with every number."""
    said = []
    for panel in panels:
        parts = []
        for index, engine in enumerate(panel.engines):
            speeds = [f"{label}: {bench_results.speed(v[index])}" for label, v in panel.rows]
            parts.append(f"{engine} {', '.join(speeds)}")
        said.append(f"{panel.title}, {panel.unit}: {'; '.join(parts)} ({panel.source})")
    return f"Bar charts of throughput. {'. '.join(said)}."


# -- the page ----------------------------------------------------------------------------------


def panels_of(page: str, root: Path) -> list[Panel]:
    """What the page's tables of results have for the plot: one engine alone, engines compared."""
    names = (match["file"] for match in readme_table.PLACE.finditer(page))
    panels = [panel_of(bench_results.load_results(root / name)) for name in names]
    alone = next(panel for panel in panels if len(panel.engines) == 1)
    return [alone, next(panel for panel in panels if len(panel.engines) > 1)]


def fill(page: str, panels: Sequence[Panel]) -> str:
    """The page with the picture of these panels."""
    line = f"![{alt_text(panels)}]({PICTURE})"
    return PLACE.sub(lambda match: f"{match[1]}{line}\n{match[2]}", page)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, metavar="PAGE", required=True, help="README.md")
    page = parser.parse_args().write
    words = page.read_text(encoding="utf-8")
    panels = panels_of(words, page.parent)
    (page.parent / PICTURE).write_text(draw(panels), encoding="utf-8")
    page.write_text(fill(words, panels), encoding="utf-8")


if __name__ == "__main__":
    common.run(main)
