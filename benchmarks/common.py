"""What the scripts of this folder share: their options for the engine, and where results go."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from random_checkpoint import SHAPES, write_checkpoint

from minivllm import LLM, EngineConfig
from minivllm.cli.options import positive
from minivllm.measure import results as bench_results

RESULTS = Path(__file__).parent / "results"


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that shows the script's docstring unchanged, and the common options."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", default="smollm2-135m", help="default: %(default)s")
    model.add_argument(
        "--random-weights", choices=SHAPES, metavar="SHAPE", help=f"one of {', '.join(SHAPES)}"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=parse_setting,
        metavar="NAME=VALUE",
        help="any setting of EngineConfig, such as max_num_seqs=64; may be repeated",
    )
    add_files(parser)
    return parser


def add_files(parser: argparse.ArgumentParser) -> None:
    """The options that `save` reads."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--save", action="store_true", help="write them to benchmarks/results/")


def add_counts(parser: argparse.ArgumentParser, *rows: tuple[str, int, str]) -> None:
    """Options that take a whole number above 0: for each its name, its default, and of what."""
    for name, default, what in rows:
        parser.add_argument(
            name, type=positive, default=default, metavar="N", help=f"{what} (default: %(default)s)"
        )


def parse_setting(text: str) -> tuple[str, Any]:
    """ "max_num_seqs=64" is ("max_num_seqs", 64); other than JSON is text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    if name not in names:
        raise argparse.ArgumentTypeError(f"{name!r} is not a setting, which are {', '.join(names)}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


@contextmanager
def open_llm(arguments: argparse.Namespace, **defaults: Any) -> Iterator[tuple[LLM, str | None]]:
    """The engine of the command line, and the name of a model that has none of its own.

    `defaults` are settings that `--set` overrules.
    """
    settings = settings_of(arguments, **defaults)
    with model_path(arguments) as (model, name), LLM(model, **settings) as llm:
        yield llm, name


def settings_of(arguments: argparse.Namespace, **defaults: Any) -> dict[str, Any]:
    """The engine's settings on the command line; `--set` overrules `defaults`."""
    given = {**defaults, "dtype": arguments.dtype, "device": arguments.device}
    return given | dict(arguments.set)


@contextmanager
def model_path(arguments: argparse.Namespace) -> Iterator[tuple[str, str | None]]:
    """The model of the command line, random weights in a folder that is gone afterwards; and the
    name of a model that has none of its own."""
    shape = arguments.random_weights
    if shape is None:
        yield arguments.model, None
        return
    with tempfile.TemporaryDirectory(prefix="minivllm-") as folder:
        path = write_checkpoint(shape, Path(folder))
        yield str(path), f"{shape} shape, random weights"


def compute_prompts(llm: LLM) -> None:
    """Do steps until every request that was added decodes."""
    scheduler = llm.engine.scheduler
    while scheduler.waiting or not all(request.is_decoding for request in scheduler.running):
        llm.step()


def print_row(cells: Sequence[str], widths: Sequence[int]) -> None:
    """Print one row of a table at once."""
    print(bench_results.text_table([cells], widths), flush=True)


def save(
    arguments: argparse.Namespace,
    results: Sequence[Mapping[str, Any]],
    kind: str,
    quiet: bool = False,
) -> None:
    """Write the results where the command line wants them; says so, unless `quiet`."""
    paths = [arguments.json] if arguments.json else []
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        paths.append(bench_results.result_path(kind, str(results[0]["device"]), RESULTS))
    for path in paths:
        bench_results.save_results(path, results)
        if not quiet:
            print(f"written: {path.name}")


def run(main: Callable[[], None]) -> None:
    """Run a script; a user's mistake is one line and exit code 2."""
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
