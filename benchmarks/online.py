"""Requests arrive one by one, as in a service, and each user waits for theirs.

    python benchmarks/online.py --rates 0.5 1 2 --figure online.png

Arrivals are a Poisson process with a seed: the same times and lengths in every run. For each
rate: time to first token, time between tokens and time to the last one (50th, 90th and 99th
percentile), counted from the arrival. Above the rate that the machine sustains, the queue and
the time to first token grow for as long as requests keep coming.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common

from minivllm.measure import results as bench_results
from minivllm.measure import workloads as bench

HEADER = ("requests/s", "output tok/s", "TTFT p50", "p90", "p99", "between p50", "p99", "end p50")
WIDTHS = (10, 12, 9, 9, 9, 11, 9, 9)


def add_options(parser: argparse.ArgumentParser) -> None:
    """How many requests come, how fast and how long they are."""
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1, 2], metavar="R")
    common.add_counts(
        parser,
        ("--num-requests", 32, "at each rate"),
        ("--min-tokens", 16, "of each prompt and answer, at least"),
        ("--max-prompt-tokens", 256, "of a prompt"),
        ("--max-output-tokens", 64, "of an answer"),
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path, help="draw latency against rate")


def measure(llm: Any, rate: float, number: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One result, without the facts of the machine. `number` is that of the run."""
    vocab_size = llm.engine.vocab_size
    ranges = [
        (arguments.min_tokens, longest)
        for longest in (arguments.max_prompt_tokens, arguments.max_output_tokens)
    ]
    workload = bench.mixed_workload(arguments.num_requests, vocab_size, *ranges, arguments.seed)
    # Other tokens at each rate: none is served by the prefix cache.
    workload = bench.with_other_tokens(workload, number, vocab_size)
    arrivals = bench.arrival_times(rate, arguments.num_requests, arguments.seed)
    result = bench.summarise(workload, [bench.time_online(llm, workload, arrivals)])
    return {
        **result,
        "workload": f"online {rate:g}/s, {workload.name}",
        "requests_per_s": rate,
        "seed": arguments.seed,
        "engine": "minivllm",
    }


def table_cells(result: dict[str, Any]) -> list[str]:
    """One row of `HEADER`."""
    first, between, end = (
        result[name] or {} for name in ("first_token_s", "inter_token_s", "end_to_end_s")
    )
    times = [first.get(name) for name in ("p50", "p90", "p99")]
    times += [between.get("p50"), between.get("p99"), end.get("p50")]
    speed = bench_results.speed(result["output_tokens_per_s"])
    return [f"{result['requests_per_s']:g}", speed, *map(bench_results.milliseconds, times)]


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Latency percentiles against the request rate."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from minivllm.pictures.figures import DPI, PALETTE, WIDTH

    figure = Figure(figsize=(WIDTH, 3.2), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    rates = [result["requests_per_s"] for result in results]
    for ax, name, title in (
        (figure.add_subplot(1, 2, 1), "first_token_s", "time to first token"),
        (figure.add_subplot(1, 2, 2), "inter_token_s", "time between tokens"),
    ):
        for percent, colour, line in (("p50", "decode", "o-"), ("p99", "prefill", "s--")):
            times = [1e3 * result[name][percent] for result in results]
            ax.plot(rates, times, line, color=PALETTE[colour], label=percent)
        ax.set(title=title, xlabel="requests per second", ylabel="milliseconds")
        ax.set_ylim(bottom=0)
        ax.legend(frameon=False)
    figure.savefig(path)
    print(f"picture: {path.name}")


def main() -> None:
    parser = common.make_parser(__doc__)
    add_options(parser)
    arguments = parser.parse_args()
    for rate in arguments.rates:
        if not rate > 0:
            raise ValueError(f"--rates {rate:g} must be above 0")
    if arguments.figure:
        bench_results.require_writable(arguments.figure)
    results = []
    with common.open_llm(arguments) as (llm, name):
        facts = bench_results.facts(llm.config, name)
        bench.warm_up(llm)
        print(f"{facts['model']}, {facts['dtype']} on {facts['machine']}")
        common.print_row(HEADER, WIDTHS)
        for number, rate in enumerate(arguments.rates):
            results.append({**facts, **measure(llm, rate, number, arguments)})
            common.print_row(table_cells(results[-1]), WIDTHS)
    if arguments.figure:
        draw(results, arguments.figure)
    common.save(arguments, results, "online")


if __name__ == "__main__":
    common.run(main)
