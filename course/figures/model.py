"""The pictures of chapter 05: bits of a number, angles of RoPE, query heads and their KV heads,
attention maps, the residual stream, and the roofline of the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from course.figures.common import (
    GRID,
    INK,
    Picture,
    curves,
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
    write,
)
from course.figures.common import speeds as speeds
from course.figures.common import this_machine as this_machine
from minivllm.pictures.figures import PALETTE, halo
from minivllm.pictures.timeline import count

MARKS = ("o", "s", "D", "^", "v", "P")  # curves can be told apart without colour


def bits(rows: Mapping[str, tuple[str, int]]) -> Picture:
    """The bits of a number in some formats: (all bits, how many of them are the exponent)."""
    figure, ax = new_axes(1.2 + 0.42 * len(rows))
    for y, (pattern, num_exponent) in enumerate(rows.values()):
        for x, bit in enumerate(pattern):
            part = "waiting" if x == 0 else "cached" if x <= num_exponent else "decode"
            ax.barh(y, 0.92, 0.8, left=x - 0.46, **fill(part))
            write(ax, x, y, bit)
    label(ax, "The same number in each format", "bit", "")
    ax.set_xlim(-0.8, max(len(pattern) for pattern, _ in rows.values()) - 0.2)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_xticks([0, 8, 16, 24, 31])
    names = [("waiting", "sign (first bit)"), ("cached", "exponent"), ("decode", "fraction (rest)")]
    legend(ax, [key(state, text) for state, text in names])
    parts = [
        f"{name}: 1 sign bit, {size} of exponent, {len(pattern) - 1 - size} of fraction ({pattern})"
        for name, (pattern, size) in rows.items()
    ]
    return picture(figure, f"Strips of bits. {'; '.join(parts)}.")


def hands(angles: Mapping[str, Sequence[float]]) -> Picture:
    """Pairs of RoPE as clocks: the hand of each at positions 0, 1, 2, ... (radians)."""
    from math import cos, sin

    figure, axes = new_axes(2.3, columns=len(angles), squeeze=False)
    for ax, (name, turns) in zip(axes[0], angles.items(), strict=True):
        from matplotlib.patches import Circle

        ax.add_patch(Circle((0, 0), 1, fill=False, edgecolor=GRID))
        slow = abs(turns[-1]) < 0.15
        for position, angle in enumerate(turns):
            x = cos(angle)
            y = sin(angle)
            ax.plot([0, x], [0, y], color=PALETTE["prefill"], linewidth=1.4)
            # Hands that lie on each other would write over each other's numbers.
            reach = 1.22 if position % 2 == 0 else 1.5
            if not slow and (position in (0, len(turns) - 1) or abs(turns[1]) > 0.15):
                write(ax, reach * x, reach * y, str(position))
        if slow:
            write(ax, 1.08, 0, f"0 to {len(turns) - 1}", ha="left")
        ax.set_title(name, fontsize=9)
        ax.set_xlim(-1.7, 1.7)
        ax.set_ylim(-1.7, 1.7)
        ax.set_aspect("equal")
        ax.axis("off")
    headline(figure, "Where a pair points at each position")
    parts = [f"{name} turns by {turns[1]:.3g} radians a position" for name, turns in angles.items()]
    positions = count(len(next(iter(angles.values()))), "position")
    return picture(
        figure, f"{count(len(angles), 'clock')} with hands for {positions}: {'; '.join(parts)}."
    )


def lines(
    values: Mapping[str, tuple[Sequence[float], Sequence[float]]], title: str, x: str, y: str
) -> Picture:
    """A line with its own marks for each name: (values of x, values of y)."""
    figure, ax = new_axes(2.9)
    curves(ax, values)
    label(ax, title, x, y)
    parts = [
        f"{name}: {ys[0]:.3g} at {xs[0]:g} to {ys[-1]:.3g} at {xs[-1]:g}"
        for name, (xs, ys) in values.items()
    ]
    return picture(figure, f"Line chart of {y} over {x}. {title}. {'; '.join(parts)}.")


def groups(reads: Sequence[int]) -> Picture:
    """Which key/value head each query head reads."""
    num_kv = max(reads) + 1
    figure, ax = new_axes(2.2)
    spread = len(reads) / num_kv
    for head, kv_head in enumerate(reads):
        middle = (kv_head + 0.5) * spread - 0.5
        ax.plot([head, middle], [1, 0], color=INK, linewidth=1, zorder=1)
        ax.barh(1, 0.7, 0.3, left=head - 0.35, zorder=2, **fill("decode"))
        write(ax, head, 1, str(head), zorder=3)
    for kv_head in range(num_kv):
        middle = (kv_head + 0.5) * spread - 0.5
        ax.barh(0, 0.7, 0.3, left=middle - 0.35, zorder=2, **fill("cached"))
        write(ax, middle, 0, str(kv_head), zorder=3)
    title = f"{count(len(reads), 'query head')} read {count(num_kv, 'key/value head')}"
    label(ax, title, "head", "")
    ax.set_yticks([1, 0], ["query heads", "KV heads"])
    ax.set_xticks([])
    ax.set_ylim(-0.4, 1.4)
    ax.set_xlim(-0.8, len(reads) - 0.2)
    parts = [
        f"KV head {kv}: query heads {[h for h, read in enumerate(reads) if read == kv]}"
        for kv in range(num_kv)
    ]
    return picture(figure, f"Diagram of heads. {title}. {'; '.join(parts)}.")


def attention_maps(maps: Mapping[str, Sequence[Sequence[float]]], tokens: Sequence[str]) -> Picture:
    """Attention weights of some heads: a row for each token that reads, a column for each read."""
    from matplotlib.colors import LinearSegmentedColormap

    figure, axes = new_axes(3.4, columns=len(maps), squeeze=False)
    paint = LinearSegmentedColormap.from_list("attention", ["#ffffff", PALETTE["prefill"], INK])
    shown = [text.replace("\n", "↵").replace("$", r"\$").strip() for text in tokens]
    edges = [place - 0.5 for place in range(len(shown) + 1)]
    parts = []
    for ax, (name, weights) in zip(axes[0], maps.items(), strict=True):
        image = ax.imshow(weights, cmap=paint, vmin=0, vmax=1)
        ax.vlines(edges, -0.5, len(shown) - 0.5, GRID, linewidth=0.4)
        ax.hlines(edges, -0.5, len(shown) - 0.5, GRID, linewidth=0.4)
        ax.set_title(name, fontsize=9, loc="left")
        ax.set_xticks(range(len(shown)), shown, rotation=90, fontsize=7)
        ax.set_yticks(range(len(shown)), shown if ax is axes[0, 0] else [], fontsize=7)
        ax.tick_params(length=0)
        ax.set_xlabel("token that is read", fontsize=8)
        strongest = [list(row).index(max(row)) for row in weights]
        first = sum(row[0] for row in weights[1:]) / max(1, len(weights) - 1)
        parts.append(
            f"{name}: {100 * first:.0f}% of the weight on the first token; most read from"
            f" {tokens[-1]!r}: {tokens[strongest[-1]]!r}"
        )
    axes[0, 0].set_ylabel("token that reads", fontsize=8)
    bar = figure.colorbar(image, ax=axes[0], location="bottom", shrink=0.4, aspect=35, pad=0.02)
    bar.set_label("attention weight (each row sums to 1)", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    title = f"{count(len(maps), 'head')}, {count(len(maps), 'habit')}: what each token reads"
    headline(figure, title)
    return picture(
        figure, f"{count(len(maps), 'attention map')} of {len(shown)} tokens. {'; '.join(parts)}."
    )


def roofline(
    flops_per_s: float, bytes_per_s: float, points: Mapping[str, tuple[float, float]], where: str
) -> Picture:
    """What a machine can do at most, and what was reached: points are (FLOP per byte, FLOP/s)."""
    figure, ax = new_axes(3.6)
    ridge = flops_per_s / bytes_per_s
    edge = f"The roof: {bytes_per_s / 1e9:.1f} GB/s, then {flops_per_s / 1e9:.0f} GFLOP/s"
    places = [0.2, ridge, max(1000.0, 3 * ridge)]
    roof = [min(flops_per_s, place * bytes_per_s) / 1e9 for place in places]
    ax.plot(places, roof, color=INK, linewidth=2)
    ax.axvline(ridge, color=INK, linestyle=":", linewidth=1)
    for number, (name, (intensity, speed)) in enumerate(points.items()):
        state = "decode" if intensity < ridge else "prefill"
        ax.plot(intensity, speed / 1e9, MARKS[number % len(MARKS)], color=PALETTE[state],
                markeredgecolor=INK, markersize=8)  # fmt: skip
        ax.annotate(name, (intensity, speed / 1e9), xytext=(8, -4), fontsize=8, color=INK,
                    textcoords="offset points", va="top", path_effects=halo())  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
    lowest = min([roof[0], *(speed / 1e9 for _, speed in points.values())])
    ax.set_ylim(lowest / 3, roof[-1] * 2)
    source(figure, where)
    label(ax, edge, "operations for each byte moved (FLOP per byte)", "GFLOP/s")
    kinds = {"decode": "limited by memory", "prefill": "limited by arithmetic"}
    legend(ax, [mark(text, **(look(s) | {"marker": "o"})) for s, text in kinds.items()])
    ax.grid(color=GRID, linewidth=0.6)
    ax.text(ridge, 0.02, f" ridge: {ridge:.0f} FLOP per byte", fontsize=8, color=INK,
            transform=ax.get_xaxis_transform(), path_effects=halo())  # fmt: skip
    parts = [f"{name}: {speed / 1e9:.2g} GFLOP/s" for name, (_, speed) in points.items()]
    words = f"{edge}; they meet at {ridge:.0f} FLOP per byte. {'; '.join(parts)}"
    return picture(figure, f"Roofline, both axes logarithmic. {words}.")
