"""What the host does for each running request in each step, without a model.

    python benchmarks/control_plane.py
    python benchmarks/control_plane.py --profile 256

The real scheduler, block manager, prefix cache and output processor around a runner that
returns fixed tokens at once. Every request decodes; the requests that wait do so because all
rows are taken, or (with "memory") because too few blocks are free: then the first of them is
looked at again in each step. The goal is 10 us per running request and step, whatever waits and
however long the contexts are.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import pstats
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import common

from minivllm.block_manager import BlockManager, blocks_for
from minivllm.config import EngineConfig
from minivllm.engine import Engine
from minivllm.measure import results as bench_results
from minivllm.output.processor import OutputProcessor
from minivllm.output.prompts import EncodedPrompt
from minivllm.prefix_cache import PrefixCache
from minivllm.request import Chunk, SamplingParams
from minivllm.scheduler import Scheduler

BLOCK_SIZE = 16
GOAL = 10.0  # microseconds per running request and step


@dataclass(frozen=True)
class Case:
    """A state of the engine that is timed."""

    num_running: int
    num_waiting: int
    context: int  # prompt tokens of each running request, and of the first that waits
    short_of: str = "rows"  # or "memory": why the waiting ones wait
    streamed: bool = False  # text is made in each step, not at the end


class FixedTokens:
    """A runner without a model: every request gets the same token, at once."""

    model = SimpleNamespace(config=SimpleNamespace(vocab_size=2**16))

    def launch(self, chunks: Sequence[Chunk]) -> Any:
        token_ids = [1] * sum(chunk.samples for chunk in chunks)
        return SimpleNamespace(wait=lambda: token_ids, ranked=None)

    def release(self, request: object) -> None:
        """There is nothing to free."""


class Letters:
    """A tokenizer in which every token is a letter."""

    def detokenizer(self, skip_special_tokens: bool = True) -> Any:
        return SimpleNamespace(push=lambda token_id: "a", finish=lambda: "")


def make_engine(case: Case, num_steps: int) -> tuple[Engine, OutputProcessor]:
    """An engine in which the case's requests run and wait, all prompts computed."""
    lacks_memory = case.short_of == "memory"
    each = blocks_for(case.context + num_steps + 2, BLOCK_SIZE)
    num_rows = case.num_running + lacks_memory
    # Room for all that run up to their end, and one block less than one more would need.
    num_blocks = case.num_running * each + blocks_for(case.context, BLOCK_SIZE) - 1
    memory = BlockManager(num_blocks, BLOCK_SIZE, 0.0, PrefixCache(BLOCK_SIZE))
    # One step computes all prompts; afterwards the budget is that of a GPU.
    scheduler = Scheduler(memory, num_rows, case.num_running * case.context)
    config = EngineConfig(max_num_seqs=num_rows, max_model_len=case.context + num_steps + 100)
    engine = Engine(config, Letters(), (), memory, scheduler, FixedTokens())  # type: ignore[arg-type]
    outputs = OutputProcessor(engine)
    for number in range(case.num_running):
        add(outputs, number, case.context, case.streamed)
    step(engine, outputs)
    if lacks_memory:
        for request in scheduler.running:
            memory.allocate(request, case.context + num_steps + 2)
    scheduler.max_num_batched_tokens = 8192
    for number in range(case.num_waiting):
        add(outputs, case.num_running + number, 100 if number else case.context, case.streamed)
    return engine, outputs


def add(outputs: OutputProcessor, number: int, num_tokens: int, streamed: bool) -> None:
    """Queue a request whose prompt begins with its number, so that no two share a prefix."""
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    prompt = EncodedPrompt(None, [number] + [1] * (num_tokens - 1))
    parent = outputs.add(prompt, params, str(number))
    if streamed:
        outputs.watch(parent)


def step(engine: Engine, outputs: OutputProcessor) -> None:
    """What `LLM` does in each step."""
    outputs.process(engine.step())
    outputs.take_outputs()


def time_case(case: Case, num_rounds: int = 9) -> list[float]:
    """Microseconds per running request and step, of several rounds.

    A round is a multiple of as many steps as a block has tokens, so that each has the same
    share of steps that take and publish blocks.
    """
    num_steps = BLOCK_SIZE * max(1, 128 // case.num_running)
    engine, outputs = make_engine(case, (num_rounds + 1) * num_steps)
    times = []
    for _ in range(num_rounds + 1):
        # One thread that never waits: its processor time is the elapsed time of an idle machine,
        # and hardly contains the other programs of a busy one.
        began = time.process_time()
        for _ in range(num_steps):
            step(engine, outputs)
        times.append((time.process_time() - began) * 1e6 / num_steps / case.num_running)
    assert len(engine.scheduler.running) == case.num_running, "no request may start or end"
    assert len(engine.scheduler.waiting) == case.num_waiting, "no request may start or end"
    return times[1:]  # the first one warms up


def measure(case: Case) -> dict[str, Any]:
    """One result."""
    times = time_case(case)
    waits = f", {case.num_waiting} waiting for {case.short_of}" if case.num_waiting else ""
    streamed = ", streamed" if case.streamed else ""
    microseconds = statistics.median(times)
    return {
        "workload": f"control plane, {case.num_running} running{waits}, context {case.context}"
        + streamed,
        "device": "cpu",
        "machine": bench_results.cpu_name(),
        "microseconds": microseconds,
        "best_microseconds": min(times),
        "microseconds_all": times,
        "seconds": microseconds * case.num_running / 1e6,  # of a step
        "output_tokens_per_s": 1e6 / microseconds,
        "prompt_tokens_per_s": 0.0,
        **bench_results.provenance(),
    }


def all_cases() -> list[Case]:
    """Every number of running and waiting requests and context, then the other ways to wait."""
    grid = itertools.product((1, 32, 256), (0, 1_000, 10_000), (100, 10_000))
    cases = [Case(*numbers) for numbers in grid]
    cases += [Case(n, 1_000, context, "memory") for n in (1, 32, 256) for context in (100, 10_000)]
    return cases + [Case(256, 0, context, streamed=True) for context in (100, 10_000)]


def print_profile(num_running: int) -> None:
    """The functions that cost most."""
    engine, outputs = make_engine(Case(num_running, 0, 100), 200)
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(10 * BLOCK_SIZE):
        step(engine, outputs)
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(18)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", type=int, metavar="RUNNING", help="where the time goes")
    common.add_files(parser)
    arguments = parser.parse_args()
    if arguments.profile:
        print_profile(arguments.profile)
        return
    results = []
    print(f"{'us per running request and step':60} median    best")
    for case in all_cases():
        results.append(result := measure(case))
        mark = "" if result["microseconds"] <= GOAL else f"  above {GOAL:.0f}"
        print(
            f"{result['workload']:60} {result['microseconds']:6.2f}"
            f"  {result['best_microseconds']:6.2f}{mark}",
            flush=True,
        )
    common.save(arguments, results, "control-plane")


if __name__ == "__main__":
    common.run(main)
