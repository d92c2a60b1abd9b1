"""The pictures of chapter 01: bytes and tokens, joins, languages, and streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from course.figures.common import (
    INK,
    Picture,
    fill,
    key,
    label,
    legend,
    mark,
    new_axes,
    picture,
    source,
    times,
    write,
)
from course.figures.common import speeds as speeds
from course.figures.common import this_machine as this_machine
from minivllm.pictures.figures import PALETTE
from minivllm.pictures.timeline import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# -- characters and bytes ----------------------------------------------------------------------


def byte_name(byte: int) -> str:
    """Return how a byte is written in a cell: a visible ASCII character, "␣", "↵", or in hex."""
    named = {0x20: "␣", 0x0A: "↵"}
    return named.get(byte) or (chr(byte) if 0x21 <= byte <= 0x7E else f"{byte:02X}")


def drawable(text: str) -> str:
    """Return `text` with U+... for every character that the figures' font lacks."""
    known = _characters_of_the_font()
    parts = [c if ord(c) in known and c.isprintable() else f"U+{ord(c):04X}" for c in text]
    return " ".join(parts) if any(part.startswith("U+") for part in parts) else "".join(parts)


@lru_cache
def _characters_of_the_font() -> frozenset[int]:
    from matplotlib.font_manager import FontProperties, findfont
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(findfont(FontProperties())).get_charmap())


# -- tokens ------------------------------------------------------------------------------------


def tokens(rows: Mapping[str, tuple[Any, Sequence[int]]], what: str) -> Picture:
    """Draw the bytes of a text and its tokens: one row for each name -> (tokenizer, ids).

    A frame is a token and a cell is a byte. A line below connects the bytes of one character. A
    control token is one word. `what` names the text in the title.
    """
    figure, ax = new_axes(1.15 + 0.62 * len(rows))
    keys = [key("decode", "token"), key("free", "next token")]
    parts = []
    for y, (name, (tokenizer, ids)) in enumerate(rows.items()):
        data = [tokenizer.token_bytes(token_id) for token_id in ids]
        controls = [token_id in tokenizer.special_ids for token_id in ids]
        for number, place in enumerate(accumulate([0, *map(len, data[:-1])])):
            _draw_token(ax, place, y, data[number], number, controls[number])
        _join_characters(ax, y, b"".join(data))
        special = f" ({sum(controls)} control)" if any(controls) else ""
        parts.append(f"{name}: {count(len(ids), 'token')}{special}")
    size = round(max(bar.get_x() + bar.get_width() for bar in ax.patches))
    title = f"{what}. {'; '.join(parts)}"
    label(ax, title, "byte of the text", "")
    ax.set_xlim(-0.3, size + 0.3)
    ax.set_ylim(len(rows) - 0.45, -0.5)
    ax.set_yticks(range(len(rows)), list(rows))
    if "control" in title:
        keys.append(key("cached", "control token", linewidth=2))
    if ax.lines:
        keys.append(mark("one character", linestyle="-", linewidth=1.6))
    legend(ax, keys)
    return picture(figure, f"Rows of {count(size, 'byte')}, in frames of one token each. {title}.")


def _draw_token(ax: Axes, place: int, y: int, token: bytes, number: int, is_control: bool) -> None:
    # Neighbours alternate in colour, and each has a frame.
    state = "cached" if is_control else "free" if number % 2 else "decode"
    frame = {"edgecolor": INK, "linewidth": 2 if is_control else 1.3}
    ax.barh(y, len(token), 0.62, left=place, **(fill(state) | frame))
    if is_control:
        write(ax, place + len(token) / 2, y, token.decode(), fontsize=7, weight="bold")
        return
    for number, byte in enumerate(token):
        write(ax, place + number + 0.5, y, byte_name(byte), fontsize=6.5, parse_math=False)


def _join_characters(ax: Axes, y: int, data: bytes) -> None:
    """Draw a line below the bytes of each character that has several."""
    place = 0
    for character in data.decode("utf-8", "replace"):
        size = len(character.encode())
        if size > 1:
            ax.plot([place + 0.15, place + size - 0.15], [y + 0.39] * 2, color=INK, linewidth=1.6)
        place += size


def joins(steps: Sequence[Sequence[str]], ranks: Sequence[int]) -> Picture:
    """Draw how a word is joined: its tokens before and after each join, with the join's rank.

    The new token of a row is gold with a thick frame.
    """
    figure, ax = new_axes(1.1 + 0.36 * len(steps))
    before: set[tuple[int, str]] = set()
    for y, row in enumerate(steps):
        places = [0, *accumulate(map(len, row))]
        now = set(zip(places, row))
        for place, token in zip(places, row):
            is_new = y > 0 and (place, token) not in before
            style = fill("cached") | {"linewidth": 2} if is_new else fill("decode")
            ax.barh(y, len(token) - 0.08, 0.7, left=place + 0.04, **style)
            write(ax, place + len(token) / 2, y, drawable(token), parse_math=False)
        rank = f"rank {ranks[y - 1]:,}" if y else "bytes"
        write(ax, places[-1] + 0.3, y, rank, ha="left")
        before = now
    size = sum(map(len, steps[0]))
    title = f"{count(size, 'byte')} become {count(len(steps[-1]), 'token')}"
    title += f" in {count(len(steps) - 1, 'join')}"
    label(ax, title, "byte of the word", "joins done")
    ax.set_xlim(0, size * 1.18 + 0.8)
    ax.set_xticks(range(size + 1))
    ax.set_ylim(len(steps) - 0.4, -0.6)
    ax.set_yticks(range(len(steps)))
    legend(ax, [key("decode", "token"), key("cached", "joined in this step", linewidth=2)])
    words = [f"after {y}: {' '.join(row)}" for y, row in enumerate(steps)]
    return picture(figure, f"Rows of tokens, one row per join. {title}. {'; '.join(words)}.")


def languages(
    counts: Mapping[str, Mapping[str, int]], num_characters: Mapping[str, int]
) -> Picture:
    """Draw the tokens of one text per language and tokenizer, and its tokens per character.

    `counts`: tokenizer -> language -> tokens.
    """
    names = list(num_characters)
    figure, axes = new_axes(1.5 + 0.3 * len(names) * max(1, len(counts) / 2), columns=2)
    states = ["waiting", "prefill", "decode", "cached"]
    height = 0.8 / len(counts)
    for number, by_language in enumerate(counts.values()):
        places = [y - 0.4 + (number + 0.5) * height for y in range(len(names))]
        values = [by_language[name] for name in names]
        shares = [by_language[name] / num_characters[name] for name in names]
        for ax, numbers, form in ((axes[0], values, "%.0f"), (axes[1], shares, "%.2f")):
            bars = ax.barh(places, numbers, height, **fill(states[number]))
            ax.bar_label(bars, fmt=form, fontsize=7, padding=2)
            ax.set_xlim(0, max([*numbers, ax.get_xlim()[1] / 1.1]) * 1.1)
    label(axes[0], f"The same text in {len(names)} languages", "tokens", "")
    label(axes[1], "Per character", "tokens per character", "")
    axes[1].set_title("Per character", loc="left", fontsize=10, pad=22)
    for ax in axes:
        ax.set_ylim(len(names) - 0.5, -0.5)
    axes[0].set_yticks(range(len(names)), names)
    axes[1].set_yticks(range(len(names)), [""] * len(names))
    legend(axes[0], [key(states[i], name) for i, name in enumerate(counts)])
    parts = [
        f"{tokenizer}: " + ", ".join(f"{name} {by[name]}" for name in names)
        for tokenizer, by in counts.items()
    ]
    return picture(figure, f"Bar charts of the tokens of one text. {'; '.join(parts)}.")


# -- streams -----------------------------------------------------------------------------------


def stream(data: Sequence[bytes], pieces: Sequence[str], held: Sequence[bytes]) -> Picture:
    """Draw the bytes of each token of a stream, the text shown then, and the bytes held back.

    `data`: the bytes of each token. `pieces`: the text that each `push` returned. `held`: the
    bytes held back after it.
    """
    highest = max(len(a) + len(b) for a, b in zip(data, [b"", *held]))
    figure, ax = new_axes(1.7 + 0.3 * highest)
    for x, (token, piece, rest) in enumerate(zip(data, pieces, held)):
        column = (held[x - 1] if x else b"") + token
        old = len(column) - len(token)
        shown = len(column) - len(rest)
        for y, byte in enumerate(column):
            style = fill("decode") if y < shown else fill("waiting") | {"hatch": "////"}
            frame = {"linewidth": 2} if y >= old else {"linewidth": 0.6, "linestyle": "--"}
            ax.bar(x, 0.86, 0.78, bottom=y + 0.07, **(style | {"edgecolor": INK} | frame))
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6} if y >= shown else None
            write(ax, x, y + 0.5, byte_name(byte), bbox=box, parse_math=False, fontsize=7.5)
        text = drawable(piece.replace(" ", "␣")) if piece else "–"
        angle = 90 if len(text) > 1 else 0
        write(ax, x, highest + 0.35, text, rotation=angle, va="bottom", parse_math=False)
    num_held = sum(map(bool, held))
    title = f"{count(len(data), 'token')}; bytes are held back after {num_held} of them"
    label(ax, title, "token pushed (above: the text it completes)", "bytes available")
    longest = max(len(drawable(piece)) for piece in pieces)
    ax.set_ylim(0, highest + 0.6 + 0.27 * longest)
    ax.set_yticks(range(highest + 1))
    ax.set_xlim(-0.6, len(data) - 0.4)
    ax.set_xticks(range(len(data)))
    keys = [key("decode", "shown"), key("waiting", "held back", hatch="////", edgecolor=INK)]
    legend(ax, [*keys, key("free", "from the token before", linestyle="--")])
    shown_text = ", ".join(repr(drawable(piece)) if piece else "nothing" for piece in pieces)
    return picture(figure, f"Columns of bytes, one for each token. {title}. Shown: {shown_text}.")


def arrivals(seconds: Sequence[float], pieces: Sequence[str], where: str) -> Picture:
    """Draw how many characters a reader has seen over time, with and without streaming.

    `seconds`: when each of `pieces` arrived, from the time of the question.
    """
    figure, ax = new_axes(2.7)
    characters = list(accumulate(map(len, pieces)))
    first = seconds[0]
    end = seconds[-1]
    ax.step([0, *seconds], [0, *characters], where="post", color=PALETTE["prefill"], linewidth=2)
    ax.plot(seconds, characters, "o", color=PALETTE["decode"], markeredgecolor=INK, markersize=4)
    ax.step([0, end], [0, characters[-1]], where="post", color=INK, linestyle="--", linewidth=1)
    arrow = {"arrowstyle": "->", "color": INK, "shrinkB": 4}
    words: dict[str, Any] = {"fontsize": 8, "color": INK, "arrowprops": arrow}
    place = (0.04 * end, 0.8 * characters[-1])
    ax.annotate(f"first text: {first:.2f} s", (first, characters[0]), place, **words)
    write(ax, end, 0.06 * characters[-1], f"whole answer: {end:.2f} s  ", ha="right", va="bottom")
    title = f"The first text arrives {times(end / first)[:-1]} times sooner than the whole answer"
    label(ax, title, "time since the question (seconds)", "characters seen")
    source(figure, where)
    ax.set_xlim(0, end * 1.02)
    streamed = mark("stream", color=PALETTE["prefill"], linestyle="-", marker="o")
    legend(ax, [streamed, mark("answer in one piece", linestyle="--")])
    alt = f"Characters over time; {where}. First text after {first:.2f} s, all after {end:.2f} s"
    return picture(figure, f"{alt}: {count(len(pieces), 'piece')}.")
