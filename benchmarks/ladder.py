r"""What each idea bought: one workload from the naive loop to the whole engine, a rung at a time.

    python benchmarks/ladder.py --random-weights tiny --batch-sizes 1 4     # a laptop, minutes
    python benchmarks/ladder.py --random-weights qwen3-0.6b --save          # a GPU, minutes

Equal requests that start together and decode; every rung computes the same lengths, and only
tokens behind the prompts count. Each rung is the one before it with one thing changed, but for
torch.compile, which the next rung does not keep:

naive loop        no cache, no batch, greedy; timed on a few tokens of middle length, one request
                  after the other, so its speed is the same for every batch size (extrapolated)
torch operations  the engine with plain PyTorch, every operation launched by the host
torch.compile     the operations between the matrix products compiled, attention as before. Not
                  whole layers: the hand-over to the cache's attention cuts each of them in two
                  anyway, and 28 layers would be compiled one by one
kernels           Triton's on a GPU, numba's with packed weights on a CPU
graph: forward    the forward pass replayed as a CUDA graph, the sampler launched after it; on a
                  CPU the recorder over plain PyTorch, which keeps the rules and gains nothing
graph: all        the sampler inside, so that a step is one launch
overlap           step n + 1 is launched before step n is read

And for prompts that come while others decode (more requests than rows): steps of prompts alone,
which hold decodes up, against prompts in chunks together with the decodes.

The hardware's limit is the time to read weights and cache at the speed of a copy, measured in
the same run. Timelines are recorded with PyTorch's profiler on, which makes launches slower; all
speeds are measured without it.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import common
import step_timeline
import torch
from rungs import NAIVE, POLICIES, Rung, names_of, rungs

from minivllm import LLM
from minivllm.cli.options import positive
from minivllm.config import known
from minivllm.kv_cache import kv_block_bytes
from minivllm.measure import results as bench_results
from minivllm.measure import workloads as bench
from minivllm.measure.naive import time_naive
from minivllm.model import CausalLM
from minivllm.request import Chunk

HEADER = ("rung", "batch", "decode tok/s", "ms/step", "launch ms", "GB/s", "of limit")
WIDTHS = (18, 6, 13, 9, 10, 8, 9)
NAIVE_TOKENS = 3
TEMPERATURE = 0.6  # nano-vllm's: sampling is part of a step
COPY_BYTES = {"cuda": 2**31, "cpu": 2**27}
COPY_REPEATS = 10


# -- measuring -----------------------------------------------------------------------------------


@dataclass
class Stopwatch:
    """Stands between engine and runner, and notes how long the launch of each decode step took:
    from the chunks to the last operation in the device's queue."""

    runner: Any
    seconds: list[float] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def launch(self, chunks: Sequence[Chunk]) -> Any:
        """The runner's, timed if all chunks decode."""
        began = time.perf_counter()
        pending = self.runner.launch(chunks)
        if all(chunk.is_decode for chunk in chunks):
            self.seconds.append(time.perf_counter() - began)
        return pending


def copy_speed(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes, the best of some: the limit of what waits
    for memory."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(COPY_REPEATS):
        synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return 2 * len(source) / min(seconds)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; a CPU is never behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_bytes(model: CausalLM, batch_size: int, context: float) -> float:
    """Bytes that a decode step must read: all weights that it multiplies with, and keys and
    values of `context` tokens of each request."""
    weight = next(model.parameters())
    weights = sum(p.numel() * p.itemsize for p in model.parameters())
    if model.lm_head is not None:  # then of the embedding only a few rows are read
        weights -= model.model.embed_tokens.weight.nbytes
    return weights + batch_size * context * kv_block_bytes(model.config, 1, weight.dtype)


def against_limit(
    tokens_per_s: float, batch_size: int, num_bytes: float, limit: float
) -> dict[str, Any]:
    """The figures of a rung: 4 requests at 400 tok/s are 10 ms a step; if a step reads 1 GB that
    is 100 GB/s, of a limit of 1,000 GB/s a tenth."""
    step_s = batch_size / tokens_per_s
    return {
        "batch_size": batch_size,
        "decode_tokens_per_s": tokens_per_s,
        "step_s": step_s,
        "step_bytes": num_bytes,
        "bytes_per_s": num_bytes / step_s,
        "limit_bytes_per_s": limit,
        "limit_tokens_per_s": batch_size * limit / num_bytes,
        "share_of_limit": num_bytes / step_s / limit,
    }


def make_workload(batch_size: int, arguments: argparse.Namespace, vocab: int) -> bench.Workload:
    """Equal requests, sampled."""
    sizes = (arguments.prompt_tokens, arguments.new_tokens)
    workload = bench.batch_workload(batch_size, *sizes, vocab)
    return dataclasses.replace(workload, temperature=TEMPERATURE)


def middle(arguments: argparse.Namespace) -> float:
    """Tokens of a request half way through its answer."""
    return float(arguments.prompt_tokens + arguments.new_tokens / 2)


def measure_rung(
    llm: LLM, rung: Rung, limit: float, arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """One result for each batch size."""
    rung.prepare(llm)
    model = llm.engine.runner.model
    vocab = llm.engine.vocab_size
    for batch_size in arguments.batch_sizes:
        workload = make_workload(batch_size, arguments, vocab)
        bench.warm_up(llm, num_requests=batch_size)
        watch = Stopwatch(llm.engine.runner)
        llm.engine.runner = watch
        runs = bench.repeat_offline(llm, workload, arguments.repeats)
        llm.engine.runner = watch.runner
        result = brief(bench.summarise(workload, runs))
        speed = result["decode_tokens_per_s"] or result["output_tokens_per_s"]
        num_bytes = step_bytes(model, batch_size, middle(arguments))
        result |= against_limit(speed, batch_size, num_bytes, limit)
        # On a CPU to launch an operation is to compute it.
        is_gpu = llm.config.device.startswith("cuda")
        result["launch_s"] = statistics.median(watch.seconds) if is_gpu else None
        if rung.has_timeline and batch_size == timeline_batch(arguments):
            result["timeline"] = step_timeline.record(llm, workload)
        yield {"rung": rung.name, **result}


def brief(summary: dict[str, Any]) -> dict[str, Any]:
    """A summary without the times of single requests."""
    lists = ("first_token_s_all", "end_to_end_s_all")
    return {name: value for name, value in summary.items() if name not in lists}


def timeline_batch(arguments: argparse.Namespace) -> int:
    """The batch size whose timeline is recorded: 8, or the nearest one."""
    return int(min(arguments.batch_sizes, key=lambda size: abs(size - 8)))


def measure_naive(
    llm: LLM, limit: float, arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """The naive loop, extrapolated from a few tokens of middle length."""
    vocab = llm.engine.vocab_size
    num_tokens = int(middle(arguments))
    prompt = bench.batch_workload(1, num_tokens, 2, vocab).prompts
    time_naive(llm, prompt, 1)
    speed = time_naive(llm, prompt, NAIVE_TOKENS).tokens_per_s
    for batch_size in arguments.batch_sizes:
        workload = make_workload(batch_size, arguments, vocab)
        seconds = workload.num_output_tokens / speed
        num_bytes = step_bytes(llm.engine.runner.model, batch_size, middle(arguments))
        figures = against_limit(speed, batch_size, num_bytes, limit)
        yield {
            "rung": NAIVE,
            "workload": workload.name,
            "seconds": seconds,
            "output_tokens_per_s": speed,
            "prompt_tokens_per_s": workload.num_prompt_tokens / seconds,
            **figures,
            "bytes_per_s": None,  # it reads no cache, and the weights once for every request
            "launch_s": None,
            "extrapolated": f"from {NAIVE_TOKENS} tokens after {num_tokens}",
        }


def measure_mixed(llm: LLM, arguments: argparse.Namespace, policy: str) -> dict[str, Any]:
    """Three times as many requests as rows, of random lengths, under one of the two policies."""
    POLICIES[policy](llm)
    rows = known(llm.config.max_num_seqs)
    lengths = [
        (max(1, size // 4), size) for size in (arguments.prompt_tokens, arguments.new_tokens)
    ]
    workload = bench.mixed_workload(3 * rows, llm.engine.vocab_size, *lengths)
    bench.warm_up(llm, num_requests=rows)
    runs = bench.repeat_offline(llm, workload, arguments.repeats)
    return {"rung": policy, **brief(bench.summarise(workload, runs))}


# -- the run -------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """How large the workload is."""
    parser.add_argument("--batch-sizes", type=positive, nargs="+", metavar="N")
    for name, what in (
        ("--prompt-tokens", "of each request (512 on a GPU, 32 on a CPU)"),
        ("--new-tokens", "of each answer (97 on a GPU, 17 on a CPU)"),
    ):
        parser.add_argument(name, type=positive, metavar="N", help=what)
    parser.add_argument("--repeats", type=positive, default=3, metavar="N")
    parser.add_argument(
        "--mixed-rows", type=positive, metavar="N", help="of the mixed workload (64; 4 on a CPU)"
    )
    parser.add_argument("--rungs", nargs="+", metavar="NAME", help="only these (default: all)")


def fill_in(arguments: argparse.Namespace, device_type: str) -> None:
    """Sizes that suit the device, where none are given. Raises ValueError for an unknown rung."""
    names = names_of(device_type)
    arguments.rungs = arguments.rungs or names
    if unknown := [name for name in arguments.rungs if name not in names]:
        raise ValueError(f"--rungs {unknown[0]!r} is none of {', '.join(names)}")
    is_gpu = device_type == "cuda"
    for name, gpu, cpu in (
        ("batch_sizes", [1, 8, 64, 256], [1, 8]),
        ("prompt_tokens", 512, 32),
        ("new_tokens", 97, 17),
        ("mixed_rows", 64, 4),
    ):
        if getattr(arguments, name) is None:
            setattr(arguments, name, gpu if is_gpu else cpu)


def settings_for(arguments: argparse.Namespace, num_rows: int) -> dict[str, Any]:
    """Room for so many requests, and no more: what is left over is not filled with zeros."""
    length = arguments.prompt_tokens + arguments.new_tokens
    blocks = num_rows * (length // 16 + 2)
    return {"max_num_seqs": num_rows, "max_model_len": length, "num_kv_blocks": blocks}


@contextmanager
def engine(model: str, arguments: argparse.Namespace, **settings: Any) -> Iterator[LLM]:
    """An engine whose memory is freed completely afterwards."""
    settings |= {"dtype": arguments.dtype, "device": arguments.device, "progress": False}
    with LLM(model, **(settings | dict(arguments.set))) as llm:
        yield llm
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def climb(
    model: str, name: str | None, limit: float, arguments: argparse.Namespace, device_type: str
) -> Iterator[dict[str, Any]]:
    """The results of all rungs, as they come. A rung that cannot be measured here is left out,
    with the reason."""
    room = settings_for(arguments, max(arguments.batch_sizes))
    steps = rungs(device_type)
    wanted = arguments.rungs
    if NAIVE in wanted:
        with engine(model, arguments, **room, **steps[0].settings) as llm:
            facts = bench_results.facts(llm.config, name)
            yield from ({**facts, **one} for one in measure_naive(llm, limit, arguments))
    for rung in [rung for rung in steps if rung.name in wanted]:
        try:
            with engine(model, arguments, **room, **rung.settings) as llm:
                facts = bench_results.facts(llm.config, name)
                yield from ({**facts, **one} for one in measure_rung(llm, rung, limit, arguments))
        except RuntimeError as error:
            print(f"{rung.name}: left out ({str(error).strip().splitlines()[0]})", flush=True)
    few = settings_for(arguments, arguments.mixed_rows) | steps[-1].settings
    few["max_num_batched_tokens"] = max(arguments.mixed_rows, 2 * arguments.prompt_tokens)
    for policy in [policy for policy in POLICIES if policy in wanted]:
        with engine(model, arguments, **few) as llm:
            facts = bench_results.facts(llm.config, name)
            yield {**facts, **measure_mixed(llm, arguments, policy)}


def table_cells(result: dict[str, Any]) -> list[str]:
    """One row of `HEADER`; of the mixed workload the speed of the whole and, in place of the
    step, the 99th percentile of the time between two tokens."""
    if "batch_size" not in result:
        speed = bench_results.speed(result["output_tokens_per_s"])
        gap = 1e3 * (result["inter_token_s"] or {"p99": 0.0})["p99"]
        return [result["rung"], "mixed", speed, f"p99 {gap:.3g}", "-", "-", "-"]
    launch = result["launch_s"]
    rate = result["bytes_per_s"]
    return [
        result["rung"],
        str(result["batch_size"]),
        bench_results.speed(result["decode_tokens_per_s"]),
        f"{1e3 * result['step_s']:.3g}",
        f"{1e3 * launch:.3g}" if launch is not None else "-",
        f"{rate / 1e9:,.3g}" if rate is not None else "-",
        f"{result['share_of_limit']:.1%}",
    ]


def main() -> None:
    parser = common.make_parser(__doc__)
    add_options(parser)
    arguments = parser.parse_args()
    if arguments.device == "auto":
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(arguments.device)
    fill_in(arguments, device.type)
    limit = copy_speed(device)
    print(f"{bench_results.describe_device(arguments.device)}, copy {limit / 1e9:,.0f} GB/s")
    common.print_row(HEADER, WIDTHS)
    results = []
    with common.model_path(arguments) as (model, name):
        for result in climb(model, name, limit, arguments, device.type):
            results.append({**result, "engine": "minivllm"})
            common.print_row(table_cells(result), WIDTHS)
    common.save(arguments, results, "ladder")


if __name__ == "__main__":
    common.run(main)
