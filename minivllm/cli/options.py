"""What the commands share: a parser whose mistakes fit into one line, options, loading a model.

Given (no notebook builds it).
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from minivllm.waiting import waiting

if TYPE_CHECKING:
    from minivllm.llm import LLM
    from minivllm.request import SamplingParams

ENGINE_SETTINGS = (
    "dtype",
    "device",
    "max_model_len",
    "max_num_batched_tokens",
    "tensor_parallel_size",
)
SAMPLING_SETTINGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "max_tokens",
    "seed",
)
# Where the checkpoint says nothing: at 1.0 a small model loses its thread.
DEFAULT_TEMPERATURE = 0.7


class Parser(argparse.ArgumentParser):
    """argparse's parser, with a mistake in one line: it prints the usage on top of that."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and end with exit code 2."""
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help explains)\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Say that nobody knows these arguments, and which options there are."""
        known = list(dict.fromkeys(re.findall(r"--[a-z][a-z-]*", self.format_usage())))
        close = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
        meant = f", did you mean {close[0]}?" if close else "."
        self.error(f"unknown argument {unknown[0]}{meant} The options are {', '.join(known)}")


def add_command(
    commands: Any, name: str, *, summary: str, teaches: str, example: str = ""
) -> Parser:
    """A command with its page of help: what it does, what its numbers mean, an example."""
    parser: Parser = commands.add_parser(
        name,
        help=summary,
        description=teaches,
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(parser=parser)
    return parser


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return number


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Which model, and how it is run."""
    group = parser.add_argument_group("the engine")
    group.add_argument(
        "--model",
        default="smollm2-135m",
        help="a built-in name, a checkpoint directory or a name on the Hub (default: %(default)s)",
    )
    group.add_argument("--dtype", help="auto, float32, bfloat16 or float16 (default: auto)")
    group.add_argument("--device", help="auto (a GPU where there is one), cpu or cuda")
    group.add_argument(
        "--max-model-len",
        type=positive,
        metavar="TOKENS",
        help="prompt and answer together, at most (default: what the model was trained for)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=positive,
        metavar="TOKENS",
        help="computed in one step, at most (default: by device)",
    )
    group.add_argument(
        "--tensor-parallel-size",
        type=positive,
        metavar="RANKS",
        help="processes that share the model, each on a GPU of its own (default: 1); for several"
        " machines: torchrun --nnodes ... -m minivllm ...",
    )


def load(arguments: argparse.Namespace, **settings: Any) -> LLM:
    """The model of the command line. Settings that were not given keep their defaults."""
    with waiting("importing PyTorch"):
        from minivllm.llm import LLM

    given = {name: getattr(arguments, name) for name in ENGINE_SETTINGS}
    given = {name: value for name, value in given.items() if value is not None}
    return LLM(arguments.model, **given, **settings)


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """How the next token is chosen."""
    group = parser.add_argument_group("sampling (where not given: what the checkpoint recommends)")
    group.add_argument(
        "--temperature",
        type=float,
        help="0: always the most probable token; 2: bold"
        f" (default: the checkpoint's, else {DEFAULT_TEMPERATURE})",
    )
    group.add_argument(
        "--top-p", type=float, help="only the likeliest tokens of together this probability; 1: all"
    )
    group.add_argument("--top-k", type=int, help="only the K likeliest tokens; 0: all")
    group.add_argument(
        "--min-p", type=float, help="only tokens at least this share as likely as the likeliest"
    )
    group.add_argument(
        "--repetition-penalty", type=float, help="above 1: less of what was said; 1: off"
    )
    group.add_argument(
        "--max-tokens",
        type=int,
        default=max_tokens,
        help="an answer is cut after this many (default: %(default)s)",
    )
    group.add_argument("--seed", type=int, help="same seed, same answers")


def sampling_params(llm: LLM, arguments: argparse.Namespace) -> SamplingParams:
    """What the checkpoint recommends, overruled by what the command line says."""
    from minivllm.request import SamplingParams

    params = llm.get_default_sampling_params()
    if params == SamplingParams():
        params = dataclasses.replace(params, temperature=DEFAULT_TEMPERATURE)
    given = {name: getattr(arguments, name) for name in SAMPLING_SETTINGS}
    given = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(params, **given)


def write_any_character() -> None:
    """From here on a character that the terminal or the pipe does not know is written as "?"
    (a pipe on Windows has 256 of them), instead of being an error."""
    for stream in (sys.stdout, sys.stderr):
        # A replaced one may not have it; a fork's may stand on another file than it was made for.
        with suppress(AttributeError, OSError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def warn(line: str) -> None:
    """One line to standard error."""
    print(line, file=sys.stderr, flush=True)
