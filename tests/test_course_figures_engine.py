"""The pictures of chapter 11 say what they were given, in image and words."""

import pytest
from figure_checks import assert_fits_the_page_and_is_described
from row_makers import make_request

from course.figures import engine as draw
from course.props.toy_device import Work
from minivllm.request import Chunk, SchedulerOutput
from minivllm.trace import Trace

pytestmark = pytest.mark.course

LOG = [
    Work("host", "launch", 0, 0, 1),
    Work("device", "compute", 0, 1, 4),
    Work("device", "compute", 1, 4, 7, is_wasted=True),
    Work("host", "read", 0, 4, 5),
    Work("blocks of A", "owned", 0, 0, 8),
]
POINTS = [
    {"batch": 1, "tokens_per_s": 50.0, "ms": 20.0},
    {"batch": 4, "tokens_per_s": 125, "ms": 32},
]
RATES = [
    {"rate": rate, "tokens_per_s": 40 * rate, "first_p50": 90, "first_p90": 140, "gap_p50": 21,
     "gap_p90": 60}
    for rate in (0.5, 2)
]  # fmt: skip


def make_trace():
    """Two requests in blocks 3 and 6; the first ends and leaves its block in the cache."""
    trace = Trace(8, 4)
    first = make_request("a", [1], [3])
    second = make_request("b", [2], [6])
    for requests, waiting, cached in (([first, second], 2, [3]), ([second], 0, [3, 1])):
        trace.record(
            SchedulerOutput([Chunk(request, 0, 1, True, True) for request in requests]),
            started=trace.began,
            finished=[],
            num_waiting=waiting,
            block_tables={r.request_id: tuple(r.block_table) for r in requests},
            cached_blocks=cached,
        )
    return trace


PICTURES = {
    "lanes": lambda: draw.lanes({"overlapped": LOG}),
    "lanes_without_blocks": lambda: draw.lanes({"serial": LOG[:2], "other": LOG[:2]}),
    "batches": lambda: draw.batches(POINTS, {1: 60.0, 4: 200.0}),
    "rates": lambda: draw.rates(RATES, 1.25),
    "memory": lambda: draw.memory(make_trace()),
    "rungs": lambda: draw.rungs({"naive": 8.0, "engine": 80.0}, 160, "A ladder"),
    "ratios": lambda: draw.ratios({"yours": [2.0, 1.0], "theirs": [2.0, 4.0]}, "A race"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_fit_the_page_and_are_described(name):
    """700 pixels wide, with alt text where a notebook keeps it."""
    assert_fits_the_page_and_is_described(PICTURES[name])


def test_pictures_are_the_same_each_time():
    """No date, no version: a notebook that is executed again changes no image."""
    assert PICTURES["lanes"]() == PICTURES["lanes"]()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lanes", ["2 steps in 8 ms, the device busy for 75%", "owned from 0 to 8; 1 discarded"]),
        ("batches", ["1: 50 tok/s of at most 60, 20 ms; 4: 125 tok/s of at most 200, 32 ms"]),
        ("rates", ["full at 1.2 requests per second", "2 requests/s: 80 tok/s", "90 ms (p90 140)"]),
        ("memory", ["At most 2 of 8 blocks are owned; at most 2 are cached, 2 requests wait"]),
        ("rungs", ["naive 8, engine 80; limit 160"]),
        ("ratios", ["yours 1.00 (rounds from 0.50), theirs 0.50 (rounds from 0.25)"]),
    ],
)
def test_words_name_the_numbers(name, words):
    """What the marks show is in the text as well."""
    alt = PICTURES[name]().alt
    assert [part for part in words if part not in alt] == [], alt


def test_a_discarded_step_looks_different():
    """Crossed out, not only named."""
    plain = [Work(w.lane, w.what, w.step, w.start, w.end) for w in LOG]
    assert draw.lanes({"overlapped": plain}).png != PICTURES["lanes"]().png


def test_a_block_counts_once():
    """A request that ends with a step leaves its blocks in the cache: they are drawn only once."""
    alt = draw.memory(make_trace()).alt
    assert "at most 2 are cached" in alt  # blocks 3 and 1 in the second step; 0 in the first
