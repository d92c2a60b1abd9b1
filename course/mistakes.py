"""The library of wrong answers, and which of them a failed check looks like.

`course/mistakes/NN_name.py` holds wrong versions of the exercises, each with the words that the
check must say to it:

    @mistake("block_manager.blocks_for", "do you round down?")
    def blocks_for(num_tokens, block_size):
        return num_tokens // block_size

The files are read, never imported.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from course import exercises, files, splice
from course.check import Event, Texts, run_variants, tests_of

LIMITS = (1, 3, 10, 20)  # seconds for one test of a wrong answer; few, so that runs can be kept


@dataclass(frozen=True)
class Mistake:
    """One wrong answer."""

    name: str  # of the exercise
    says: str
    source: str


def read_mistakes(path: Path) -> list[Mistake]:
    """The wrong answers of a file in its order; none if there is no such file."""
    if not path.exists():
        return []
    text = files.read(path).replace("\r\n", "\n")
    return [found for node in splice.parse(text).body if (found := _mistake(text, node))]


def mistakes_of(name: str) -> list[Mistake]:
    """The wrong answers of one exercise."""
    notebook = exercises.find_exercise(name).notebook
    path = files.HOME / "course" / "mistakes" / f"{notebook}.py"
    return [mistake for mistake in read_mistakes(path) if mistake.name == name]


def _mistake(text: str, node: ast.stmt) -> Mistake | None:
    for decorator in getattr(node, "decorator_list", []):
        if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "mistake":
            name, says = (ast.literal_eval(argument) for argument in decorator.args)
            source = text.split("\n")[decorator.end_lineno : node.end_lineno]
            return Mistake(name, says, "\n".join(source))
    return None


def likely(name: str, events: list[Event], root: Path) -> str | None:
    """The words of the wrong answer that gives the learner's result; None if none does.

    Each is put in the learner's place and the tests run again. It must fail the learner's first
    failed test with the same result; of several, the one that agrees on most tests speaks.
    """
    mine = outcomes(events)
    first = next((test for test, result in mine.items() if result != "pass"), None)
    if first is None:
        return None
    library = mistakes_of(name)
    best, most = None, 0
    for mistake, run in zip(library, runs_of(name, library, root, events)):
        theirs = outcomes(run)
        agree = sum(theirs.get(test) == result for test, result in mine.items())
        if theirs.get(first) == mine[first] and agree > most:
            best, most = mistake.says, agree
    return best


def passes_alone(name: str, events: list[Event], root: Path) -> bool:
    """Whether the learner's version would pass if all other exercises were ours."""
    sources = {n: exercise.reference for n, exercise in exercises.exercises().items()}
    sources[name] = exercises.current(name)
    run = run_variants(name, root, [_texts(root, sources)], heavy(events))[0]
    results = outcomes(run).values()
    return bool(results) and all(result == "pass" for result in results)


def outcomes(events: list[Event]) -> dict[str, str]:
    """What became of each test: "pass", or a text that is the same for the same failure."""
    out: dict[str, str] = {}
    for event in events:
        if event["event"] == "start":
            out[event["test"]] = "did not end"
        elif event["event"] in ("pass", "skip"):
            out[event["test"]] = "pass"
        elif event["event"] == "fail":
            result = event["came"] if event.get("came") else event["text"].split("\n")[0]
            out[event["test"]] = f"{event['kind']} {event.get('line')} {result}"
    return out


def is_whole(events: list[Event]) -> bool:
    """Whether a run came to its end."""
    return any(event["event"] == "done" for event in events)


def heavy(events: list[Event]) -> list[str]:
    """Modules worth importing once before all further runs."""
    return next((event["heavy"] for event in events if event["event"] == "done"), [])


def time_limit(events: list[Event]) -> float:
    """Seconds for one test of a variant: enough for whoever needs about what the learner needs."""
    wanted = 10 * max((event["seconds"] for event in events if "seconds" in event), default=0)
    return next((limit for limit in LIMITS if limit > wanted), LIMITS[-1])


def runs_of(
    name: str, library: list[Mistake], root: Path, events: list[Event]
) -> list[list[Event]]:
    """What the tests report of each wrong answer; `events` are those of another run of them."""
    texts = [_texts(root, {name: mistake.source}) for mistake in library]
    limit = time_limit(events)
    kept = _kept(name, root, json.dumps(texts), _stamps(name, root))
    longest, runs = kept[0] if kept else (0, [[] for _ in texts])
    if longest < limit:
        # More time changes nothing for a run that came to its end.
        cut = [index for index, run in enumerate(runs) if not is_whole(run)]
        again = run_variants(name, root, [texts[index] for index in cut], heavy(events), limit)
        new = dict(zip(cut, again))
        kept[:] = [(limit, [new.get(index, run) for index, run in enumerate(runs)])]
    return kept[0][1]


@lru_cache(maxsize=100)
def _kept(
    name: str, root: Path, key: str, stamps: tuple[int, ...]
) -> list[tuple[float, list[list[Event]]]]:
    """Where the runs for one state of tests and package are kept, with the time that a test had:
    a learner tries again."""
    return []


def _stamps(name: str, root: Path) -> tuple[int, ...]:
    """When the tests and the other modules last changed."""
    module = name.split(".", 1)[0]
    paths = [path for path in sorted((root / "minivllm").rglob("*.py")) if path.stem != module]
    return tuple(path.stat().st_mtime_ns for path in [*paths, tests_of(name, root)])


def _texts(root: Path, sources: dict[str, str]) -> Texts:
    return {path.stem: text for path, text in exercises.spliced(root, sources).items()}
