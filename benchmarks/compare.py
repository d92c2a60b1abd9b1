r"""One benchmark on two trees of this project, side by side in one run.

    git archive --prefix=before/ fc0e68a | tar x -C /tmp
    python benchmarks/compare.py --before /tmp/before --rounds 5 -- offline.py --workloads batch

Everything behind `--` is a script of benchmarks/ with its own options. Each tree runs its own copy
of the script, in the tree's folder and in a fresh process that imports the tree's own package, so
paths among the options must be absolute. The trees take turns, and the order changes from round to
round, so that a busy machine slows both.

The ratios are after / before, of speeds and of process time: best of all rounds, median of all
rounds, and the smallest and the largest ratio within one round. --json writes every figure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from minivllm.measure import results as bench_results

HERE = Path(__file__).resolve().parents[1]
# The figures of a result that are compared, where it has them. More is better.
SPEEDS = {
    "output_tokens_per_s": "output tok/s",
    "decode_tokens_per_s": "decode tok/s",
    "prefill_tokens_per_s": "prompt tok/s",
    "gb_per_s": "GB/s",
}
PROCESS = "whole process"  # its seconds from start to end, loading included. Less is better.
HEADER = ("workload", "", "before", "after", "best", "median", "in a round")
WIDTHS = (41, 12, 7, 7, 5, 6, 10)

Figures = dict[tuple[str, str], float]  # by workload and measure


def run_script(tree: Path, command: Sequence[str]) -> Figures:
    """Run a script of `tree` and return its figures. Raises RuntimeError if it fails."""
    script = tree / "benchmarks" / command[0]
    with tempfile.TemporaryDirectory(prefix="minivllm-compare-") as folder:
        path = Path(folder) / "results.json"
        began = time.perf_counter()
        ran = subprocess.run(
            [sys.executable, str(script), *command[1:], "--json", str(path)],
            cwd=tree,  # the workers of an engine import what lies here
            env={**os.environ, "PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
        )
        seconds = time.perf_counter() - began
        if ran.returncode != 0:
            raise RuntimeError(f"{script} failed:\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}")
        results = json.loads(path.read_text(encoding="utf-8"))
    return {**figures_of(results), (PROCESS, "seconds"): seconds}


def figures_of(results: Sequence[dict[str, Any]]) -> Figures:
    """The speeds in a file of results. Equal names of workloads are numbered: "batch #2"."""
    figures: Figures = {}
    count: dict[str, int] = {}
    for result in results:
        workload = result["workload"]
        count[workload] = count.get(workload, 0) + 1
        name = workload if count[workload] == 1 else f"{workload} #{count[workload]}"
        for key, measure in SPEEDS.items():
            if result.get(key):
                figures[name, measure] = result[key]
    return figures


def play(
    trees: dict[str, Path], command: Sequence[str], rounds: int
) -> Iterator[tuple[str, Figures]]:
    """Let the trees take turns: before, after; after, before; ... Yields each run's figures."""
    for number in range(rounds):
        names = list(trees) if number % 2 == 0 else list(trees)[::-1]
        for name in names:
            figures = run_script(trees[name], command)
            seconds = figures[PROCESS, "seconds"]
            print(f"round {number + 1} of {rounds}, {name}: {seconds:.1f} s", flush=True)
            yield name, figures


def compare(before: Sequence[Figures], after: Sequence[Figures]) -> list[dict[str, Any]]:
    """One row for each figure that both trees have; run i of `before` and of `after` are a round.

    Example: speeds 10, 20 before and 20, 30 after have the ratios 1.5 (best), 1.67 (median) and
    1.5 to 2 (within a round).
    """
    rows = []
    for workload, measure in before[0]:
        if (workload, measure) not in after[0]:
            continue
        old = [figures[workload, measure] for figures in before]
        new = [figures[workload, measure] for figures in after]
        best = min if workload == PROCESS else max
        in_round = [b / a for a, b in zip(old, new, strict=True)]
        rows.append(
            {
                "workload": workload,
                "measure": measure,
                "before": old,
                "after": new,
                "best_ratio": best(new) / best(old),
                "median_ratio": statistics.median(new) / statistics.median(old),
                "smallest_ratio": min(in_round),
                "largest_ratio": max(in_round),
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for a terminal: medians of both trees, and the ratios."""
    cells = [
        [
            row["workload"],
            row["measure"],
            bench_results.speed(statistics.median(row["before"])),
            bench_results.speed(statistics.median(row["after"])),
            f"{row['best_ratio']:.3f}",
            f"{row['median_ratio']:.3f}",
            f"{row['smallest_ratio']:.2f}..{row['largest_ratio']:.2f}",
        ]
        for row in rows
    ]
    return bench_results.text_table([HEADER, *cells], WIDTHS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, metavar="DIR")
    parser.add_argument("--after", type=Path, default=HERE, metavar="DIR", help="default: this one")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("command", nargs="+", metavar="SCRIPT", help="a script and its options")
    arguments = parser.parse_args()
    trees = {"before": arguments.before.resolve(), "after": arguments.after.resolve()}
    for tree in trees.values():
        if not (tree / "benchmarks" / arguments.command[0]).is_file():
            parser.error(f"{tree} has no benchmarks/{arguments.command[0]}")
    runs: dict[str, list[Figures]] = {name: [] for name in trees}
    for name, figures in play(trees, arguments.command, arguments.rounds):
        runs[name].append(figures)
        rows = compare(*runs.values()) if len(runs["before"]) == len(runs["after"]) else []
        if rows and arguments.json:  # what was measured is kept if a later run fails
            report = {
                **bench_results.provenance(),
                "script": arguments.command,
                "rounds": len(runs["after"]),
                "rows": rows,
            }
            arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("\n" + table(rows))


if __name__ == "__main__":
    main()
