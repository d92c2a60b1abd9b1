"""What a check says: the events of its tests in the learner's words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from course import sandbox, splice
from course.check import TEST_LIMIT, Event, run_tests
from course.exercises import Exercise, current, find_exercise, marks_of, module_text, state, states
from course.files import CheckFailed, CourseError, OpenExercise, root
from course.ledger import entry_of, ledger
from course.needs import lacking
from course.progress import chapter_line
from course.signatures import signature_fault

# What Python and Triton's interpreter say of a mistake, and what it means.
MEANINGS = {
    "NoneType": (
        "a value is None: `sort`, `append` and a function without `return` give None, and so does"
        " `get` of a dict for a key that is not there"
    ),
    "index out of range": (
        "a place outside of the list: does the last element have a neighbour, and does the list"
        " get shorter while you go through it?"
    ),
    "missing 1 required positional argument": (
        "an argument is missing: does a tuple that holds two of them need a `*` before it?"
    ),
    "invalid operands of type pointer": (
        "`/` divides with a fraction: which operator counts whole blocks?"
    ),
    "mask has unsupported dtype": (
        "Triton's interpreter cannot join a block mask with one scalar condition: return early "
        "(`if slot < 0: return`), or compare a block (`slot + 0 * d >= 0`)"
    ),
    "make_shape_compatible": (
        "two blocks do not fit each other: which axis did you reduce, and is a row "
        "(`x[None, :]`) or a column (`x[:, None]`) wanted?"
    ),
    "equal reduction dimensions": (
        "tl.dot wants [M, K] and [K, N]: does one of them have to be transposed (tl.trans)?"
    ),
    "Both operands must be same dtype": (
        "tl.dot wants two tiles of one type: x.to(y.dtype) gives x the type of y"
    ),
}


TRY_LIMIT = 2  # seconds for one test of a run that only explains


def check(name: str) -> str:
    """Check the learner's version of an exercise and record that it passed; what to print.

    Raises OpenExercise if there is nothing of the learner's to check, CheckFailed if it is not
    right yet, each with the text to show. What this machine cannot run at all fails nothing.
    """
    exercise = find_exercise(name)
    if missing := lacking(module_text(exercise.name)):
        return f"– {exercise.inner.rsplit('.', 1)[-1]}: not checked. It {missing}."
    refuse_if_not_yours(exercise)
    text, place = current(exercise.name), root()
    refuse_other_signature(exercise, text)
    try:
        events = run_tests(exercise.name, place)
        ok, message = verdict(exercise.name, events, place)
        if not ok:
            raise CheckFailed(message + _elsewhere(exercise.name))
    except KeyboardInterrupt:
        raise CourseError(f"Stopped {exercise.name}: nothing was recorded.") from None
    with ledger() as book:
        mark, _ = marks_of(text)
        entry_of(book, exercise.name).update(mine=mark, passed=mark)
    known = states(exercise.notebook)
    return "\n".join([message, chapter_line(exercise.notebook, known), *_next_step(known)])


def _next_step(states: Mapping[str, str]) -> list[str]:
    """What comes after a check that passed: the chapter's first exercise that has not."""
    left = [name for name, word in states.items() if word != "passed"]
    if not left:
        return ["All exercises of this chapter have passed."]
    number = list(states).index(left[0]) + 1
    return [f"Next: exercise {number}, {left[0].split('.', 1)[1]}"]


def refuse_if_not_yours(exercise: Exercise) -> None:
    """Raise OpenExercise for a hole and for a borrowed function."""
    with ledger() as book:
        word = state(exercise, book)
    if word == "open":
        raise OpenExercise(
            f"Open: {exercise.name} is still a hole in minivllm/{exercise.module}.py.\n"
            "Write its body there or in the build cell above, run that cell, then this one."
        )
    if word == "borrowed":
        raise OpenExercise(
            f"Open: {exercise.name} is still borrowed, so there is nothing of yours to check.\n"
            "Write the body in the build cell above, run that cell, then this one."
        )


def refuse_other_signature(exercise: Exercise, text: str) -> None:
    """Raise CheckFailed for an answer that the engine could not call; build cells refuse it, but
    an editor does not."""
    if fault := signature_fault(text, exercise.reference):
        raise CheckFailed(f"✗ {exercise.inner.rsplit('.', 1)[-1]}: {fault}")


def verdict(name: str, events: list[Event], root: Path) -> tuple[bool, str]:
    """Whether a run of `name`'s tests passed, and what to tell the learner."""
    short = name.rsplit(".", 1)[-1]
    fault = _our_fault(name, events, root)
    failed = [event for event in events if event["event"] == "fail"]
    passed, tests = _passed(events), _tests(events)
    if fault:
        return False, f"✗ {short}: {fault}"
    if failed:
        lines = _failure(name, failed[0])
        lines.append(f"{len(passed)} of {len(tests)} tests pass. The tests: {_file(name)}")
        return False, "\n".join([f"✗ {short}: {_rule(failed[0]['test'])}", *lines])
    if not any(event["event"] == "done" for event in events) or _missing(events):
        return False, f"✗ {short}: {_broken_off(name, events, root)}"
    if not passed:
        return False, f"✗ {short}: {_skipped(events)}"
    return True, f"✓ {short}: {len(passed)} of {len(tests)} tests pass. It is yours."


# -- what the events say --


def _tests(events: list[Event]) -> list[str]:
    return next((event["tests"] for event in events if event["event"] == "collected"), [])


def _passed(events: list[Event]) -> list[str]:
    return [event["test"] for event in events if event["event"] == "pass"]


def _missing(events: list[Event]) -> list[str]:
    """Tests that were collected and never reported."""
    told = {event["test"] for event in events if event["event"] in ("pass", "skip", "fail")}
    return [test for test in _tests(events) if test not in told]


def _our_fault(name: str, events: list[Event], root: Path) -> str | None:
    """What is wrong with the check itself, if anything is."""
    report = "this is our mistake, please report it."
    end = events[-1]
    broken = next((event["text"] for event in events if event["event"] == "broken"), None)
    if broken or not any(event["event"] == "collected" for event in events):
        lines = (broken or end["out"]).strip().split("\n")[-12:]
        return "\n    ".join([f"the tests could not start (exit code {end['code']}).", *lines])
    if not _tests(events):
        return f"no test in {_file(name)} carries the mark exercise({name!r}); {report}"
    done = next((event for event in events if event["event"] == "done"), None)
    if done and not Path(done["package"] or "").resolve().is_relative_to(root.resolve()):
        return f"the tests imported {done['package']}, not the package in {root}; {report}"
    return None


def _skipped(events: list[Event]) -> str:
    reasons = dict.fromkeys(event["reason"] for event in events if event["event"] == "skip")
    return f"it cannot be checked on this machine: {'; '.join(reasons)}"


def _broken_off(name: str, events: list[Event], root: Path) -> str:
    """A test that did not end, or took the process with it."""
    end = events[-1]
    started = [event["test"] for event in events if event["event"] == "start"]
    rule = _rule(started[-1]) if started else "the start"
    if "Timeout" not in end["stacks"]:
        return (
            f"the process ended in the middle of “{rule}” (exit code {end['code']}): "
            "os._exit, a crash, or out of memory"
        )
    frames = re.findall(r'File "(.*?)", line (\d+) in (\w+)', end["stacks"])
    inside = [frame for frame in frames if frame[0].startswith(str(root / "minivllm"))]
    at = ""
    if inside:
        file, line, function = inside[0]
        at = f"; it was in {function}, {Path(file).name}:{line}"
    return (
        f"“{rule}” did not end within {TEST_LIMIT} s{at}.\n"
        "    likely    a loop whose condition never changes: is each new value kept?"
    )


# -- the words --


def _file(name: str) -> str:
    return f"tests/test_{name.split('.', 1)[0]}.py"


def _rule(test: str) -> str:
    """test_a_rule_in_words[3-4] -> a rule in words"""
    return test.split("[")[0].removeprefix("test_").replace("_", " ")


def _failure(name: str, event: Event) -> list[str]:
    """The lines below the title: called, came back, expected, likely."""
    rows = [("called", event.get("called"))]
    if "came" in event:
        looked = event.get("looked")
        rows += [("looked at", looked), ("found" if looked else "came back", event["came"])]
        rows += [("expected", event["expected"])]
    else:
        first = event["text"].split("\n")[0]
        rows += [("raised", f"{event['kind']}: {first}" if first else event["kind"])]
        if event["where"]:
            rows += [("at", ": ".join(event["where"]))]
    rows += [("likely", _why(name, event) or event.get("hint") or _meaning(event))]
    rows += [("printed", event["printed"].strip())]
    return [_row(label, text) for label, text in rows if text]


def _row(label: str, text: str) -> str:
    return f"    {label:<9} " + text.replace("\n", "\n" + " " * 14)


def _why(name: str, event: Event) -> str | None:
    """Causes that the exception itself gives away."""
    kind, text = event["kind"], event["text"]
    if kind == "NotImplementedError":
        span = splice.find(current(name), name.rsplit(".", 1)[-1])[-1]
        if splice.ends_in_raise(span.node):
            return "`raise NotImplementedError` is still below your code: delete that line"
        return "a function that yours calls is still open: %progress shows which"
    if kind == "OSError" and "File too large" in text:
        return "a loop that prints and never ends"
    if kind == "MemoryError":
        return "a list that grows and never ends"
    if kind == "RecursionError":
        return "it calls itself and never stops: which case has no further call?"
    return None


def _meaning(event: Event) -> str | None:
    return next((why for words, why in MEANINGS.items() if words in event["text"]), None)


def _elsewhere(name: str) -> str:
    """After a failure: would this version pass if all other exercises were ours?"""
    others = [n for n, word in states().items() if n != name and word != "borrowed"]
    if not others or not _passes_alone(name):
        return ""
    names = ", ".join(n.split(".", 1)[1] for n in others)
    return f"\nThis version passes when all else is ours, so the cause is in {names}."


def _passes_alone(name: str) -> bool:
    with sandbox.temporary(reference=True) as folder:
        sandbox.set_sources(folder, {name: current(name)})
        return verdict(name, run_tests(name, folder, TRY_LIMIT), folder)[0]
