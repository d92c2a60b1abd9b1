"""`minivllm bench`: how fast this machine is. Given (no notebook builds it)."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.cli.options import add_command, add_engine_options, load, positive
from minivllm.waiting import waiting

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
             below: how smooth the text comes

A larger batch gives more tokens per second in all and fewer to each user. Other programs that
are running slow it down: look at several runs before you believe one.
"""


def add_bench(commands: Any) -> None:
    """The command and its options."""
    bench = add_command(
        commands,
        "bench",
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
        ("--max-seconds", 100, "in all, about: then repeats, and at last workloads, are left out"),
    ):
        bench.add_argument(
            name, type=positive, default=default, metavar="N", help=f"{what} (default: %(default)s)"
        )
    bench.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write all that was measured, raw times too",
    )
    add_engine_options(bench)
    bench.set_defaults(run=run_bench)


def run_bench(arguments: argparse.Namespace) -> None:
    """Measure and print, one row as soon as it is known."""
    deadline = time.perf_counter() + arguments.max_seconds
    with waiting("importing PyTorch"):
        from minivllm import bench_results
        from minivllm.measure import workloads as bench

    if arguments.json is not None:
        bench_results.require_writable(arguments.json)
    largest = max(arguments.batch_sizes)
    widths = bench_results.WIDTHS
    results = []
    # The default has room for 32 at least; a batch that is larger must not wait for a row.
    with load(arguments, max_num_seqs=largest if largest > 32 else None) as llm:
        facts = bench_results.facts(llm.config)
        workloads = choose_workloads(llm, arguments)
        for workload in workloads:
            bench.check_fits(llm, workload)
        print(f"{facts['model']}, {facts['dtype']} on {facts['machine']}")
        times = f"each {arguments.repeats} times" if arguments.repeats > 1 else "each once"
        print(f"{len(workloads)} workloads, {times}, in about {arguments.max_seconds} s at most\n")
        bench.warm_up(llm)
        print(bench_results.text_table([bench_results.SHORT_HEADER], widths), flush=True)
        for workload, runs in share_time(llm, workloads, arguments, deadline):
            results.append({**facts, **bench.summarise(workload, runs)})
            cells = bench_results.table_cells(results[-1])
            print(bench_results.text_table([cells], widths), flush=True)
    if arguments.json is not None:
        bench_results.save_results(arguments.json, results)
        print(f"\nwritten: {arguments.json}")


def share_time(
    llm: LLM, workloads: list[Workload], arguments: argparse.Namespace, deadline: float
) -> Iterator[tuple[Workload, list[Run]]]:
    """Yield the runs of each workload. The remaining workloads share the time until the
    `deadline`, a time of `time.perf_counter`; after it they are named and not begun."""
    from minivllm.measure import workloads as bench

    for number, workload in enumerate(workloads):
        left = deadline - time.perf_counter()
        if left <= 0 and number:
            names = ", ".join(workload.name for workload in workloads[number:])
            print(f"\nleft out, because --max-seconds {arguments.max_seconds} are over: {names}")
            return
        share = left / (len(workloads) - number)
        with waiting(workload.name):
            runs = bench.repeat_offline(llm, workload, arguments.repeats, share)
        yield workload, runs


def choose_workloads(llm: LLM, arguments: argparse.Namespace) -> list[Workload]:
    """A prompt alone, the batches, and requests of mixed lengths up to those of the batches."""
    from minivllm.measure import workloads as bench

    vocab_size = llm.engine.vocab_size
    prompt, new = arguments.prompt_tokens, arguments.new_tokens
    batches = [
        bench.batch_workload(size, prompt, new, vocab_size) for size in arguments.batch_sizes
    ]
    prefill = bench.batch_workload(1, arguments.prefill_tokens, 1, vocab_size)
    ranges = (max(1, prompt // 8), prompt), (max(1, new // 4), new)
    mixed = bench.mixed_workload(arguments.mixed_requests, vocab_size, *ranges)
    return [prefill, *batches, mixed]
