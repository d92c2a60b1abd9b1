"""The pictures of chapter 04: keys, prefixes found, the tree of known blocks, runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from course.figures.common import (
    INK,
    Picture,
    fill,
    key,
    label,
    legend,
    new_axes,
    picture,
    source,
    write,
)
from course.figures.common import speeds as speeds
from course.figures.common import this_machine as this_machine
from course.figures.common import timeline as timeline
from minivllm.pictures.figures import halo
from minivllm.pictures.timeline import count
from minivllm.prefix_cache import CachedBlock

# -- tokens: found or computed ---------------------------------------------------------------


def reuse(rows: Mapping[str, tuple[int, int]], title: str) -> Picture:
    """One bar a row: the (known, new) tokens of a prompt, or those (found, computed) of a run."""
    figure, ax = new_axes(1.3 + 0.27 * len(rows))
    widest = max(known + new for known, new in rows.values())
    for y, (known, new) in enumerate(rows.values()):
        for left, tokens, state in ((0, known, "cached"), (known, new, "prefill")):
            ax.barh(y, tokens, 0.7, left=left, **fill(state))
            if tokens > widest / 25:
                write(ax, left + tokens / 2, y, str(tokens), path_effects=halo())
    share = sum(known for known, _ in rows.values()) / sum(map(sum, rows.values()))
    label(ax, f"{title}: {share:.0%} of the tokens", "tokens of the prompt", "")
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_yticks(range(len(rows)), list(rows))
    legend(ax, [key("cached", "computed before"), key("prefill", "computed now")])
    parts = [f"{name}: {known} before, {new} now" for name, (known, new) in rows.items()]
    return picture(figure, f"Bars. {title}: {share:.0%} of the tokens. {'; '.join(parts)}.")


def matches(rows: Mapping[str, tuple[int, int]], block_size: int, title: str) -> Picture:
    """For each row the slots of its (number of tokens, tokens found): found or still to compute."""
    figure, ax = new_axes(1.2 + 0.36 * len(rows))
    for y, (num_tokens, num_found) in enumerate(rows.values()):
        for slot in range(num_tokens):
            state = "cached" if slot < num_found else "prefill"
            ax.barh(y, 0.86, 0.6, left=slot, **fill(state))
        for left in range(0, num_found, block_size):
            frame: dict[str, Any] = {"fill": False, "edgecolor": INK, "linewidth": 1.8}
            ax.barh(y, block_size - 0.1, 0.78, left=left - 0.02, **frame)
        write(ax, num_tokens + 0.5, y, f"{num_found} found", ha="left")
    longest = max(num_tokens for num_tokens, _ in rows.values())
    label(ax, title, "position (tokens)", "")
    ax.set_xlim(-0.4, longest * 1.16)
    ax.set_xticks(range(0, longest + 1, block_size))
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_yticks(range(len(rows)), list(rows))
    found = key("cached", "found, in whole blocks (framed)", linewidth=1.8)
    legend(ax, [found, key("prefill", "to compute")])
    parts = [f"{name}: {found} of {total} found" for name, (total, found) in rows.items()]
    return picture(figure, f"Rows of slots in blocks of {block_size}. {title}. {'; '.join(parts)}.")


# -- keys --------------------------------------------------------------------------------------


def chains(rows: Mapping[str, Sequence[tuple[str, int]]]) -> Picture:
    """Each row's blocks as (text, key), from left to right; a key that two rows share is gold."""
    figure, ax = new_axes(1.2 + 0.62 * len(rows))
    rows_of: dict[int, set[str]] = {}
    for name, blocks in rows.items():
        for _, number in blocks:
            rows_of.setdefault(number, set()).add(name)
    for y, blocks in enumerate(rows.values()):
        for x, (text, number) in enumerate(blocks):
            state = "cached" if len(rows_of[number]) > 1 else "free"
            ax.barh(y, 0.84, 0.72, left=x, **(fill(state) | {"linewidth": 1.0}))
            write(ax, x + 0.42, y - 0.15, text)
            write(ax, x + 0.42, y + 0.17, f"key …{number & 0xFFFF:04x}", weight="bold")
            if x:
                arrow = {"arrowstyle": "->", "color": INK}
                ax.annotate("", (x, y), xytext=(x - 0.16, y), arrowprops=arrow)
    label(ax, "Blocks and their keys, each made of all tokens up to its end", "block", "")
    ax.set_xlim(-0.1, max(map(len, rows.values())))
    ax.set_xticks([x + 0.42 for x in range(max(map(len, rows.values())))], _numbers(rows))
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_yticks(range(len(rows)), list(rows))
    legend(ax, [key("cached", "a key that two rows have"), key("free", "a key of one row")])
    shared = sum(len(names) > 1 for names in rows_of.values())
    alt = f"{count(len(rows), 'chain')} of blocks with their keys; {count(shared, 'key')} shared."
    texts = [f"{name}: {' | '.join(text for text, _ in blocks)}" for name, blocks in rows.items()]
    return picture(figure, f"{alt} {'; '.join(texts)}.")


def _numbers(rows: Mapping[str, Sequence[Any]]) -> list[str]:
    return [str(x) for x in range(max(map(len, rows.values())))]


def collisions(shared: Mapping[int, int], num_blocks: int) -> Picture:
    """By the length of the keys in bits: how many blocks share their key with another one."""
    figure, ax = new_axes(2.5)
    bars = ax.bar([str(bits) for bits in shared], list(shared.values()), 0.6, **fill("preempted"))
    ax.bar_label(bars, [str(blocks) for blocks in shared.values()], fontsize=8)
    title = f"Keys cut short: {num_blocks:,} different blocks, and those with a taken key"
    label(ax, title, "length of a key (bits)", "blocks that share a key")
    ax.set_ylim(0, max(shared.values()) * 1.12 + 1)
    parts = [f"{bits} bits: {blocks}" for bits, blocks in shared.items()]
    return picture(figure, f"Bar chart. {title}. {', '.join(parts)}.")


# -- the tree ----------------------------------------------------------------------------------


class Run(NamedTuple):
    """Neighbouring nodes of the tree that are drawn as one box, and its place."""

    nodes: list[CachedBlock]
    column: int
    row: int
    parent: tuple[int, int] | None  # column and row of the run before it
    state: str  # of the palette: decode (has owners), cached, or free (evicted)

    @property
    def tokens(self) -> list[int]:
        """The tokens of its blocks."""
        return [token for node in self.nodes for token in node.token_ids]

    @property
    def name(self) -> str:
        """Block 7, or: 11 blocks."""
        one = len(self.nodes) == 1
        return f"block {self.nodes[0].block_id}" if one else f"{len(self.nodes)} blocks"


def tree(
    nodes: Iterable[CachedBlock],
    owners: Sequence[int],
    text: Callable[[Sequence[int]], str],
    joined: bool = False,
) -> Picture:
    """The tree of known blocks, beginnings at the left. `owners` counts each block's owners.

    `text` makes words of token ids. `joined`: blocks in a row without a branch are one box.
    An evicted block stays in the picture, dashed, as long as a known block comes after it.
    """
    known = list(nodes)
    runs = _runs(known, owners, joined)
    num_rows = max((run.row for run in runs), default=0) + 1
    num_columns = max((run.column for run in runs), default=0) + 1
    figure, ax = new_axes(0.8 + 0.62 * num_rows)
    letters = int(100 / num_columns) - 6
    for run in runs:
        gone = {"linestyle": "--"} if run.state == "free" else {}
        box = fill(run.state) | {"linewidth": 1.0} | gone
        ax.barh(run.row, 0.9, 0.74, left=run.column, **box)
        write(ax, run.column + 0.45, run.row - 0.16, _shortened(text(run.tokens), letters))
        told = {"decode": f"owners: {owners[run.nodes[0].block_id]}", "free": "evicted"}
        state = told.get(run.state, "cached")
        write(ax, run.column + 0.45, run.row + 0.18, f"{run.name}: {state}", weight="bold")
        if run.parent:
            column, row = run.parent
            line = {"color": INK, "linewidth": 1, "zorder": 0} | gone
            ax.plot([column + 0.9, run.column], [row, run.row], **line)
    num_blocks = count(len(known), "known block")
    num_ends = count(len(runs) - len({run.parent for run in runs if run.parent}), "end")
    title = f"The tree of {num_blocks}, with {num_ends}"
    label(ax, title, "from the beginning of the prompts to their ends", "")
    ax.set(xlim=(-0.05, num_columns - 0.05), ylim=(num_rows - 0.5, -0.5), xticks=[], yticks=[])
    ax.spines["left"].set_visible(False)
    keys = [key("decode", "has owners"), key("cached", "cached: no owner")]
    if any(run.state == "free" for run in runs):
        keys.append(key("free", "evicted: no match reaches the blocks after it", linestyle="--"))
    legend(ax, keys)
    states = {"free": "evicted, "}
    parts = [
        f"{run.name} ({states.get(run.state, '')}{_shortened(text(run.tokens), 40)})"
        for run in runs
    ]
    return picture(figure, f"{title}: {'; '.join(parts)}.")


def _runs(nodes: list[CachedBlock], owners: Sequence[int], joined: bool) -> list[Run]:
    """The boxes of the tree, depth first; children stand below each other, right of the parent."""
    known = set(map(id, nodes))
    children: dict[int | None, list[CachedBlock]] = {}
    drawn = set[int]()
    for node in nodes:
        chain: CachedBlock | None = node
        while chain is not None and id(chain) not in drawn:  # up to the start, evicted ones too
            drawn.add(id(chain))
            children.setdefault(id(chain.parent) if chain.parent else None, []).append(chain)
            chain = chain.parent
    runs: list[Run] = []

    def state_of(node: CachedBlock) -> str:
        if id(node) not in known:
            return "free"
        return "decode" if owners[node.block_id] else "cached"

    def place(node: CachedBlock, column: int, row: int, before: tuple[int, int] | None) -> int:
        box = [node]
        while joined and len(below := children.get(id(box[-1]), [])) == 1:
            if state_of(below[0]) != state_of(node):
                break
            box.append(below[0])
        runs.append(Run(box, column, row, before, state_of(node)))
        below = children.get(id(box[-1]), [])
        next_row = row
        for child in below:
            next_row = place(child, column + 1, next_row, (column, row))
        return next_row if below else row + 1

    row = 0
    for first in children.get(None, []):
        row = place(first, 0, row, None)
    return runs


def _shortened(text: str, letters: int) -> str:
    text = " ".join(text.split()).replace("$", r"\$")
    half = letters // 2
    return text if len(text) <= letters else f"{text[: half - 1]}…{text[-(letters - half) :]}"


# -- the queue ---------------------------------------------------------------------------------


def queue(states: Mapping[str, Sequence[tuple[int, str]]]) -> Picture:
    """The free queue after each action, its front at the left: (block, content or "")."""
    figure, ax = new_axes(1.1 + 0.45 * len(states))
    for y, blocks in enumerate(states.values()):
        for x, (block, content) in enumerate(blocks):
            ax.barh(y, 0.86, 0.72, left=x, **fill("cached" if content else "free"))
            text = f"block {block}: {content}" if content else f"block {block}"
            write(ax, x + 0.43, y, text)
    widest = max([len(blocks) for blocks in states.values()] + [1])
    label(ax, "The free queue: the next block is taken at the left", "place in the queue", "")
    ax.set_xlim(-0.1, widest)
    ax.set_xticks([x + 0.43 for x in range(widest)], [str(x) for x in range(widest)])
    ax.set_ylim(len(states) - 0.5, -0.5)
    ax.set_yticks(range(len(states)), list(states))
    legend(ax, [key("cached", "content that can be found"), key("free", "no content")])
    parts = [f"{name}: {[block for block, _ in blocks]}" for name, blocks in states.items()]
    return picture(figure, f"Rows of blocks, the free queue. {'; '.join(parts)}.")


# -- runs --------------------------------------------------------------------------------------


def first_tokens(
    seconds: Mapping[str, Sequence[float]], tokens: Sequence[int], where: str
) -> Picture:
    """The time to the first token, turn by turn, a bar for each name; `tokens` of each prompt."""
    figure, ax = new_axes(2.8)
    width = 0.8 / len(seconds)
    for index, (name, values) in enumerate(seconds.items()):
        places = [turn + (index - (len(seconds) - 1) / 2) * width for turn in range(len(values))]
        style = fill(("prefill", "cached")[index % 2])
        bars = ax.bar(places, [1000 * s for s in values], width, label=name, **style)
        ax.bar_label(bars, [f"{1000 * s:.0f}" for s in values], fontsize=8)
    last = [1000 * values[-1] for values in seconds.values()]
    shown = " or ".join(f"{ms:.0f} ms {name}" for ms, name in zip(last, seconds, strict=True))
    title = f"Time to first token: in turn {len(tokens)}, {shown}"
    label(ax, title, "turn (tokens of its prompt)", "milliseconds")
    source(figure, where)
    ax.set_xticks(range(len(tokens)), [f"{i + 1} ({n})" for i, n in enumerate(tokens)])
    ax.set_ylim(0, ax.get_ylim()[1] * 1.25)
    ax.legend(loc="upper left", ncols=len(seconds), fontsize=8, frameon=False)
    parts = [f"{name} {[round(1000 * s) for s in values]}" for name, values in seconds.items()]
    return picture(
        figure, f"Bars for each turn, milliseconds to the first token. {'; '.join(parts)}."
    )
