"""The command line: `minivllm demo` and `minivllm generate`. Given (no notebook builds it)."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.llm import LLM
    from minivllm.request import RequestOutput

# Eight questions of different lengths, so that their answers end one by one.
DEMO_QUESTIONS = (
    ("What is the capital of France?", 24),
    ("Name three primary colours.", 32),
    ("Write one sentence about the sea.", 40),
    ("What is 2 + 2? Answer with the number.", 16),
    (
        "Summarise this in one sentence: A language model writes one token at a time. To write"
        " the next one it needs the keys and values of all tokens before it, so an engine keeps"
        " them in memory instead of computing them again. That memory is called the KV cache,"
        " and it grows with every token of every conversation that is being served.",
        64,
    ),
    ("Explain in two sentences why the sky is blue.", 72),
    ("Give me a short recipe for pancakes.", 96),
    (
        "You are a helpful librarian. A reader likes stories about ships, storms and islands,"
        " and dislikes love stories. Recommend one classic novel and say why it fits.",
        80,
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 2 for a user's mistake, 130 for Ctrl-C."""
    arguments = build_parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except (ValueError, OSError) as error:
        print(f"minivllm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("minivllm: stopped", file=sys.stderr)
        return 130
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    parser = argparse.ArgumentParser(
        prog="minivllm",
        description="A small LLM inference engine. The model smollm2-135m needs no account; it is"
        " fetched once (93 MB) and kept in your user cache.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_generate(commands)
    return parser


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="answer eight prompts together and draw what happened",
        description="Answers eight prompts of different lengths with continuous batching: five"
        " run at a time, each leaves when it is done, and the next one takes its place and finds"
        " the beginning that all share in the prefix cache. Prints the answers, tokens per second"
        " and the time to each first token, and draws when each request was computed and which KV"
        " blocks it owned.",
    )
    _add_engine_options(demo)
    demo.add_argument(
        "--figure",
        type=Path,
        default=Path("minivllm-demo.png"),
        help="where to write the picture (default: %(default)s)",
    )
    demo.set_defaults(run=run_demo)


def _add_generate(commands: Any) -> None:
    generate = commands.add_parser(
        "generate",
        help="answer your prompts",
        description="Answers each PROMPT; several are computed together."
        ' Example: minivllm generate "What is the capital of France?" --temperature 0',
    )
    generate.add_argument("prompts", nargs="+", metavar="PROMPT")
    generate.add_argument(
        "--raw",
        action="store_true",
        help="continue the text as it stands, instead of answering it as a chat message",
    )
    generate.add_argument("--max-tokens", type=int, default=128, help="default: %(default)s")
    generate.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        help="0 takes the most probable token each time (default: %(default)s)",
    )
    generate.add_argument("--top-k", type=int, default=0, help="0: off (default)")
    generate.add_argument("--top-p", type=float, default=1.0, help="1: off (default)")
    generate.add_argument("--min-p", type=float, default=0.0, help="0: off (default)")
    generate.add_argument("--seed", type=int, default=None, help="same seed, same answer")
    _add_engine_options(generate)
    generate.set_defaults(run=run_generate)


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="smollm2-135m",
        help="a built-in name or a checkpoint directory (default: %(default)s)",
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=None,
        help="tokens computed in one step, at most (default: by device)",
    )


def _load(arguments: argparse.Namespace, **settings: Any) -> LLM:
    from minivllm.llm import LLM

    return LLM(
        arguments.model,
        dtype=arguments.dtype,
        device=arguments.device,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        **settings,
    )


def run_generate(arguments: argparse.Namespace) -> None:
    """Answer the prompts of the command line."""
    from minivllm.request import SamplingParams

    params = SamplingParams(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        max_tokens=arguments.max_tokens,
        seed=arguments.seed,
    )
    with _load(arguments) as llm:
        prompts = arguments.prompts if arguments.raw else _as_chats(llm, arguments.prompts)
        outputs = llm.generate(list(prompts), params, use_tqdm=sys.stderr.isatty())
    for prompt, output in zip(arguments.prompts, outputs, strict=True):
        if len(outputs) > 1:
            print(f"> {prompt}")
        print(output.outputs[0].text.strip(), end="\n\n" if len(outputs) > 1 else "\n")


def run_demo(arguments: argparse.Namespace) -> None:
    """Answer the eight demo prompts and draw the run."""
    from minivllm.request import SamplingParams

    started = time.perf_counter()
    # Five rows for eight prompts, so that some wait and enter when others leave.
    with _load(arguments, trace=True, max_num_seqs=5) as llm:
        ready = time.perf_counter() - started
        prompts = _as_chats(llm, [question for question, _ in DEMO_QUESTIONS])
        params = [SamplingParams(temperature=0, max_tokens=limit) for _, limit in DEMO_QUESTIONS]
        began = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - began
        _print_answers(outputs)
        _print_summary(llm, outputs, ready, seconds)
        _draw(llm, arguments.figure)


def _as_chats(llm: LLM, questions: Sequence[str]) -> list[Any]:
    """Each question as token ids of a chat with one message."""
    return [
        llm.tokenizer.apply_chat_template([{"role": "user", "content": question}])
        for question in questions
    ]


def _print_answers(outputs: Sequence[RequestOutput]) -> None:
    for (question, _), output in zip(DEMO_QUESTIONS, outputs, strict=True):
        answer = output.outputs[0]
        more = " …" if answer.finish_reason == "length" else ""
        print(f"\n> {question}\n  {' '.join(answer.text.split())}{more}")


def _print_summary(
    llm: LLM, outputs: Sequence[RequestOutput], ready: float, seconds: float
) -> None:
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    first = [output.metrics.time_to_first_token or 0.0 for output in outputs]
    gaps = [gap for output in outputs for gap in output.metrics.inter_token_latencies]
    config = llm.config
    print(
        f"\n{config.model}, {config.dtype} on {config.device}; ready after {ready:.1f} s"
        f"\n{len(outputs)} answers, {num_prompt} prompt tokens ({num_cached} from the prefix"
        f" cache), {num_output} answer tokens in {seconds:.2f} s: {num_output / seconds:.0f} tok/s"
        f"\ntime to first token {min(first) * 1e3:.0f} to {max(first) * 1e3:.0f} ms;"
        f" between tokens {statistics.median(gaps) * 1e3:.0f} ms (median)"
    )


def _draw(llm: LLM, path: Path) -> None:
    from minivllm import figures

    if llm.trace is None:
        return
    try:
        figures.save_demo_figure(llm.trace, path)
    except ImportError as error:
        print(f"no picture: {error}")
        return
    print(f"picture: {path}")


if __name__ == "__main__":
    sys.exit(main())
