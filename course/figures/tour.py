"""The pictures of chapter 00: what the naive loop computes, a run, and how long tokens take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from course.figures.common import (
    GRID,
    INK,
    Picture,
    grid,
    label,
    legend,
    mark,
    new_axes,
    picture,
    speeds,
    this_machine,
    timeline,
    write,
)
from minivllm.pictures.figures import PALETTE
from minivllm.pictures.timeline import count
from minivllm.trace import Trace

__all__ = ["grid", "speeds", "this_machine", "timeline", "waits", "work"]


def work(naive: Sequence[int], cached: Sequence[int]) -> Picture:
    """The tokens computed so far, after each new token: by the naive loop, and with a KV cache.

    `naive` and `cached` hold the tokens that each new token costs.
    """
    figure, ax = new_axes(2.8)
    places = range(1, len(naive) + 1)
    words = f"{sum(naive):,} tokens computed, {sum(cached):,} of them for the first time"
    for costs, state, shape in ((naive, "waiting", "s"), (cached, "decode", "o")):
        sums = list(accumulate(costs))
        look = {"color": PALETTE[state], "marker": shape, "markeredgecolor": INK}
        ax.plot(places, sums, linewidth=2, markersize=5, **look)
        write(ax, len(naive) + 0.4, sums[-1], f"{sums[-1]:,}", ha="left", fontsize=9)
    label(ax, f"{count(len(naive), 'new token')}: {words}", "new token", "tokens computed so far")
    ax.set_xlim(0.4, len(naive) + 2.2)
    ax.set_ylim(0, 1.08 * sum(naive))
    ax.grid(axis="y", color=GRID, linewidth=0.6)
    grey = mark("naive loop: the whole text each time", marker="s", color=PALETTE["waiting"])
    green = mark(
        "for the first time: all that a KV cache leaves", marker="o", color=PALETTE["decode"]
    )
    legend(ax, [grey, green])
    alt = f"Two lines over {count(len(naive), 'new token')}. {words}. The naive loop computes"
    return picture(
        figure, f"{alt} {naive[0]} tokens for the first one and {naive[-1]} for the last."
    )


def waits(trace: Trace, lines: Mapping[str, float]) -> Picture:
    """The wait before the tokens of each step, and levels (seconds) across it.

    A step that also computed a prompt is a blue square.
    """
    figure, ax = new_axes(3.0)
    kinds: dict[bool, list[tuple[int, float]]] = {True: [], False: []}
    for before, step in zip(trace.steps, trace.steps[1:]):
        decoding = [chunk.is_decode for chunk in step.chunks]
        if any(decoding):
            kinds[not all(decoding)].append((step.index, 1e3 * (step.end - before.end)))
    looks = {True: ("s", "prefill", "a prompt in the step"), False: ("o", "decode", "tokens only")}
    for beside, (shape, state, text) in looks.items():
        style = {"marker": shape, "color": PALETTE[state], "linestyle": "none", "label": text}
        ax.plot(*zip(*kinds[beside]), markersize=6, markeredgecolor=INK, **style)
    for place, (name, seconds) in enumerate(lines.items()):
        ax.axhline(1e3 * seconds, color=INK, linestyle="--", linewidth=1, zorder=1)
        at = (0.99 - 0.12 * place, 1e3 * seconds)
        ax.annotate(name, at, xycoords=("axes fraction", "data"), va="bottom", ha="right")
    words = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in lines.items())
    label(ax, f"From one token to the next: {words}", "step", "wait (milliseconds)")
    ax.set_ylim(bottom=0)
    legend(ax, ax.get_legend_handles_labels()[0])
    alt = f"Waits over {count(len(trace.steps), 'step')}, dashed: {words}."
    slow = [f"step {index}: {wait:.0f} ms" for index, wait in kinds[True]]
    return picture(figure, f"{alt} With a prompt in the step: {', '.join(slow) or 'none'}.")
