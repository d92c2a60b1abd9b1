r"""One model on several ranks: speed for each number of them, and what their talk costs.

    python benchmarks/tensor_parallel.py --sizes 1 3                   # a laptop, SmolLM2
    python benchmarks/tensor_parallel.py --sizes 1 2 4 --random-weights qwen3-0.6b \
        --batch-sizes 1 64 256 --prompt-tokens 512 --new-tokens 256    # several GPUs

Batches of equal requests, decoded greedily. Medians over the repeats are printed; the file has
every time.

message   what the leader says of a step: its length, and the leader's time to write and send it
sums      all-reduces and gathered logits of a step: on a CPU the leader's time in them, waiting for
          slower ranks included; on GPUs the time of NCCL's kernels, from a profile
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import common
import torch

from minivllm import LLM, bench, bench_results
from minivllm.cli_options import positive
from minivllm.leader import Leader

HEADER = ("ranks", "workload", "tok/s", "step", "message", "", "sums", "share")
WIDTHS = (6, 32, 9, 10, 9, 9, 10, 7)
SUMS = ("all_reduce", "all_gather", "broadcast")


def add_options(parser: argparse.ArgumentParser) -> None:
    """How many ranks, and which batches."""
    parser.add_argument("--sizes", type=positive, nargs="+", default=[1, 3], metavar="RANKS")
    parser.add_argument("--batch-sizes", type=positive, nargs="+", default=[1, 16], metavar="N")
    for name, default, what in (
        ("--prompt-tokens", 128, "of each request"),
        ("--new-tokens", 33, "of each answer"),
        ("--repeats", 3, "of each batch"),
    ):
        parser.add_argument(
            name, type=positive, default=default, metavar="N", help=f"{what} (default: %(default)s)"
        )


@dataclass
class Talk:
    """What the leader of an engine has spent on its workers."""

    num_messages: int = 0
    num_bytes: int = 0
    message_seconds: float = 0.0
    sum_seconds: float = 0.0


def timed(function: Callable[..., Any], note: Callable[[float, Any], None]) -> Callable[..., Any]:
    """The function, and `note(seconds, first argument)` after each call."""

    def call(*arguments: Any) -> Any:
        started = time.perf_counter()
        result = function(*arguments)
        note(time.perf_counter() - started, arguments[0])
        return result

    return call


@contextmanager
def listening(llm: LLM) -> Iterator[Talk]:
    """Times the leader's messages and sums until the end."""
    talk, leader = Talk(), llm.engine.runner
    if not isinstance(leader, Leader):
        yield talk
        return

    def note_message(seconds: float, message: bytes) -> None:
        talk.num_messages += 1
        talk.num_bytes += len(message)
        talk.message_seconds += seconds

    def note_description(seconds: float, _: Any) -> None:
        talk.message_seconds += seconds

    def note_sum(seconds: float, _: Any) -> None:
        talk.sum_seconds += seconds

    group: Any = leader.group
    directory: Any = leader.directory
    directory.describe = timed(directory.describe, note_description)
    group.send = timed(group.send, note_message)
    for name in SUMS:
        setattr(group, name, timed(getattr(group, name), note_sum))
    yield talk
    for thing, names in ((directory, ("describe",)), (group, ("send", *SUMS))):
        for name in names:
            delattr(thing, name)  # the method shows again


def nccl_seconds(llm: LLM, workload: bench.Workload) -> float:
    """The time of NCCL's kernels on the leader's GPU in one run of the workload."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        bench.time_offline(llm, workload)
    events = [event for event in profile.key_averages() if event.key.startswith("nccl")]
    return sum(event.device_time_total for event in events) / 1e6


def measure(llm: LLM, workload: bench.Workload, repeats: int) -> dict[str, Any]:
    """Speed of the workload, and the leader's talk per step."""
    bench.warm_up(llm, num_requests=len(workload.prompts))
    runs = bench.repeat_offline(llm, workload, repeats)
    steps = -(-workload.num_output_tokens // len(workload.prompts))
    with listening(llm) as talk:
        seconds = bench.time_offline(llm, workload).seconds
    if llm.config.device.startswith("cuda") and llm.config.tensor_parallel_size > 1:
        talk.sum_seconds = nccl_seconds(llm, workload)
    messages = max(1, talk.num_messages)
    return {
        **bench.summarise(workload, runs),
        "step_ms": 1e3 * seconds / steps,
        "message_bytes": talk.num_bytes / messages,
        "message_us": 1e6 * talk.message_seconds / messages,
        "sums_ms": 1e3 * talk.sum_seconds / steps,
        "sums_share": talk.sum_seconds / seconds,
    }


def cells(result: dict[str, Any]) -> list[str]:
    """One line of the table."""
    return [
        str(result["tensor_parallel_size"]),
        result["workload"],
        f"{result['output_tokens_per_s']:.1f}",
        f"{result['step_ms']:.2f} ms",
        f"{result['message_bytes']:.0f} B",
        f"{result['message_us']:.0f} us",
        f"{result['sums_ms']:.2f} ms",
        f"{100 * result['sums_share']:.0f} %",
    ]


def main() -> None:
    parser = common.make_parser(__doc__)
    add_options(parser)
    arguments = parser.parse_args()
    results = []
    print(bench_results.text_table([HEADER], WIDTHS), flush=True)
    for size in arguments.sizes:
        with common.open_llm(arguments, tensor_parallel_size=size) as (llm, name):
            facts = bench_results.facts(llm.config, name)
            for batch_size in arguments.batch_sizes:
                shape = (batch_size, arguments.prompt_tokens, arguments.new_tokens)
                workload = bench.batch_workload(*shape, bench.vocab_size_of(llm))
                bench.check_fits(llm, workload)
                found = measure(llm, workload, arguments.repeats)
                ranks = {"tensor_parallel_size": size, "engine": "minivllm"}
                results.append({**facts, **ranks, **found})
                print(bench_results.text_table([cells(results[-1])], WIDTHS), flush=True)
    common.save(arguments, results, "tensor-parallel")


if __name__ == "__main__":
    common.run(main)
