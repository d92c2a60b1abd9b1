"""The figures of chapter 02 show their data, in the image and in the alt text."""

import pytest
from figure_checks import assert_fits_the_page_and_is_described

from course.figures import scheduler as draw
from minivllm.request import Chunk
from minivllm.trace import ChunkTrace, StepTrace, Trace

pytestmark = pytest.mark.course


def make_trace():
    """a: a prompt of 6 tokens, then decode, then preempted; b's prompt of 9 in two chunks."""
    steps = [
        ([ChunkTrace("a", 0, 6, False, True), ChunkTrace("b", 0, 4, False, False)], ()),
        ([ChunkTrace("a", 6, 1, True, True), ChunkTrace("b", 4, 5, False, True)], ()),
        ([ChunkTrace("b", 9, 1, True, True)], ("a",)),
    ]
    trace = Trace(0, 1, began=0.0, arrivals={"a": 0.0, "b": 0.0})
    for index, (chunks, preempted) in enumerate(steps):
        trace.steps.append(
            StepTrace(
                index=index,
                start=float(index),
                end=index + 1.0,
                chunks=tuple(chunks),
                preempted=preempted,
                finished=(),
                num_waiting=0,
                block_tables={},
                cached_blocks=frozenset(),
            )
        )
    return trace


def make_chunks():
    """A prompt of 5 in chunks of 4 and 1, then a decode."""
    parts = [(0, 4, False, False), (4, 1, True, False), (5, 1, True, True)]
    return [Chunk(None, *part) for part in parts]


PICTURES = {
    "timelines": lambda: draw.timelines({"one": make_trace(), "two": make_trace()}),
    "chunks": lambda: draw.chunks(make_chunks(), "A prompt of 5"),
    "step_bars": lambda: draw.step_bars(make_trace(), budget=10),
    "memory": lambda: draw.memory([{"a": 4, "b": 4}, {"a": 5}], 8, [(1, "b")]),
    "token_gaps": lambda: draw.token_gaps({"whole": [(0.1, 5.0), (0.3, 200.0)]}),
    "load_curves": lambda: draw.load_curves({"a car": [(100.0, 50.0), (200.0, 10.0)]}),
    "budget_curves": lambda: draw.budget_curves({32: (6.0, 900.0, 300.0), 64: (7.0, 90.0, 400.0)}),
    "speeds": lambda: draw.speeds({"slow": 2.0, "fast": 40.0}, "a machine"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_fits_the_page_and_is_described(name):
    """700 pixels wide, with alt text where a notebook keeps it."""
    assert_fits_the_page_and_is_described(PICTURES[name])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("timelines", "one: 3 steps in 3 s, 1 preemption; two: 3 steps in 3 s, 1 preemption"),
        ("chunks", "positions 4 to 5 prefill and sample; positions 5 to 6 decode and sample"),
        ("step_bars", "1 of 3 steps use the whole budget of 10 tokens; at most 1 decode per"),
        ("memory", "limit of 8. 1 preemption: the newest request loses its memory. Preempted: b"),
        ("token_gaps", "whole: the longest wait is 200 ms"),
        ("load_curves", "a car: 50 ms at 100 tokens/s, at least 10 ms, at most 200 tokens/s"),
        ("budget_curves", "budget 32: 6 ms, 900 ms, 300 tokens/s; budget 64: 7 ms, 90 ms, 400"),
    ],
)
def test_the_words_hold_the_numbers(name, words):
    """The alt text has the numbers that the image shows."""
    assert words in PICTURES[name]().alt


def test_a_gap_between_two_rounds_is_said():
    """All others are done, and the preempted request restarts in the next step."""
    alt = draw.memory([{"a": 4}, {}, {"b": 1}], 8, [(0, "b")]).alt
    assert "Nothing is held from step 1 to 1." in alt


def test_no_preemption_is_said():
    """A run without preemption can be drawn too."""
    assert "Preempted: none" in draw.memory([{"a": 4}], 8, []).alt


def test_pictures_are_the_same_each_time():
    """No date, no version: a notebook that is executed again changes no image."""
    assert PICTURES["step_bars"]() == PICTURES["step_bars"]()
