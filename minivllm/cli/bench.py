"""`minivllm bench`: how fast this machine is. Not built in the course."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.cli.options import add_command, add_engine_options, load, positive
from minivllm.measure import results as bench_results

if TYPE_CHECKING:
    from minivllm.llm import LLM
    from minivllm.measure.workloads import Run, Workload

TEACHES = """\
Times random prompts of fixed lengths, which are never cut short. Takes about two minutes on a
laptop with two cores, less on a better machine.

  batch N    N equal requests that start together: what one user (batch 1) or many get
  prefill    prompts alone: how fast text is read
  mixed      requests of random lengths, coming and going as in a service

  output     answer tokens per second, all requests together, from the first prompt on
  decode     the same, only while every request is decoding
  prompt     prompt tokens per second
  TTFT       time to first token (median): how long a user waits to see something
  between    time between two tokens of a request (median), and p99, which 99 of 100 stay
             below: how smoothly the text arrives

A larger batch gives more tokens per second in all and fewer to each user. Other running programs
slow it down, so compare several runs.
"""


def add_bench(commands: Any) -> None:
    """Add the command and its options."""
    bench = add_command(
        commands,
        "bench",
        run_bench,
        summary="measure speed on this machine",
        teaches=TEACHES,
        example="example: minivllm bench --batch-sizes 1 8 --json speed.json",
    )
    bench.add_argument(
        "--batch-sizes", type=positive, nargs="+", default=[1, 4, 16], help="default: 1 4 16"
    )
    for name, default, what in (
        ("--prompt-tokens", 128, "of each request of a batch"),
        ("--new-tokens", 32, "of each answer"),
        ("--prefill-tokens", 512, "of the prompt that is timed alone"),
        ("--mixed-requests", 12, "of the mixed workload"),
        ("--repeats", 3, "of each workload; the median counts"),
        ("--max-seconds", 100, "in all, about: then repeats and later workloads are skipped"),
    ):
        bench.add_argument(
            name, type=positive, default=default, metavar="N", help=f"{what} (default: %(default)s)"
        )
    bench.add_argument(
        "--json", type=Path, metavar="FILE", help="write all measurements, raw times too"
    )
    add_engine_options(bench)


def run_bench(arguments: argparse.Namespace) -> int:
    """Measure and print, one row as soon as it is known."""
    deadline = time.perf_counter() + arguments.max_seconds
    if arguments.json is not None:
        bench_results.require_writable(arguments.json)
    largest = max(arguments.batch_sizes)
    results = []
    # The default has room for 32 at least; a larger batch must not wait for a row.
    with load(arguments, max_num_seqs=largest if largest > 32 else None) as llm:
        from tqdm import tqdm

        from minivllm.measure import workloads as bench

        facts = bench_results.facts(llm.config)
        workloads = choose_workloads(llm, arguments)
        for workload in workloads:
            bench.check_fits(llm, workload)
        print(f"{facts['model']}, {facts['dtype']} on {facts['machine']}")
        times = f"each {arguments.repeats} times" if arguments.repeats > 1 else "each once"
        print(f"{len(workloads)} workloads, {times}, in about {arguments.max_seconds} s at most\n")
        bench.warm_up(llm)
        print(
            bench_results.text_table([bench_results.SHORT_HEADER], bench_results.WIDTHS), flush=True
        )
        for workload, runs in share_time(llm, workloads, arguments.repeats, deadline):
            results.append({**facts, **bench.summarise(workload, runs)})
            cells = bench_results.table_cells(results[-1])
            tqdm.write(bench_results.text_table([cells], bench_results.WIDTHS))
    for workload in workloads[len(results) :]:
        print(f"skipped, because --max-seconds {arguments.max_seconds} are over: {workload.name}")
    if arguments.json is not None:
        bench_results.save_results(arguments.json, results)
        print(f"\nwritten: {arguments.json}")
    return 0


def share_time(
    llm: LLM, workloads: list[Workload], repeats: int, deadline: float
) -> Iterator[tuple[Workload, list[Run]]]:
    """Yield the runs of each workload. The remaining workloads share the remaining time; once it
    is over, no workload but the first begins."""
    from tqdm import tqdm

    from minivllm.measure import workloads as bench

    with tqdm(workloads, leave=False, disable=not sys.stderr.isatty()) as bar:
        for number, workload in enumerate(bar):
            left = deadline - time.perf_counter()
            if left <= 0 and number:
                return
            bar.set_description(workload.name)
            share = left / (len(workloads) - number)
            yield workload, bench.repeat_offline(llm, workload, repeats, share)


def choose_workloads(llm: LLM, arguments: argparse.Namespace) -> list[Workload]:
    """Return a prompt alone, the batches, and requests of mixed lengths up to those of these."""
    from minivllm.measure import workloads as bench

    vocab_size = llm.engine.vocab_size
    prompt = arguments.prompt_tokens
    new = arguments.new_tokens
    batches = [
        bench.batch_workload(size, prompt, new, vocab_size) for size in arguments.batch_sizes
    ]
    prefill = bench.batch_workload(1, arguments.prefill_tokens, 1, vocab_size)
    prompts = (max(1, prompt // 8), prompt)
    answers = (max(1, new // 4), new)
    mixed = bench.mixed_workload(arguments.mixed_requests, vocab_size, prompts, answers)
    return [prefill, *batches, mixed]
