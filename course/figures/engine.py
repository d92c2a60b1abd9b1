"""The pictures of chapter 11: launch and read on a clock, throughput and latency against batch size
and request rate, memory over time, what each part bought, and engines side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from course.figures.common import (
    DOTS,
    GRID,
    INK,
    Picture,
    fill,
    headline,
    key,
    label,
    legend,
    look,
    mark,
    new_axes,
    picture,
    source,
    times,
    write,
)
from course.figures.common import this_machine as this_machine
from course.figures.common import timeline as timeline
from course.figures.ladder import climb
from course.figures.ladder import find as find
from course.figures.ladder import ladder as ladder
from course.figures.ladder import provenance as provenance
from course.figures.ladder import recorded as recorded
from course.props.toy_device import Work
from minivllm.pictures.figures import PALETTE, halo
from minivllm.pictures.timeline import count, num_blocks_in_use
from minivllm.trace import Trace

LOOKS = {"launch": "prefill", "read": "waiting", "compute": "decode", "owned": "cached"}


# -- the loop ----------------------------------------------------------------------------------


def lanes(runs: Mapping[str, Sequence[Work]]) -> Picture:
    """What host and device did in each run, and which requests owned blocks meanwhile.

    The number in a bar is the step's. A step with a discarded result is crossed out.
    """
    names = {run: list(dict.fromkeys(work.lane for work in log)) for run, log in runs.items()}
    heights = [len(lanes) for lanes in names.values()]
    figure, panels = new_axes(
        0.7 + sum(0.5 + 0.34 * height for height in heights),
        len(runs),
        squeeze=False,
        sharex=True,
        gridspec_kw={"height_ratios": heights},
    )
    words = []
    for ax, (run, log) in zip(panels[:, 0], runs.items(), strict=True):
        for work in log:
            paint = fill(LOOKS[work.what]) | ({"hatch": "xxx"} if work.is_wasted else {})
            y = names[run].index(work.lane)
            ax.barh(y, work.end - work.start, 0.8, left=work.start, **paint)
            if work.what != "owned":
                middle = (work.start + work.end) / 2
                write(ax, middle, y, str(work.step), path_effects=halo())
        words.append(_lanes_in_words(ax, run, log, names[run]))
    panels[-1, 0].set_xlabel("time (ms of a clock that only counts)", fontsize=9)
    keys = [key("prefill", "launch"), key("waiting", "read"), key("decode", "compute")]
    keys.append(key("decode", "discarded", hatch="xxx"))
    if any(work.what == "owned" for log in runs.values() for work in log):
        keys.append(key("cached", "owned"))
    legend(panels[0, 0], keys)
    return picture(figure, f"Timelines of host and device. {' '.join(words)}")


def _lanes_in_words(ax: Any, run: str, log: Sequence[Work], lanes: Sequence[str]) -> str:
    steps = [work for work in log if work.what == "compute"]
    end = max(work.end for work in log)
    busy = sum(work.end - work.start for work in steps)
    wasted = sum(work.is_wasted for work in steps)
    words = f"{count(len(steps), 'step')} in {end:g} ms, the device busy for {busy / end:.0%}"
    label(ax, f"{run}: {words}", "", "")
    ax.set_yticks(range(len(lanes)), lanes)
    ax.set_ylim(len(lanes) - 0.5, -0.5)
    ax.set_xlim(0, None)
    owned = [f"{w.lane} owned from {w.start:g} to {w.end:g}" for w in log if w.what == "owned"]
    more = "".join(f"; {part}" for part in owned) + (f"; {wasted} discarded" if wasted else "")
    return f"{run}: {words}{more}."


# -- throughput and latency ----------------------------------------------------------------------


def batches(points: Sequence[Mapping[str, float]], limits: Mapping[int, float]) -> Picture:
    """Tokens per second and milliseconds per token over the batch size. A point has `batch`,
    `tokens_per_s` and `ms`; `limits` is the most tokens per second that the machine allows at a
    batch size."""
    from matplotlib.ticker import LogLocator

    figure, (left, right) = new_axes(3.5, 1, 2)
    sizes = [point["batch"] for point in points]
    speeds = [point["tokens_per_s"] for point in points]
    waits = [point["ms"] for point in points]
    left.plot(sizes, speeds, "o-", color=PALETTE["prefill"], markeredgecolor=INK)
    left.plot(list(limits), list(limits.values()), "--", color=INK, linewidth=1.4)
    middle = list(limits)[len(limits) // 2]
    left.annotate("the machine's limit", (middle, limits[middle]), xytext=(4, 8), ha="right",
                  textcoords="offset points", fontsize=8, color=INK)  # fmt: skip
    label(left, "Throughput", "requests at a time", "tokens per second (log scale)")
    left.set_yscale("log")
    left.set_ylim(min(speeds) / 1.6, max(*speeds, *limits.values()) * 1.6)
    right.plot(sizes, waits, "s-", color=PALETTE["preempted"], markeredgecolor=INK)
    label(right, "Wait of each reader", "requests at a time", "ms between two tokens (median)")
    right.set_ylim(0, max(waits) * 1.2)
    # A range of less than a factor of ten would have one power of ten, so one label.
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.yaxis.set_major_formatter("{x:,g}")
    for ax, values, form in ((left, speeds, "{:.0f}"), (right, waits, "{:.0f}")):
        ax.set_xscale("log", base=2)
        ax.set_xticks(sizes, [f"{size:g}" for size in sizes])
        ax.minorticks_off()
        ax.grid(color=GRID, linewidth=0.6)
        for x, y in zip(sizes, values, strict=True):
            ax.annotate(form.format(y), (x, y), xytext=(0, -13), textcoords="offset points",
                        ha="center", fontsize=7, color=INK, path_effects=halo())  # fmt: skip
    gain = times(speeds[-1] / speeds[0])
    more = f"{sizes[-1]:g} requests at a time: {gain} the throughput of {sizes[0]:g}"
    headline(figure, f"{more}, {times(waits[-1] / waits[0])} the wait")
    source(figure, this_machine())
    parts = [
        f"{p['batch']:g}: {p['tokens_per_s']:.0f} tok/s of at most {limits[int(p['batch'])]:.0f},"
        f" {p['ms']:.0f} ms"
        for p in points
    ]
    return picture(figure, f"Throughput and latency by batch size. {'; '.join(parts)}.")


def rates(points: Sequence[Mapping[str, float]], capacity: float) -> Picture:
    """Three panels over the request rate: throughput, time to first token, time between tokens.

    A point has `rate` (requests per second that arrive), `tokens_per_s`, and milliseconds
    `first_p50`, `first_p90`, `gap_p50`, `gap_p90`. `capacity` is in requests per second.
    """
    figure, panels = new_axes(3.5, 1, 3)
    curves = [
        ("Output", "tokens per second", ["tokens_per_s"]),
        ("First token", "ms", ["first_p50", "first_p90"]),
        ("Between tokens", "ms", ["gap_p50", "gap_p90"]),
    ]
    places = range(len(points))
    for ax, (title, unit, names) in zip(panels, curves, strict=True):
        # A few measured loads, side by side: a line would claim to know what lies between.
        if len(names) > 1:
            low, high = ([point[name] for point in points] for name in names)
            ax.vlines(places, low, high, INK, linewidth=1, zorder=1)
        looks = (("decode", "top"), ("prefill", "bottom"))
        for name, (state, side) in zip(names, looks):
            values = [point[name] for point in points]
            told = {"tokens_per_s": None, "p50": "median"}
            kind = name.rpartition("_")[2] if len(names) > 1 else name
            ax.plot(places, values, **look(state), label=told.get(kind, kind))
            for x, value in zip(places, values, strict=True):
                ax.annotate(f"{value:.0f}", (x, value), (6, 0), textcoords="offset points",
                            va=side, fontsize=8, color=INK)  # fmt: skip
        label(ax, title, "load (requests per second)", unit)
        ax.set_ylim(0, max(point[name] for point in points for name in names) * 1.4)
        ax.set_xlim(-0.5, len(points) - 0.2)
        loads = [f"{point['rate'] / capacity:.0%}\n({point['rate']:.2g})" for point in points]
        ax.set_xticks(places, loads)
        if len(names) > 1:
            ax.legend(fontsize=8, frameon=False, loc="upper left", ncols=2)
    most = f"{points[-1]['rate'] / capacity:.0%} of what the engine can serve"
    headline(figure, f"{count(len(points), 'load')}, up to {most}")
    source(figure, f"Poisson arrivals; 100%: the most that it can serve; {this_machine()}")
    parts = [
        f"{p['rate']:.2g} requests/s: {p['tokens_per_s']:.0f} tok/s, first token"
        f" {p['first_p50']:.0f} ms (p90 {p['first_p90']:.0f}), between tokens"
        f" {p['gap_p50']:.0f} ms (p90 {p['gap_p90']:.0f})"
        for p in points
    ]
    words = f"the machine is full at {capacity:.2g} requests per second"
    return picture(figure, f"Dots for each request rate; {words}. {'; '.join(parts)}.")


# -- memory ----------------------------------------------------------------------------------------


def phases(seconds: Mapping[str, float], where: str) -> Picture:
    """From a command to its first token: each phase begins where the one before it ends."""
    figure, ax = new_axes(1.3 + 0.3 * len(seconds))
    total = sum(seconds.values())
    start = 0.0
    for y, value in enumerate(seconds.values()):
        ax.barh(y, value, 0.7, left=start, **fill("prefill"))
        at_right = start > total / 2
        x = start - 0.01 * total if at_right else start + value + 0.01 * total
        write(ax, x, y, f"{value:.2f} s", ha="right" if at_right else "left")
        start += value
    label(ax, f"{total:.1f} s from the command to the first token", "seconds", "")
    ax.set_yticks(range(len(seconds)), list(seconds))
    ax.invert_yaxis()
    ax.set_xlim(0, total * 1.05)
    source(figure, where)
    parts = [f"{name} {value:.2f} s" for name, value in seconds.items()]
    return picture(figure, f"Bars of seconds, one after the other. {', '.join(parts)}.")


def memory(trace: Trace) -> Picture:
    """The KV blocks over the seconds of a run: in use, cached, free; and the waiting requests."""
    from matplotlib.ticker import MaxNLocator

    figure, (ax, below) = new_axes(3.6, 2, sharex=True, gridspec_kw={"height_ratios": [3, 1]})
    used = [num_blocks_in_use(step) for step in trace.steps]
    # A request that ended with a step owned blocks in it, and left them in the cache.
    owned = [set().union(*step.block_tables.values()) for step in trace.steps]
    cached = [len(step.cached_blocks - own) for step, own in zip(trace.steps, owned, strict=True)]
    waiting = [step.num_waiting for step in trace.steps]
    edges = [trace.steps[0].start, *(step.end for step in trace.steps)]
    top = [a + b for a, b in zip(used, cached, strict=True)]
    ax.stairs(used, edges, fill=True, **(fill("decode") | {"hatch": None}))
    ax.stairs(top, edges, baseline=used, fill=True, **fill("cached", dotted=True))
    ax.axhline(trace.num_blocks, color=INK, linestyle="--", linewidth=1.2)
    ax.text(edges[-1], trace.num_blocks, "all blocks ", fontsize=8, ha="right", va="bottom")
    lost = [step for step in trace.steps if step.preempted]
    for step in lost:
        ax.plot(step.start, used[step.index], "x", color=PALETTE["preempted"], markersize=8)
    below.stairs(waiting, edges, fill=True, **fill("waiting"))
    title = f"At most {max(used)} of {trace.num_blocks} blocks are owned"
    if lost:
        title += f", {count(len(lost), 'preemption')}"
    label(ax, title, "", "KV blocks")
    label(below, "", "time (seconds)", "waiting")
    ax.set_ylim(0, trace.num_blocks * 1.15)
    below.set_ylim(0, max(*waiting, 1) * 1.2)
    below.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    keys = [key("decode", "owned"), key("cached", "cached, without an owner", **DOTS)]
    keys.append(key("waiting", "requests in the queue"))
    lost_key = mark("preemption", **(look("preempted") | {"marker": "x"}))
    legend(ax, keys + ([lost_key] if lost else []))
    words = f"{title}; at most {max(cached)} are cached, {max(waiting)} requests wait"
    seconds = edges[-1] - edges[0]
    return picture(figure, f"KV blocks over {seconds:.1f} seconds of a run. {words}.")


# -- side by side ----------------------------------------------------------------------------------


def rungs(tokens_per_s: Mapping[str, float], limit: float, where: str) -> Picture:
    """Tokens per second of each rung of a ladder (log scale), and the hardware's limit."""
    figure, ax = new_axes(1.7 + 0.32 * len(tokens_per_s))
    names = list(tokens_per_s)
    words = climb(ax, names, tokens_per_s, limit, 10)
    ratio = tokens_per_s[names[-1]] / tokens_per_s[names[0]]
    title = f"All rungs together: {times(ratio)[:-1]} times the speed of “{names[0]}”"
    ax.set_title(title, loc="left", fontsize=10)
    source(figure, where)
    return picture(figure, f"Dots at tokens per second, on a log axis. {title}: {words}.")


def ratios(seconds: Mapping[str, Sequence[float]], where: str) -> Picture:
    """How many times as fast as the first engine each one is: its best round, and the span of all
    rounds as a line."""
    figure, ax = new_axes(1.6 + 0.42 * len(seconds))
    base = min(next(iter(seconds.values())))
    words = []
    for place, (name, rounds) in enumerate(seconds.items()):
        values = [base / value for value in rounds]
        ax.barh(place, max(values), 0.55, **fill("decode" if place == 0 else "waiting"))
        ax.plot([min(values), max(values)], [place, place], color=INK, linewidth=2)
        write(ax, max(values), place, f"  {max(values):.2f}", ha="left")
        words.append(f"{name} {max(values):.2f} (rounds from {min(values):.2f})")
    first = next(iter(seconds))
    ax.axvline(1, color=INK, linestyle=":", linewidth=1.2)
    best = {name: base / min(rounds) for name, rounds in seconds.items()}
    title = "; ".join(f"{name} {times(ratio)}" for name, ratio in best.items() if name != first)
    label(ax, f"Speed, as a multiple of “{first}”: {title}", f"speed, {first} = 1", "")
    span = mark("from the slowest to the best round", linestyle="-", linewidth=2)
    legend(ax, [key("decode", first), key("waiting", "another engine"), span])
    source(figure, where)
    ax.set_yticks(range(len(seconds)), seconds)
    ax.set_xlim(0, max(1.2, *best.values()) * 1.15)
    ax.set_ylim(len(seconds) - 0.5, -0.5)
    return picture(figure, f"Bars of speed against {first}: {', '.join(words)}.")
