"""Compare our engine with others, on the same prompts and lengths, in one run.

    python benchmarks/peers.py --batch-sizes 1 16 --repeats 5 --save

transformers always; llama.cpp (pip install llama-cpp-python, and --gguf FILE with the same
weights) and vLLM (pip install vllm) where they are installed. All decode greedily from the same
random token ids, end-of-sequence tokens ignored, nothing kept from one call to the next, in the
same type (llama.cpp: in that of its file) and with the same number of threads. They take turns,
in another order each time, so that a busy machine slows all; best and median of --repeats
count, and the ratios compare one run's.

output   answer tokens per second of the whole call
decode   those that came after every request had its first, per second from there on
prompt   prompt tokens per second until every request had its first token
ready    from the command to the first token in a fresh process

With --profile, also where our engine spends its time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
from engines import ENGINES, FIRST_PROMPT, Answers, Peer, Setup, TokenIds

from minivllm.cli.options import positive
from minivllm.measure import results as bench_results
from minivllm.measure import workloads as bench

SPEEDS = ("output tok/s", "decode tok/s", "prompt tok/s")
HEADER = ("workload", "engine", *SPEEDS, "best ratio", "median")
WIDTHS = (28, 12, 12, 12, 12, 10, 10)
READY_LIMIT = 600  # seconds
ENGINES_SCRIPT = Path(__file__).parent / "engines.py"


def load_peers(names: Sequence[str], setup: Setup) -> dict[str, Peer]:
    """The engines that are installed; says of each other one why it is not here."""
    peers = {}
    for name in names:
        try:
            peers[name] = ENGINES[name](setup)
        except ImportError as error:
            print(f"{name}: not installed ({error})", flush=True)
    return peers


@dataclass(frozen=True)
class Call:
    """What one call took: seconds, all counted from its beginning."""

    seconds: float
    first_token_seconds: float  # until every request had its first token
    num_decoded: int  # tokens after that

    @classmethod
    def of(cls, began: float, ended: float, answers: Answers) -> Call:
        """From times of `time.perf_counter`: two requests whose tokens come at 1, 2, 3 and at
        2, 3, 4 have their first ones at 2, and three tokens after that."""
        first = max(times[0] for times in answers.token_times)
        num_decoded = sum(time > first for times in answers.token_times for time in times)
        return cls(ended - began, first - began, num_decoded)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """None where no token came after the first ones."""
        if self.num_decoded == 0:
            return None
        return self.num_decoded / (self.seconds - self.first_token_seconds)


def time_calls(
    peers: Mapping[str, Peer], prompts: Sequence[TokenIds], num_tokens: int, repeats: int
) -> dict[str, list[Call]]:
    """Each call by engine; all take turns, after one call that is not counted.

    Raises RuntimeError for answers of another length: then the times do not compare.
    """
    calls: dict[str, list[Call]] = {name: [] for name in peers}
    for number in range(repeats + 1):
        names = list(peers)
        # An engine may be slower right after a heavy one: the order changes each time.
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            began = time.perf_counter()
            answers = peers[name].generate(prompts, num_tokens)
            ended = time.perf_counter()
            if [len(token_ids) for token_ids in answers.token_ids] != [num_tokens] * len(prompts):
                raise RuntimeError(f"{name} gave other lengths than asked for: no fair comparison")
            if number:
                calls[name].append(Call.of(began, ended, answers))
    return calls


def compare(
    peers: Mapping[str, Peer], prompts: Sequence[TokenIds], num_tokens: int, repeats: int
) -> list[dict[str, Any]]:
    """One result for each engine, ours first."""
    calls = time_calls(peers, prompts, num_tokens, repeats)
    workload = bench.workload_name(len(prompts), len(prompts[0]), num_tokens)
    return [
        {"engine": name, **figures(calls[name], prompts, num_tokens)} | {"workload": workload}
        for name in peers
    ]


def figures(calls: Sequence[Call], prompts: Sequence[TokenIds], num_tokens: int) -> dict[str, Any]:
    """Median and best speeds of equal calls."""
    num_prompt_tokens = sum(len(prompt) for prompt in prompts)
    num_output_tokens = len(prompts) * num_tokens
    whole = [call.seconds for call in calls]
    first = [call.first_token_seconds for call in calls]
    decode = [call.decode_tokens_per_s for call in calls]
    known = [speed for speed in decode if speed is not None]
    return {
        "batch_size": len(prompts),
        "num_prompt_tokens": num_prompt_tokens,
        "num_output_tokens": num_output_tokens,
        "seconds": statistics.median(whole),
        "best_seconds": min(whole),
        "output_tokens_per_s": num_output_tokens / statistics.median(whole),
        "prompt_tokens_per_s": num_prompt_tokens / statistics.median(first),
        "decode_tokens_per_s": statistics.median(known) if known else None,
        "best_output_tokens_per_s": num_output_tokens / min(whole),
        "best_prompt_tokens_per_s": num_prompt_tokens / min(first),
        "best_decode_tokens_per_s": max(known, default=None),
        "seconds_all": whole,
        "first_token_seconds_all": first,
        "decode_tokens_per_s_all": decode,
    }


def add_ratios(results: Sequence[dict[str, Any]]) -> None:
    """How many times as fast as each other engine ours is, by best and by median times."""
    ours = next((result for result in results if result["engine"] == "minivllm"), None)
    for result in results:
        if ours is not None:
            # By decoding where there is some: prefill has a row of its own.
            name = "seconds" if result["decode_tokens_per_s"] is None else "decode_tokens_per_s"
            for kind in ("", "best_"):
                theirs = result[kind + name]
                mine = ours[kind + name]
                pair = (theirs, mine) if name == "seconds" else (mine, theirs)
                result[kind + "ratio"] = pair[0] / pair[1] if pair[0] and pair[1] else None


def table_cells(result: Mapping[str, Any]) -> list[str]:
    """One row of `HEADER`, by best times."""
    speeds = [result[f"best_{name}_tokens_per_s"] for name in ("output", "decode", "prompt")]
    ratios = [result.get(name) for name in ("best_ratio", "ratio")]
    return [
        result["workload"],
        result["engine"],
        *map(bench_results.speed, speeds),
        *(f"{ratio:.2f}" if ratio else "-" for ratio in ratios),
    ]


# -- time to ready -----------------------------------------------------------------------------


def time_ready(name: str, setup: Setup, repeats: int) -> list[float]:
    """Seconds from the command to the first token, each in a fresh process. Raises RuntimeError for
    an engine that ends before."""
    seconds = []
    for _ in range(repeats):
        command = [sys.executable, str(ENGINES_SCRIPT), name, json.dumps(asdict(setup))]
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None, "it was asked for"
            limit = threading.Timer(READY_LIMIT, child.kill)
            limit.start()
            seen = any(line.strip() == "ready" for line in child.stdout)
            seconds.append(time.perf_counter() - began)
            limit.cancel()
            child.kill()
        if not seen:
            raise RuntimeError(f"{name} ended before its first token; run it alone to see why")
    return seconds


def ready_result(name: str, seconds: Sequence[float]) -> dict[str, Any]:
    """The result of `time_ready`; one token is all that comes out."""
    median = statistics.median(seconds)
    return {
        "engine": name,
        "workload": "ready: command to first token",
        "seconds": median,
        "best_seconds": min(seconds),
        "output_tokens_per_s": 1 / median,
        "prompt_tokens_per_s": len(FIRST_PROMPT) / median,
        "seconds_all": list(seconds),
    }


# -- the whole ---------------------------------------------------------------------------------


def print_profile(peer: Peer, prompts: Sequence[TokenIds], num_tokens: int) -> None:
    """The operations that cost our engine most, over a whole batch."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        peer.generate(prompts, num_tokens)
    table = profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=14)
    print(f"batch {len(prompts)}, {num_tokens} tokens:\n{table}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which engines, which sizes."""
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--gguf", metavar="FILE", help="the model for llama.cpp")
    parser.add_argument("--batch-sizes", type=positive, nargs="+", default=[1, 4, 16, 32])
    common.add_counts(
        parser,
        ("--prompt-tokens", 128, "of each request"),
        ("--new-tokens", 97, "of each answer"),
        ("--prefill-tokens", 512, "of the prompt that is timed alone"),
        ("--repeats", 5, "of each call"),
        ("--ready-repeats", 3, "of the start in a fresh process"),
    )
    parser.add_argument("--no-ready", action="store_true", help="leave the start out")
    parser.add_argument("--profile", action="store_true")


def make_setup(llm: Any, arguments: argparse.Namespace) -> Setup:
    """The same for all engines, from what ours chose for this machine."""
    import torch

    return Setup(
        model_path=llm.config.model_path,
        max_batch=max(arguments.batch_sizes),
        max_len=max(arguments.prompt_tokens + arguments.new_tokens, arguments.prefill_tokens + 1),
        dtype=llm.config.dtype,
        device=llm.config.device,
        num_threads=torch.get_num_threads(),
        gguf=arguments.gguf,
        settings=dict(arguments.set),
    )


def measure(setup: Setup, vocab_size: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Load the engines, time them, print the rows."""
    peers = load_peers(arguments.engines, setup)
    lengths = arguments.prompt_tokens, arguments.new_tokens
    shapes = [(size, *lengths) for size in arguments.batch_sizes]
    results = []
    common.print_row(HEADER, WIDTHS)
    for size, prompt_tokens, new_tokens in [*shapes, (1, arguments.prefill_tokens, 1)]:
        workload = bench.batch_workload(size, prompt_tokens, new_tokens, vocab_size)
        compared = compare(peers, workload.prompts, new_tokens, arguments.repeats)
        add_ratios(compared)
        results += compared
        rows = [table_cells(result) for result in compared]
        print(bench_results.text_table(rows, WIDTHS), flush=True)
        if arguments.profile and "minivllm" in peers:
            print_profile(peers["minivllm"], workload.prompts, new_tokens)
    if not arguments.no_ready:
        for name in peers:
            results.append(ready_result(name, time_ready(name, setup, arguments.ready_repeats)))
            print(f"{name}: ready after {results[-1]['best_seconds']:.1f} s", flush=True)
    return results


def main() -> None:
    parser = common.make_parser(__doc__)
    add_options(parser)
    arguments = parser.parse_args()
    with common.open_llm(arguments) as (llm, name):
        facts = bench_results.facts(llm.config, name)
        setup = make_setup(llm, arguments)
        vocab_size = llm.engine.vocab_size
        print(f"{facts['model']}, {facts['dtype']} on {facts['machine']}")
        llm.close()  # the files stay; its memory is for the engines that are timed
        results = measure(setup, vocab_size, arguments)
    common.save(arguments, [{**facts, **result} for result in results], "peers")


if __name__ == "__main__":
    common.run(main)
