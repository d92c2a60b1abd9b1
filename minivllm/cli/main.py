"""The command line: `minivllm demo | chat | generate | bench | doctor`.

Here are the commands as a whole, demo and generate; the others have files of their own. Given
(no notebook builds it).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.bench_results import require_writable
from minivllm.cli.bench import add_bench
from minivllm.cli.chat import add_chat
from minivllm.cli.options import (
    Parser,
    add_command,
    add_engine_options,
    add_sampling_options,
    load,
    sampling_params,
    warn,
    write_any_character,
)
from minivllm.waiting import waiting

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
    write_any_character()
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        getattr(arguments, "parser", parser).refuse(unknown)
    if "run" not in arguments:
        parser.print_help()
        return 2
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()  # here, where a reader that has left can be dealt with
        return code or 0
    except BrokenPipeError:
        # The reader has left (`| head`). Nothing may be flushed into the pipe at exit, either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        warn(f"minivllm: {error}")
        return 2
    except KeyboardInterrupt:
        warn("minivllm: stopped")
        return 130


def build_parser() -> Parser:
    """The commands and their options."""
    parser = Parser(
        prog="minivllm",
        description="A small LLM inference engine. The model smollm2-135m needs no account; it is"
        " fetched once (93 MB) and kept in your user cache.",
        epilog="minivllm COMMAND --help explains a command. Begin with: minivllm demo",
    )
    commands = parser.add_subparsers(metavar="COMMAND")
    _add_demo(commands)
    add_chat(commands)
    _add_generate(commands)
    add_bench(commands)
    _add_doctor(commands)
    return parser


def _add_demo(commands: Any) -> None:
    demo = add_command(
        commands,
        "demo",
        summary="answer eight prompts together and draw what happened",
        teaches="Answers eight prompts of different lengths with continuous batching: five run at\n"
        "a time, each leaves when it is done, and the next one takes its place and finds the\n"
        "beginning that all share in the prefix cache. Prints the answers, tokens per second and\n"
        "the time to each first token, and draws when each request was computed and which KV\n"
        "blocks it owned.",
        example="example: minivllm demo --figure run.png",
    )
    demo.add_argument(
        "--figure",
        type=Path,
        default=Path("minivllm-demo.png"),
        help="where to write the picture (default: %(default)s)",
    )
    add_engine_options(demo)
    demo.set_defaults(run=run_demo)


def _add_generate(commands: Any) -> None:
    generate = add_command(
        commands,
        "generate",
        summary="answer your prompts",
        teaches="Answers each PROMPT as the first message of a chat of its own; several are\n"
        "computed together. With --raw the text is continued instead: so base models are used.",
        example='example: minivllm generate "What is the capital of France?" --temperature 0',
    )
    generate.add_argument("prompts", nargs="+", metavar="PROMPT")
    generate.add_argument(
        "--raw", action="store_true", help="continue the text instead of answering it as a message"
    )
    add_sampling_options(generate, max_tokens=128)
    add_engine_options(generate)
    generate.set_defaults(run=run_generate)


def _add_doctor(commands: Any) -> None:
    doctor = add_command(
        commands,
        "doctor",
        summary="look at this machine: what is there, what is missing, how to get it",
        teaches="Checks Python, PyTorch, Triton, the GPU, the model and Jupyter. Each line says\n"
        "what is there or what its absence costs, and the command that mends it. Changes nothing.",
        example="example: minivllm doctor",
    )
    doctor.set_defaults(run=run_doctor)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Look at this machine; the exit code says whether everything needed is there."""
    from minivllm.cli import doctor

    return doctor.run_doctor(arguments)


def run_generate(arguments: argparse.Namespace) -> None:
    """Answer the prompts of the command line."""
    with load(arguments) as llm:
        params = sampling_params(llm, arguments)
        prompts = arguments.prompts if arguments.raw else _as_chats(llm, arguments.prompts)
        outputs = llm.generate(list(prompts), params, use_tqdm=sys.stderr.isatty())
    for prompt, output in zip(arguments.prompts, outputs, strict=True):
        if len(outputs) > 1:
            print(f"> {prompt}")
        print(output.outputs[0].text.strip(), end="\n\n" if len(outputs) > 1 else "\n")


def run_demo(arguments: argparse.Namespace) -> None:
    """Answer the eight demo prompts and draw the run."""
    from minivllm.request import SamplingParams

    require_writable(arguments.figure)
    started = time.perf_counter()
    # Five rows for eight prompts, so that some wait and enter when others leave.
    with load(arguments, trace=True, max_num_seqs=5) as llm:
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
    from minivllm.pictures import figures

    if llm.trace is None:
        return
    try:
        with waiting(f"drawing {path}"):
            figures.save_demo_figure(llm.trace, path)
    except ImportError as error:
        print(f"no picture: {error}")
        return
    print(f"picture: {path}")


if __name__ == "__main__":
    sys.exit(main())
