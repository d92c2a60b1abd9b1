"""The pictures of chapter 00: what the naive loop computes, a run, and how long tokens take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from course.figures.common import (
    INK,
    Picture,
    fill,
    grid,
    key,
    label,
    legend,
    new_axes,
    picture,
    speeds,
    this_machine,
    timeline,
)
from minivllm.pictures.figures import PALETTE
from minivllm.pictures.timeline import count
from minivllm.trace import Trace

__all__ = ["grid", "speeds", "this_machine", "timeline", "waits", "work"]


def work(naive: Sequence[int], cached: Sequence[int]) -> Picture:
    """For each new token: how many tokens the naive loop computes, and how many are new."""
    figure, ax = new_axes(2.8)
    places = range(1, len(naive) + 1)
    ax.bar(places, naive, 0.8, **fill("waiting"))
    ax.bar(places, cached, 0.4, **fill("decode"))
    words = f"{sum(naive):,} tokens computed, {sum(cached):,} of them for the first time"
    label(ax, f"{count(len(naive), 'new token')}: {words}", "new token", "tokens computed for it")
    ax.set_xlim(0.4, len(naive) + 0.6)
    keys = [key("waiting", "naive loop (wide)"), key("decode", "for the first time (narrow)")]
    legend(ax, keys)
    alt = f"Bar chart over {count(len(naive), 'new token')}. {words}. The wide bars grow from"
    return picture(figure, f"{alt} {naive[0]} to {naive[-1]}; after the first token one is new.")


def waits(trace: Trace, lines: Mapping[str, float]) -> Picture:
    """How long the tokens of each step had been waited for, and levels (seconds) across it.

    A step in which a prompt was computed beside the tokens is a blue square.
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
