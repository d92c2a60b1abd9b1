"""The learner's engine in fresh processes: alone, and on the same work as ours and `transformers`.

"Ours" is a copy of the package in which every exercise holds our version; "yours" is the package
as it is. Each runs in a process of its own, and all take turns. For chapter 11. The engines behind
one interface are those of `benchmarks/engines.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from course import files, sandbox

SIGN = "racer: "  # begins the lines that are for us: libraries print, too
READY_LIMIT = 240  # seconds


def run_fresh(code: str, folder: Path | None = None) -> str:
    """What a new Python prints that imports the package of `folder` (the learner's, if None).

    Raises CourseError with the end of its error if it fails.
    """
    folder = folder or files.root()
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=sandbox.environment(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=READY_LIMIT,
    )
    if process.returncode:
        raise files.CourseError("\n".join(process.stderr.strip().split("\n")[-6:]))
    return process.stdout.strip()


COLD_START = """
import os, time
marks = [("Python", START)]
def mark(name): marks.append((name, time.time()))
mark("Python starts")
import torch
mark("import torch")
from minivllm import LLM, SamplingParams
mark("import minivllm")
llm = LLM(MODEL, dtype="float32", num_kv_blocks=8, progress=False)
mark("load weights, compile, allocate")
llm.generate("The capital of France is", SamplingParams(max_tokens=1), use_tqdm=False)
mark("first token")
for (_, began), (name, ended) in zip(marks, marks[1:]): print(name, ended - began, sep="=")
"""


def cold_start(model: str, folder: Path | None = None) -> dict[str, float]:
    """Return the seconds of each phase from starting a new Python to its first token."""
    settings = f"MODEL = {model!r}\nSTART = {time.time()}\n"
    lines = run_fresh(settings + COLD_START, folder).split("\n")
    return {name: float(value) for name, _, value in (line.rpartition("=") for line in lines)}


@dataclass
class Result:
    """What one engine did in a race."""

    seconds: list[float] = field(default_factory=list)  # of each round
    token_ids: list[list[int]] = field(default_factory=list)  # the answers of the last round


def race(
    setup: Mapping[str, Any], prompts: Sequence[Sequence[int]], num_tokens: int, rounds: int = 3
) -> dict[str, Result]:
    """Greedy answers of `num_tokens` tokens to all prompts (of one length), by each engine in
    turn, after a round that is not counted.

    `setup` are the fields of `benchmarks/engines.py`'s `Setup`. "transformers" takes part where it
    is installed.
    """
    with ExitStack() as stack:
        ours = stack.enter_context(sandbox.temporary(reference=True))
        racers = {"yours": ("minivllm", files.root()), "ours": ("minivllm", ours)}
        if find_spec("transformers"):
            racers["transformers"] = ("transformers", files.root())
        lines = {}
        for name, (engine, folder) in racers.items():
            lines[name] = stack.enter_context(_racer(engine, folder, setup))
        for process in lines.values():
            _answer(process)  # "ready"
        results = {name: Result() for name in racers}
        for number in range(rounds + 1):
            # An engine that follows a heavy one may be slower, so the order changes.
            names = list(racers)[number % len(racers) :] + list(racers)[: number % len(racers)]
            for name in names:
                seconds, token_ids = _ask(lines[name], [list(map(list, prompts)), num_tokens])
                if number:
                    results[name].seconds.append(seconds)
                    results[name].token_ids = token_ids
    return results


@contextmanager
def _racer(engine: str, folder: Path, setup: Mapping[str, Any]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "course.props.race", json.dumps([engine, dict(setup)])],
        cwd=folder,
        env=sandbox.environment(folder),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _ask(process: subprocess.Popen[str], question: Any) -> Any:
    assert process.stdin is not None, "it was asked for"
    print(json.dumps(question), file=process.stdin, flush=True)
    return _answer(process)


def _answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None, "it was asked for"
    for line in process.stdout:
        if line.startswith(SIGN):
            return json.loads(line.removeprefix(SIGN))
    raise files.CourseError(
        "An engine of the race ended before it answered. Run the cells above again; if they"
        " work, there may be too little memory for three engines at once."
    )


def _run(engine: str, setup: dict[str, Any]) -> None:
    """What a racer does: load, say so, then answer each line of its input."""
    sys.path.insert(0, str(files.HOME / "benchmarks"))
    from engines import ENGINES, Setup  # type: ignore[import-not-found]

    peer = ENGINES[engine](Setup(**setup))
    print(SIGN + '"ready"', flush=True)
    for line in sys.stdin:
        prompts, num_tokens = json.loads(line)
        began = time.perf_counter()
        answers = peer.generate(prompts, num_tokens)
        answer = [time.perf_counter() - began, answers.token_ids]
        print(SIGN + json.dumps(answer), flush=True)


if __name__ == "__main__":
    _run(*json.loads(sys.argv[1]))
