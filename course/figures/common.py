"""What the pictures of all lessons share: how they look, how they are described, the map.

A function that draws returns a `Picture`, which a notebook shows and stores together with its
text for those who cannot see it. Colours and sizes are those of `minivllm.pictures.figures`;
every state has a label, a hatch or a height beside its colour. Each chapter's own pictures lie
beside this file; none of them computes: the cell above does that, with the learner's code.
"""

from __future__ import annotations

import base64
import html
import io
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING, Any

from course.figures.live import is_live, show_with_slider
from minivllm.pictures.figures import DPI, PALETTE, WIDTH, block_grid, request_timeline
from minivllm.pictures.timeline import count, fullest_step, request_rows
from minivllm.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GRID = PALETTE["ink"], PALETTE["grid"]


@dataclass(frozen=True)
class Picture:
    """A drawn figure, 700 pixels wide, and what it shows in words."""

    png: bytes
    alt: str

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[Any, Any]:
        """What Jupyter stores in the notebook: the image, and the words as its plain text."""
        image = base64.b64encode(self.png).decode("ascii")
        data = {"image/png": image, "text/plain": self.alt}
        if is_live():
            # JupyterLab drops the words of an image/png. A tag keeps them for screen readers.
            words = html.escape(self.alt)
            data["text/html"] = f'<img src="data:image/png;base64,{image}" alt="{words}">'
        return data, {"image/png": {"alt": self.alt}}


@dataclass(frozen=True)
class Film(Picture):
    """One of several frames. Where somebody looks, a slider below it shows the others."""

    frame: Callable[[int], Picture] = field(compare=False)
    number: int  # of this frame
    num_frames: int

    def _ipython_display_(self) -> None:
        still = Picture(self.png, self.alt)
        show_with_slider(still, self.frame, self.number, self.num_frames, "step")


def picture(figure: Figure, alt: str) -> Picture:
    """Turn a figure into a picture with its text."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    figure.set_dpi(DPI)
    # Not `savefig`, which draws everything twice.
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Description": alt, "Software": None})
    return Picture(buffer.getvalue(), alt)


def new_axes(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """A figure of the course's width, `height` inches high, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def label(ax: Axes, title: str, x: str, y: str) -> None:
    """Title and axes in the course's style; units stand in the axes' names."""
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


def fill(state: str) -> dict[str, Any]:
    """How a bar or patch of a state of the palette is filled: options for matplotlib."""
    # Prefill is hatched: blue and green may look alike, these two do not.
    hatch = "////" if state == "prefill" else None
    edge = PALETTE["hatch"] if state == "prefill" else INK
    return {"facecolor": PALETTE[state], "edgecolor": edge, "hatch": hatch, "linewidth": 0.6}


def write(ax: Axes, x: float, y: float, text: str, **options: Any) -> None:
    """A short text in the middle of a mark."""
    style: dict[str, Any] = {"fontsize": 8, "ha": "center", "va": "center_baseline"}
    ax.text(x, y, text, color=INK, **(style | options))


# -- the engine's map --------------------------------------------------------------------------


def lit_map(svg: str, module: str) -> str:
    """The engine's map (`docs/engine.svg`) with one module lit and the others pale.

    The lit box is gold and has a thick frame. Raises ValueError if the map has no such box.
    """
    # The engine's own name stands in a plain rectangle on its frame.
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


def speeds(tokens_per_s: Mapping[str, float], title: str) -> Picture:
    """Generated tokens per second, one bar for each way of generating them."""
    figure, ax = new_axes(1.0 + 0.4 * len(tokens_per_s))
    values = list(tokens_per_s.values())
    bars = ax.barh(list(tokens_per_s), values, 0.6, **fill("decode"))
    ax.bar_label(bars, [f" {value:.1f}" for value in values], fontsize=9)
    label(ax, title, "generated tokens per second", "")
    ax.invert_yaxis()
    ax.set_xlim(0, max(values) * 1.12)
    parts = [f"{name} {value:.1f}" for name, value in tokens_per_s.items()]
    return picture(figure, f"Bar chart of tokens per second: {', '.join(parts)}.")
