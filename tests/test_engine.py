"""The loop: serial and overlapped, what may be in flight, and what an error leaves behind.

The answers themselves are compared with an oracle in test_engine_traces.py.
"""

import pytest
from stand_in import EOS, expected_answer, make_engine, make_request

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


# -- the two loops --


def test_serial_loop_reads_each_step_before_the_next():
    """launch 0, wait 0, launch 1, wait 1 ..."""
    engine, events = make_engine(), []
    spy_on(engine, events)
    add(engine, [1, 2], max_tokens=3)
    list(engine.run())
    assert events == [(kind, step) for step in range(3) for kind in ("launch", "wait")]


def test_overlapped_loop_launches_a_step_before_the_last_one_is_read():
    """The same lines in another order, and every step is read in the end."""
    engine, events = make_engine(), []
    spy_on(engine, events)
    add(engine, [1, 2], max_tokens=3)
    list(engine.run_overlapped())
    assert events == [
        ("launch", 0),
        ("launch", 1),
        ("wait", 0),
        ("launch", 2),
        ("wait", 1),
        ("wait", 2),
    ]


def test_both_loops_give_the_same_tokens():
    """Also where requests wait, are preempted and end at different times."""
    prompts = [[1, 2, 3], [4] * 9, [5, 6], [7] * 6, STOPPING]
    answers = []
    for loop in ("run", "run_overlapped"):
        engine = make_engine(num_blocks=8, max_num_seqs=3)
        requests = add(engine, *prompts, max_tokens=12)
        ended = list(getattr(engine, loop)())
        assert sorted(r.request_id for r in ended) == sorted(r.request_id for r in requests)
        answers.append([request.output_token_ids for request in requests])
    assert answers[0] == answers[1] == [expected_answer(p, 12) for p in prompts]


# -- what holds while a step is in flight (overlapped execution) --


def test_blocks_of_an_ended_request_stay_its_own_while_a_step_writes_to_them():
    """It ended with the step that was read; the next step, launched before, still computes it."""
    engine = make_engine(caching=False)
    (request,) = add(engine, STOPPING, max_tokens=20)
    while not request.is_finished:
        engine.step_overlapped()
    assert request.num_in_flight == 1, "one step too many was launched"
    assert request.block_table
    assert engine.memory.pool.num_free < engine.memory.pool.num_blocks
    engine.step_overlapped()
    assert engine.memory.pool.num_free == engine.memory.pool.num_blocks


def test_the_extra_step_of_an_ended_request_is_discarded():
    """Neither its token nor its time is kept."""
    engine = make_engine()
    (request,) = add(engine, STOPPING, max_tokens=20)
    list(engine.run_overlapped())
    assert request.output_token_ids == expected_answer(STOPPING, 20)
    assert len(request.metrics.token_times) == request.num_output_tokens


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
    assert list(engine.run_overlapped()) == []
    assert engine.memory.pool.num_free == engine.memory.pool.num_blocks


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
    list(engine.run_overlapped())
    assert 1 in was_tested, "nobody was preempted in flight: the test tests nothing"
    expected = [expected_answer(r.token_ids[: r.num_prompt_tokens], 16) for r in requests]
    assert [request.output_token_ids for request in requests] == expected


def test_blocks_are_published_only_once_their_ids_have_arrived():
    """A block whose tokens are computed but not read is nobody's prefix."""
    engine = make_engine(block_size=2)
    (request,) = add(engine, [1, 2, 3, 4], max_tokens=5)
    engine.step_overlapped()
    assert request.num_computed_tokens == 4
    assert request.num_published_blocks == 0
    engine.step_overlapped()
    assert request.num_published_blocks == 2


def test_at_most_one_step_is_in_flight_between_two_calls():
    """One behind, never more: so there are two sets of anything that a step occupies."""
    engine = make_engine()
    add(engine, [1, 2, 3], [4, 5], max_tokens=6)
    while engine.has_unfinished_requests:
        engine.step_overlapped()
        assert len(engine.flights) <= 1


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
