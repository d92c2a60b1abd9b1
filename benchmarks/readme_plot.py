"""The plots of the README, from result files: tokens per second by batch.

    python benchmarks/readme_plot.py --write README.md

Writes each picture that is named in a `<!-- plot: FILE -->` of the page, and puts it, with its text
for those who do not see it, between there and the next `<!-- end of plot -->`. docs/throughput.svg
has the engines of results/peers, and the first file with several engines that the page names.
docs/several_gpus.svg has the runs of `tensor_parallel.py` on GPUs. SVG by hand: the same bytes on
every machine.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import common
import readme_table

from minivllm.measure import results as bench_results
from minivllm.pictures.figures import PALETTE

PLACE = re.compile(
    r"(?P<begin><!-- plot: (?P<file>\S+) -->\n).*?(?P<end><!-- end of plot -->)", re.DOTALL
)
BATCH = re.compile(r"batch \d+ x ")

WIDTH = 700  # pixels, as everything below
HEIGHT = 250
PANELS = (8, 358)  # where each begins
LABELS = 66  # room for the words before the bars
BARS = 200  # the longest bar
TOP = 58  # where the rows begin
ROWS = 138  # the height of all rows together
# Each series with its look: told apart without colour, too.
LOOKS = (f'fill="{PALETTE["decode"]}"', 'fill="url(#other)"')

Results = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Panel:
    """Bars of one run: for each row its label and a value (tokens per second) per series."""

    title: str
    unit: str
    series: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]
    source: str


def panel_of(results: Results) -> Panel:
    """The bars of a file with several engines: the decoded tokens of each batch."""
    engines = tuple(dict.fromkeys(str(r["engine"]) for r in results))
    rows = []
    for workload in dict.fromkeys(str(r["workload"]) for r in results):
        same = [r for r in results if r["workload"] == workload]
        speeds = tuple(float(r.get("decode_tokens_per_s") or 0) for r in same)
        if BATCH.match(workload) and len(speeds) == len(engines):
            rows.append((batch_of(workload), speeds))
    return new_panel(results[0], engines, rows)


def peers_panel(peers: Mapping[str, Any]) -> Panel:
    """The bars of a file of results/peers: for each engine the middle of its runs."""
    engines = peers["engines"]
    dates = sorted(one["date"] for one in engines)
    versions = ", ".join(f"{one['engine']} {one['version']}" for one in engines if "version" in one)
    return Panel(
        f"{peers['machine']}, nano-vllm's benchmark, {peers['dtype']}",
        "output tokens per second, 256 requests",
        ("output",),
        tuple((one["engine"], (sum(one["output_tokens_per_s"]) / 2,)) for one in engines),
        f"{versions}; {dates[0]} to {dates[-1]}",
    )


def ranks_panel(results: Results) -> Panel:
    """The bars of a file of `tensor_parallel.py`: decoded tokens of each batch with CUDA graphs, in
    the fastest repeat, on one GPU and on the most there were."""
    chosen = [r for r in results if r["mode"] == "graphs" and r["decode_tokens_per_s"]]
    most = max(result["tensor_parallel_size"] for result in chosen)
    rows: dict[str, dict[int, float]] = {}
    for result in chosen:
        speeds = rows.setdefault(batch_of(result["workload"]), {})
        speeds[result["tensor_parallel_size"]] = max(result["decode_tokens_per_s_all"])
    both = [(label, (speeds[1], speeds[most])) for label, speeds in rows.items()]
    return new_panel(chosen[0], ("1 GPU", f"{most} GPUs"), both)


def new_panel(
    one: Mapping[str, Any],
    series: tuple[str, ...],
    rows: Sequence[tuple[str, tuple[float, ...]]],
) -> Panel:
    """A panel with these bars, of the run that `one` is a result of."""
    torch = str(one["versions"]["torch"]).partition("+")[0]
    return Panel(
        f"{'CPU, ' if one['device'] == 'cpu' else ''}{one['model']}, {one['dtype']}",
        "decoded tokens per second, by requests at a time",
        series,
        tuple(rows),
        f"{one.get('machine', one['device'])}; torch {torch}, {one['date']}",
    )


def batch_of(workload: str) -> str:
    """ "batch 8 x 512 in, 256 out" -> "8"."""
    return workload.split()[1]


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
    yield from draw_keys(panel.series, left)
    most = max(value for _, values in panel.rows for value in values)
    base = left + LABELS
    height = ROWS / len(panel.rows)
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


def draw_keys(series: Sequence[str], left: int) -> Iterator[str]:
    """Which look is whose; nothing for a single series."""
    x = float(left)
    for index, name in enumerate(series if len(series) > 1 else ()):
        yield from draw_bar(x, 40, 18, 10, index)
        yield text(x + 23, 49, name, 10)
        x += 40 + 7 * len(name)


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
    step = next(step * share for share in (5, 2.5, 2, 1, 0.5, 0.25) if most / (step * share) >= 2.5)
    return [step * number for number in range(int(most / step) + 1)]


def alt_text(panels: Sequence[Panel]) -> str:
    """The picture in words, with every number."""
    said = []
    for panel in panels:
        parts = []
        for index, name in enumerate(panel.series):
            speeds = [f"{label}: {bench_results.speed(v[index])}" for label, v in panel.rows]
            parts.append(f"{name} {', '.join(speeds)}")
        said.append(f"{panel.title}, {panel.unit}: {'; '.join(parts)} ({panel.source})")
    return f"Bar charts of throughput. {'. '.join(said)}."


# -- the page ----------------------------------------------------------------------------------


def throughput(page: str, root: Path) -> list[Panel]:
    """The engines of the latest file of results/peers on a GPU; the page's own on a CPU."""
    latest = max((root / "benchmarks" / "results" / "peers").glob("*.json"))
    peers = peers_panel(json.loads(latest.read_text(encoding="utf-8")))
    names = (match["file"] for match in readme_table.PLACE.finditer(page))
    files = [bench_results.load_results(root / name) for name in names]
    return [peers, panel_of(next(file for file in files if len({r["engine"] for r in file}) > 1))]


def several_gpus(page: str, root: Path) -> list[Panel]:
    """The recorded runs on several GPUs, a panel for each file."""
    files = sorted((root / "benchmarks" / "results").glob("*gpu*tensor-parallel*.json"))
    return [ranks_panel(bench_results.load_results(path)) for path in files]


PICTURES = {"docs/throughput.svg": throughput, "docs/several_gpus.svg": several_gpus}


def pictures_of(page: str, root: Path) -> dict[str, list[Panel]]:
    """By file name the panels of each picture that the page has."""
    return {m["file"]: PICTURES[m["file"]](page, root) for m in PLACE.finditer(page)}


def fill(page: str, pictures: Mapping[str, Sequence[Panel]]) -> str:
    """The page with these pictures."""

    def line(match: re.Match[str]) -> str:
        file = match["file"]
        return f"{match['begin']}![{alt_text(pictures[file])}]({file})\n{match['end']}"

    return PLACE.sub(line, page)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, metavar="PAGE", required=True, help="README.md")
    page = parser.parse_args().write
    words = page.read_text(encoding="utf-8")
    pictures = pictures_of(words, page.parent)
    for file, panels in pictures.items():
        (page.parent / file).write_text(draw(panels), encoding="utf-8")
    page.write_text(fill(words, pictures), encoding="utf-8")


if __name__ == "__main__":
    common.run(main)
