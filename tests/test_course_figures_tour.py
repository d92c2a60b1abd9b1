"""The pictures of chapter 00 show their data, in the image and in the alt text."""

import pytest
from figure_checks import assert_fits_the_page_and_is_described

from course.figures import tour as draw
from minivllm.trace import ChunkTrace, StepTrace, Trace

pytestmark = pytest.mark.course


def make_trace(*steps):
    """Steps given as (end in seconds, whether each chunk decodes)."""
    trace = Trace(4, 4, began=0.0)
    for index, (end, decodes) in enumerate(steps):
        chunks = tuple(ChunkTrace(str(i), 0, 1, d, True) for i, d in enumerate(decodes))
        times = {"index": index, "start": end - 0.01, "end": end, "num_waiting": 0}
        tables = {"block_tables": {}, "cached_blocks": frozenset()}
        no_one_leaves = {"preempted": (), "finished": ()}
        trace.steps.append(StepTrace(chunks=chunks, **times, **tables, **no_one_leaves))
    return trace


# Two prompts; tokens alone; a third prompt at the same time; tokens alone.
TRACE = make_trace(
    (0.2, [False, False]),
    (0.23, [True, True]),
    (0.33, [True, True, False]),
    (0.37, [True, True, True]),
)

PICTURES = {
    "work": lambda: draw.work([37, 38, 39], [37, 1, 1]),
    "waits": lambda: draw.waits(TRACE, {"p50": 0.04, "p99": 0.1}),
    "timeline": lambda: draw.timeline(TRACE),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_fits_the_page_and_is_described(name):
    """It is 700 pixels wide and has alt text in the notebook."""
    assert_fits_the_page_and_is_described(PICTURES[name])


def test_work_is_counted_in_tokens():
    """114 are computed, and 37 + 1 + 1 are necessary."""
    alt = draw.work([37, 38, 39], [37, 1, 1]).alt
    assert "3 new tokens. 114 tokens computed, 39 of them necessary" in alt
    assert "37 tokens for the first one, 39 for the last" in alt


def test_waits_are_from_token_to_token():
    """The first step ends no wait, and the third lasts 100 ms because of its prompt."""
    alt = draw.waits(TRACE, {"p50": 0.04, "p99": 0.1}).alt
    assert "Waits between tokens in 4 steps, dashed: p50 40 ms, p99 100 ms" in alt
    assert alt.endswith("Steps with a prompt: step 2: 100 ms.")


def test_a_run_without_prompts_beside_tokens_can_be_drawn():
    """No step has both a prompt and decoding requests."""
    trace = make_trace((0.1, [False]), (0.2, [True]))
    assert draw.waits(trace, {}).alt.endswith("Steps with a prompt: none.")
