"""What the commands share: a parser with mistakes in one line, options, loading a model.

Not built in the course.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from minivllm.config import EngineConfig
from minivllm.request import SamplingParams

if TYPE_CHECKING:
    from minivllm.llm import LLM

# Used if the checkpoint recommends nothing: at 1.0 a small model loses the thread.
DEFAULT_TEMPERATURE = 0.7

# Setting, type, name of the value, help. The checks are those of `EngineConfig`.
ENGINE_OPTIONS: tuple[tuple[str, Callable[[str], Any], str, str], ...] = (
    ("dtype", str, "TYPE", "auto, float32, bfloat16 or float16 (default: auto)"),
    ("device", str, "DEVICE", "auto (a GPU if there is one), cpu or cuda"),
    (
        "max_model_len",
        int,
        "TOKENS",
        "most tokens of prompt and answer together (default: what the model was trained for)",
    ),
    ("max_num_seqs", int, "REQUESTS", "most requests that run together (default: by device)"),
    ("max_num_batched_tokens", int, "TOKENS", "token budget of one step (default: by device)"),
    ("num_kv_blocks", int, "BLOCKS", "size of the KV cache (default: by free memory)"),
    ("memory_utilization", float, "SHARE", "share of memory to fill (default: by device)"),
    (
        "tensor_parallel_size",
        int,
        "RANKS",
        "processes that share the model, each on its own GPU (default: 1); for several machines:"
        " torchrun --nnodes ... -m minivllm ...",
    ),
)
SAMPLING_OPTIONS: tuple[tuple[str, Callable[[str], Any], str, str], ...] = (
    (
        "temperature",
        float,
        "T",
        "0: always the most probable token; 2: very random (default: the checkpoint's, else"
        f" {DEFAULT_TEMPERATURE})",
    ),
    (
        "top_p",
        float,
        "P",
        "sample from the smallest set of tokens whose probability reaches P; 1: all",
    ),
    ("top_k", int, "K", "sample from the K most probable tokens; 0: all"),
    ("min_p", float, "P", "only tokens at least P times as probable as the most probable one"),
    ("repetition_penalty", float, "R", "above 1: fewer repetitions; 1: off"),
    ("max_tokens", int, "N", "cut an answer after N tokens (default: %(default)s)"),
    ("seed", int, "S", "same seed, same answers"),
)


class Parser(argparse.ArgumentParser):
    """argparse's parser, with mistakes in one line instead of below the usage."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and exit with code 2."""
        if wrong := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            known = re.findall(r"[\w-]+", wrong[2])
            meant = _meant(wrong[1], known)
            message = f"unknown command {wrong[1]}{meant} The commands are {', '.join(known)}"
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help explains)\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Print that the first of these arguments is unknown, and which options there are."""
        known = list(dict.fromkeys(re.findall(r"--[a-z][a-z-]*", self.format_usage())))
        meant = _meant(unknown[0].partition("=")[0], known)
        self.error(f"unknown argument {unknown[0]}{meant} The options are {', '.join(known)}")


def _meant(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f", did you mean {close[0]}?" if close else "."


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    summary: str,
    teaches: str,
    example: str,
) -> Parser:
    """Add a command with its page of help: what it does, what its numbers mean, an example.

    `run` returns the exit code.
    """
    parser: Parser = commands.add_parser(
        name,
        help=summary,
        description=teaches,
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(parser=parser, run=run)
    return parser


def positive(text: str) -> int:
    """Return a whole number of at least 1, for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return number


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which model runs, and how."""
    group = parser.add_argument_group("the engine")
    group.add_argument(
        "--model",
        default=EngineConfig.model,
        help="a built-in name, a checkpoint directory or a name on the Hub (default: %(default)s)",
    )
    _add_options(group, ENGINE_OPTIONS)


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Add the options that say how the next token is chosen."""
    group = parser.add_argument_group("sampling (default: what the checkpoint recommends)")
    _add_options(group, SAMPLING_OPTIONS)
    parser.set_defaults(max_tokens=max_tokens)


def _add_options(group: Any, options: Sequence[tuple[str, Any, str, str]]) -> None:
    for name, kind, metavar, text in options:
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)


def _given(arguments: argparse.Namespace, options: Sequence[tuple[str, Any, str, str]]) -> Any:
    values = {name: getattr(arguments, name, None) for name, *_ in options}
    return {name: value for name, value in values.items() if value is not None}


def load(arguments: argparse.Namespace, **settings: Any) -> LLM:
    """Load the model of the command line; its options overrule `settings`.

    Exits with code 2 for an impossible option, before PyTorch is imported.
    """
    settings |= _given(arguments, ENGINE_OPTIONS)
    try:
        EngineConfig(model=arguments.model, **{k: v for k, v in settings.items() if k != "trace"})
        SamplingParams(**_given(arguments, SAMPLING_OPTIONS))
    except ValueError as error:
        arguments.parser.error(str(error))
    if sys.stderr.isatty():
        note("importing PyTorch and loading the model ...")
    from minivllm.llm import LLM

    return LLM(arguments.model, progress=sys.stderr.isatty(), **settings)


def sampling_params(llm: LLM, arguments: argparse.Namespace) -> SamplingParams:
    """Return what the checkpoint recommends, overruled by the command line."""
    params = llm.get_default_sampling_params()
    if params == SamplingParams():
        params = dataclasses.replace(params, temperature=DEFAULT_TEMPERATURE)
    return dataclasses.replace(params, **_given(arguments, SAMPLING_OPTIONS))


def note(line: str) -> None:
    """Print one line to standard error."""
    print(line, file=sys.stderr, flush=True)
