"""The pictures of chapter 08 and of the ladder say what they were given, in image and words."""

import json

import pytest
import torch
from figure_checks import assert_fits_the_page_and_is_described

from course.figures import cuda_graphs as draw
from minivllm.cuda_graphs import Tape

pytestmark = pytest.mark.course


def make_tape():
    """x times 2 into new memory, a view of it added to, all copied to `out`."""
    x = torch.ones(3)
    out = torch.zeros(3)
    with Tape() as tape:
        doubled = x * 2
        doubled[1:].add_(10)
        out.copy_(doubled)
    return tape.calls, {"x": x, "out": out}


def result(rung, batch_size, speed, **more):
    """One rung of a recorded run, limit 1,000 tokens a second."""
    facts = {"model": "m", "dtype": "bfloat16", "device": "cuda:0", "machine": "a GPU"}
    facts |= {"versions": {"torch": "2.11.0"}, "date": "2026-11-30", "command": "c"}
    facts |= {"workload": "w", "seconds": 1.0, "output_tokens_per_s": 1.0}
    facts |= {"prompt_tokens_per_s": 1.0, "limit_tokens_per_s": 1000.0}
    return {**facts, "rung": rung, "batch_size": batch_size, "decode_tokens_per_s": speed, **more}


TIMELINE = {
    "num_steps": 2,
    "num_launches": 10,
    "num_kernels": 12,
    "seconds": 0.004,
    "busy_seconds": 0.001,
    "window_us": 3000.0,
    "steps": [[0.0, 2000.0], [2000.0, 2000.0]],
    "launches": [[10.0, 5.0]],
    "kernels": [[20.0, 4.0]],
}
RESULTS = [
    result("slow", 1, 10.0),
    result("fast", 1, 500.0, timeline=TIMELINE),
    result("slow", 8, 80.0),
    {"rung": "mixed"},
]

PICTURES = {
    "launches": lambda: draw.launches_and_work({"a GPU": (30.0, 0.3)}, "One step"),
    "tape": lambda: draw.tape(*make_tape(), "A step"),
    "buckets": lambda: draw.buckets({1: 1, 2: 2, 3: 4, 5: None}, "at most 5"),
    "rides": lambda: draw.rides([(1, None), (3, 4), (4, 4)], "a run"),
    "places": lambda: draw.places({"one": ([5, 9], [17, 0], 1)}, padding_row=9),
    "ladder": lambda: draw.ladder(RESULTS, [1, 8]),
    "timelines": lambda: draw.timelines(RESULTS, ["fast"]),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_fit_the_page_and_are_described(name):
    """700 pixels wide, with alt text where a notebook keeps it."""
    assert_fits_the_page_and_is_described(PICTURES[name])


def test_pictures_are_the_same_each_time():
    """No date, no version: a notebook that is executed again changes no image."""
    assert PICTURES["tape"]() == PICTURES["tape"]()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("launches", ["a GPU: launch 30 ms, read 0.3 ms"]),
        ("tape", ["mul: r x, w tape 1", "slice: view tape 1", "add_: r w tape 1", "copy_: w out"]),
        ("buckets", ["14.3% padding", "at 3 requests in a bucket of 4", "Without a graph: 5"]),
        ("rides", ["2 of them replayed", "1 in None, 3 in 4, 4 in 4"]),
        ("places", ["5 at 17, 9 at 0, 1 of them real"]),
        ("ladder", ["1 request: slow 10, fast 500; limit 1,000", "8 requests: slow 80"]),
        ("timelines", ["fast: 5 launches, 6 kernels and 2.0 ms a step, GPU busy for 25%"]),
    ],
)
def test_words_name_the_numbers(name, words):
    """What the bars show is in the text as well."""
    alt = PICTURES[name]().alt
    assert [part for part in words if part not in alt] == [], alt


def test_a_stale_place_is_marked():
    """A row behind the real ones that is not the padding's."""
    fresh = draw.places({"one": ([5, 9], [17, 0], 1)}, padding_row=9)
    stale = draw.places({"one": ([5, 7], [17, 0], 1)}, padding_row=9)
    assert fresh.png != stale.png


def test_views_and_memory_alone_are_no_work():
    """Of four calls three compute; room for numbers is not a number."""
    calls, _ = make_tape()
    assert [draw.computes(call) for call in calls] == [True, False, True, True]
    with Tape() as tape:
        torch.empty(3)
        torch.zeros(2, 3).flatten()
    assert sum(draw.computes(call) for call in tape.calls) == 1


def test_the_newest_recorded_gpu_run_is_taken(tmp_path):
    """By the date in its name; a CPU's ladder is not used."""
    assert draw.recorded(tmp_path) == []
    cpu = [{**RESULTS[0], "device": "cpu"}]
    for name, results in (
        ("2026-01-01-gpu-ladder", RESULTS[:1]),
        ("2026-02-02-gpu-ladder", RESULTS[1:2]),
        ("2026-03-03-cpu-ladder", cpu),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(results))
    assert [one["rung"] for one in draw.recorded(tmp_path)] == ["fast"]


def test_a_result_that_is_not_there_is_named():
    """Rung and batch size."""
    assert draw.find(RESULTS, "slow", 8)["decode_tokens_per_s"] == 80.0
    with pytest.raises(ValueError, match="rung='fast' at batch_size=8"):
        draw.find(RESULTS, "fast", 8)
