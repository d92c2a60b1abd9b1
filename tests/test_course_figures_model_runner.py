"""The pictures of chapter 06 say what they were given, in image and words."""

import pytest
import torch
from figure_checks import assert_fits_the_page_and_is_described
from row_makers import make_request

from course.figures import model_runner as draw
from minivllm.request import Chunk, SchedulerOutput
from minivllm.rows import Rows
from minivllm.trace import Trace

pytestmark = pytest.mark.course


def make_tables():
    """Rows of one request that has gained a block, and their tables before."""
    rows = Rows(2, 12, 3, torch.device("cpu"), padding_block=99)
    request = make_request("a", [1], [7])
    rows.update([request])
    before = rows.block_table.clone()
    request.block_table.append(5)
    rows.update([request])
    return rows, before


def make_trace():
    """A prompt of 5 tokens in two blocks of 4, then a decode in the same blocks."""
    trace = Trace(8, 4)
    request = make_request("a", range(5), [3, 6])
    for chunk in (Chunk(request, 0, 5, True, False), Chunk(request, 5, 1, True, True)):
        tables = {"a": tuple(request.block_table)}
        trace.record(
            SchedulerOutput([chunk]),
            started=trace.began,
            finished=[],
            num_waiting=0,
            block_tables=tables,
            cached_blocks=(),
        )
    return trace


PICTURES = {
    "growth": lambda: draw.growth({"big": 524_288, "small": 131_072, "near": 114_688}, 1024),
    "block_tables": lambda: draw.block_tables(*make_tables()),
    "step": lambda: draw.step({"owner": [0, 1, 1], "position": [8, 2, 3]}, [0, 1, 1], "A step"),
    "slots": lambda: draw.slots({"S": ([0, 1], [4, 5]), "P": ([0], [2])}, 2, 4),
    "clash": lambda: draw.slots({"S": ([0, 1], [4, 5]), "P": ([0], [5])}, 2, 4),
    "weights": lambda: draw.weights([[0.25, 0.75], [1.0, 0.0]], [2, 1]),
    "differences": lambda: draw.differences({"again": 0.0, "chunks": 2e-5}, 1.5, "Ways"),
    "sent": lambda: draw.sent({"tables": [63, 64], "rows": [0, 3]}, "Two steps"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_fit_the_page_and_are_described(name):
    """700 pixels wide, with alt text where a notebook keeps it."""
    assert_fits_the_page_and_is_described(PICTURES[name])


def test_pictures_are_the_same_each_time():
    """No date, no version: a notebook that is executed again changes no image."""
    assert PICTURES["slots"]() == PICTURES["slots"]()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("growth", ["big 512 KiB a token, 0.5 GiB in all", "near 112 KiB"]),
        ("block_tables", ["3 rows", "Written: row 0, entry 1: 5"]),
        ("step", ["the 3 tokens of a step", "owner: 0, 1, 1; position: 8, 2, 3"]),
        ("slots", ["2 blocks of 4", "S positions [0, 1] in slots [4, 5]"]),
        ("weights", ["request 0 sees 2: 0.25, 0.75; request 1 sees 1: 1.00"]),
        ("differences", ["again 0.0e+00, chunks 2.0e-05", "leads by 1.5"]),
        ("sent", ["tables: 127 in all, at most 64 a step; rows: 3 in all"]),
    ],
)
def test_words_name_the_numbers(name, words):
    """What the marks show is in the text as well."""
    alt = PICTURES[name]().alt
    assert [part for part in words if part not in alt] == [], alt


def test_a_slot_of_two_owners_is_marked():
    """Title and colour say so."""
    assert PICTURES["clash"]().png != PICTURES["slots"]().png
    assert "P positions [0] in slots [5]" in PICTURES["clash"]().alt
