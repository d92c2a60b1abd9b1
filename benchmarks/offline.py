r"""Everything is given at once, and the engine computes it as fast as it can.

    python benchmarks/offline.py                       # a laptop with two cores: some minutes
    python benchmarks/offline.py --workloads nano-vllm batch --random-weights qwen3-0.6b \
        --batch-sizes 1 8 64 256 --prompt-tokens 512 --new-tokens 256      # a GPU

nano-vllm  its benchmark, token for token: 256 requests, prompts and answers of 100 to 1024
mixed      random lengths as well, in numbers of your choice
batch      equal requests that start together, decoded greedily
prefill    prompts alone

Medians over the repeats are printed; the file has every time. Each repeat has other tokens, so
none is served by the prefix cache.
"""

from __future__ import annotations

import argparse

import common

from minivllm.cli.options import positive
from minivllm.measure import results as bench_results
from minivllm.measure import workloads as bench


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which workloads, and how large."""
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=["nano-vllm", "mixed", "batch", "prefill"],
        default=["mixed", "batch", "prefill"],
        metavar="NAME",
        help="default: mixed batch prefill",
    )
    common.add_counts(
        parser,
        ("--num-requests", 16, "of the mixed workload"),
        ("--min-tokens", 16, "of each prompt and answer of the mixed workload, at least"),
        ("--max-prompt-tokens", 256, "of a prompt of the mixed workload"),
        ("--max-output-tokens", 128, "of an answer of the mixed workload"),
        ("--prompt-tokens", 128, "of each request of a batch"),
        ("--new-tokens", 97, "of each answer of a batch"),
        ("--prefill-tokens", 512, "of each prompt of the prefill workload"),
        ("--prefill-requests", 1, "of the prefill workload"),
        ("--repeats", 3, "of each workload"),
    )
    parser.add_argument("--batch-sizes", type=positive, nargs="+", default=[1, 4, 16, 32])


def choose_workloads(arguments: argparse.Namespace, vocab_size: int) -> list[bench.Workload]:
    """The workloads of the command line."""
    low = arguments.min_tokens
    made = {
        "nano-vllm": lambda: [bench.mixed_workload(256, vocab_size)],
        "mixed": lambda: [
            bench.mixed_workload(
                arguments.num_requests,
                vocab_size,
                (low, arguments.max_prompt_tokens),
                (low, arguments.max_output_tokens),
            )
        ],
        "batch": lambda: [
            bench.batch_workload(size, arguments.prompt_tokens, arguments.new_tokens, vocab_size)
            for size in arguments.batch_sizes
        ],
        "prefill": lambda: [
            bench.batch_workload(
                arguments.prefill_requests, arguments.prefill_tokens, 1, vocab_size
            )
        ],
    }
    return [workload for name in arguments.workloads for workload in made[name]()]


def main() -> None:
    parser = common.make_parser(__doc__)
    add_options(parser)
    arguments = parser.parse_args()
    results = []
    with common.open_llm(arguments) as (llm, name):
        facts = bench_results.facts(llm.config, name)
        workloads = choose_workloads(arguments, llm.engine.vocab_size)
        for workload in workloads:
            bench.check_fits(llm, workload)
        print(f"{facts['model']}, {facts['dtype']} on {facts['machine']}")
        print(
            bench_results.text_table([bench_results.SHORT_HEADER], bench_results.WIDTHS), flush=True
        )
        for workload in workloads:
            # One request first, as nano-vllm does; for a batch as many as it has.
            is_mixed = workload.name.startswith("mixed")
            bench.warm_up(llm, num_requests=1 if is_mixed else len(workload.prompts))
            runs = bench.repeat_offline(llm, workload, arguments.repeats)
            results.append({**facts, **bench.summarise(workload, runs), "engine": "minivllm"})
            cells = bench_results.table_cells(results[-1])
            common.print_row(cells, bench_results.WIDTHS)
    common.save(arguments, results, "offline")


if __name__ == "__main__":
    common.run(main)
