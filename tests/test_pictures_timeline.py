"""From the steps of a trace to the life of each request and the owners of each block."""

import pytest

from minivllm.pictures.timeline import (
    Span,
    alt_text,
    block_owners,
    count,
    fullest_step,
    num_blocks_in_use,
    request_rows,
)
from minivllm.trace import ChunkTrace, StepTrace, Trace


def chunk(request_id, start, length, *, decode=False):
    return ChunkTrace(request_id, start, length, decode, samples=True)


def step(index, start, end, *chunks, **facts):
    empty = {"preempted": (), "finished": (), "num_waiting": 0, "block_tables": {}}
    empty["cached_blocks"] = frozenset()
    return StepTrace(index, start, end, chunks, **{**empty, **facts})


def trace(*steps, **arrivals):
    return Trace(num_blocks=8, block_size=4, began=0.0, steps=list(steps), arrivals=arrivals)


def spans(of, request_id="a"):
    return [(span.phase, span.start, span.end) for span in request_rows(of)[request_id].spans]


def test_life_is_waiting_prefill_decode():
    """The example of `request_rows`; steps that do the same are one span."""
    steps = [
        step(0, 1, 2, chunk("a", 0, 4)),
        step(1, 2, 3, chunk("a", 4, 1, decode=True)),
        step(2, 3, 4, chunk("a", 5, 1, decode=True), finished=("a",)),
    ]
    assert spans(trace(*steps, a=0)) == [("waiting", 0, 1), ("prefill", 1, 2), ("decode", 2, 4)]
    assert request_rows(trace(*steps, a=0))["a"].num_tokens == 3


def test_small_gap_between_steps_is_no_waiting():
    """The host's work between two steps belongs to the span; so does their overlap."""
    gap = trace(step(0, 0, 1.0, chunk("a", 0, 4)), step(1, 1.1, 2, chunk("a", 4, 1, decode=True)))
    assert spans(gap) == [("prefill", 0, 1.0), ("decode", 1.0, 2)]
    overlap = trace(step(0, 0, 1, chunk("a", 0, 4)), step(1, 0.5, 2, chunk("a", 4, 1, decode=True)))
    assert spans(overlap) == [("prefill", 0, 1), ("decode", 1, 2)]


def test_an_end_told_with_the_next_step_adds_no_waiting():
    """It ran in step 0; that it has ended is known with step 1, which begins a little later."""
    steps = [step(0, 0, 1.0, chunk("a", 0, 4)), step(1, 1.1, 2, finished=("a",))]
    assert spans(trace(*steps)) == [("prefill", 0, 1.0)]


def test_left_out_of_a_step_is_waiting():
    """A prompt whose second chunk did not fit into step 1 waits for step 2."""
    steps = [
        step(0, 0, 1, chunk("a", 0, 4)),
        step(1, 1, 2, chunk("b", 0, 4)),
        step(2, 2, 3, chunk("a", 4, 4)),
    ]
    assert spans(trace(*steps)) == [("prefill", 0, 1), ("waiting", 1, 2), ("prefill", 2, 3)]


def test_preempted_request_waits_and_may_find_its_blocks():
    """Preempted at 2 s, resumed at 3 s from position 4, which the cache still had."""
    steps = [
        step(0, 0, 1, chunk("a", 0, 6)),
        step(1, 1, 2, chunk("a", 6, 1, decode=True)),
        step(2, 2, 3, preempted=("a",)),
        step(3, 3, 4, chunk("a", 4, 3)),
    ]
    row = request_rows(trace(*steps))["a"]
    assert row.preemptions == [2]
    assert row.cache_hits == [(3, 4)]
    assert row.spans[2:] == [Span("waiting", 2, 3), Span("prefill", 3, 4)]


def test_cached_prefix_is_a_hit_once():
    """The second chunk of a prompt goes on where the first ended: that is not a second hit."""
    steps = [step(0, 1, 2, chunk("a", 4, 4)), step(1, 2, 3, chunk("a", 8, 4))]
    assert request_rows(trace(*steps))["a"].cache_hits == [(1, 4)]
    cold = [step(0, 1, 2, chunk("a", 0, 4)), step(1, 2, 3, chunk("a", 4, 4))]
    assert request_rows(trace(*cold))["a"].cache_hits == []


def test_request_that_never_ran():
    """It waits until the trace ends, or until it failed."""
    busy = [step(0, 1, 2, chunk("b", 0, 4)), step(1, 2, 3, chunk("b", 4, 1, decode=True))]
    assert spans(trace(*busy, a=0)) == [("waiting", 0, 3)]
    failed = [busy[0], step(1, 2, 3, chunk("b", 4, 1, decode=True), finished=("a",))]
    assert spans(trace(*failed, a=0)) == [("waiting", 0, 2)]


def test_extra_step_of_a_finished_request_is_not_drawn():
    """An overlapped engine computes one more step before it learns of the end."""
    steps = [
        step(0, 0, 1, chunk("a", 0, 4), finished=("a",)),
        step(1, 1, 2, chunk("a", 4, 1, decode=True)),
    ]
    row = request_rows(trace(*steps))["a"]
    assert row.spans == [Span("prefill", 0, 1)]
    assert row.num_tokens == 1


def test_labels_are_short():
    """An id that fits into a block of the grid is the label, else all get their number."""
    labels = [row.label for row in request_rows(trace(b=0, a=1)).values()]
    assert labels == ["b", "a"]
    labels = [row.label for row in request_rows(trace(request_b=0, a=1)).values()]
    assert labels == ["0", "1"]


def test_owners_of_a_shared_block():
    """The example of `block_owners`: a in decode and b in prefill share block 0."""
    now = step(
        0,
        0,
        1,
        chunk("a", 7, 1, decode=True),
        chunk("b", 4, 2),
        block_tables={"a": (0, 1), "b": (0,)},
    )
    assert block_owners(trace(now), now) == {
        0: [("a", "decode"), ("b", "prefill")],
        1: [("a", "decode")],
    }
    assert num_blocks_in_use(now) == 2


def test_fullest_step_is_the_first_with_most_blocks():
    """A shared block is one block; without steps there is no fullest one."""
    steps = [
        step(0, 0, 1, block_tables={"a": (0, 1), "b": (0, 1)}),
        step(1, 1, 2, block_tables={"a": (0, 1, 2)}),
        step(2, 2, 3, block_tables={"a": (3, 4, 5)}),
    ]
    assert fullest_step(trace(*steps)).index == 1
    with pytest.raises(ValueError, match="0 steps.*run a request first"):
        fullest_step(trace())


def test_alt_text_has_the_numbers():
    """Who cannot see the picture learns the same from it."""
    steps = [
        step(0, 0, 1, chunk("a", 0, 4), block_tables={"a": (0,)}),
        step(
            1,
            1,
            2.5,
            chunk("a", 4, 1, decode=True),
            chunk("b", 4, 2),
            block_tables={"a": (0, 1), "b": (0, 2)},
            cached_blocks=frozenset([7]),
        ),
    ]
    text = alt_text(trace(*steps, a=0, b=0))
    assert "2 requests over 2.50 seconds and 2 steps" in text
    assert "3 tokens were generated" in text
    assert "At most 2 requests ran at once" in text
    assert "1 request began with a prefix from the cache, 0 preemptions" in text
    assert "step 1: 3 of 8 in use, 1 cached" in text
    assert "has not run a step" in alt_text(trace())


def test_count_knows_the_plural():
    """One step, no steps, eight steps."""
    assert [count(n, "step") for n in (0, 1, 8)] == ["0 steps", "1 step", "8 steps"]
