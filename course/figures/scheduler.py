"""The figures of chapter 02: requests in time, tokens in a step, and waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from course.figures.common import (
    GRID,
    INK,
    Picture,
    curves,
    fill,
    key,
    label,
    legend,
    look,
    mark,
    new_axes,
    picture,
    write,
)
from course.figures.common import speeds as speeds
from course.figures.common import this_machine as this_machine
from minivllm.pictures.figures import halo, request_timeline, shade
from minivllm.pictures.timeline import count, request_rows
from minivllm.request import Chunk
from minivllm.trace import StepTrace, Trace

# -- runs, request by request ------------------------------------------------------------------


def timelines(traces: Mapping[str, Trace]) -> Picture:
    """One timeline per run, on the same time axis."""
    rows = [len(request_rows(trace)) for trace in traces.values()]
    figure, axes = new_axes(
        sum(0.75 + 0.22 * n for n in rows) + 0.3,
        rows=len(rows),
        sharex=True,
        squeeze=False,
        height_ratios=[n + 2 for n in rows],
    )
    parts = []
    for index, (ax, (name, trace)) in enumerate(zip(axes[:, 0], traces.items(), strict=True)):
        request_timeline(trace, ax)
        parts.append(f"{name}: {_told(trace)}")
        ax.set_title(parts[-1], loc="left", fontsize=10, pad=6 if index else 22)
        if index:
            ax.get_legend().remove()
        ax.label_outer()
    axes[0, 0].set_xlim(0, 1.1 * max(trace.steps[-1].end for trace in traces.values()))
    alt = f"Timelines of requests: grey waiting, blue prefill, green decode. {'; '.join(parts)}."
    return picture(figure, alt)


def _told(trace: Trace) -> str:
    seconds = trace.steps[-1].end
    lost = sum(len(step.preempted) for step in trace.steps)
    told = f"{count(len(trace.steps), 'step')} in {seconds:.3g} s"
    return f"{told}, {count(lost, 'preemption')}" if lost else told


def chunks(parts: Sequence[Chunk], title: str) -> Picture:
    """Chunks of one request, one per row: positions, phase, and whether it samples."""
    figure, ax = new_axes(1.2 + 0.36 * len(parts))
    for y, chunk in enumerate(parts):
        phase = "decode" if chunk.is_decode else "prefill"
        ax.barh(y, chunk.start, 0.2, **fill("waiting"))
        ax.barh(y, chunk.length, 0.7, left=chunk.start, **fill(phase))
        told = f"{phase}, {count(chunk.length, 'token')}{', samples' * chunk.samples}"
        write(ax, chunk.end + parts[-1].end / 60, y, told, ha="left")
    label(ax, title, "position in the request (tokens)", "step")
    ax.set_xlim(0, parts[-1].end * 1.35)
    ax.set_ylim(len(parts) - 0.5, -0.5)
    ax.set_yticks(range(len(parts)))
    names = {"waiting": "computed before", "prefill": "prefill", "decode": "decode"}
    legend(ax, [key(state, text) for state, text in names.items()])
    steps = [
        f"positions {c.start} to {c.end} {'decode' if c.is_decode else 'prefill'}"
        f"{' and sample' * c.samples}"
        for c in parts
    ]
    return picture(figure, f"{title}. Step by step: {'; '.join(steps)}.")


# -- runs, step by step ------------------------------------------------------------------------


def step_bars(trace: Trace, budget: int, steps: int = 60) -> Picture:
    """The tokens of each step: decodes at the bottom, prefill on top, and the budget as a line."""
    figure, ax = new_axes(2.7)
    shown = trace.steps[:steps]
    decodes = [sum(c.length for c in step.chunks if c.is_decode) for step in shown]
    prefills = [num_tokens(step) - n for step, n in zip(shown, decodes, strict=True)]
    numbers = [step.index for step in shown]
    ax.bar(numbers, decodes, 0.85, **fill("decode"))
    ax.bar(numbers, prefills, 0.85, bottom=decodes, **fill("prefill"))
    ax.axhline(budget, color=INK, linestyle="--", linewidth=1)
    ax.text(len(shown) - 0.5, budget, "budget ", fontsize=8, ha="right", va="bottom", color=INK)
    full = sum(num_tokens(step) == budget for step in shown)
    title = f"{full} of {count(len(shown), 'step')} use the whole budget of {budget} tokens"
    label(ax, title, "step", "tokens computed")
    ax.set_ylim(0, 1.15 * max(budget, *(num_tokens(step) for step in shown)))
    legend(ax, [key("decode", "decode"), key("prefill", "prefill")])
    most = f"at most {count(max(decodes), 'decode')} per step"
    return picture(figure, f"Stacked bars, one per step, decodes below prefill. {title}; {most}.")


def num_tokens(step: StepTrace) -> int:
    """Tokens computed in a step."""
    return sum(chunk.length for chunk in step.chunks)


def memory(
    held: Sequence[Mapping[str, int]], limit: int, lost: Sequence[tuple[int, str]]
) -> Picture:
    """Tokens that each request holds after each step, stacked; `lost`: (step, request)."""
    names = list(dict.fromkeys(name for step in held for name in step))
    figure, ax = new_axes(2.9)
    floor = [0] * len(held)
    for number, name in enumerate(names):
        tokens = [step.get(name, 0) for step in held]
        paint = {"color": shade("decode", number % 4), "edgecolor": GRID, "linewidth": 0.4}
        ax.bar(range(len(held)), tokens, 1.0, bottom=floor, **paint)
        for x in range(len(held)):
            # Named where a request starts or leaves, because the layers below move there.
            if tokens[x] and (x == 0 or set(held[x]) != set(held[x - 1])):
                write(ax, x, floor[x] + tokens[x] / 2, name, path_effects=halo())
        floor = [low + n for low, n in zip(floor, tokens, strict=True)]
    ax.axhline(limit, color=INK, linestyle="--", linewidth=1)
    for step, name in lost:
        ax.plot(step, limit, clip_on=False, zorder=4, **look("preempted"))
        write(ax, step, limit * 1.08, name)
    gaps = _gaps([sum(step.values()) for step in held])
    for start, end in gaps:
        text = "empty: the others are done,\npreempted requests restart"
        middle = (start + end - 1) / 2
        arrow = {"arrowstyle": "->", "color": INK}
        style = {"fontsize": 8, "ha": "center", "color": INK, "arrowprops": arrow}
        ax.annotate(text, (middle, limit * 0.02), (middle, limit * 0.84), **style)
    title = f"{count(len(lost), 'preemption')}: the newest request loses its memory"
    label(ax, title, "step", "tokens held")
    ax.set_ylim(0, limit * 1.16)
    keys = [key("decode", "held (letter: the request)"), mark("preempted", **look("preempted"))]
    legend(ax, [*keys, mark(f"limit: {limit} tokens", linestyle="--")])
    told = ", ".join(f"{name} in step {step}" for step, name in lost)
    alt = f"Stacked bars of the tokens that requests hold, up to a limit of {limit}. {title}."
    empty = "".join(f" Nothing is held from step {start} to {end - 1}." for start, end in gaps)
    return picture(figure, f"{alt} Preempted: {told or 'none'}.{empty}")


def _gaps(values: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of zeros between other values: [start, end)."""
    inside = [index for index, value in enumerate(values) if value]
    return [(a + 1, b) for a, b in zip(inside, inside[1:]) if b > a + 1]


# -- how long it takes -------------------------------------------------------------------------


def token_gaps(runs: Mapping[str, Sequence[tuple[float, float]]]) -> Picture:
    """For each run the wait before each token of an answer: (second of its arrival, ms)."""
    figure, axes = new_axes(
        0.7 + 1.3 * len(runs), rows=len(runs), sharex=True, sharey=True, squeeze=False
    )
    usual = look("decode") | {"markersize": 4.5}
    longest = look("waiting") | {"markersize": 8, "zorder": 3}
    last = max(time for waits in runs.values() for time, _ in waits)
    parts = []
    for ax, (name, waits) in zip(axes[:, 0], runs.items(), strict=True):
        worst = max(waits, key=lambda point: point[1])
        ax.vlines([time for time, _ in waits], 0, [wait for _, wait in waits], INK, linewidth=0.7)
        ax.plot(*zip(*waits, strict=True), **usual)
        ax.plot(*worst, **longest)
        above = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center"}
        text = f"{worst[1]:,.0f} ms without a token"
        ax.annotate(text, worst, fontsize=8, color=INK, **above)
        parts.append(f"{name}: the longest wait is {worst[1]:,.0f} ms")
        label(ax, parts[-1], "time at which the token arrives (seconds)", "wait (ms)")
        ax.label_outer()
    axes[0, 0].set_ylim(0, 1.4 * max(wait for waits in runs.values() for _, wait in waits))
    axes[0, 0].set_xlim(0, 1.15 * last)
    keys = [mark("a token (height: the wait before it)", **usual), mark("longest wait", **longest)]
    legend(axes[0, 0], keys)
    alt = "One dot per token, as high as the wait before it; a triangle marks the longest wait."
    return picture(figure, f"{alt} {'; '.join(parts)}.")


def load_curves(runs: Mapping[str, Sequence[tuple[float, float]]]) -> Picture:
    """For each policy, a line through (tokens per second, ms per token) as the load grows."""
    figure, ax = new_axes(3.4)
    parts = []
    lines = {n: ([a for a, _ in points], [b for _, b in points]) for n, points in runs.items()}
    curves(ax, lines)
    for name, (rates, waits) in lines.items():
        parts.append(
            f"{name}: {waits[0]:.0f} ms at {rates[0]:.0f} tokens/s, at least {min(waits):.0f} ms,"
            f" at most {max(rates):.0f} tokens/s"
        )
    title = "Throughput against latency as the load grows"
    label(ax, title, "generated tokens per second", "ms per token, waiting included")
    ax.set_yscale("log")
    ax.set_yticks([5, 10, 20, 50, 100], ["5", "10", "20", "50", "100"])
    ax.set_yticks([], minor=True)
    ax.set_xlim(0, None)
    return picture(figure, f"Lines of latency (log) over throughput. {'; '.join(parts)}.")


def budget_curves(runs: Mapping[int, tuple[float, float, float]]) -> Picture:
    """By token budget: longest wait between tokens (ms), time to first token (ms), tokens/s."""
    figure, axes = new_axes(2.5, columns=3)
    budgets = [str(budget) for budget in runs]
    units = ("longest wait (ms)", "mean TTFT (ms)", "tokens per second")
    titles = ("Between two tokens", "Time to first token", "Throughput")
    for index, (ax, unit, title) in enumerate(zip(axes, units, titles, strict=True)):
        values = [run[index] for run in runs.values()]
        bars = ax.bar(budgets, values, **fill(("decode", "prefill", "waiting")[index]))
        ax.bar_label(bars, [f"{value:.0f}" for value in values], fontsize=7)
        label(ax, title, "budget (tokens)", unit)
        ax.tick_params(axis="x", labelsize=7, rotation=60)
    ends = [(budget, runs[budget]) for budget in (min(runs), max(runs))]
    parts = [f"budget {b}: {w:.0f} ms, {f:.0f} ms, {r:.0f} tokens/s" for b, (w, f, r) in ends]
    alt = "Three bar charts over the budget: longest wait, time to first token, throughput."
    return picture(figure, f"{alt} {'; '.join(parts)}.")
