r"""One model on several ranks: speed for each number of them, and what their talk costs.

    python benchmarks/tensor_parallel.py --sizes 1 3                   # a laptop, SmolLM2
    python benchmarks/tensor_parallel.py --sizes 1 2 4 --random-weights qwen3-8b \
        --modes graphs eager --batch-sizes 1 64 256 --prompt-tokens 512    # several GPUs

Batches of equal requests, decoded greedily, and prompts without an answer. Medians over the repeats
are printed; the file has every time.

message   what the leader says of a step: its length, and the leader's time to write and send it
sums      all-reduces and gathered logits of a step: on a CPU the leader's time in them, waiting for
          slower ranks included; on GPUs the time of NCCL's kernels, from a profile
          (both without the steps that compute prompts, if there is an answer)
mode      with CUDA graphs or eager; overlapped, or with each step read before the next begins
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

from minivllm import LLM
from minivllm.cli.options import positive
from minivllm.leader import Leader
from minivllm.measure import results as bench_results
from minivllm.measure import workloads as bench

HEADER = (
    "ranks",
    "workload",
    "mode",
    "decode tok/s",
    "prompt tok/s",
    "step",
    "message",
    "",
    "sums",
    "share",
)
WIDTHS = (5, 29, 15, 12, 12, 9, 8, 8, 9, 6)
SUMS = ("all_reduce", "all_gather", "broadcast")
MODES: dict[str, dict[str, bool]] = {
    "chosen": {},  # by the engine
    "graphs": {"enforce_eager": False, "overlap": True},
    "graphs-serial": {"enforce_eager": False, "overlap": False},
    "eager": {"enforce_eager": True, "overlap": True},
    "eager-serial": {"enforce_eager": True, "overlap": False},
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """How many ranks, and which batches."""
    parser.add_argument("--sizes", type=positive, nargs="+", default=[1, 3], metavar="RANKS")
    parser.add_argument("--batch-sizes", type=positive, nargs="+", default=[1, 16], metavar="N")
    parser.add_argument(
        "--modes",
        choices=MODES,
        nargs="+",
        default=["chosen"],
        help=f"any of {', '.join(MODES)} (default: chosen, by the engine)",
    )
    common.add_counts(
        parser,
        ("--prompt-tokens", 128, "of each request"),
        ("--new-tokens", 33, "of each answer"),
        ("--repeats", 3, "of each batch"),
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
    talk = Talk()
    leader = llm.engine.runner
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


def start(llm: LLM, workload: bench.Workload) -> None:
    """Add the requests; if their answers are longer than a token, compute their prompts."""
    for number, (prompt, params) in enumerate(zip(workload.prompts, workload.params, strict=True)):
        llm.add_request(prompt, params, request_id=f"talk-{number}")
    if max(workload.num_new_tokens) > 1:
        common.compute_prompts(llm)


def count_steps(llm: LLM) -> int:
    """Compute what is left; returns the number of steps."""
    steps = 0
    while llm.has_unfinished_requests():
        llm.step()
        steps += 1
    return steps


def nccl_seconds(llm: LLM, workload: bench.Workload) -> float:
    """The time of NCCL's kernels on the leader's GPU in what `start` leaves."""
    start(llm, workload)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        count_steps(llm)
    events = [event for event in profile.key_averages() if event.key.startswith("nccl")]
    return sum(event.device_time_total for event in events) / 1e6


def measure(llm: LLM, workload: bench.Workload, repeats: int) -> dict[str, Any]:
    """Speed of the workload, and the leader's talk per step."""
    bench.warm_up(llm, num_requests=len(workload.prompts))
    result = bench.summarise(workload, bench.repeat_offline(llm, workload, repeats))
    others = [bench.with_other_tokens(workload, n, llm.engine.vocab_size) for n in (101, 102)]
    start(llm, others[0])
    with listening(llm) as talk:
        began = time.perf_counter()
        steps = count_steps(llm)
        seconds = time.perf_counter() - began
    if llm.config.device.startswith("cuda") and llm.config.tensor_parallel_size > 1:
        talk.sum_seconds = nccl_seconds(llm, others[1])
    messages = max(1, talk.num_messages)
    return {
        **result,
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
        result["mode"],
        bench_results.speed(result["decode_tokens_per_s"]),
        bench_results.speed(result["prefill_tokens_per_s"]),
        f"{result['step_ms']:.2f} ms",
        f"{result['message_bytes']:.0f} B",
        f"{result['message_us']:.0f} us",
        f"{result['sums_ms']:.2f} ms",
        f"{100 * result['sums_share']:.0f} %",
    ]


def workloads(arguments: argparse.Namespace, vocab_size: int) -> list[bench.Workload]:
    """Batches with answers, and then prompts alone: as many as the largest batch has."""
    sizes = arguments.batch_sizes
    tokens = arguments.prompt_tokens
    shapes = [(size, tokens, arguments.new_tokens) for size in sizes] + [(max(sizes), tokens, 1)]
    return [bench.batch_workload(*shape, vocab_size) for shape in shapes]


def mode_of(llm: LLM) -> str:
    """What the engine chose, or was told: one of `MODES`."""
    step = "eager" if llm.config.enforce_eager else "graphs"
    return step if llm.config.overlap else f"{step}-serial"


def measure_all(
    llm: LLM, name: str | None, arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A result for each workload."""
    facts = bench_results.facts(llm.config, name)
    ranks = {"tensor_parallel_size": llm.config.tensor_parallel_size, "engine": "minivllm"}
    for workload in workloads(arguments, llm.engine.vocab_size):
        found = measure(llm, workload, arguments.repeats)
        result = {**facts, **ranks, "mode": mode_of(llm), **found}
        common.print_row(cells(result), WIDTHS)
        yield result


def main() -> None:
    parser = common.make_parser(__doc__)
    add_options(parser)
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    common.print_row(HEADER, WIDTHS)
    with common.model_path(arguments) as (model, name):
        for size in arguments.sizes:
            for mode in arguments.modes:
                settings = {"tensor_parallel_size": size, **MODES[mode]}
                with LLM(model, **common.settings_of(arguments, **settings)) as llm:
                    for result in measure_all(llm, name, arguments):
                        results.append(result)
                        # What was measured is kept, whatever comes of the rest.
                        common.save(arguments, results, "tensor-parallel", quiet=True)
    common.save(arguments, results, "tensor-parallel")


if __name__ == "__main__":
    common.run(main)
