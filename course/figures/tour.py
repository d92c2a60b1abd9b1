"""The pictures of chapter 00: the work of the naive loop, a run, and the waits between tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from course.figures.common import (
    INK,
    Picture,
    curves,
    label,
    legend,
    look,
    new_axes,
    picture,
    write,
)
from course.figures.common import grid as grid
from course.figures.common import speeds as speeds
from course.figures.common import this_machine as this_machine
from course.figures.common import timeline as timeline
from minivllm.pictures.timeline import count
from minivllm.trace import Trace


def work(naive: Sequence[int], cached: Sequence[int]) -> Picture:
    """Draw the tokens computed so far after each new token: naive loop and KV cache.

    `naive` and `cached` are the numbers of tokens computed for each new token.
    """
    figure, ax = new_axes(2.8)
    words = f"{sum(naive):,} tokens computed, {sum(cached):,} of them necessary"
    names = {"with a KV cache": cached, "naive loop": naive}
    places = range(1, len(naive) + 1)
    curves(ax, {name: (places, list(accumulate(costs))) for name, costs in names.items()})
    for costs in names.values():
        write(ax, len(naive) + 0.4, sum(costs), f"{sum(costs):,}", ha="left", fontsize=9)
    label(ax, f"{count(len(naive), 'new token')}: {words}", "new token", "tokens computed so far")
    ax.set_xlim(0.4, len(naive) + 2.2)
    ax.set_ylim(0, 1.08 * sum(naive))
    alt = f"Two lines over {count(len(naive), 'new token')}. {words}. The naive loop computes"
    return picture(figure, f"{alt} {naive[0]} tokens for the first one, {naive[-1]} for the last.")


def waits(trace: Trace, lines: Mapping[str, float]) -> Picture:
    """Draw the wait before the tokens of each step, and horizontal lines at `lines` (seconds).

    A step that also computed a prompt is a blue square.
    """
    figure, ax = new_axes(3.0)
    kinds: dict[bool, list[tuple[int, float]]] = {True: [], False: []}
    for before, step in zip(trace.steps, trace.steps[1:]):
        decoding = [chunk.is_decode for chunk in step.chunks]
        if any(decoding):
            kinds[not all(decoding)].append((step.index, 1e3 * (step.end - before.end)))
    looks = {True: ("prefill", "step with a prompt"), False: ("decode", "decode only")}
    for kind, (state, text) in looks.items():
        ax.plot(*zip(*kinds[kind]), label=text, **look(state))
    for place, (name, seconds) in enumerate(lines.items()):
        ax.axhline(1e3 * seconds, color=INK, linestyle="--", linewidth=1, zorder=1)
        at = (0.99 - 0.12 * place, 1e3 * seconds)
        ax.annotate(name, at, xycoords=("axes fraction", "data"), va="bottom", ha="right")
    words = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in lines.items())
    label(ax, f"Wait between two tokens: {words}", "step", "wait (milliseconds)")
    ax.set_ylim(bottom=0)
    legend(ax, ax.get_legend_handles_labels()[0])
    alt = f"Waits between tokens in {count(len(trace.steps), 'step')}, dashed: {words}."
    slow = [f"step {index}: {wait:.0f} ms" for index, wait in kinds[True]]
    return picture(figure, f"{alt} Steps with a prompt: {', '.join(slow) or 'none'}.")
