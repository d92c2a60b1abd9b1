"""The pictures of chapter 09: matrices in parts, heads, the cost of a sum, ranks in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course.figures.common import (
    DOTS,
    GRID,
    INK,
    Picture,
    curves,
    fill,
    key,
    label,
    legend,
    log_axis,
    mark,
    new_axes,
    picture,
    write,
)
from course.figures.common import speeds as speeds
from course.figures.common import this_machine as this_machine
from course.figures.several_gpus import gains as gains
from course.figures.several_gpus import recorded as recorded
from minivllm.pictures.figures import PALETTE
from minivllm.pictures.timeline import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

# The ranks of a picture: a colour each, next to a name or a number.
STATES = ("decode", "prefill", "cached", "waiting")

# -- why ----------------------------------------------------------------------------------------


def memory(weights_gb: Mapping[str, float], cards_gb: Mapping[str, float]) -> Picture:
    """Draw the weights that each of 1, 2, 4 and 8 ranks holds, a line per model, and the memories
    of some cards."""
    figure, ax = new_axes(3.2)
    sizes = [1, 2, 4, 8]
    parts = []
    styles = ("-", "--", "-.", ":")
    for (name, size), style in zip(weights_gb.items(), styles, strict=False):
        ax.plot(sizes, [size / n for n in sizes], style, marker="o", color=INK, markersize=4)
        ax.text(8.4, size / 8, name, fontsize=8, color=INK, va="center")
        parts.append(f"{name} {size:.3g} GB on one, {size / 8:.3g} GB on each of 8")
    for name, size in cards_gb.items():
        ax.axhline(size, color=PALETTE["preempted"], linewidth=1, linestyle=(0, (1, 2)))
        ax.text(0.52, size, name, fontsize=8, color=INK, va="bottom")
    label(ax, "What each rank holds", "ranks (log scale)", "GB of weights (log scale)")
    weights = mark("weights, one line per model", color=INK, marker="o", markersize=4)
    card = mark("memory of one card", color=PALETTE["preempted"], linestyle=(0, (1, 2)))
    legend(ax, [weights, card])
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:,g}")
    ax.set_xlim(0.5, 11)
    ax.set_xticks(sizes, sizes)
    cards = ", ".join(f"{name} {size:g} GB" for name, size in cards_gb.items())
    return picture(figure, f"Lines of weights per rank: {'; '.join(parts)}. Memories: {cards}.")


# -- shards --------------------------------------------------------------------------------------


def matrices(pieces: Sequence[Any], title: str) -> Picture:
    """Draw small matrices in a row, with signs between them.

    A piece is a sign, or (name, rows of numbers, rank). The colour is the rank's; None is for all
    ranks.
    """
    shown = [piece for piece in pieces if not isinstance(piece, str)]
    tallest = max(len(rows) for _, rows, _ in shown)
    figure, ax = new_axes(1.25 + 0.34 * tallest)
    x = 0.0
    words = []
    ranks = set[int]()
    for piece in pieces:
        if isinstance(piece, str):
            write(ax, x + 0.35, tallest / 2, piece, fontsize=12)
            x += 0.9
            continue
        name, rows, rank = piece
        top = (tallest - len(rows)) / 2
        for y, row in enumerate(rows):
            for column, value in enumerate(row):
                paint = fill("free" if rank is None else STATES[rank % 4]) | {"edgecolor": GRID}
                ax.barh(top + y + 0.5, 0.96, 0.92, left=x + column, **paint)
                style = {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1}}
                write(ax, x + column + 0.48, top + y + 0.5, f"{value:g}", **style)
        write(ax, x + len(rows[0]) / 2, top - 0.4, name)
        words.append(f"{name}: {[list(row) for row in rows]}")
        ranks |= set() if rank is None else {rank}
        x += len(rows[0]) + 0.2
    label(ax, title, "", "")
    ax.set_xlim(-0.1, max(x, 13))
    ax.set_ylim(tallest + 0.1, -0.8)
    ax.set_axis_off()
    keys = [key(STATES[rank % 4], f"rank {rank}") for rank in sorted(ranks)]
    legend(ax, [*keys, key("free", "all ranks")])
    return picture(figure, f"{title}. {'; '.join(words)}.")


def by_outputs(x: Tensor, weights: Sequence[Tensor], results: Sequence[Tensor]) -> Picture:
    """Draw a product cut by its outputs: `x [1, in]`, and by rank the weight `[out / R, in]` and
    the result `[1, out / R]`."""
    cut = [("weight.T", weight.T.tolist(), rank) for rank, weight in enumerate(weights)]
    made = [("result", part.tolist(), rank) for rank, part in enumerate(results)]
    return matrices([("x", x.tolist(), None), "·", *cut, "=", *made], "Cut by outputs")


def by_inputs(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], sums: Sequence[Tensor]
) -> Picture:
    """Draw a product cut by its inputs: by rank the input `[1, in / R]`, the weight
    `[out, in / R]` and the part `[1, out]` of every sum."""
    pieces: list[Any] = []
    for rank, (x, weight) in enumerate(zip(inputs, weights, strict=True)):
        pieces += ["+"] if rank else []
        pieces += [("input", x.tolist(), rank), "·", ("weight.T", weight.T.tolist(), rank)]
    total: Any = sum(sums)
    return matrices([*pieces, "=", ("sum", total.tolist(), None)], "Cut by inputs: parts are added")


def heads(num_heads: int, num_kv_heads: int, held: Mapping[int, Sequence[int]]) -> Picture:
    """Draw query heads in the order of the ranks, and below them the key/value heads that each rank
    holds; the title counts query heads whose key/value head is missing."""
    figure, ax = new_axes(2.3)
    each = num_heads // len(held)
    group = num_heads // num_kv_heads
    missing = []
    for head in range(num_heads):
        rank = head // each
        wanted = head // group
        paint = fill(STATES[wanted % 4]) | {"edgecolor": GRID}
        style = {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1}}
        ax.barh(0, 0.92, 0.7, left=head - 0.46, **paint)
        write(ax, head, 0, f"q{head}", **style)
        if wanted not in held[rank]:
            missing.append(f"q{head} on rank {rank} reads {wanted}")
    for rank, mine in held.items():
        width = each / max(len(mine), 1)
        for place, kv_head in enumerate(mine):
            left = rank * each + place * width - 0.46
            wanted_here = any(h // group == kv_head for h in range(rank * each, (rank + 1) * each))
            paint = fill(STATES[kv_head % 4]) | {"edgecolor": INK}
            ax.barh(1, width - 0.08, 0.7, left=left, **paint)
            text = f"k{kv_head} v{kv_head}" + ("" if wanted_here else " (unused)")
            write(ax, left + width / 2 - 0.04, 1, text, **style)
        write(ax, rank * each + each / 2 - 0.5, 1.75, f"rank {rank}")
        if rank:
            ax.axvline(rank * each - 0.5, color=INK, linewidth=2)
    title = f"{num_heads} query heads, {num_kv_heads} key/value heads, {len(held)} ranks"
    if missing:
        title += f": {count(len(missing), 'query head')} cannot find keys"
    label(ax, title, "", "")
    ax.set_ylim(2.1, -0.5)
    ax.set_yticks([0, 1], ["query heads", "held keys, values"])
    ax.set_xticks([])
    kv_heads = range(min(num_kv_heads, 4))
    legend(ax, [key(STATES[n], f"key/value head {n}") for n in kv_heads])
    shown = "; ".join(f"rank {rank} holds {list(mine)}" for rank, mine in held.items())
    lost = f" Missing: {'; '.join(missing)}." if missing else ""
    return picture(figure, f"{title}. {shown}.{lost}")


def parts(tensors: Mapping[str, tuple[Sequence[int], Any]], title: str) -> Picture:
    """Draw weights to scale, rows down and columns across, and the part of each that a rank holds.

    `tensors`: name -> (shape, part with dim, start and stop; None for all of it).
    """
    figure, ax = new_axes(3.3)
    from matplotlib.patches import Rectangle

    x = 0.0
    words = []
    tallest = max(shape[0] for shape, _ in tensors.values())
    widest = sum(shape[1] for shape, _ in tensors.values())
    gap = widest * 0.03
    for name, ((rows, columns), part) in tensors.items():
        ax.add_patch(Rectangle((x, 0), columns, rows, **fill("free")))
        start, stop = (0, rows) if part is None or part.dim else (part.start, part.stop)
        left, right = (part.start, part.stop) if part is not None and part.dim else (0, columns)
        held = Rectangle((x + left, start), right - left, stop - start, **fill("decode"))
        ax.add_patch(held)
        write(ax, x + columns / 2, -tallest * 0.035, name, fontsize=7)
        x += columns + gap
        what = "columns" if part is not None and part.dim else "rows"
        ends = (left, right) if what == "columns" else (start, stop)
        words.append(f"{name} {what} {ends[0]} to {ends[1] - 1}")
    label(ax, title, "columns: inputs (same scale as the rows)", "rows: outputs")
    ax.set_xlim(-gap, x)
    ax.set_ylim(tallest * 1.02, -tallest * 0.09)
    ax.set_xticks([])
    legend(ax, [key("decode", "this rank's"), key("free", "the other ranks'")])
    return picture(figure, f"{title}. {'; '.join(words)}.")


# -- what it costs -------------------------------------------------------------------------------


def latency(times: Mapping[str, Mapping[int, float]], marks: Mapping[str, int]) -> Picture:
    """Draw the microseconds of an all-reduce against its size, a line per number of ranks; `marks`
    are sizes in bytes to point at."""
    from matplotlib.ticker import LogLocator

    figure, ax = new_axes(3.4)
    lines = {name: ([n / 1024 for n in c], list(c.values())) for name, c in times.items()}
    curves(ax, lines)
    words = [
        f"{name}: {us[0]:.0f} µs for {sizes[0]:.3g} KiB, {us[-1]:.0f} µs for {sizes[-1]:,.0f} KiB"
        for name, (sizes, us) in lines.items()
    ]
    for name, size in marks.items():
        ax.axvline(size / 1024, color=INK, linewidth=1, linestyle=":", zorder=0)
        ax.text(size / 1024, 1.01, name, fontsize=8, color=INK, ha="center", va="bottom",
                transform=ax.get_xaxis_transform())  # fmt: skip
    title = "The time of one all-reduce"
    label(ax, title, "size (KiB, log scale)", "time (µs, log scale)")
    ax.set_title(title, loc="left", fontsize=10, pad=22)
    sizes = [size for line, _ in lines.values() for size in line]
    log_axis(ax, min(sizes) / 1.5, max(sizes) * 1.5)
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:,g}")
    ax.yaxis.set_minor_formatter("")
    return picture(figure, f"Latency of an all-reduce over its size. {'; '.join(words)}.")


# -- ranks in time -------------------------------------------------------------------------------

# call -> what it is, and how it looks
KINDS = {
    "send": ("message", "cached"),
    "receive": ("message", "cached"),
    "all_reduce": ("sum", "prefill"),
    "all_gather": ("sum", "prefill"),
    "broadcast": ("choice", "waiting"),
}


NUM_CALLS = 16  # that fit side by side


def ranks_in_time(step: Mapping[int, Sequence[tuple[str, float, float]]], title: str) -> Picture:
    """Draw what each rank did in one step: in total, and in its first calls.

    A call waits for the other ranks; between calls a rank computes. Times are seconds since the
    leader began to send.
    """
    figure, (above, below) = new_axes(2.3 + 0.7 * len(step), rows=2)
    words = []
    for rank, calls in step.items():
        spent = _milliseconds(calls)
        left = 0.0
        for kind, state in (("message", "cached"), ("computes", "decode"), *WAITS):
            above.barh(rank, spent[kind], 0.7, left=left, **fill(state, dotted=True))
            left += spent[kind]
        num_sums = sum(KINDS[name][0] == "sum" for name, _, _ in calls)
        took = ", ".join(f"{kind} {value:.2f} ms" for kind, value in spent.items())
        words.append(f"rank {rank}: {num_sums} sums and gathers; {took}")
        _draw_calls(below, rank, calls[:NUM_CALLS])
    longest = max(1e3 * calls[-1][2] for calls in step.values())
    num_calls = len(next(iter(step.values())))
    shown = f"The first {NUM_CALLS} of {num_calls} calls" if num_calls > NUM_CALLS else "In order"
    label(above, f"{title}: {longest:,.1f} ms in all", "milliseconds, added up by kind", "")
    label(below, shown, "milliseconds since the leader began to send", "")
    for ax in (above, below):
        ax.set_yticks(list(step), [f"rank {n}" + (" (leads)" if n == 0 else "") for n in step])
        ax.set_ylim(max(step) + 0.5, -0.5)
    keys = [key("cached", "message", **DOTS), key("decode", "computes")]
    legend(above, [*keys, key("prefill", "sum or gather"), key("waiting", "sampled tokens")])
    return picture(figure, f"Bars of one step, {longest:.1f} ms. {'; '.join(words)}.")


WAITS = (("sum", "prefill"), ("choice", "waiting"))


def _milliseconds(calls: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    """Return a rank's milliseconds by kind, starting with its message."""
    spent = dict.fromkeys(("message", "computes", "sum", "choice"), 0.0)
    before = calls[0][1]
    for name, start, end in calls:
        spent["computes"] += 1e3 * (start - before)
        spent[KINDS[name][0]] += 1e3 * (end - start)
        before = end
    return spent


def _draw_calls(ax: Axes, rank: int, calls: Sequence[tuple[str, float, float]]) -> None:
    begin = 1e3 * calls[0][1]
    ax.barh(rank, 1e3 * calls[-1][2] - begin, 0.7, left=begin, **fill("decode"))
    for name, start, end in calls:
        ax.barh(
            rank, 1e3 * (end - start), 0.7, left=1e3 * start, **fill(KINDS[name][1], dotted=True)
        )
