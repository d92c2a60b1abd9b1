"""The pictures of chapter 08: what launching costs, a tape and its memory, buckets, padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from course.figures.common import (
    GRID,
    INK,
    Picture,
    dots,
    fill,
    key,
    label,
    legend,
    log_axis,
    look,
    mark,
    new_axes,
    picture,
    write,
)
from course.figures.common import speeds as speeds
from course.figures.common import this_machine as this_machine
from course.figures.ladder import find as find
from course.figures.ladder import ladder as ladder
from course.figures.ladder import provenance as provenance
from course.figures.ladder import recorded as recorded
from course.figures.ladder import timelines as timelines
from minivllm.cuda_graphs import Call, tensors_in
from minivllm.pictures.figures import PALETTE


def launches_and_work(machines: Mapping[str, tuple[float, float]], title: str) -> Picture:
    """For each machine the milliseconds to launch a step's operations one by one, and those to
    read weights and cache once."""
    figure, ax = new_axes(1.5 + 0.6 * len(machines))
    for place, (launching, reading) in enumerate(machines.values()):
        dots(ax, place - 0.17, {"prefill": launching}, [f"{launching:.3g} ms"])
        dots(ax, place + 0.17, {"decode": reading}, [f"{reading:.3g} ms"])
    label(ax, title, "milliseconds per step (log scale)", "")
    values = [value for pair in machines.values() for value in pair]
    log_axis(ax, min(values) / 3, max(values) * 4)
    ax.set_yticks(range(len(machines)), machines)
    ax.set_ylim(len(machines) - 0.5, -0.5)
    host = mark("host: launch everything", **look("prefill"))
    legend(ax, [host, mark("memory: read it once", **look("decode"))])
    parts = [f"{name}: launch {a:.3g} ms, read {b:.3g} ms" for name, (a, b) in machines.items()]
    return picture(figure, f"Dots at the milliseconds per step. {'; '.join(parts)}.")


def tape(calls: Sequence[Call], names: Mapping[str, Any], title: str) -> Picture:
    """Which memory each call of a tape reads (r) and writes (w).

    `names` are those of tensors that exist outside of the tape; all other memory is the tape's
    own and gets numbers.
    """
    columns = {_memory(tensor): name for name, tensor in names.items()}
    for call in calls:
        for tensor in (*tensors_in((call.args, call.kwargs)), *call.results):
            columns.setdefault(_memory(tensor), f"tape {len(columns) - len(names) + 1}")
    figure, ax = new_axes(1.2 + 0.36 * len(calls))
    places = {memory: place for place, memory in enumerate(columns)}
    words = []
    for row, call in enumerate(calls):
        name = call.operation.overloadpacket.__name__
        marks = _marks(call, places)
        for place, use in marks.items():
            state = {"r": "free", "view": "waiting"}.get(use, "decode")
            ax.barh(row, 0.8, 0.7, left=place - 0.4, **fill(state))
            write(ax, place, row, use)
        shown = ", ".join(f"{use} {list(columns.values())[p]}" for p, use in marks.items())
        words.append(f"{name}: {shown}")
    label(ax, title, "memory, by address", "call")
    ax.set_xlim(-0.6, len(columns) - 0.4)
    ax.set_ylim(len(calls) - 0.4, -0.6)
    ax.set_xticks(range(len(columns)), columns.values())
    ax.set_yticks(range(len(calls)), [c.operation.overloadpacket.__name__ for c in calls])
    ax.grid(axis="x", color=GRID, linewidth=0.6)
    legend(
        ax, [key("free", "r: reads"), key("decode", "w: writes"), key("waiting", "view: no work")]
    )
    return picture(figure, f"Calls of a tape and the memory they use. {'; '.join(words)}.")


def _memory(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


def computes(call: Call) -> bool:
    """Whether a call does any work: it writes somewhere, and does not only view its arguments."""
    name = call.operation.overloadpacket.__name__
    arguments = {_memory(tensor) for tensor in tensors_in((call.args, call.kwargs))}
    makes_memory = any(_memory(tensor) not in arguments for tensor in call.results)
    writes = call.operation._schema.is_mutable or makes_memory
    return writes and not name.startswith("empty")  # memory alone is not work


def _marks(call: Call, places: Mapping[int, int]) -> dict[int, str]:
    """What the call does with which memory."""
    if not computes(call):
        return {places[_memory(tensor)]: "view" for tensor in call.results}
    marks = {places[_memory(tensor)]: "r" for tensor in tensors_in((call.args, call.kwargs))}
    for tensor in call.results:
        place = places[_memory(tensor)]
        is_copy = call.operation.overloadpacket.__name__ == "copy_"
        marks[place] = "r w" if place in marks and not is_copy else "w"
    return marks


def buckets(bucket_of: Mapping[int, int | None], title: str) -> Picture:
    """The bucket that each batch size rides in, and the rows of padding above it; a batch size
    without a bucket has a cross."""
    figure, ax = new_axes(3.0)
    sizes = list(bucket_of)
    known = {size: bucket for size, bucket in bucket_of.items() if bucket is not None}
    ax.bar(sizes, sizes, 1.0, color=PALETTE["decode"], linewidth=0)
    padding = [bucket - size for size, bucket in known.items()]
    paint = {"facecolor": PALETTE["free"], "edgecolor": PALETTE["grid"], "hatch": "xxxx"}
    ax.bar(list(known), padding, 1.0, bottom=list(known), linewidth=0, **paint)
    missing = [size for size in sizes if size not in known]
    style: dict[str, Any] = {"marker": "x", "color": PALETTE["preempted"], "linestyle": "none"}
    ax.plot(missing, missing, **style)
    share = sum(padding) / sum(known.values())
    label(ax, f"{title}: {share:.1%} of the rows computed are padding", "requests", "rows")
    keys = [
        key("decode", "real rows", edgecolor=PALETTE["decode"]),
        key("free", "padding", **paint),
    ]
    if missing:
        keys += ax.plot([], [], label="no graph", **style)
    legend(ax, keys)
    worst = max(known, key=lambda size: (known[size] - size) / known[size])
    alt = f"Rows over batch sizes {sizes[0]} to {sizes[-1]}. {share:.1%} padding in all; most at"
    lost = f" Without a graph: {', '.join(map(str, missing))}." if missing else ""
    return picture(figure, f"{alt} {worst} requests in a bucket of {known[worst]}.{lost}")


def rides(steps: Sequence[tuple[int, int | None]], title: str) -> Picture:
    """The steps of a run, each as (requests, bucket): real rows, padding above them, and grey the
    steps that no graph can serve."""
    figure, ax = new_axes(2.9)
    for x, (num_rows, bucket) in enumerate(steps):
        ax.bar(x, num_rows, 0.8, **fill("waiting" if bucket is None else "decode"))
        if bucket is not None and bucket > num_rows:
            ax.bar(x, bucket - num_rows, 0.8, bottom=num_rows, **(fill("free") | {"hatch": "xxxx"}))
    replayed = [bucket for _, bucket in steps if bucket is not None]
    label(ax, f"{title}: {len(replayed)} of {len(steps)} steps are replayed", "step", "requests")
    ax.set_ylim(bottom=0)
    ax.set_yticks(range(1 + max(bucket or num_rows for num_rows, bucket in steps)))
    keys = [key("decode", "replayed"), key("free", "padding", hatch="xxxx")]
    legend(ax, [*keys, key("waiting", "no graph: a prompt is in it")])
    alt = f"{len(steps)} steps of a run, {len(replayed)} of them replayed from a graph. Requests"
    return picture(
        figure, f"{alt} and bucket of each: {', '.join(f'{n} in {b}' for n, b in steps)}."
    )


def places(
    steps: Mapping[str, tuple[Sequence[int], Sequence[int], int]], padding_row: int
) -> Picture:
    """The places of a bucket after some steps, each with its row and start.

    A step is (row_ids, starts, real rows). A place behind the real rows must have the padding
    row; one that has not is marked.
    """
    figure, ax = new_axes(1.4 + 0.5 * len(steps))
    words = []
    for y, (name, (rows, starts, num_real)) in enumerate(steps.items()):
        for x, (row, start) in enumerate(zip(rows, starts, strict=True)):
            stale = x >= num_real and row != padding_row
            state = "decode" if x < num_real else "preempted" if stale else "free"
            ax.barh(y, 0.9, 0.8, left=x - 0.45, **fill(state))
            told = "padding row" if row == padding_row else f"row {row}"
            text = f"{told}, position {start}" + ("\n(stale)" if stale else "")
            color = "white" if stale else INK
            ax.text(x, y, text, color=color, fontsize=8, ha="center", va="center")
        shown = [f"{row} at {start}" for row, start in zip(rows, starts, strict=True)]
        words.append(f"{name}: {', '.join(shown)}, {num_real} of them real")
    label(ax, "Where the graph reads its rows", "place in the bucket", "")
    ax.set_xlim(-0.55, len(rows) - 0.45)
    ax.set_ylim(len(steps) - 0.4, -0.6)
    ax.set_xticks(range(len(rows)))
    ax.set_yticks(range(len(steps)), steps)
    keys = [key("decode", "real row"), key("free", "padding")]
    is_stale = any("stale" in text.get_text() for text in ax.texts)
    legend(ax, keys + ([key("preempted", "stale: left by the step before")] if is_stale else []))
    alt = f"The places of a bucket; row {padding_row} is reserved for padding."
    return picture(figure, f"{alt} {'; '.join(words)}.")
