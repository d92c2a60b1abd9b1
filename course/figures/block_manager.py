"""The figures of chapter 03: memory without blocks, blocks and their owners, runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from course.figures.common import (
    DOTS,
    GRID,
    INK,
    Picture,
    fill,
    key,
    label,
    legend,
    new_axes,
    picture,
    write,
)
from course.figures.common import grid as grid
from course.figures.common import speeds as speeds
from course.figures.common import this_machine as this_machine
from course.figures.common import timeline as timeline
from minivllm.pictures.figures import PALETTE, shade
from minivllm.pictures.timeline import Row, block_owners, count, num_blocks_in_use, request_rows
from minivllm.trace import StepTrace, Trace

# -- memory without blocks -----------------------------------------------------------------


def reservations(used: Sequence[int], reserved: int) -> Picture:
    """One bar per request: the `reserved` slots, and how many of them are ever `used`."""
    figure, ax = new_axes(1.2 + 0.3 * len(used))
    for y, tokens in enumerate(used):
        ax.barh(y, reserved, 0.7, **fill("free"))
        ax.barh(y, tokens, 0.7, **fill("decode"))
        write(ax, tokens + reserved / 100, y, f"{tokens} used", ha="left")
    share = sum(used) / (reserved * len(used))
    title = f"{count(len(used), 'request')} reserve {reserved * len(used):,} slots"
    label(ax, f"{title} and use {share:.1%} of them", "slots (one token each)", "request")
    ax.set_ylim(len(used) - 0.5, -0.5)
    ax.set_yticks(range(len(used)))
    legend(ax, [key("decode", "used"), key("free", "reserved, never used")])
    alt = f"Bar chart. {title}, {reserved:,} each, and use {share:.1%}: the bars are nearly empty."
    return picture(figure, alt)


def memory_strip(spans: Mapping[str, tuple[int, int]], total: int, wanted: int) -> Picture:
    """Contiguous memory of `total` slots: the (start, size) of each request, and the gaps."""
    figure, ax = new_axes(1.7)
    gaps = []
    end = 0
    for start, size in [*sorted(spans.values()), (total, 0)]:
        if start > end:
            gaps.append((end, start - end))
        ax.broken_barh([(start, size)], (0, 1), **fill("decode"))
        if size > total / 40:
            write(ax, start + size / 2, 0.5, str(size))
        end = start + size
    for start, size in gaps:
        ax.broken_barh([(start, size)], (0, 1), **fill("free"))
        if size > total / 40:
            write(ax, start + size / 2, 0.5, str(size), style="italic", weight="bold")
    free = sum(size for _, size in gaps)
    largest = max([size for _, size in gaps], default=0)
    title = f"{free} slots are free, the largest gap has {largest}: a request for {wanted} waits"
    label(ax, title, "slot of the memory", "")
    ax.set_xlim(0, total)
    ax.set_yticks([])
    legend(ax, [key("decode", "held (tokens)"), key("free", "gap (slots, bold)")])
    alt = f"A strip of {total} slots with {count(len(spans), 'request')} in it and gaps between."
    return picture(figure, f"{alt} {title}.")


# -- blocks --------------------------------------------------------------------------------


def slots(num_blocks: Mapping[int, int], block_size: int) -> Picture:
    """For each number of tokens, its blocks: slots filled, and slots left empty."""
    figure, ax = new_axes(1.1 + 0.34 * len(num_blocks))
    for y, (tokens, blocks) in enumerate(num_blocks.items()):
        for slot in range(max(blocks * block_size, tokens)):
            state = "decode" if slot < tokens else "free"
            ax.barh(y, 0.86, 0.6, left=slot, **(fill(state) | {"edgecolor": GRID}))
        for block in range(blocks):
            frame = {"fill": False, "edgecolor": INK, "linewidth": 1.6}
            ax.barh(y, block_size - 0.1, 0.76, left=block * block_size - 0.02, **frame)
        write(ax, max(blocks, 0) * block_size + 0.5, y, count(blocks, "block"), ha="left")
    label(ax, "A block is needed when a token starts one", "slot (one token)", "tokens")
    widest = max(max(blocks * block_size, tokens) for tokens, blocks in num_blocks.items())
    ax.set_xlim(-0.3, widest * 1.12)
    ax.set_xticks(range(0, widest + 1, block_size))
    ax.set_ylim(len(num_blocks) - 0.5, -0.5)
    ax.set_yticks(range(len(num_blocks)), [str(tokens) for tokens in num_blocks])
    frame = key("free", "block", linewidth=2)
    legend(ax, [key("decode", "token"), key("free", "empty slot"), frame])
    parts = [f"{tokens} tokens have {count(n, 'block')}" for tokens, n in num_blocks.items()]
    return picture(figure, f"Rows of slots in blocks of {block_size}: {'; '.join(parts)}.")


def ownership(tables: Mapping[str, Sequence[int]], ref_counts: Sequence[int]) -> Picture:
    """The tables that contain each block, and its position there; below, each block's count."""
    figure, ax = new_axes(1.3 + 0.42 * (len(tables) + 1))
    for y, table in enumerate(tables.values()):
        for place, block in enumerate(table):
            ax.barh(y, 0.86, 0.8, left=block - 0.43, **fill("decode"))
            write(ax, block, y, str(place))
    for block, owners in enumerate(ref_counts):
        frame = {"linewidth": 2} if owners > 1 else {}  # as in the grid of a run
        style = fill("decode" if owners else "free") | frame
        ax.barh(len(tables), 0.86, 0.8, left=block - 0.43, **style)
        write(ax, block, len(tables), str(owners), weight="bold")
    label(ax, "Each count is the number of tables above it", "block", "")
    ax.set_xlim(-0.6, len(ref_counts) - 0.4)
    ax.set_xticks(range(len(ref_counts)))
    ax.set_ylim(len(tables) + 0.5, -0.5)
    ax.set_yticks(range(len(tables) + 1), [*tables, "owners"])
    keys = [key("decode", "owned (place in the table)"), key("decode", "shared", linewidth=2)]
    legend(ax, [*keys, key("free", "free")])
    parts = [f"{name} has blocks {list(table)}" for name, table in tables.items()]
    return picture(figure, f"Grid of blocks and owners. {'; '.join(parts)}. Counts: {ref_counts}.")


def trade_off(wasted: Mapping[int, float], entries: Mapping[int, float]) -> Picture:
    """By block size: the share of empty slots, and the entries of a block table."""
    figure, axes = new_axes(2.7, columns=2)
    sizes = [str(size) for size in wasted]
    for ax, values, state, unit in (
        (axes[0], [100 * share for share in wasted.values()], "free", "empty slots (%)"),
        (axes[1], list(entries.values()), "waiting", "table entries per request"),
    ):
        bars = ax.bar(sizes, values, **fill(state))
        ax.bar_label(bars, [f"{value:.3g}" for value in values], fontsize=8)
        label(ax, "Waste" if ax is axes[0] else "Bookkeeping", "block size (tokens)", unit)
    ends = [(size, wasted[size], entries[size]) for size in (min(wasted), max(wasted))]
    parts = [f"blocks of {s}: {w:.0%} empty, {e:.3g} table entries" for s, w, e in ends]
    return picture(figure, f"Two bar charts over the block size. {'; '.join(parts)}.")


# -- runs ---------------------------------------------------------------------------------------


# How followed requests look: the first one plain, the others with lines.
FOLLOWED: tuple[dict[str, Any], ...] = tuple(
    fill("decode") | {"hatch": hatch, "zorder": 2} for hatch in (None, "//////", "......")
)


def block_history(trace: Trace, follow: Sequence[str]) -> Picture:
    """Every block (upwards) in every step (to the right): free, cached, or in use.

    The blocks of up to three requests, by the labels in `follow`, stand out from the others.
    """
    rows = request_rows(trace)
    figure, ax = new_axes(4.2)
    looks = dict(zip(follow, FOLLOWED, strict=False))
    others = {"facecolor": shade("waiting", 2), "edgecolor": GRID, "linewidth": 0.3}
    styles = {"": fill("cached", dotted=True) | {"linewidth": 0}} | looks
    for block, start, end, owner in _spans(trace, rows):
        ax.broken_barh([(start, end - start)], (block, 1), **styles.get(owner, others))
    most = max(num_blocks_in_use(step) for step in trace.steps)
    title = f"{count(len(rows), 'request')} use at most {most} of {trace.num_blocks} blocks"
    label(ax, title, "step", f"block (of {trace.block_size} tokens)")
    ax.set(xlim=(0, len(trace.steps)), ylim=(0, trace.num_blocks))
    keys = [key("decode", f"request {name}", **look) for name, look in looks.items()]
    keys += [key("waiting", "other requests", **others), key("free", "free")]
    if any(step.cached_blocks for step in trace.steps):
        keys.append(key("cached", "cached", **DOTS))
    legend(ax, keys)
    parts = [f"request {name} uses {count(n, 'block')}" for name, n in _used(trace, looks).items()]
    alt = f"Map of {trace.num_blocks} blocks over {count(len(trace.steps), 'step')}. {title}"
    return picture(figure, f"{alt}; {', '.join(parts)}.")


def _owners(trace: Trace, rows: Mapping[str, Row], step: StepTrace) -> dict[int, str]:
    """The label of each used block's first owner; "" for a cached block."""
    owners = dict.fromkeys(step.cached_blocks, "")
    used = block_owners(trace, step, dict(rows))
    return owners | {block: own[0][0] for block, own in used.items()}


def _spans(trace: Trace, rows: Mapping[str, Row]) -> Iterator[tuple[int, int, int, str]]:
    """The steps in which a block's owner stays the same: (block, start, end, owner)."""
    steps = [_owners(trace, rows, step) for step in trace.steps]
    for block in range(trace.num_blocks):
        start = 0
        for owner, same in groupby(owners.get(block) for owners in steps):
            end = start + len(list(same))
            if owner is not None:
                yield block, start, end, owner
            start = end


def _used(trace: Trace, names: Iterable[str]) -> dict[str, int]:
    """How many different blocks each of these requests used during the run."""
    ids = {row.label: request_id for request_id, row in request_rows(trace).items()}
    tables = {
        name: [step.block_tables.get(ids[name], ()) for step in trace.steps] for name in names
    }
    return {name: len(set().union(*used)) for name, used in tables.items()}


def at_once(traces: Mapping[str, Trace]) -> Picture:
    """How many requests run in each step, one line for each policy."""
    figure, ax = new_axes(2.7)
    parts = []
    for (name, trace), look in zip(traces.items(), ("--", "-"), strict=True):
        running = [len(step.block_tables) for step in trace.steps]
        mean = sum(running) / len(running)
        parts.append(f"{name}: {mean:.1f} at once, {count(len(running), 'step')}")
        style = {"color": INK if look == "--" else PALETTE["prefill"], "linestyle": look}
        ax.step(range(len(running)), running, where="post", label=parts[-1], **style)
    label(ax, "Requests running at the same time", "step", "requests")
    ax.set_ylim(0, None)
    ax.legend(fontsize=8, frameon=False)
    return picture(figure, f"Lines of the running requests over the steps. {'; '.join(parts)}.")


def free_blocks(traces: Mapping[str, Trace], reserve: Mapping[str, int]) -> Picture:
    """Free blocks after each step of several runs, the reserve, and every preemption."""
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
