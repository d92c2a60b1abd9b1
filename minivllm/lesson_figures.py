"""The pictures of the lessons: each function draws what a notebook's cell has computed.

A function returns a `Picture`, which a notebook shows and stores together with its text for
those who cannot see it. Colours and sizes are those of `figures`; every state has a label, a
hatch or a height beside its colour. Leaves out computing: the cell above does that, with the
learner's code. Given (no notebook builds it).
"""

from __future__ import annotations

import base64
import io
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any

from minivllm.figures import DPI, PALETTE, WIDTH, block_grid, request_timeline
from minivllm.timeline import block_owners, count, num_blocks_in_use, request_rows
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
        return {"image/png": image, "text/plain": self.alt}, {"image/png": {"alt": self.alt}}


def picture(figure: Figure, alt: str) -> Picture:
    """Turn a figure into a picture with its text."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Description": alt, "Software": None})
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


def _legend(ax: Axes, keys: list[Any]) -> None:
    ax.set_title(ax.get_title(loc="left"), loc="left", fontsize=10, pad=22)
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1.0)}
    ax.legend(handles=keys, ncols=len(keys), frameon=False, fontsize=8, borderaxespad=0.2, **place)


def _key(state: str, text: str, **options: Any) -> Any:
    from matplotlib.patches import Patch

    return Patch(label=text, **(_fill(state) | options))


def _fill(state: str) -> dict[str, Any]:
    # Prefill is hatched: blue and green may look alike, these two do not.
    hatch = "////" if state == "prefill" else None
    edge = PALETTE["hatch"] if state == "prefill" else INK
    return {"facecolor": PALETTE[state], "edgecolor": edge, "hatch": hatch, "linewidth": 0.6}


def _write(ax: Axes, x: float, y: float, text: str, **options: Any) -> None:
    style: dict[str, Any] = {"fontsize": 8, "ha": "center", "va": "center_baseline"}
    ax.text(x, y, text, color=INK, **(style | options))


# -- the engine's map --------------------------------------------------------------------------


def lit_map(svg: str, module: str) -> str:
    """The engine's map (`docs/engine.svg`) with one module lit and the others pale.

    The lit box is gold and has a thick frame. Raises ValueError if the map has no such box.
    """
    box = re.compile(rf'<rect class="box"(?= [^\n]*\n[^\n]*>{re.escape(module)}</text>)')
    lit, found = box.subn('<rect class="lit"', svg)
    if found != 1:
        raise ValueError(f"module={module!r} has {found} boxes on the map; it must have 1")
    style = f".lit {{ fill: {PALETTE['cached']}; stroke: {INK}; stroke-width: 3.5 }}"
    lit = lit.replace(".name {", f"{style}\n    .name {{", 1)
    lit = lit.replace(".box {", ".box { opacity: 0.55;", 1)
    words = f"The engine and its modules, {module} lit: this chapter builds it"
    return lit.replace("The engine and its modules", words, 1)


# -- 03: memory without blocks -----------------------------------------------------------------


def reservations(used: Sequence[int], reserved: int) -> Picture:
    """One bar a request: the `reserved` slots it holds, and how many of them it ever `used`."""
    figure, ax = new_axes(1.2 + 0.3 * len(used))
    for y, tokens in enumerate(used):
        ax.barh(y, reserved, 0.7, **_fill("free"))
        ax.barh(y, tokens, 0.7, **_fill("decode"))
        _write(ax, tokens + reserved / 100, y, f"{tokens} used", ha="left")
    share = sum(used) / (reserved * len(used))
    title = f"{count(len(used), 'request')} reserve {reserved * len(used):,} slots"
    label(ax, f"{title} and use {share:.1%} of them", "slots (one token each)", "request")
    ax.set_ylim(len(used) - 0.5, -0.5)
    ax.set_yticks(range(len(used)))
    _legend(ax, [_key("decode", "used"), _key("free", "reserved, never used")])
    alt = f"Bar chart. {title}, {reserved:,} each, and use {share:.1%}: the bars are nearly empty."
    return picture(figure, alt)


def memory_strip(spans: Mapping[str, tuple[int, int]], total: int, wanted: int) -> Picture:
    """Contiguous memory: who holds which (start, size) of its `total` slots, and what is free."""
    figure, ax = new_axes(1.7)
    gaps, end = [], 0
    for start, size in [*sorted(spans.values()), (total, 0)]:
        if start > end:
            gaps.append((end, start - end))
        ax.broken_barh([(start, size)], (0, 1), **_fill("decode"))
        if size > total / 40:
            _write(ax, start + size / 2, 0.5, str(size))
        end = start + size
    for start, size in gaps:
        ax.broken_barh([(start, size)], (0, 1), **_fill("free"))
        if size > total / 40:
            _write(ax, start + size / 2, 0.5, str(size), style="italic", weight="bold")
    free, largest = sum(size for _, size in gaps), max([size for _, size in gaps], default=0)
    title = f"{free} slots are free, the largest gap has {largest}: a request for {wanted} waits"
    label(ax, title, "slot of the memory", "")
    ax.set_xlim(0, total)
    ax.set_yticks([])
    _legend(ax, [_key("decode", "held (tokens)"), _key("free", "gap (slots, bold)")])
    alt = f"A strip of {total} slots with {count(len(spans), 'request')} in it and gaps between."
    return picture(figure, f"{alt} {title}.")


# -- 03: blocks --------------------------------------------------------------------------------


def slots(num_blocks: Mapping[int, int], block_size: int) -> Picture:
    """For each number of tokens the blocks it was given: slots filled, and slots left empty."""
    figure, ax = new_axes(1.1 + 0.34 * len(num_blocks))
    for y, (tokens, blocks) in enumerate(num_blocks.items()):
        for slot in range(max(blocks * block_size, tokens)):
            state = "decode" if slot < tokens else "free"
            ax.barh(y, 0.86, 0.6, left=slot, **(_fill(state) | {"edgecolor": GRID}))
        for block in range(blocks):
            frame = {"fill": False, "edgecolor": INK, "linewidth": 1.6}
            ax.barh(y, block_size - 0.1, 0.76, left=block * block_size - 0.02, **frame)
        _write(ax, max(blocks, 0) * block_size + 0.5, y, count(blocks, "block"), ha="left")
    label(ax, "A block is needed when a token starts one", "slot (one token)", "tokens")
    widest = max(max(blocks * block_size, tokens) for tokens, blocks in num_blocks.items())
    ax.set_xlim(-0.3, widest * 1.12)
    ax.set_xticks(range(0, widest + 1, block_size))
    ax.set_ylim(len(num_blocks) - 0.5, -0.5)
    ax.set_yticks(range(len(num_blocks)), [str(tokens) for tokens in num_blocks])
    frame = _key("free", "block", linewidth=2)
    _legend(ax, [_key("decode", "token"), _key("free", "empty slot"), frame])
    parts = [f"{tokens} tokens have {count(n, 'block')}" for tokens, n in num_blocks.items()]
    return picture(figure, f"Rows of slots in blocks of {block_size}: {'; '.join(parts)}.")


def ownership(tables: Mapping[str, Sequence[int]], ref_counts: Sequence[int]) -> Picture:
    """Whose table each block stands in and at which place; below, each block's count."""
    figure, ax = new_axes(1.3 + 0.42 * (len(tables) + 1))
    for y, table in enumerate(tables.values()):
        for place, block in enumerate(table):
            ax.barh(y, 0.86, 0.8, left=block - 0.43, **_fill("decode"))
            _write(ax, block, y, str(place))
    for block, owners in enumerate(ref_counts):
        state = "cached" if owners > 1 else "decode" if owners else "free"
        ax.barh(len(tables), 0.86, 0.8, left=block - 0.43, **_fill(state))
        _write(ax, block, len(tables), str(owners), weight="bold")
    label(ax, "Each count is the number of tables above it", "block", "")
    ax.set_xlim(-0.6, len(ref_counts) - 0.4)
    ax.set_xticks(range(len(ref_counts)))
    ax.set_ylim(len(tables) + 0.5, -0.5)
    ax.set_yticks(range(len(tables) + 1), [*tables, "owners"])
    keys = [_key("decode", "owned (place in the table)"), _key("cached", "shared")]
    _legend(ax, [*keys, _key("free", "free")])
    parts = [f"{name} has blocks {list(table)}" for name, table in tables.items()]
    return picture(figure, f"Grid of blocks and owners. {'; '.join(parts)}. Counts: {ref_counts}.")


def trade_off(wasted: Mapping[int, float], entries: Mapping[int, float]) -> Picture:
    """By block size: the share of slots that stay empty, and the entries of a block table."""
    figure, axes = new_axes(2.7, columns=2)
    sizes = [str(size) for size in wasted]
    for ax, values, state, unit in (
        (axes[0], [100 * share for share in wasted.values()], "free", "empty slots (%)"),
        (axes[1], list(entries.values()), "waiting", "table entries per request"),
    ):
        bars = ax.bar(sizes, values, **_fill(state))
        ax.bar_label(bars, [f"{value:.3g}" for value in values], fontsize=8)
        label(ax, "Waste" if ax is axes[0] else "Bookkeeping", "block size (tokens)", unit)
    ends = [(size, wasted[size], entries[size]) for size in (min(wasted), max(wasted))]
    parts = [f"blocks of {s}: {w:.0%} empty, {e:.0f} table entries" for s, w, e in ends]
    return picture(figure, f"Two bar charts over the block size. {'; '.join(parts)}.")


# -- runs: what a trace shows ------------------------------------------------------------------


def timeline(trace: Trace) -> Picture:
    """`figures.request_timeline` as a picture with its text."""
    rows = request_rows(trace).values()
    alt = f"Timeline of {count(len(rows), 'request')} over {count(len(trace.steps), 'step')}"
    lost = sum(len(row.preemptions) for row in rows)
    return picture(request_timeline(trace), f"{alt}; {count(lost, 'preemption')}.")


def grid(trace: Trace, step: int | None = None) -> Picture:
    """`figures.block_grid` as a picture with its text."""
    figure = block_grid(trace, step)
    return picture(figure, f"Grid of blocks. {figure.axes[0].get_title(loc='left')}.")


def block_history(trace: Trace) -> Picture:
    """Every block (upwards) in every step (to the right): free, cached, in prefill or decode.

    Neighbours differ in shade; a number stands where a request gets its first block.
    """
    number_of = {row.label: i for i, row in enumerate(request_rows(trace).values())}
    image = [[shade("free")] * len(trace.steps) for _ in range(trace.num_blocks)]
    figure, ax = new_axes(3.6)
    named = set[str]()
    for step in trace.steps:
        for block in step.cached_blocks:
            image[block][step.index] = shade("cached")
        for block, owners in block_owners(trace, step).items():
            name, phase = owners[0]
            image[block][step.index] = shade(phase, number_of[name] % 3)
            if name not in named:
                _write(ax, step.index, block, name, ha="left", path_effects=_halo())
                named.add(name)
    ax.imshow(image, aspect="auto", origin="lower", interpolation="nearest")
    most = max(num_blocks_in_use(step) for step in trace.steps)
    title = f"At most {most} of {trace.num_blocks} blocks are in use; a number: a request begins"
    label(ax, title, "step", f"block (of {trace.block_size} tokens)")
    names = {"prefill": "owner in prefill", "decode": "owner in decode (three shades)"}
    _legend(ax, [_key(state, names.get(state, state)) for state in (*names, "cached", "free")])
    alt = f"Map of {trace.num_blocks} blocks over {count(len(trace.steps), 'step')}. {title}."
    return picture(figure, alt)


def shade(state: str, step: int = 0) -> tuple[float, float, float]:
    """A colour of the palette, as it is or one or two steps paler."""
    from matplotlib.colors import to_rgb

    red, green, blue = (part + (1 - part) * 0.22 * step for part in to_rgb(PALETTE[state]))
    return red, green, blue


def _halo() -> list[Any]:
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2.5, foreground="white")]


def free_blocks(traces: Mapping[str, Trace], reserve: Mapping[str, int]) -> Picture:
    """The free blocks after each step of several runs, the reserve, and every preemption."""
    figure, axes = new_axes(1.9 * len(traces), rows=len(traces), sharex=True, squeeze=False)
    parts = []
    for ax, (name, trace) in zip(axes[:, 0], traces.items(), strict=True):
        free = [trace.num_blocks - num_blocks_in_use(step) for step in trace.steps]
        lost = [step.index for step in trace.steps for _ in step.preempted]
        ax.step(range(len(free)), free, where="post", color=PALETTE["prefill"], linewidth=1.4)
        ax.axhline(reserve[name], color=INK, linestyle="--", linewidth=1, label="reserve")
        cross = {
            "label": "preemption",
            "marker": "X",
            "color": PALETTE["preempted"],
            "linestyle": "none",
        }
        ax.plot(lost, [free[step] for step in lost], markeredgecolor=INK, zorder=3, **cross)
        parts.append(f"{name}: {count(len(lost), 'preemption')} in {count(len(free), 'step')}")
        label(ax, parts[-1], "step" if ax is axes[-1, 0] else "", "free blocks")
        ax.set_ylim(-1, max(free) + 1)
    axes[0, 0].legend(loc="upper center", ncols=2, fontsize=8, frameon=False)
    alt = "Free blocks over steps, dashed: the reserve, crosses: preemptions."
    return picture(figure, f"{alt} {'; '.join(parts)}.")


def this_machine() -> str:
    """What measured numbers belong to: "2 cores (x86_64), 2026-11-29"."""
    return f"{count(os.cpu_count() or 1, 'core')} ({platform.machine()}), {date.today()}"


def speeds(tokens_per_s: Mapping[str, float], title: str) -> Picture:
    """Generated tokens per second, one bar for each way of generating them."""
    figure, ax = new_axes(1.0 + 0.4 * len(tokens_per_s))
    values = list(tokens_per_s.values())
    bars = ax.barh(list(tokens_per_s), values, 0.6, **_fill("decode"))
    ax.bar_label(bars, [f" {value:.1f}" for value in values], fontsize=9)
    label(ax, title, "generated tokens per second", "")
    ax.invert_yaxis()
    ax.set_xlim(0, max(values) * 1.12)
    parts = [f"{name} {value:.1f}" for name, value in tokens_per_s.items()]
    return picture(figure, f"Bar chart of tokens per second: {', '.join(parts)}.")
