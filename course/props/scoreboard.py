"""The table at the end of a chapter's open problem: your idea and ours, on the same work."""

from __future__ import annotations

from collections.abc import Mapping


def scoreboard(results: Mapping[str, Mapping[str, float]], wanted: str) -> str:
    """A table with a row for each contestant and a column for each measure.

    `results` maps contestants to measures; `wanted` says what counts, for the last line. The best
    contestant of each measure gets a star: the lowest number wins, or the highest where the
    measure's name ends in "(more)".

    Example: {"ours": {"steps": 12}, "yours": {"steps": 10}} gives the star to yours.
    """
    measures = list(next(iter(results.values())))
    best = {name: _best(results, name) for name in measures}
    width = max(map(len, results)) + 2
    rows = [" " * width + "".join(f"{name:>22}" for name in measures)]
    for contestant, found in results.items():
        cells = [_shown(found[m]) + ("*" if found[m] == best[m] else " ") for m in measures]
        rows.append(f"{contestant:<{width}}" + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join([*rows, f"* best of its column. {wanted}"])


def _shown(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def _best(results: Mapping[str, Mapping[str, float]], measure: str) -> float:
    choose = max if measure.endswith("(more)") else min
    return choose(found[measure] for found in results.values())
