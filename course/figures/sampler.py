"""The pictures of chapter 10: what may be drawn, how one is drawn, what was drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from course.figures.common import (
    INK,
    Picture,
    compared,
    fill,
    key,
    label,
    legend,
    mark,
    new_axes,
    picture,
    write,
)
from course.figures.common import speeds as speeds
from course.figures.common import this_machine as this_machine
from minivllm.pictures.figures import halo
from minivllm.pictures.timeline import count


def shown(token: str, limit: int = 10) -> str:
    """A token in a few characters, its blanks visible."""
    text = token.replace(" ", "·").replace("\n", "↵")
    return (text if len(text) <= limit else text[: limit - 1] + "…").replace("$", r"\$")


# -- what may be drawn -------------------------------------------------------------------------


def knobs(tokens: Sequence[str], rows: Mapping[str, Sequence[float]]) -> Picture:
    """One panel a setting: the probability of each of some tokens. Those of 0 are crossed out."""
    columns = 3 if len(rows) == 3 else 2
    lines = -(-len(rows) // columns)
    options: dict[str, Any] = {"sharex": True, "sharey": True, "squeeze": False}
    has_gone = any(p == 0 for probs in rows.values() for p in probs)
    figure, axes = new_axes(0.6 + 1.45 * lines + 0.3 * has_gone, lines, columns, **options)
    for ax in axes.flat[len(rows) :]:
        ax.set_visible(False)
    highest = max(max(probs) for probs in rows.values())
    places = range(len(tokens))
    for ax, (name, probs) in zip(axes.flat, rows.items()):
        ax.bar(places, probs, 0.75, **fill("decode"))
        gone = [place for place in places if probs[place] == 0]
        ax.plot(gone, [highest * 0.05] * len(gone), "x", color=INK, markersize=5)
        best = shown(tokens[_largest(probs)])
        first = f"at most {max(probs):.0%}" if columns == 3 else f"{max(probs):.0%} for “{best}”"
        told = f"keeps {sum(p > 0 for p in probs)} of {len(tokens)}" if gone else first
        label(ax, f"{name}: {told}", "", "")
        ax.set_ylim(0, min(1, highest * 1.1))
    names = [shown(token) for token in tokens]
    for ax in axes.flat[max(0, len(rows) - columns) : len(rows)]:
        ax.set_xticks(places, names, rotation=60, fontsize=8, ha="right", rotation_mode="anchor")
        ax.tick_params(labelbottom=True)
    figure.supylabel("probability", fontsize=9)
    if has_gone:
        keys = [key("decode", "can be drawn"), mark("cannot be drawn", marker="x", markersize=5)]
        place: dict[str, Any] = {"loc": "outside upper left", "ncols": 2, "fontsize": 8}
        figure.legend(handles=keys, frameon=False, **place)
    tops = [f"{name}: {tokens[_largest(p)]!r} {max(p):.2f}" for name, p in rows.items()]
    alt = (
        f"Bar charts, one a setting, of the probabilities of {count(len(tokens), 'token')}; x: not"
    )
    return picture(figure, f"{alt} possible. The most probable under {'; '.join(tops)}.")


def _largest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda place: values[place])


def cuts(tokens: Sequence[str], probs: Sequence[float], kept: Mapping[str, int]) -> Picture:
    """Tokens from the most probable on, their running sum, and how many each filter keeps."""
    figure, ax = new_axes(3.2 + 0.2 * len(kept))
    sums = [sum(probs[: end + 1]) for end in range(len(probs))]
    ax.bar(range(len(probs)), probs, 0.75, **fill("decode"))
    ax.step(range(len(probs)), sums, where="mid", color=INK, linestyle="--", linewidth=1.2)
    for line, (name, number) in enumerate(kept.items()):
        y = 1.1 + 0.13 * line
        ax.plot([-0.4, number - 0.6], [y, y], color=INK, linewidth=2.5, solid_capstyle="butt")
        ax.plot([number - 0.6], [y], "|", color=INK, markersize=9, markeredgewidth=2.5)
        write(ax, number - 0.35, y, f"{name} keeps {number}", ha="left", path_effects=halo())
    title = "Three filters, each a number of tokens from the top"
    label(ax, title, "token, the most probable first", "probability")
    keys = [key("decode", "of a token"), mark("running sum", linestyle="--")]
    legend(ax, [*keys, mark("kept by a filter", linestyle="-", linewidth=2.5)])
    names = [shown(token) for token in tokens]
    ax.set_xticks(range(len(probs)), names, rotation=60, ha="right", rotation_mode="anchor")
    ax.set_xlim(-0.6, len(probs) + 1.5)
    ax.set_ylim(0, 1.1 + 0.13 * len(kept))
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1])
    parts = [f"{name} keeps {number}" for name, number in kept.items()]
    return picture(
        figure, f"Bars of sorted probabilities and their running sum. {'; '.join(parts)}."
    )


# -- how one is drawn --------------------------------------------------------------------------


def cdf(
    tokens: Sequence[str], masses: Sequence[float], uniforms: Sequence[float], places: Sequence[int]
) -> Picture:
    """The masses side by side, and where each uniform falls: on the token of its place."""
    figure, ax = new_axes(1.9)
    total = sum(masses)
    left = 0.0
    for place, mass in enumerate(masses):
        state = ("decode", "cached", "waiting")[place % 3]
        ax.broken_barh([(left / total, mass / total)], (0, 1), **fill(state))
        if mass / total > 0.0125 * len(shown(tokens[place])):
            write(ax, (left + mass / 2) / total, 0.5, shown(tokens[place]))
        left += mass
    for uniform, place in zip(uniforms, places):
        ax.annotate(
            f"{uniform:.2f}\n{shown(tokens[place])}",
            (uniform, 1.0),
            (uniform, 1.45),
            ha="center",
            fontsize=8,
            arrowprops={"arrowstyle": "-|>", "color": INK},
        )
    label(ax, "A uniform number falls on a token", "running sum, as a share of the whole", "")
    ax.set_xlim(-0.02, 1.02)
    ax.set_ylim(0, 2.1)
    ax.set_yticks([])
    parts = [f"{u:.2f} on {tokens[place]!r}" for u, place in zip(uniforms, places)]
    return picture(figure, f"A strip from 0 to 1, a part for each token. {'; '.join(parts)}.")


def race(tokens: Sequence[str], scores: Sequence[float], noise: Sequence[float]) -> Picture:
    """One draw in the Gumbel form: each token's score, its noise, their sum; the largest wins."""
    figure, ax = new_axes(1.2 + 0.3 * len(tokens))
    sums = [score + one for score, one in zip(scores, noise)]
    winner = _largest(sums)
    first = _largest(scores)
    for y, (score, total) in enumerate(zip(scores, sums)):
        ax.barh(y, score, 0.55, **fill("decode"))
        ax.annotate("", (total, y), (score, y), arrowprops={"arrowstyle": "-|>", "color": INK})
        text = f"{total:.1f}" + ("  drawn" if y == winner else "")
        weight = "bold" if y == winner else "normal"
        x, ha = (total + 0.06, "left") if total >= score else (total - 0.06, "right")
        write(ax, x, y, text, ha=ha, weight=weight, path_effects=halo())
    label(
        ax,
        "The largest of logit / temperature + noise is drawn",
        "logit / temperature, then with noise",
        "",
    )
    ax.set_yticks(range(len(tokens)), [shown(token) for token in tokens])
    ax.set_ylim(len(tokens) - 0.5, -0.5)
    low = min([*sums, *scores, 0.0])
    high = max([*sums, *scores])
    ax.set_xlim(low - 0.5, high + (high - low) * 0.25)
    legend(ax, [key("decode", "logit / temperature (largest: 0)"), mark("noise", marker=">")])
    alt = f"Bars and arrows. The largest logit is {tokens[first]!r}; with noise"
    return picture(figure, f"{alt} {tokens[winner]!r} is the largest at {sums[winner]:.1f}: drawn.")


# -- what was drawn ----------------------------------------------------------------------------


def observed(
    tokens: Sequence[str], counts: Sequence[int], expected: Sequence[float], title: str
) -> Picture:
    """How often each token was drawn, and how often it should be."""
    figure, ax = new_axes(2.7)
    places = range(len(tokens))
    ax.bar([x - 0.2 for x in places], expected, 0.38, **fill("free"))
    ax.bar([x + 0.2 for x in places], counts, 0.38, **fill("decode"))
    # Two standard deviations of a count: nearly n p (1 - p) for each token.
    total = sum(expected)
    spread = [2 * (e * (1 - e / total)) ** 0.5 for e in expected]
    ax.errorbar([x - 0.2 for x in places], expected, spread, fmt="none", color=INK, capsize=3)
    label(ax, title, "token", "draws")
    names = [shown(token) for token in tokens]
    ax.set_xticks(places, names, rotation=45, ha="right", rotation_mode="anchor")
    legend(ax, [key("free", "expected, ± 2 deviations"), key("decode", "drawn")])
    parts = [f"{t!r} {c} of {e:.0f}" for t, c, e in zip(tokens, counts, expected)]
    return picture(figure, f"Bars of draws against what is expected. {title}. {'; '.join(parts)}.")


def token_grid(rows: Mapping[str, Sequence[str]], title: str) -> Picture:
    """One line a run, one cell a token; a token unlike the first line's is hatched and bold."""
    figure, ax = new_axes(1.2 + 0.34 * len(rows))
    first = next(iter(rows.values()))
    for y, tokens in enumerate(rows.values()):
        for x, token in enumerate(tokens):
            same = token == first[x]
            ax.barh(y, 0.92, 0.8, left=x, **fill("free" if same else "prefill"))
            style: dict[str, Any] = {"fontsize": 7.5, "path_effects": halo()}
            text = shown(token, max(3, 84 // len(first)))  # what fits into a cell in bold
            write(ax, x + 0.46, y, text, weight="normal" if same else "bold", **style)
    label(ax, title, "token of the answer", "")
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlim(-0.05, len(first))
    ax.set_xticks([x + 0.46 for x in range(len(first))], [str(x) for x in range(len(first))])
    legend(ax, [key("free", "as in the first line"), key("prefill", "another token")])
    parts = []
    for name, tokens in rows.items():
        other = sum(a != b for a, b in zip(tokens, first))
        parts.append(f"{name}: {count(other, 'token')} of {len(first)} unlike the first line's")
    return picture(figure, f"A grid of tokens. {title}. {'; '.join(parts)}.")


def times(milliseconds: Mapping[str, float], where: str) -> Picture:
    """Milliseconds per step, one bar for each way to sample."""
    return compared(milliseconds, "milliseconds per step", "time", where)
