"""The command line: `minivllm demo | chat | generate | bench | doctor`.

Holds the parser, demo and generate; the other commands have their own modules. Not built in the
course.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm import __version__
from minivllm.cli.bench import add_bench
from minivllm.cli.chat import add_chat
from minivllm.cli.doctor import run_doctor
from minivllm.cli.options import (
    Parser,
    add_command,
    add_engine_options,
    add_sampling_options,
    load,
    note,
    sampling_params,
)
from minivllm.measure.results import require_writable
from minivllm.request import SamplingParams

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
    """Run one command and return the exit code: 0; 1 if `doctor` found faults; 2 for a user's
    mistake or an empty answer; 130 for Ctrl-C."""
    repair_streams()
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        getattr(arguments, "parser", parser).refuse(unknown)
    if "run" not in arguments:
        parser.print_help()
        return 2
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = lambda message, *_, **__: note(f"minivllm: {message}")
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()  # here, where a failure can be handled
        return code
    except BrokenPipeError:  # the reader has left (`| head`)
        _discard_output()
        return 0
    except OSError as error:
        _discard_output()
        note(f"minivllm: {error}")
        return 2
    except NotImplementedError as error:
        first, *_ = str(error).splitlines() or [""]  # PyTorch's own has a hundred
        note(f"minivllm: not implemented: {first[:200]}")
        return 2
    except ValueError as error:
        note(f"minivllm: {error}")
        return 2
    except KeyboardInterrupt:
        note("minivllm: stopped")
        return 130


def _discard_output() -> None:
    # Python flushes once more at exit, which must not fail again.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def repair_streams() -> None:
    """Replace closed standard streams by empty ones, and read and write any character: one that
    the other side does not know becomes a replacement character instead of an error."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            empty = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 (until the end)
            setattr(sys, name, empty)
        # A stream that was replaced may not have this method.
        with contextlib.suppress(AttributeError, OSError):
            getattr(sys, name).reconfigure(errors="replace")


def build_parser() -> Parser:
    """Return the parser of all commands and their options."""
    parser = Parser(
        prog="minivllm",
        description="A small LLM inference engine. The model smollm2-135m needs no account; it is"
        " downloaded once (93 MB) and kept in your user cache.",
        epilog="minivllm COMMAND --help explains a command. Begin with: minivllm demo",
    )
    parser.add_argument("--version", action="version", version=f"minivllm {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    _add_demo(commands)
    add_chat(commands)
    _add_generate(commands)
    add_bench(commands)
    add_command(
        commands,
        "doctor",
        run_doctor,
        summary="diagnose problems on this machine and suggest fixes",
        teaches="Checks the installation, PyTorch, Triton, the GPU, the cores and the model. Each\n"
        "line says what was found, or what is missing, what that costs and how to fix it.\n"
        "Changes nothing. The exit code is 1 if something required is missing or broken.",
        example="example: minivllm doctor",
    )
    return parser


def _add_demo(commands: Any) -> None:
    demo = add_command(
        commands,
        "demo",
        run_demo,
        summary="answer eight prompts together and draw what happened",
        teaches="Answers eight prompts of different lengths with continuous batching: five run at\n"
        "a time; when one is done, the next takes its place and finds the beginning that all of\n"
        "them share in the prefix cache. Prints the answers, tokens per second and the time to\n"
        "each first token, and draws when each request was computed and which KV blocks it owned.",
        example="example: minivllm demo --figure run.png",
    )
    demo.add_argument(
        "--figure",
        type=Path,
        default=Path("minivllm-demo.png"),
        help="where to write the picture (default: %(default)s)",
    )
    add_engine_options(demo)


def _add_generate(commands: Any) -> None:
    generate = add_command(
        commands,
        "generate",
        run_generate,
        summary="answer your prompts",
        teaches="Answers each PROMPT as the first message of its own chat; several are computed\n"
        "together. With --raw the text is continued instead, as base models expect it.\n"
        "The exit code is 2 if a prompt was refused or an answer is empty.",
        example='example: minivllm generate "What is the capital of France?" --temperature 0',
    )
    generate.add_argument("prompts", nargs="+", type=_prompt, metavar="PROMPT")
    generate.add_argument(
        "--raw", action="store_true", help="continue the text instead of answering it as a message"
    )
    add_sampling_options(generate, max_tokens=128)
    add_engine_options(generate)


def _prompt(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty; write a question or a beginning")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{text!a} is not valid UTF-8") from None
    return text


def run_generate(arguments: argparse.Namespace) -> int:
    """Answer the prompts of the command line."""
    with load(arguments) as llm:
        params = sampling_params(llm, arguments)
        prompts = arguments.prompts if arguments.raw else _as_chats(llm, arguments.prompts)
        outputs = llm.generate(list(prompts), params, use_tqdm=sys.stderr.isatty())
    code = 0
    for prompt, output in zip(arguments.prompts, outputs, strict=True):
        answer = output.outputs[0]
        if len(outputs) > 1:
            print(f"> {prompt}")
        print(answer.text.strip(), end="\n\n" if len(outputs) > 1 else "\n")
        if not answer.text.strip():
            code = 2
            if answer.finish_reason != "error":  # the engine has given the reason as a warning
                note(f"minivllm: the answer is empty (finish_reason: {answer.finish_reason})")
    return code


def run_demo(arguments: argparse.Namespace) -> int:
    """Answer the eight demo prompts and draw the run."""
    require_writable(arguments.figure)
    started = time.perf_counter()
    # Five rows for eight prompts, so that some wait and enter when others leave.
    with load(arguments, trace=True, max_num_seqs=5) as llm:
        ready = time.perf_counter() - started
        prompts = _as_chats(llm, [question for question, _ in DEMO_QUESTIONS])
        params = [SamplingParams(temperature=0, max_tokens=limit) for _, limit in DEMO_QUESTIONS]
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
        seconds = time.perf_counter() - began
        _print_answers(outputs)
        _print_summary(llm, outputs, ready, seconds)
        _draw(llm, arguments.figure)
    return 0


def _as_chats(llm: LLM, questions: Sequence[str]) -> list[Any]:
    """Return each question as the token ids of a chat with one message."""
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
        f" between tokens {statistics.median(gaps or [0.0]) * 1e3:.0f} ms (median)"
    )


def _draw(llm: LLM, path: Path) -> None:
    from minivllm.pictures import figures

    assert llm.trace is not None, "the demo loads its model with a trace"
    try:
        figures.save_demo_figure(llm.trace, path)
        print(f"picture: {path}")
    except ImportError as error:
        print(f"no picture: {error}")


if __name__ == "__main__":
    sys.exit(main())
