"""The pictures of chapter 06: rows, steps, slots, attention in blocks, the cache of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from course.figures.common import (
    GRID,
    INK,
    Picture,
    curves,
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
from course.figures.common import timeline as timeline
from minivllm.pictures.figures import PALETTE, halo
from minivllm.pictures.timeline import count

# Requests of one picture: a colour each, and a letter or a name next to it.
STATES = ("decode", "waiting", "cached", "prefill")

# -- sizes -------------------------------------------------------------------------------------


def growth(bytes_per_token: Mapping[str, int], most_tokens: int) -> Picture:
    """The KV cache of one request against its length, a line for each model."""
    figure, ax = new_axes(3.2)
    styles = ("-", "--", "-.", ":")
    parts = []
    for (name, size), style in zip(bytes_per_token.items(), styles, strict=False):
        top = size * most_tokens / 2**30
        ax.plot([0, most_tokens], [0, top], style, color=INK, linewidth=1.6)
        text = f" {name}: {size / 1024:,.0f} KiB a token"
        # Lines that end close together: the smaller one's text stands below.
        others = [s * most_tokens / 2**30 for s in bytes_per_token.values()]
        near = any(0 < other - top < 0.05 * max(others) for other in others)
        ax.text(most_tokens, top, text, fontsize=8, color=INK, va="top" if near else "bottom")
        parts.append(f"{name} {size / 1024:,.0f} KiB a token, {top:.2g} GiB in all")
    label(ax, "What one request keeps", "tokens of the request", "KV cache (GiB)")
    ax.set_xlim(0, most_tokens * 1.5)
    ax.set_ylim(bottom=0)
    ticks = [most_tokens * part // 4 for part in range(5)]
    ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    ax.grid(axis="y", color=GRID, linewidth=0.6)
    return picture(
        figure, f"Lines of KV cache over tokens, up to {most_tokens:,} tokens: {'; '.join(parts)}."
    )


# -- rows and steps ----------------------------------------------------------------------------


def block_tables(rows: Any, before: Any) -> Picture:
    """The block tables on the device, a row each; marked is what differs from `before`."""
    table = rows.block_table.tolist()
    old = before.tolist()
    names = {row: name for name, row in rows.row_of.items()}
    names[rows.padding_row] = "padding"
    figure, ax = new_axes(1.2 + 0.34 * len(table))
    changes = []
    for row, entries in enumerate(table):
        for index, block in enumerate(entries):
            is_new = block != old[row][index]
            known = rows.num_blocks[row] if row < len(rows.num_blocks) else len(entries)
            state = "cached" if is_new else "decode" if index < known else "free"
            ax.barh(row, 0.94, 0.84, left=index - 0.47, **(fill(state) | {"edgecolor": GRID}))
            write(ax, index, row, str(block), weight="bold" if is_new else "normal")
            if is_new:
                changes.append(f"row {row}, entry {index}: {block}")
    label(ax, f"{count(len(changes), 'entry')} written in this step", "entry of the table", "")
    ax.set_xticks(range(len(table[0])))
    ax.set_yticks(
        range(len(table)), [f"row {r}: {names.get(r, 'free')}" for r in range(len(table))]
    )
    ax.set_ylim(len(table) - 0.45, -0.55)
    legend(
        ax,
        [
            key("cached", "written now (bold)"),
            key("decode", "there already"),
            key("free", "unused"),
        ],
    )
    return picture(figure, f"Block tables of {len(table)} rows. Written: {'; '.join(changes)}.")


def step(lines: Mapping[str, Sequence[Any]], owners: Sequence[int], title: str) -> Picture:
    """The tokens of a step, a column each, and one line for each thing to know of them.

    Chunks differ in colour, and a thick line stands between them.
    """
    figure, ax = new_axes(1.2 + 0.33 * len(lines))
    words = []
    for y, (name, values) in enumerate(lines.items()):
        for x, value in enumerate(values):
            look = fill(STATES[owners[x] % 3]) | {"edgecolor": GRID}
            ax.barh(y, 1, 0.86, left=x - 0.5, **look)
            write(ax, x, y, str(value))
        words.append(f"{name}: {', '.join(map(str, values))}")
    for x in range(1, len(owners)):
        if owners[x] != owners[x - 1]:
            ax.axvline(x - 0.5, color=INK, linewidth=2)
    label(ax, title, "place in the step", "")
    ax.set_xlim(-0.55, len(owners) - 0.45)
    ax.set_ylim(len(lines) - 0.45, -0.55)
    ax.set_xticks(range(len(owners)))
    ax.set_yticks(range(len(lines)), lines)
    chunks = sorted(set(owners))
    legend(ax, [key(STATES[chunk % 3], f"token of chunk {chunk}") for chunk in chunks])
    return picture(figure, f"Table of the {len(owners)} tokens of a step. {'; '.join(words)}.")


def slots(
    places: Mapping[str, tuple[Sequence[int], Sequence[int]]], num_blocks: int, block_size: int
) -> Picture:
    """The slots of the cache in their blocks, each with its request and position.

    `places`: for each request its (positions, slots). A slot of two owners is marked.
    """
    figure, ax = new_axes(1.45 + 0.3 * num_blocks)
    for slot in range(num_blocks * block_size):
        block, offset = divmod(slot, block_size)
        look = fill("free") | {"edgecolor": GRID}
        ax.barh(block, 0.94, 0.84, left=offset - 0.47, **look)
    owners: dict[int, list[str]] = {}
    words = []
    for name, (positions, where) in places.items():
        for position, slot in zip(positions, where, strict=True):
            owners.setdefault(slot, []).append(f"{name} {position}")
        words.append(f"{name} positions {list(positions)} in slots {list(where)}")
    names = list(places)
    for slot, tokens in owners.items():
        block, offset = divmod(slot, block_size)
        is_double = len(tokens) > 1
        state = "preempted" if is_double else STATES[names.index(tokens[0].rsplit(" ", 1)[0]) % 3]
        ax.barh(block, 0.94, 0.84, left=offset - 0.47, **(fill(state) | {"edgecolor": INK}))
        style: dict[str, Any] = {"fontsize": 8, "ha": "center", "va": "center_baseline"}
        color = "white" if is_double else INK
        ax.text(offset, block, " and ".join(tokens), color=color, **style)
    double = [slot for slot, tokens in owners.items() if len(tokens) > 1]
    title = "Each token has a slot of its own"
    if double:
        title = f"{count(len(double), 'slot')} with two owners"
    label(ax, title, "offset in the block", "block")
    ax.set_xticks(range(block_size))
    ax.set_yticks(range(num_blocks))
    ax.set_ylim(num_blocks - 0.45, -0.55)
    keys = [key(STATES[n % 3], f"{name} and its position") for n, name in enumerate(names)]
    keys.append(key("free", "empty"))
    legend(ax, keys + ([key("preempted", "two tokens in one slot")] if double else []))
    alt = f"Grid of {num_blocks} blocks of {block_size}. {title}. {'; '.join(words)}."
    return picture(figure, alt)


# -- attention and logits ------------------------------------------------------------------------


def weights(shares: Sequence[Sequence[float]], seq_lens: Sequence[int]) -> Picture:
    """The weight that the query of each request gives each position, and what is masked."""
    figure, ax = new_axes(1.2 + 0.4 * len(shares))
    words = []
    for y, (row, length) in enumerate(zip(shares, seq_lens, strict=True)):
        for x, share in enumerate(row):
            is_seen = x < length
            look = fill("decode" if is_seen else "free") | {"edgecolor": GRID}
            if not is_seen:
                look["hatch"] = "xxx"
            ax.barh(y, 0.96, 0.86, left=x - 0.48, **look)
            if is_seen or share > 0.004:
                write(ax, x, y, f"{share:.2f}", path_effects=halo())
        words.append(f"request {y} sees {length}: {', '.join(f'{w:.2f}' for w in row[:length])}")
    label(ax, "Weights of one query each", "position", "request")
    ax.set_xlim(-0.55, len(shares[0]) - 0.45)
    ax.set_ylim(len(shares) - 0.45, -0.55)
    ax.set_xticks(range(len(shares[0])))
    ax.set_yticks(range(len(shares)))
    legend(ax, [key("decode", "seen (weight)"), key("free", "masked: weight 0", hatch="xxx")])
    return picture(figure, f"Grid of attention weights. {'; '.join(words)}.")


def differences(found: Mapping[str, float], margin: float, title: str) -> Picture:
    """The largest difference of a logit from those of one prefill, for each way to compute them.

    `margin` is the difference that would change the most probable token.
    """
    figure, ax = new_axes(1.6 + 0.36 * len(found))
    smallest = min([value for value in found.values() if value], default=margin)
    for y, value in enumerate(found.values()):
        if value:
            dots(ax, y, {"decode": value}, [f"{value:.1e}"])
        else:
            write(ax, smallest / 20, y, "0: the same in every bit (a log axis has no 0)", ha="left")
    line = {"color": PALETTE["preempted"], "linestyle": "--", "linewidth": 1.5}
    ax.axvline(margin, **line)
    times_less = margin / max(smallest, *found.values())
    words = f"{title}: the lead is {times_less:,.0f} times the largest difference"
    label(ax, words, "largest difference of any logit (log scale)", "")
    log_axis(ax, smallest / 30, margin * 20)
    ax.set_ylim(len(found) - 0.5, -0.5)
    ax.set_yticks(range(len(found)), list(found))
    lead = mark(f"lead of the most probable token: {margin:.2g}", **line)
    legend(ax, [mark("largest difference", **look("decode")), lead])
    parts = [f"{name} {value:.1e}" for name, value in found.items()]
    return picture(
        figure,
        f"Dots at the largest difference of a logit: {', '.join(parts)}. The most probable token"
        f" leads by {margin:.2g}.",
    )


# -- runs ------------------------------------------------------------------------------------------


def sent(numbers: Mapping[str, Sequence[int]], title: str) -> Picture:
    """Numbers that the host sends to the device in each step, for each way of doing it."""
    figure, ax = new_axes(2.8)
    curves(ax, {name: (range(len(values)), values) for name, values in numbers.items()})
    parts = [
        f"{name}: {sum(values):,} in all, at most {max(values):,} a step"
        for name, values in numbers.items()
    ]
    label(ax, title, "step", "numbers sent (log scale from 1 on)")
    ax.set_yscale("symlog")
    ax.set_ylim(-0.5, 8 * max(max(values) for values in numbers.values()))
    return picture(figure, f"{title}. {'; '.join(parts)}.")
