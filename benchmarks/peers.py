"""Our engine beside `transformers`, on the same prompts and lengths, in one run.

    python benchmarks/peers.py --batch-sizes 1 16 --output benchmarks/results/peers.json

Both decode greedily from random token ids, end-of-sequence tokens ignored, in the same type and
with the same number of threads. The peers take turns, so that a busy machine slows both, and
the best of `--repeats` counts. With `--profile`, also where our decode step spends its time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import sys
import time
from pathlib import Path

import torch
import transformers

from minivllm import LLM, SamplingParams


def make_prompts(batch_size: int, num_tokens: int, vocab_size: int) -> list[list[int]]:
    """The same random prompts in every run."""
    rng = random.Random(0)
    return [[rng.randrange(100, vocab_size) for _ in range(num_tokens)] for _ in range(batch_size)]


def time_ours(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    """Seconds for the whole batch."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    if any(len(output.outputs[0].token_ids) != num_tokens for output in outputs):
        raise RuntimeError("an answer is shorter than asked for; the comparison would be unfair")
    return seconds


def time_transformers(
    model: transformers.PreTrainedModel, prompts: list[list[int]], num_tokens: int
) -> float:
    """Seconds for the whole batch."""
    ids = torch.tensor(prompts, device=model.device)
    started = time.perf_counter()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        do_sample=False,
    )
    seconds = time.perf_counter() - started
    if output.shape[1] != ids.shape[1] + num_tokens:
        raise RuntimeError("transformers stopped early; the comparison would be unfair")
    return seconds


def compare(
    llm: LLM, model: transformers.PreTrainedModel, batch_size: int, arguments: argparse.Namespace
) -> list[dict[str, object]]:
    """Best times of both peers at one batch size: two result records."""
    prompts = make_prompts(batch_size, arguments.prompt_tokens, model.config.vocab_size)
    seconds: dict[str, list[float]] = {"minivllm": [], "transformers": []}
    for _ in range(arguments.repeats + 1):
        seconds["minivllm"].append(time_ours(llm, prompts, arguments.new_tokens))
        seconds["transformers"].append(time_transformers(model, prompts, arguments.new_tokens))
    records = []
    for engine, times in seconds.items():
        best = min(times[1:])  # the first one warms up
        records.append(
            {
                "engine": engine,
                "workload": f"batch {batch_size}, {arguments.prompt_tokens} prompt tokens,"
                f" {arguments.new_tokens} new tokens, greedy",
                "batch_size": batch_size,
                "seconds": best,
                "output_tokens_per_s": batch_size * arguments.new_tokens / best,
                "prompt_tokens_per_s": batch_size * arguments.prompt_tokens / best,
            }
        )
    ours, theirs = records
    ratio = float(theirs["seconds"]) / float(ours["seconds"])  # type: ignore[arg-type]
    print(
        f"batch {batch_size:3}: minivllm {ours['output_tokens_per_s']:7.1f} tok/s, transformers"
        f" {theirs['output_tokens_per_s']:7.1f} tok/s, ratio {ratio:.2f}",
        flush=True,
    )
    return records


def print_profile(llm: LLM, batch_size: int, arguments: argparse.Namespace) -> None:
    """The operations that cost our engine most, over a whole batch."""
    prompts = make_prompts(batch_size, arguments.prompt_tokens, 10_000)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        time_ours(llm, prompts, arguments.new_tokens)
    table = profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=12)
    print(f"batch {batch_size}, {arguments.new_tokens} tokens:\n{table}")


def environment(llm: LLM) -> dict[str, object]:
    """What a reader needs to know to compare the numbers."""
    return {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "model": llm.config.model,
        "dtype": llm.config.dtype,
        "device": llm.config.device,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads,"
        f" {torch.backends.cpu.get_cpu_capability()}",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()

    # Without a prefix cache: a repeated prompt must be computed again, as transformers does.
    llm = LLM(arguments.model, dtype=arguments.dtype, enable_prefix_caching=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        llm.config.model_path, dtype=getattr(torch, llm.config.dtype)
    ).to(llm.config.device)
    results = [r for size in arguments.batch_sizes for r in compare(llm, model, size, arguments)]
    if arguments.profile:
        for size in arguments.batch_sizes:
            print_profile(llm, size, arguments)
    if arguments.output:
        record = environment(llm) | {"results": results}
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")
        print(f"written: {arguments.output}")


if __name__ == "__main__":
    main()
