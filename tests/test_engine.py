"""The loop: serial and overlapped, what may be in flight, and what an error leaves behind; and
the engine put together.

The answers themselves are compared with an oracle in test_engine_traces.py.
"""

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from stand_in import EOS, expected_answer, make_engine, make_request
from tiny_checkpoint import END, STOP, make_checkpoint

from minivllm import LLM, SamplingParams
from minivllm.config import EngineConfig
from minivllm.engine import build_engine
from minivllm.measure.naive import naive_generate
from minivllm.trace import Trace

# A prompt whose answer ends with EOS in the middle, found by trying.
STOPPING = next(
    [a, b]
    for a in range(1, 50)
    for b in range(1, 50)
    if 3 <= len(expected_answer([a, b], 20)) <= 6 and expected_answer([a, b], 20)[-1] == EOS
)


def add(engine, *prompts, max_tokens=4):
    """Queue prompts; returns their requests."""
    requests = [make_request(f"r{i}", prompt, max_tokens) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.scheduler.add_request(request)
    return requests


def spy_on(engine, events):
    """Note every launch and every wait, by the number of the step."""
    launch = engine.runner.launch

    def noting_launch(chunks):
        pending = launch(chunks)
        number = sum(kind == "launch" for kind, _ in events)
        events.append(("launch", number))
        wait = pending.wait

        def noting_wait():
            events.append(("wait", number))
            return wait()

        pending.wait = noting_wait
        return pending

    engine.runner.launch = noting_launch


def take_in(engine):
    """What `read` does first, for the checks of `launch`; returns the step."""
    flight = engine.flights.pop(0)
    engine.scheduler.update(flight.output, flight.pending.wait())
    return flight


def at_most(count, requests):
    """The requests of a loop, which ends or fails: a wrong one may never end."""
    ended = list(itertools.islice(requests, count))
    assert len(ended) < count, "the loop yields more requests than there are"
    return ended


def break_off(*arguments):
    """Ctrl-C, in the place of a function."""
    raise KeyboardInterrupt


# -- launching --


@pytest.mark.exercise("engine.Engine.launch")
def test_a_step_is_launched_and_nobody_waits_for_it():
    """It is among the flights, with what the runner gave for it."""
    engine, events = make_engine(), []
    spy_on(engine, events)
    add(engine, [1, 2], [3])
    was_launched = engine.launch()
    assert events == [("launch", 0)], (
        "launching must not wait for the device: the caller that wants the tokens calls `read`."
        " Do you wait"
        " for the step, or launch it twice?"
    )
    assert was_launched is True, "there was a step: do you say so?"
    assert [flight.output.num_tokens for flight in engine.flights] == [3], (
        "one step of 3 tokens is on its way: is it in `flights`?"
    )
    assert engine.flights[0].pending is not None, (
        "without the runner's answer the step cannot be waited for: do you keep it in `pending`?"
    )
    assert engine.num_computed_tokens == 3, "prompts of 2 and 1 tokens: are their tokens counted?"


@pytest.mark.exercise("engine.Engine.launch")
def test_a_step_is_noted_before_it_is_launched():
    """The scheduler has counted it already, so an error on the way must find it to undo it."""
    engine = make_engine()
    add(engine, [1, 2])
    engine.runner.launch = break_off
    with pytest.raises(KeyboardInterrupt):
        engine.launch()
    assert len(engine.flights) == 1, (
        "the launch broke off: is the step noted in `flights` by then, so that it can be undone?"
    )


@pytest.mark.exercise("engine.Engine.launch")
def test_a_step_that_can_never_do_anything_is_an_error():
    """Requests wait, nothing is in flight, no chunk comes out: an endless loop without an error."""
    engine = make_engine()
    add(engine, [1, 2])
    engine.scheduler.max_num_batched_tokens = 0
    with pytest.raises(RuntimeError, match="cannot do anything"):
        engine.launch()


@pytest.mark.exercise("engine.Engine.launch")
def test_while_a_step_is_in_flight_having_nothing_to_launch_is_no_error():
    """There is something to read: False, and nothing more."""
    engine = make_engine()
    add(engine, [1, 2], max_tokens=1)
    engine.launch()
    assert engine.launch() is False, "its last token is on its way: was there a second step?"
    assert len(engine.flights) == 1, "a step without chunks is none: is it among the flights?"


@pytest.mark.exercise("engine.Engine.launch")
def test_the_preempted_give_their_rows_back():
    """A row belongs to a running request."""
    engine = make_engine(num_blocks=8, block_size=4, max_num_seqs=3, watermark=0, caching=False)
    add(engine, [1, 2, 3, 4, 5, 6, 7], [2] * 7, [3] * 7, max_tokens=16)
    preempted = []
    while not preempted:
        engine.launch()
        preempted = [request.request_id for request in take_in(engine).output.preempted]
    assert not set(preempted) & set(engine.runner.rows.row_of), (
        "it waits to be computed again: does the preempted request still hold its row?"
    )


@pytest.mark.exercise("engine.Engine.launch")
def test_who_can_never_fit_is_kept_for_the_next_read():
    """Its step has no chunk, and yet something happened in it."""
    engine = make_engine(num_blocks=4, block_size=4, caching=False)
    (large,) = add(engine, [3] * 20)
    assert engine.launch() is False, "no chunk came out: was there a step?"
    assert [r.request_id for r in engine.failed] == ["r0"], (
        "it has left the queue with an error: who will report it?"
    )
    assert large.metrics.finished_time is not None, "it ended in this step: is the time noted?"


@pytest.mark.exercise("engine.Engine.launch")
def test_nothing_is_published_at_launch():
    """A block becomes a prefix once its step has been read."""
    engine = make_engine(block_size=2)
    (request,) = add(engine, [1, 2, 3, 4])
    engine.launch()
    assert request.num_published_blocks == 0, (
        "the step has only been asked for: are its blocks made known to others already?"
    )


# -- reading --


@pytest.mark.exercise("engine.Engine.read")
def test_the_tokens_of_a_step_reach_their_request():
    """Once each, with the time at which they came."""
    engine = make_engine()
    (request,) = add(engine, [1, 2], max_tokens=2)
    engine.launch()
    ended = engine.read()
    assert request.output_token_ids == expected_answer([1, 2], 1), (
        "one step, one token: do you hand the tokens to `scheduler.update`, and to nothing else?"
    )
    assert ended == [], "it has one more token to come: has it ended?"
    assert len(request.metrics.token_times) == 1, (
        "one token has been read: is its time noted after the scheduler has taken it in?"
    )
    assert engine.flights == [], "the step has been read: is it still among the flights?"


@pytest.mark.exercise("engine.Engine.read")
def test_the_oldest_step_is_read_first():
    """Steps end in the order in which they were launched."""
    engine, events = make_engine(), []
    spy_on(engine, events)
    (request,) = add(engine, [1, 2], max_tokens=4)
    engine.launch()
    engine.launch()
    engine.read()
    assert events[2:] == [("wait", 0)], (
        "steps 0 and 1 are in flight: do you wait for the older one, and for no other?"
    )
    assert request.output_token_ids == expected_answer([1, 2], 1), "the token of step 0 comes first"


@pytest.mark.exercise("engine.Engine.read")
def test_a_step_leaves_the_flights_when_its_tokens_are_there():
    """A wait that breaks off leaves it, to be rolled back."""
    engine = make_engine()
    add(engine, [1, 2])
    engine.launch()
    engine.flights[0].pending.wait = break_off
    with pytest.raises(KeyboardInterrupt):
        engine.read()
    assert len(engine.flights) == 1, (
        "the wait broke off: is the step still among the flights, so that it can be undone?"
    )


@pytest.mark.exercise("engine.Engine.read")
def test_an_ended_request_is_returned_and_its_row_is_free():
    """At once: the device does one step after the other."""
    engine = make_engine()
    (request,) = add(engine, [1, 2], max_tokens=1)
    engine.launch()
    assert engine.read() == [request], "it got its only token: is it returned?"
    assert dict(engine.runner.rows.row_of) == {}, (
        "it has ended, and the next request wants a row: do you release the runner's?"
    )


@pytest.mark.exercise("engine.Engine.read", "engine.Engine.step_overlapped")
def test_blocks_stay_while_a_step_in_flight_writes_to_them():
    """They come free with the read of the last step that computes their owner."""
    engine = make_engine(caching=False)
    (request,) = add(engine, STOPPING, max_tokens=20)
    for _ in range(8):
        engine.launch()
        if len(engine.flights) == 2 and not request.is_finished:
            engine.read()
    assert request.num_in_flight == 1, "it ended with one step too many in flight"
    assert request.block_table, (
        "a step in flight still writes to the ended request's blocks: do you free them yourself?"
        " The scheduler does, when that step is read"
    )
    engine.read()
    assert engine.memory.pool.num_free == engine.memory.pool.num_blocks, "nothing is in flight now"


@pytest.mark.exercise("engine.Engine.read")
def test_the_token_of_the_extra_step_is_dropped():
    """A request ends with the token that ended it, whatever was computed after that."""
    engine = make_engine()
    (request,) = add(engine, STOPPING, max_tokens=20)
    engine.launch()
    while len(engine.flights) == 1:
        engine.launch()
        engine.read()
    assert request.output_token_ids == expected_answer(STOPPING, 20), (
        "one step was launched before its end was known: is a token behind the end kept?"
    )
    times = request.metrics.token_times
    assert len(times) == request.num_output_tokens, "is a time kept for the dropped token?"


@pytest.mark.exercise("engine.Engine.read")
def test_failed_requests_are_reported_once():
    """By the next read, whether or not there is a step to read."""
    engine = make_engine(num_blocks=4, block_size=4, caching=False)
    (large,) = add(engine, [3] * 20)
    engine.launch()
    assert engine.read() == [large], "it failed, and nothing else reports it: is it returned?"
    assert engine.read() == [], "it has been reported: is `failed` empty afterwards?"


@pytest.mark.exercise("engine.Engine.read")
def test_a_step_is_entered_into_the_trace():
    """With the blocks that its requests had when it was launched."""
    engine = make_engine()
    engine.trace = Trace(engine.memory.pool.num_blocks, engine.memory.block_size)
    add(engine, [1, 2], max_tokens=1)
    engine.launch()
    engine.read()
    assert [step.finished for step in engine.trace.steps] == [("r0",)], (
        "the trace has no step in which r0 ended: do you `_note` the flight and who ended?"
    )
    assert len(engine.trace.steps[0].block_tables["r0"]) == 1, "one block held its 2 tokens"


# -- the two loops --


@pytest.mark.exercise("engine.Engine.step")
def test_a_step_is_launched_and_read():
    """Nothing is left in flight, so the next one begins with everything known."""
    engine, events = make_engine(), []
    spy_on(engine, events)
    (request,) = add(engine, [1, 2], max_tokens=2)
    ended = [engine.step(), engine.step()]
    assert events == [("launch", 0), ("wait", 0), ("launch", 1), ("wait", 1)], (
        "two tokens, two steps: is each launched once and read before the next?"
    )
    assert ended == [[], [request]], "the second token is its last: is the request returned?"


@pytest.mark.exercise("engine.Engine.run")
def test_serial_loop_reads_each_step_before_the_next():
    """launch 0, wait 0, launch 1, wait 1 ..."""
    engine, events = make_engine(), []
    spy_on(engine, events)
    add(engine, [1, 2], max_tokens=3)
    ended = [request.request_id for request in at_most(9, engine.run())]
    assert events == [(kind, step) for step in range(3) for kind in ("launch", "wait")], (
        "three tokens, three steps: is each launched once and read before the next?"
    )
    assert ended == ["r0"], "one request, which ends once: is it yielded?"


@pytest.mark.exercise("engine.Engine.step")
def test_a_step_in_which_somebody_failed_reports_it():
    """Nothing was launched, and there is something to say."""
    engine = make_engine(num_blocks=4, block_size=4, caching=False)
    (large,) = add(engine, [3] * 20)
    assert engine.step() == [large], (
        "it failed, and no step was launched: do you read all the same?"
    )


def broken_off(engine, step, place):
    """The requests of an engine whose third call of `step` breaks off in a place."""
    requests, launch = add(engine, [1, 2, 3], [4, 5], max_tokens=6), engine.runner.launch
    step()
    step()

    def breaking(chunks):
        pending = launch(chunks) if place == "wait" else break_off()
        pending.wait = break_off
        return pending

    engine.runner.launch = breaking
    if place == "wait" and engine.flights:
        engine.flights[0].pending.wait = break_off
    with pytest.raises(KeyboardInterrupt):
        step()
    engine.runner.launch = launch
    return requests


@pytest.mark.exercise("engine.Engine.step")
@pytest.mark.parametrize("place", ["launch", "wait"])
def test_a_step_that_breaks_off_is_rolled_back(place):
    """Ctrl-C anywhere in it: the requests stand where they stood, and nothing is in flight."""
    engine = make_engine()
    requests = broken_off(engine, engine.step, place)
    in_flight = [request.num_in_flight for request in requests]
    assert in_flight == [0, 0], (
        "Ctrl-C came in the middle: does everything happen inside `_rolled_back_on_error`?"
    )
    assert engine.flights == [], "the step was given up: is it still in flight?"


@pytest.mark.exercise("engine.Engine.run")
def test_requests_are_yielded_as_they_end():
    """A finished answer does not wait for the slowest."""
    engine = make_engine()
    short, long = add(engine, [1, 2], [3, 4, 5], max_tokens=1)
    long.max_num_tokens = 9
    assert next(iter(engine.run())) is short
    assert not long.is_finished, (
        "the short answer is there: does its reader wait until the long one has ended, too?"
    )


@pytest.mark.exercise("engine.Engine.run")
def test_what_is_in_flight_is_read_although_nobody_waits_or_runs():
    """An aborted request leaves a step behind, which holds its blocks."""
    engine = make_engine(caching=False)
    (request,) = add(engine, [1, 2, 3], max_tokens=9)
    engine.launch()
    engine.abort(request.request_id)
    assert at_most(3, engine.run()) == [], "it was aborted: is it reported as ended?"
    assert engine.memory.pool.num_free == engine.memory.pool.num_blocks, (
        "the queues are empty, a step is in flight: does the loop go on until it is read?"
    )


@pytest.mark.exercise("engine.Engine.step_overlapped")
def test_the_next_step_is_launched_before_the_last_one_is_read():
    """Launch 0; launch 1, read 0; launch 2, read 1; read 2."""
    engine, events = make_engine(), []
    spy_on(engine, events)
    (request,) = add(engine, [1, 2], max_tokens=3)
    ended = [engine.step_overlapped() for _ in range(3)]
    assert events[:3] == [("launch", 0), ("launch", 1), ("wait", 0)], (
        "the device must not wait for the host: is step 1 launched before step 0 is read?"
    )
    assert ended == [[], [], []], (
        "three calls have read two of three tokens, and no request has ended: do they return []?"
    )
    ended = engine.step_overlapped()
    assert events[3:] == [("launch", 2), ("wait", 1), ("wait", 2)], (
        "there is no step 3 to launch: is step 2 read all the same?"
    )
    assert ended == [request], "its last token has been read: is it returned?"


@pytest.mark.exercise("engine.Engine.run_overlapped")
def test_overlapped_loop_launches_a_step_before_the_last_one_is_read():
    """The same lines in another order, and every step is read in the end."""
    engine, events = make_engine(), []
    spy_on(engine, events)
    add(engine, [1, 2], max_tokens=3)
    ended = [request.request_id for request in at_most(9, engine.run_overlapped())]
    assert events[:3] == [("launch", 0), ("launch", 1), ("wait", 0)], (
        "the device must not wait for the host: is step 1 launched before step 0 is read?"
    )
    assert events[3:] == [("launch", 2), ("wait", 1), ("wait", 2)], (
        "there is no step 3 to launch: is step 2 read all the same?"
    )
    assert ended == ["r0"], "one request, which ends once: is it yielded?"


@pytest.mark.exercise("engine.Engine.step_overlapped")
def test_at_most_one_step_is_in_flight_between_two_calls():
    """One behind, never more: so there are two sets of anything that a step occupies."""
    engine, left = make_engine(), []
    add(engine, [1, 2, 3], [4, 5], max_tokens=6)
    for _ in range(7):
        engine.step_overlapped()
        left.append(len(engine.flights))
    assert left == [1, 1, 1, 1, 1, 1, 0], (
        "six steps in seven calls: is one flight left after each call, and none at the end?"
    )


@pytest.mark.exercise("engine.Engine.step_overlapped")
@pytest.mark.parametrize("place", ["launch", "wait"])
def test_an_overlapped_step_that_breaks_off_is_rolled_back(place):
    """Both steps that were not read are undone, the newest first."""
    engine = make_engine()
    requests = broken_off(engine, engine.step_overlapped, place)
    in_flight = [request.num_in_flight for request in requests]
    assert in_flight == [0, 0], (
        "Ctrl-C came in the middle: does everything happen inside `_rolled_back_on_error`?"
    )
    assert engine.flights == [], "the steps were given up: are they still in flight?"


@pytest.mark.exercise("engine.Engine.step_overlapped")
def test_both_loops_give_the_same_tokens():
    """Also where requests wait, are preempted and end at different times."""
    prompts = [[1, 2, 3], [4] * 9, [5, 6], [7] * 6, STOPPING]
    engine = make_engine(num_blocks=8, max_num_seqs=3)
    requests = add(engine, *prompts, max_tokens=12)
    for _ in range(100):
        if engine.has_unfinished_requests:
            engine.step_overlapped()
    answers = [request.output_token_ids for request in requests]
    assert answers == [expected_answer(p, 12) for p in prompts], (
        "the order of launching and reading must change no answer"
    )


def test_both_loops_report_everybody():
    """Serial and overlapped, each request once."""
    prompts = [[1, 2, 3], [4] * 9, [5, 6], [7] * 6, STOPPING]
    for loop in ("run", "run_overlapped"):
        engine = make_engine(num_blocks=8, max_num_seqs=3)
        requests = add(engine, *prompts, max_tokens=12)
        ended = list(getattr(engine, loop)())
        assert sorted(r.request_id for r in ended) == sorted(r.request_id for r in requests)
        assert [r.output_token_ids for r in requests] == [expected_answer(p, 12) for p in prompts]


# -- what holds while a step is in flight (overlapped execution) --


@pytest.mark.exercise("engine.Engine.run_overlapped")
def test_abort_in_flight_frees_after_the_flight():
    """The blocks come back with the read of the last step that writes to them."""
    engine = make_engine(caching=False)
    (request,) = add(engine, [1, 2, 3], max_tokens=9)
    engine.step_overlapped()
    engine.step_overlapped()
    assert engine.abort(request.request_id) is request
    assert request.num_in_flight == 1
    assert request.block_table
    assert engine.has_unfinished_requests, "there is a step left to read"
    assert at_most(9, engine.run_overlapped()) == [], "it was aborted: is it reported as ended?"
    assert engine.memory.pool.num_free == engine.memory.pool.num_blocks, (
        "no request waits or runs, and a step is still in flight: does the loop end without"
        " reading it?"
    )


@pytest.mark.exercise("engine.Engine.step_overlapped")
def test_a_preempted_requests_unread_token_is_collected_before_it_is_computed_again():
    """While its last token is unread it stays in the queue."""
    engine = make_engine(num_blocks=8, block_size=4, max_num_seqs=3, watermark=0, caching=False)
    requests = add(engine, [1, 2, 3, 4, 5, 6, 7], [2] * 7, [3] * 7, max_tokens=16)
    schedule, was_tested = engine.scheduler.schedule, []

    def checked():
        output = schedule()
        for request in output.preempted:
            was_tested.append(request.num_pending_tokens)
        for chunk in output.chunks:
            if chunk.start == 0:
                assert chunk.request.num_pending_tokens - chunk.samples == 0, "unread token"
        return output

    engine.scheduler.schedule = checked
    for _ in range(200):
        if engine.has_unfinished_requests:
            engine.step_overlapped()
    assert 1 in was_tested, (
        "no request was preempted in flight: is a step launched before the last?"
    )
    expected = [expected_answer(r.token_ids[: r.num_prompt_tokens], 16) for r in requests]
    assert [request.output_token_ids for request in requests] == expected


def test_blocks_are_published_only_once_their_ids_have_arrived():
    """A block whose tokens are computed but not read is not a prefix yet."""
    engine = make_engine(block_size=2)
    (request,) = add(engine, [1, 2, 3, 4], max_tokens=5)
    engine.step_overlapped()
    assert request.num_computed_tokens == 4
    assert request.num_published_blocks == 0
    engine.step_overlapped()
    assert request.num_published_blocks == 2


# -- when a step breaks off --


@pytest.mark.parametrize("loop", ["step", "step_overlapped"])
@pytest.mark.parametrize("place", ["launch", "wait"])
@pytest.mark.parametrize("number", [0, 1, 2, 5])
def test_after_an_interrupt_the_requests_go_on_where_they_stood(loop, place, number):
    """Ctrl-C anywhere loses no token and doubles none."""
    engine, events = make_engine(num_blocks=8, max_num_seqs=3), []
    requests = add(engine, [1, 2, 3], [4] * 9, [7] * 6, max_tokens=12)
    launch, was_raised = engine.runner.launch, []

    def breaking_launch(chunks):
        step = len(events)
        events.append(step)
        pending = launch(chunks)
        wait = pending.wait

        def breaking(now="wait"):
            if (now, step) == (place, number):
                was_raised.append(step)
                raise KeyboardInterrupt
            return wait()

        pending.wait = breaking
        if place == "launch":
            breaking("launch")
        return pending

    engine.runner.launch = breaking_launch
    while engine.has_unfinished_requests:
        try:
            getattr(engine, loop)()
        except KeyboardInterrupt:
            assert not engine.flights
            assert all(r.num_in_flight == r.num_pending_tokens == 0 for r in requests)
            engine.scheduler.check()
    assert was_raised
    for request in requests:
        prompt = request.token_ids[: request.num_prompt_tokens]
        assert request.output_token_ids == expected_answer(prompt, 12)
    assert engine.memory.pool.num_free == engine.memory.pool.num_blocks
    assert not engine.runner.rows.row_of


@pytest.mark.parametrize("loop", ["run", "run_overlapped"])
def test_a_request_that_cannot_fit_ends_alone_with_its_error(loop):
    """The others go on; the one is reported once, with the reason."""
    engine = make_engine(num_blocks=4, block_size=4, caching=False)
    small, large, last = add(engine, [1, 2], [3] * 20, [4, 5], max_tokens=4)
    ended = list(getattr(engine, loop)())
    assert sorted(r.request_id for r in ended) == ["r0", "r1", "r2"]
    assert large.finish_reason == "error"
    assert "needs KV memory for 20 tokens" in large.error
    assert large.metrics.finished_time is not None
    assert small.output_token_ids == expected_answer([1, 2], 4)
    assert last.output_token_ids == expected_answer([4, 5], 4)


@pytest.mark.parametrize("loop", ["step", "step_overlapped"])
def test_a_schedule_that_can_do_nothing_is_an_error(loop):
    """An endless loop would be worse."""
    engine = make_engine()
    add(engine, [1, 2])
    engine.scheduler.max_num_batched_tokens = 0
    with pytest.raises(RuntimeError, match="cannot do anything"):
        getattr(engine, loop)()


# -- the whole --

SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch",
    "num_kv_blocks": 20,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
}


def build(folder, **options):
    """An engine of a model of a few kilobytes."""
    config = EngineConfig(model=str(make_checkpoint(folder)), **SETTINGS)
    return build_engine(config, progress=False, **options)


@pytest.mark.exercise("engine.build_engine")
def test_engine_and_scheduler_share_one_memory(tmp_path):
    """What the scheduler allocates is what the engine, its trace and its user look at."""
    engine = build(tmp_path)
    same = engine.scheduler.memory is engine.memory
    assert same, "the scheduler allocates in one memory and the engine looks at another: why two?"


@pytest.mark.exercise("engine.build_engine")
def test_every_part_gets_the_settings_that_are_used(tmp_path):
    """Not those that came in, in which None stands for "whatever suits"."""
    engine = build(tmp_path)
    assert engine.config.max_model_len == 128, (
        "the checkpoint allows 128 tokens, and the settings ask for no fewer: is the config that"
        " you keep the one that `load_parts` has filled in?"
    )
    scheduler = engine.scheduler
    sizes = {"seqs": scheduler.max_num_seqs, "tokens": scheduler.max_num_batched_tokens}
    assert sizes == {"seqs": 2, "tokens": 16}, (
        "2 requests at once, 16 tokens a step: which of the two does the scheduler take first?"
    )
    assert engine.memory.pool.num_blocks == 20, "num_kv_blocks is 20"
    assert len(engine.runner.rows.num_blocks) == 2, "the runner has a row for each of 2 requests"


@pytest.mark.exercise("engine.build_engine")
def test_the_memory_is_as_large_as_was_found_out(tmp_path):
    """The number of blocks is not set: two requests of 128 tokens can use 16."""
    model = str(make_checkpoint(tmp_path))
    config = EngineConfig(model=model, **SETTINGS | {"num_kv_blocks": None})
    num_blocks = build_engine(config, progress=False).memory.pool.num_blocks
    assert num_blocks == 16, "num_kv_blocks came in as None: from which config is the memory?"


@pytest.mark.exercise("engine.build_engine")
def test_an_answer_ends_where_the_checkpoint_says(tmp_path):
    """Its end tokens, its tokenizer, its recommendations for sampling."""
    engine = build(tmp_path)
    assert sorted(engine.eos_token_ids) == [END, STOP], "two ids end an answer of this checkpoint"
    assert engine.tokenizer.encode("hi") == [104, 105], "its tokens are bytes"
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25, "do_sample": true}')
    config = EngineConfig(model=str(tmp_path), **SETTINGS)
    defaults = dict(build_engine(config, progress=False).generation_defaults)
    assert defaults == {"temperature": 0.25}, (
        "the checkpoint recommends a temperature: does the engine know what it recommends?"
    )


@pytest.mark.exercise("engine.build_engine")
def test_a_trace_only_if_it_is_asked_for(tmp_path):
    """Without one, the engine pays nothing for it."""
    assert build(tmp_path).trace is None, "no trace was asked for: is there one?"
    trace = build(tmp_path, trace=True).trace
    assert trace is not None, "trace=True: is there a Trace?"
    sizes = {"blocks": trace.num_blocks, "tokens a block": trace.block_size}
    assert sizes == {"blocks": 20, "tokens a block": 16}, "the trace draws the memory's blocks"


@pytest.mark.exercise("engine.build_engine")
@pytest.mark.parametrize("overlap", [False, True])
def test_the_whole_engine_answers_like_the_naive_loop(tmp_path, overlap):
    """Text in, text out, by every part that was handed over."""
    path = str(make_checkpoint(tmp_path))
    prompts = [[104, 105], [33] * 20, [65, 66, 67]]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(path, progress=False, overlap=overlap, **SETTINGS) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        expected = [naive_generate(llm, prompt, 6) for prompt in prompts]
    answers = [output.outputs[0].token_ids for output in outputs]
    assert answers == expected, "the engine's answers must be those of the loop of chapter 00"
