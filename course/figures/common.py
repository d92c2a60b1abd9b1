"""What the pictures of all lessons share: their look, their alt text, the engine's map.

A function that draws returns a `Picture`, which a notebook shows and stores together with its
alt text. Colours and sizes are those of `minivllm.pictures.figures`; every state has a label, a
hatch, a marker or a height next to its colour. The pictures of a chapter are next to this file;
none of them computes: the cell above does that, with the learner's code.
"""

from __future__ import annotations

import base64
import html
import io
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING, Any

from course.figures.live import show_with_slider
from minivllm.pictures.figures import DPI, PALETTE, WIDTH, block_grid, request_timeline
from minivllm.pictures.timeline import count, fullest_step, request_rows
from minivllm.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = PALETTE["ink"]
GRID = PALETTE["grid"]
PAPER = "#f7f8fa"  # behind every figure
SCALE = 2
NUM_COLORS = 128
DOTS = {"hatch": "....", "edgecolor": "#b57f0c"}
# The marker of each state, so that colour is not needed to tell marks apart.
SHAPES = {"decode": "o", "prefill": "s", "waiting": "^", "cached": "D", "preempted": "X"}


@dataclass(frozen=True)
class Picture:
    """A drawn figure, 700 pixels wide on the page, and what it shows in words."""

    png: bytes
    alt: str

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """An image tag, and the words as plain text.

        JupyterLab and nbconvert drop the alt text of an image/png; both keep that of a tag.
        """
        image = base64.b64encode(self.png).decode("ascii")
        source = f"data:image/png;base64,{image}"
        tag = f'<img src="{source}" width="{WIDTH * DPI:.0f}" alt="{html.escape(self.alt)}">'
        return {"text/html": tag, "text/plain": self.alt}


@dataclass(frozen=True)
class Film(Picture):
    """One of several frames. In a live notebook a slider below it shows the others."""

    frame: Callable[[int], Picture] = field(compare=False)
    number: int  # of this frame
    num_frames: int

    def _ipython_display_(self) -> None:
        still = Picture(self.png, self.alt)
        show_with_slider(still, self.frame, self.number, self.num_frames, "step")


def picture(figure: Figure, alt: str) -> Picture:
    """Turn a figure into a picture with its alt text."""
    return Picture(png_of(figure), alt)


def png_of(figure: Figure) -> bytes:
    """The figure as a sheet with a frame, which stands out from light and from dark pages.

    Each pixel of the page has `SCALE` × `SCALE` of the image, for dense screens.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    figure.set(dpi=SCALE * DPI, facecolor=PAPER, edgecolor=GRID, linewidth=2)
    for ax in figure.axes:
        ax.set_facecolor("none")
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.1, h_pad=0.08)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    size = canvas.get_width_height(physical=True)
    image = Image.frombuffer("RGBA", size, canvas.buffer_rgba()).convert("RGB")
    # A figure has few colours: a palette of them halves the file.
    image = image.quantize(NUM_COLORS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    image.save(buffer, "png")
    return buffer.getvalue()


def new_axes(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """A figure of the course's width, `height` inches high, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def label(ax: Axes, title: str, x: str, y: str) -> None:
    """Title and axes in the course's style; units are part of the axes' names."""
    ax.set_title(title, loc="left", fontsize=10)
    ax.set_xlabel(x, fontsize=9)
    ax.set_ylabel(y, fontsize=9)
    ax.tick_params(labelsize=8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def legend(ax: Axes, keys: list[Any]) -> None:
    """A legend in one row between the title and the axes; `keys` are made by `key`."""
    ax.set_title(ax.get_title(loc="left"), loc="left", fontsize=10, pad=22)
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1.0)}
    ax.legend(handles=keys, ncols=len(keys), frameon=False, fontsize=8, borderaxespad=0.2, **place)


def key(state: str, text: str, **options: Any) -> Any:
    """The entry of a state of the palette in a legend."""
    from matplotlib.patches import Patch

    return Patch(label=text, **(fill(state) | options))


def look(state: str) -> dict[str, Any]:
    """How a mark of a state of the palette looks: options for matplotlib's `plot`."""
    face = {"marker": SHAPES[state], "color": PALETTE[state], "markeredgecolor": INK}
    return face | {"linestyle": "none", "markersize": 7}


def curves(ax: Axes, lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> None:
    """A line of its own look for each name: (values of x, values of y).

    Each is thinner than the one before it, so that lines in the same place can all be seen.
    """
    styles = {"decode": "-", "prefill": "--", "preempted": ":", "waiting": "-."}
    pairs = zip(lines.items(), styles.items(), strict=False)
    for number, ((name, (x, y)), (state, line)) in enumerate(pairs):
        size = {"markersize": 7 - 1.5 * number, "linewidth": 2.8 - 0.6 * number}
        style = {"linestyle": line, "label": name, "markevery": max(1, len(x) // 24)}
        ax.plot(x, y, **(look(state) | size | style))
    ax.grid(color=GRID, linewidth=0.6)
    ax.legend(fontsize=8, frameon=False)


def dots(ax: Axes, y: float, values: Mapping[str, float], texts: Sequence[str]) -> None:
    """Marks at values (by state) in the row `y` of a log axis, which has no room for bars: they
    would have to begin at 0. Each mark has its text next to it, if any."""
    for (state, value), text in zip(values.items(), texts, strict=True):
        ax.plot(value, y, **look(state))
        ax.annotate(f"  {text}", (value, y), (4, 0), textcoords="offset points", va="center",
                    fontsize=8, color=INK)  # fmt: skip


def log_axis(ax: Axes, low: float, high: float, step: int = 10) -> None:
    """Make the x axis logarithmic, with a plain number and a line at each power of `step`."""
    from matplotlib.ticker import LogLocator

    ax.set_xscale("log")
    ax.set_xlim(low, high)
    ax.xaxis.set_major_locator(LogLocator(step))
    ax.xaxis.set_major_formatter("{x:,.10g}")
    ax.xaxis.set_minor_formatter("")
    ax.grid(axis="x", color=GRID, linewidth=0.6)


def mark(text: str, **look: Any) -> Any:
    """The entry of a marker or a line in a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=text, **({"color": INK, "linestyle": "none"} | look))


def source(figure: Figure, text: str) -> None:
    """Where the numbers come from, in small letters below the axes."""
    figure.supxlabel(text, fontsize=7.5, x=0.015, ha="left", color=INK)


def headline(figure: Figure, text: str) -> None:
    """The title of a figure of several axes."""
    figure.suptitle(text, fontsize=10, x=0.015, ha="left")


def times(ratio: float) -> str:
    """A factor in two digits or more: 0.78×, 6.9×, 2,050×."""
    return f"{ratio:,.0f}×" if ratio >= 9.95 else f"{ratio:.2g}×"


def fill(state: str, *, dotted: bool = False) -> dict[str, Any]:
    """How a bar or patch of a state of the palette is filled: options for matplotlib.

    `dotted`: cached gets dots, for marks without a text: in print it is as dark as decode.
    """
    paint = {"facecolor": PALETTE[state], "edgecolor": INK, "hatch": None, "linewidth": 0.6}
    # Blue and green may look alike, so prefill is always hatched.
    hatched = {"hatch": "////", "edgecolor": PALETTE["hatch"]} if state == "prefill" else {}
    return paint | hatched | (DOTS if dotted and state == "cached" else {})


def write(ax: Axes, x: float, y: float, text: str, **options: Any) -> None:
    """A short text in the middle of a mark."""
    style: dict[str, Any] = {"fontsize": 8, "ha": "center", "va": "center_baseline"}
    ax.text(x, y, text, color=INK, **(style | options))


# -- the engine's map --------------------------------------------------------------------------


def lit_map(svg: str, module: str) -> str:
    """The engine's map (`docs/engine.svg`) with one module lit and the others pale.

    The lit box is gold and has a thick frame. Raises ValueError if the map has no such box.
    """
    # The engine's own name is in a plain rectangle on its frame.
    name = rf"(?=[^\n]*\n[^\n]*>{re.escape(module)}</text>)"
    lit, found = re.subn(rf'<rect (?:class="box" )?{name}', '<rect class="lit" ', svg)
    if found != 1:
        raise ValueError(f"module={module!r} has {found} boxes on the map; it must have 1")
    style = f".lit {{ fill: {PALETTE['cached']}; stroke: {INK}; stroke-width: 3.5 }}"
    lit = lit.replace(".name {", f"{style}\n    .name {{", 1)
    lit = lit.replace(".box {", ".box { opacity: 0.55;", 1)
    words = f"The engine and its modules, {module} lit: this chapter builds it"
    return lit.replace("The engine and its modules", words, 1)


# -- runs: what a trace shows ------------------------------------------------------------------


def timeline(trace: Trace) -> Picture:
    """`figures.request_timeline` as a picture with its text."""
    rows = request_rows(trace).values()
    alt = f"Timeline of {count(len(rows), 'request')} over {count(len(trace.steps), 'step')}"
    lost = sum(len(row.preemptions) for row in rows)
    return picture(request_timeline(trace), f"{alt}; {count(lost, 'preemption')}.")


def grid(trace: Trace, step: int | None = None) -> Picture:
    """`figures.block_grid` as a picture with its text; a slider shows the other steps."""

    def frame(index: int) -> Picture:
        figure = block_grid(trace, index)
        return picture(figure, f"Grid of blocks. {figure.axes[0].get_title(loc='left')}.")

    number = fullest_step(trace).index if step is None else step
    first = frame(number)
    return Film(first.png, first.alt, frame, number, len(trace.steps))


def this_machine() -> str:
    """What measured numbers belong to: "2 cores (x86_64), 2026-11-29"."""
    return f"{count(os.cpu_count() or 1, 'core')} ({platform.machine()}), {date.today()}"


def speeds(tokens_per_s: Mapping[str, float], where: str) -> Picture:
    """Generated tokens per second, one bar for each way of generating them."""
    return compared(tokens_per_s, "generated tokens per second", "speed", where)


def compared(values: Mapping[str, float], unit: str, what: str, where: str) -> Picture:
    """One bar for each value, and each as a multiple of the first one.

    The title compares the last one (its `what`) with the first one; `where` is the model and the
    machine.
    """
    figure, ax = new_axes(1.25 + 0.4 * len(values))
    first, *_, last = values
    factors = {name: times(value / values[first]) for name, value in values.items()}
    bars = ax.barh(list(values), list(values.values()), 0.6, **fill("decode"))
    ax.bar_label(bars, [f" {values[n]:.1f} ({factors[n]})" for n in values], fontsize=9)
    title = f"{last}: {factors[last][:-1]} times the {what} of “{first}”"
    label(ax, title, f"{unit} (in brackets: as a multiple of the first)", "")
    source(figure, where)
    ax.invert_yaxis()
    ax.set_xlim(0, max(values.values()) * 1.22)
    parts = [f"{name} {value:.1f}" for name, value in values.items()]
    return picture(figure, f"Bar chart of {unit}. {title}. {', '.join(parts)}.")
