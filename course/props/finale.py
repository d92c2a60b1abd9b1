"""Every exercise of the course at work, in a fresh process, for the end of chapter 11.

A CPU's default engine leaves some exercises out: the kernels of 07 need a GPU or Triton's
interpreter, the graphs of 08 a GPU or the tape, the ranks of 09 several devices. So one small model
runs on all of these in turn, and a profile function notes which exercises were called.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from course import files, sandbox
from course.exercises import MINE, exercises

SIGN = "finale: "  # begins the line that is for us
LIMIT = 240  # seconds
STAGES = ("generate", "overlap", "tape", "ranks", "kernels", "called once")
PROMPTS = [list(range(40, 60)), list(range(40, 56)), [7, 8, 9]]
LONG_PROMPT = list(range(100, 170))  # more keys than one part of Flash-Decoding has
TEXT = "The quick brown fox – déjà vu 🦊"


@dataclass(frozen=True)
class Finale:
    """What ran where."""

    ran: dict[str, str]  # by exercise: the first stage that called it
    same_tokens: dict[str, bool]  # by stage: whether its greedy tokens are those of "generate"
    errors: dict[str, str]  # by stage that broke off: the last line of the error

    def in_words(self, states: Mapping[str, str]) -> str:
        """How many exercises ran, how many are the learner's, and a line for each chapter with
        exercises that are not."""
        mine = sum(states.get(name) in MINE for name in self.ran)
        lines = [f"{len(self.ran)} of {len(exercises())} exercises ran; {mine} of them are yours."]
        by_default = sum(stage == "generate" for stage in self.ran.values())
        lines.append(f"{by_default} ran in `generate` with this machine's defaults.")
        same = [stage for stage, is_same in self.same_tokens.items() if is_same]
        lines.append(f"Same tokens as `generate`: {', '.join(same) or 'none'}.")
        lines += [f"{stage} broke off: {error}" for stage, error in self.errors.items()]
        return "\n".join(lines)


def finale() -> Finale:
    """Run every stage on the package as it is now. Raises CourseError if the process dies."""
    folder = files.root()
    process = subprocess.run(
        [sys.executable, "-m", "course.props.finale"],
        cwd=folder,
        env=sandbox.environment(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    for line in process.stdout.split("\n"):
        if line.startswith(SIGN):
            return Finale(**json.loads(line.removeprefix(SIGN)))
    raise files.CourseError("\n".join(process.stderr.strip().split("\n")[-6:]))


# -- inside the fresh process ------------------------------------------------------------------


def _run() -> None:
    calls = _Calls()
    ran: dict[str, str] = {}
    tokens: dict[str, Any] = {}
    errors: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for stage, run in _stages(Path(folder)):
            try:
                with calls.noted():
                    tokens[stage] = run()
            except Exception as error:  # an open exercise, or a wrong one: the others still run
                errors[stage] = (str(error) or type(error).__name__).strip().split("\n")[-1]
            for name in calls.names():
                ran.setdefault(name, stage)
    expected = tokens.get("generate") or []
    same = {
        stage: all(e[: len(f)] == f for e, f in zip(expected[-len(found) :], found))
        for stage, found in tokens.items()
        if found is not None
    }
    print(SIGN + json.dumps({"ran": ran, "same_tokens": same, "errors": errors}), flush=True)


class _Calls:
    """Which exercises were called, by the place of their code."""

    def __init__(self) -> None:
        self.places = dict(_places())
        self.codes: set[CodeType] = set()

    @contextmanager
    def noted(self) -> Iterator[None]:
        def note(frame: FrameType, event: str, argument: Any) -> None:
            if event == "call":
                self.codes.add(frame.f_code)

        threading.setprofile(note)
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def names(self) -> set[str]:
        """The exercises among the codes that ran."""
        found = set()
        for code in self.codes:
            lines = self.places.get((code.co_filename, code.co_name), {})
            # A decorated function begins at its decorator, and Triton's interpreter at its `def`.
            found |= {lines[code.co_firstlineno]} if code.co_firstlineno in lines else set()
        return found


def _places() -> Iterator[tuple[tuple[str, str], dict[int, str]]]:
    """For each file and function name: the exercises by the lines where they may begin."""
    places: dict[tuple[str, str], dict[int, str]] = {}
    for name in exercises():
        module, *inner = name.split(".")
        path = files.root() / "minivllm" / f"{module}.py"
        body: Any = ast.parse(path.read_text("utf-8"))
        for part in inner:
            body = next(node for node in body.body if getattr(node, "name", None) == part)
        first = min([body.lineno, *(node.lineno for node in body.decorator_list)])
        lines = places.setdefault((str(path), inner[-1]), {})
        lines |= dict.fromkeys(range(first, body.lineno + 1), name)
    yield from places.items()


def _stages(folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    from course.props.ranks import make_tiny_checkpoint, ranks_as_threads

    path = str(make_tiny_checkpoint(folder / "tiny"))

    def engine(**settings: Any) -> list[list[int]]:
        return _answers(path, **settings)

    def ranks() -> list[list[int]]:
        with ranks_as_threads():
            return engine(attention_backend="torch", tensor_parallel_size=2)

    def kernels() -> list[list[int]]:
        interpreted = {"attention_backend": "triton", "num_tokens": 2}  # slow: few tokens
        engine(prompts=[LONG_PROMPT], num_kv_blocks=10, max_model_len=80, **interpreted)
        return engine(prompts=PROMPTS[2:], **interpreted)

    yield "generate", engine
    yield "overlap", lambda: engine(overlap=True)
    yield "tape", lambda: engine(attention_backend="torch", enforce_eager=False)
    yield "ranks", ranks
    if find_spec("triton"):
        yield "kernels", kernels
    yield "called once", _call_the_rest


def _answers(
    path: str, prompts: list[list[int]] = PROMPTS, num_tokens: int = 6, **settings: Any
) -> list[list[int]]:
    """Return the greedy answers of a small engine whose memory is too small for all prompts;
    afterwards it answers with every setting of the sampler."""
    from minivllm import LLM, SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    drawn = SamplingParams(
        temperature=0.8, top_p=0.9, top_k=20, repetition_penalty=1.1, max_tokens=2, seed=1
    )
    sizes = {"max_num_seqs": 4, "num_kv_blocks": 9, "block_size": 8, "max_model_len": 64}
    options = {"dtype": "float32", "device": "cpu", "progress": False, **sizes, **settings}
    with LLM(path, **options) as llm:
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        if settings.get("attention_backend") != "triton":
            more: list[Any] = [*prompts, TEXT]
            llm.generate(more, drawn, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _call_the_rest() -> None:
    """What no engine on this machine calls: the naive loop, a tokenizer with merges, and the
    draw that a GPU uses."""
    import torch

    from course.props.vocabulary import chat_tokenizer
    from minivllm import naive, sampler

    naive.generate_tokens(lambda token_ids: [0.0, 1.0], [0], 2)
    chat_tokenizer([("a", "b")]).encode("abab")
    one = torch.ones(1)
    sampler.gumbel_sample(torch.ones(1, 4), one, one.long(), one.long())


if __name__ == "__main__":
    _run()
