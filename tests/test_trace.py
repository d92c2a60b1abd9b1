"""A trace keeps what a step did, also when the request moves on afterwards."""

import time

from minivllm.request import Chunk, Request, SamplingParams, SchedulerOutput
from minivllm.trace import ChunkTrace, Trace


def make_request(request_id):
    return Request(
        request_id=request_id,
        token_ids=[1, 2, 3, 4],
        num_prompt_tokens=4,
        sampling_params=SamplingParams(),
        max_num_tokens=8,
    )


def record(trace, output, **changes):
    facts = {
        "started": trace.began + 1.0,
        "finished": [],
        "num_waiting": 0,
        "block_tables": {},
        "cached_blocks": [],
    }
    trace.record(output, **{**facts, **changes})
    return trace.steps[-1]


def test_times_count_from_the_beginning_of_the_trace():
    """Arrival 0.5 s and a step 1 s after the trace began, whatever the clock said then."""
    trace = Trace(num_blocks=8, block_size=4, began=time.perf_counter() - 100.0)
    request = make_request("a")
    request.metrics.arrival_time = trace.began + 0.5
    trace.arrived(request)
    step = record(trace, SchedulerOutput())
    assert abs(trace.arrivals["a"] - 0.5) < 1e-6
    assert abs(step.start - 1.0) < 1e-6
    assert 100.0 <= step.end < 1000.0


def test_step_is_recorded_in_full():
    """Chunks, preempted and finished requests, memory: all of it by name and number."""
    trace = Trace(num_blocks=8, block_size=4)
    one, two = make_request("one"), make_request("two")
    output = SchedulerOutput([Chunk(one, start=2, length=2, samples=True, is_decode=False)], [two])
    step = record(
        trace,
        output,
        finished=[one],
        num_waiting=3,
        block_tables={"one": (5, 6)},
        cached_blocks=[0, 0, 1],
    )
    assert step.chunks == (ChunkTrace("one", 2, 2, False, True),)
    assert (step.preempted, step.finished, step.num_waiting) == (("two",), ("one",), 3)
    assert step.block_tables == {"one": (5, 6)}
    assert step.cached_blocks == {0, 1}


def test_steps_are_numbered_from_zero():
    """The index of a step is its place in the list."""
    trace = Trace(num_blocks=8, block_size=4)
    for _ in range(3):
        record(trace, SchedulerOutput())
    assert [step.index for step in trace.steps] == [0, 1, 2]


def test_record_does_not_change_later():
    """What happened to a request afterwards is not in an earlier step."""
    trace = Trace(num_blocks=8, block_size=4)
    request = make_request("a")
    output = SchedulerOutput([Chunk(request, 0, 4, True, False)])
    step = record(trace, output, finished=iter([request]))
    output.chunks.clear()
    assert step.chunks == (ChunkTrace("a", 0, 4, False, True),)
    assert step.finished == ("a",)
