"""The picture of recorded runs of `benchmarks/tensor_parallel.py` for chapter 09: the gain from
more GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from course.figures.common import (
    INK,
    PAPER,
    Picture,
    fill,
    headline,
    key,
    label,
    legend,
    mark,
    new_axes,
    picture,
    source,
    write,
)
from course.figures.ladder import RESULTS
from minivllm.measure.results import Result, load_results, speed

# Behind a text that a line would cross.
PLATE = {"facecolor": PAPER, "edgecolor": "none", "pad": 1}
MODE = "graphs"  # of the runs that are drawn, as the program names it


def recorded(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The results of all runs on GPUs, by file name; empty if there are none."""
    found: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*gpu*tensor-parallel*.json")):
        found += load_results(path)
    return found


def speed_of(result: Result) -> float:
    """Tokens per second in the fastest repeat: those that are decoded, or of prompts where
    nothing is decoded."""
    kind = "decode" if result["decode_tokens_per_s"] else "prefill"
    return float(max(result[f"{kind}_tokens_per_s_all"]))


def pairs(results: Sequence[Result]) -> Iterator[tuple[Result, Sequence[Result]]]:
    """Each workload of each model, in `MODE`: its result on one GPU, and those on several."""
    chosen = [result for result in results if result["mode"] == MODE]
    for alone in chosen:
        if alone["tensor_parallel_size"] == 1:
            same = (alone["model"], alone["workload"])
            yield (
                alone,
                [r for r in chosen if (r["model"], r["workload"]) == same and r is not alone],
            )


def gains(results: Sequence[Result]) -> Picture:
    """Draw each workload's speed on several GPUs as a multiple of the speed on one, and the share
    of a step spent in sums; a panel per model."""
    models: dict[str, list[tuple[Result, Sequence[Result]]]] = {}
    for alone, shared in pairs(results):
        if not shared:
            continue
        models.setdefault(str(alone["model"]).partition(" ")[0], []).append((alone, shared))
    count = sum(len(rows) for rows in models.values())
    heights = [len(rows) for rows in models.values()]
    figure, panels = new_axes(
        1.7 + 0.42 * count, len(models), height_ratios=heights, squeeze=False, sharex=True
    )
    words = [
        f"{name}: {'; '.join(_panel(ax, name, rows))}"
        for ax, (name, rows) in zip(panels[:, 0], models.items(), strict=True)
    ]
    # The panels share the axis, and the longest bar may be in any of them.
    panels[0, 0].set_xlim(0, 1.2 * max(ax.dataLim.x1 for ax in panels[:, 0]))
    panels[-1, 0].set_xlabel("speed, as a multiple of that on one GPU", fontsize=9)
    line = mark("one GPU", linestyle="-", linewidth=1.5)
    legend(panels[0, 0], [key("decode", "answers"), key("prefill", "prompts"), line])
    headline(figure, "The gain from more GPUs")
    source(figure, provenance(results))
    return picture(figure, f"Bars of speed on several GPUs. {'. '.join(words)}.")


def _panel(ax: Any, name: str, rows: Sequence[tuple[Result, Sequence[Result]]]) -> list[str]:
    """One bar for each workload and number of GPUs; returns what they show in words."""
    bars = [(alone, result) for alone, shared in rows for result in shared]
    words = []
    names = []
    for y, (alone, result) in enumerate(bars):
        gain = speed_of(result) / speed_of(alone)
        ax.barh(y, gain, 0.62, **fill("decode" if result["decode_tokens_per_s"] else "prefill"))
        # Left of the line at 1 the number is inside its bar, or the line would cross it.
        end, side = (gain - 0.02, "right") if gain < 1 else (gain + 0.02, "left")
        write(ax, end, y, f"{gain:.2f}×", ha=side, bbox=PLATE)
        rates = f"{speed(speed_of(alone))} to {speed(speed_of(result))} tok/s"
        shown = f"{rates}, {result['sums_share']:.0%} in sums"
        write(ax, 1.02, y, shown, ha="left", transform=ax.get_yaxis_transform())
        kind, _, shape = result["workload"].partition(" ")
        size = shape.partition(" ")[0]
        names.append(
            f"{size} {'prompts' if kind == 'prefill' else 'at a time'},"
            f" {result['tensor_parallel_size']} GPUs"
        )
        words.append(f"{names[-1]} {gain:.2f} ({rates})")
    label(ax, name, "", "")
    ax.axvline(1, color=INK, linewidth=1.5)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    return words


def provenance(results: Sequence[Result]) -> str:
    """What the numbers belong to: weights, dtype, machine, PyTorch's version and the date."""
    one = results[0]
    torch = one["versions"].get("torch", "?")
    return f"random weights, {one['dtype']}; {one['machine']}, torch {torch}, {one['date']}"
