"""Pictures of a recorded run of `benchmarks/ladder.py`: what each rung bought, and what host and
device do meanwhile. For chapters 08 and 11.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from course.figures.common import (
    INK,
    Picture,
    dots,
    headline,
    key,
    label,
    legend,
    log_axis,
    new_axes,
    picture,
    source,
    times,
    write,
)
from minivllm.measure.results import load_results, speed
from minivllm.pictures.figures import PALETTE

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
Result = Mapping[str, Any]


def recorded(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The results of the newest ladder that was recorded on a GPU; empty if there is none."""
    for path in sorted(folder.glob("*ladder.json"), reverse=True):
        results = load_results(path)
        if results and str(results[0]["device"]).startswith("cuda"):
            return results
    return []


def find(results: Sequence[Result], rung: str, batch_size: int) -> Result:
    """The result of one rung at one batch size. Raises ValueError if there is none."""
    for result in results:
        if (result["rung"], result.get("batch_size")) == (rung, batch_size):
            return result
    raise ValueError(f"no result of rung={rung!r} at batch_size={batch_size}")


def provenance(results: Sequence[Result]) -> str:
    """What the numbers belong to: model, dtype, machine, PyTorch's version and the date."""
    one = results[0]
    torch = one["versions"].get("torch", "?")
    return f"{one['model']}, {one['dtype']}; {one['machine']}, torch {torch}, {one['date']}"


def ladder(results: Sequence[Result], batch_sizes: Sequence[int]) -> Picture:
    """Decoded tokens per second of each rung, a panel for each batch size, next to the limit of
    the hardware."""
    names = list(dict.fromkeys(r["rung"] for r in results if "batch_size" in r))
    height = 1.9 + 0.27 * len(names)
    figure, panels = new_axes(height, 1, len(batch_sizes), sharey=True, squeeze=False)
    words = []
    for ax, batch_size in zip(panels[0], batch_sizes, strict=True):
        chosen = {r["rung"]: r for r in results if r.get("batch_size") == batch_size}
        speeds = {name: chosen[name]["decode_tokens_per_s"] for name in names if name in chosen}
        told = climb(ax, names, speeds, next(iter(chosen.values()))["limit_tokens_per_s"], 100)
        batch = "1 request" if batch_size == 1 else f"{batch_size} requests"
        ax.set_title(f"{batch} at a time", loc="left", fontsize=10)
        words.append(f"{batch}: {told}")
    title = "What each rung brings (in brackets: as a multiple of the first rung)"
    headline(figure, title)
    source(figure, provenance(results))
    return picture(figure, f"Dots at tokens per second, on a log axis. {'. '.join(words)}.")


def climb(
    ax: Any, names: Sequence[str], tokens_per_s: Mapping[str, float], limit: float, step: int
) -> str:
    """A dot for each rung, its number and its multiple of the first rung next to it, and the limit
    of the hardware in the last row; returns them in words. The axis has a number at each power of
    `step`."""
    rows = [*names, "limit of the hardware"]
    first = next(iter(tokens_per_s.values()))
    log_axis(ax, first / 2, limit * (limit / first) ** 0.6, step)
    for y, name in enumerate(names):
        if name in tokens_per_s:
            value = tokens_per_s[name]
            dots(ax, y, {"decode": value}, [f"{speed(value)} ({times(value / first)})"])
        else:
            write(ax, first, y, "not measured", ha="left")
    dots(ax, len(names), {"waiting": limit}, [f"{speed(limit)} ({times(limit / first)})"])
    label(ax, "", "tokens per second (log scale)", "")
    ax.set_yticks(range(len(rows)), rows)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    told = ", ".join(f"{name} {speed(value)}" for name, value in tokens_per_s.items())
    return f"{told}; limit {speed(limit)}"


def timelines(results: Sequence[Result], rungs: Sequence[str]) -> Picture:
    """The first milliseconds of some decode steps, for each rung: the host's launches above, the
    device's kernels below."""
    found = [next(r for r in results if r["rung"] == rung and "timeline" in r) for rung in rungs]
    figure, panels = new_axes(0.9 + 1.1 * len(found), len(found), sharex=True, squeeze=False)
    words = []
    for ax, result in zip(panels[:, 0], found, strict=True):
        words.append(_lanes(ax, result["timeline"], result["rung"]))
    batch = found[0]["batch_size"]
    window = found[0]["timeline"]["window_us"] / 1e3
    panels[-1, 0].set_xlabel("time (milliseconds)", fontsize=9)
    panels[-1, 0].set_xlim(0, window)
    plain = {"hatch": None, "linewidth": 0}
    keys = [key("prefill", "host launches", **plain), key("decode", "GPU computes", **plain)]
    legend(panels[0, 0], keys)
    source(figure, f"{batch} requests decode; {provenance(results)}")
    return picture(figure, f"Timelines of {window:g} ms. {' '.join(words)}")


def _lanes(ax: Any, timeline: Mapping[str, Any], rung: str) -> str:
    """Two lanes of bars in milliseconds; returns what they show in words."""
    for lane, name, state in ((1, "launches", "prefill"), (0, "kernels", "decode")):
        spans = [(start / 1e3, length / 1e3) for start, length in timeline[name]]
        # No outlines: most bars are thinner than a line.
        ax.broken_barh(spans, (lane + 0.1, 0.8), color=PALETTE[state], linewidth=0)
    for start, _ in timeline["steps"]:
        ax.axvline(start / 1e3, color=INK, linewidth=0.8, linestyle=":")
    steps = timeline["num_steps"]
    launches = timeline["num_launches"] / steps
    kernels = timeline["num_kernels"] / steps
    busy = timeline["busy_seconds"] / timeline["seconds"]
    step = 1e3 * timeline["seconds"] / steps
    words = f"{launches:.0f} launches, {kernels:.0f} kernels and {step:.1f} ms a step"
    label(ax, f"{rung}: {words}; the GPU is busy for {busy:.0%}", "", "")
    ax.set_yticks([0.5, 1.5], ["GPU", "host"])
    ax.set_ylim(0, 2)
    return f"{rung}: {words}, GPU busy for {busy:.0%}."
