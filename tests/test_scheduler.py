"""Who computes how many tokens in a step: order, budget, admission, preemption, the end."""

import random
import sys

import pytest

from minivllm.block_manager import BlockManager
from minivllm.config import EngineConfig
from minivllm.request import Request, SamplingParams
from minivllm.scheduler import Scheduler, TokenCounter, finish_reason, next_chunk

STOP = 99


def make_request(request_id="r", num_prompt=4, max_tokens=8, token_ids=None):
    """A request with the prompt 0, 1, 2, ... unless told otherwise."""
    token_ids = list(range(num_prompt)) if token_ids is None else list(token_ids)
    return Request(
        request_id=request_id,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling_params=SamplingParams(),
        max_num_tokens=len(token_ids) + max_tokens,
        stop_token_ids=frozenset([STOP]),
    )


def make_scheduler(max_tokens=1000, max_num_seqs=8, budget=64, requests=()):
    """A scheduler over a memory that only counts tokens."""
    scheduler = Scheduler(TokenCounter(max_tokens), max_num_seqs, budget)
    for request in requests:
        scheduler.add_request(request)
    return scheduler


def step(scheduler, token_id=5):
    """One serial step in which every sample is `token_id`; returns what was done."""
    output = scheduler.schedule()
    scheduler.update(output, [token_id for chunk in output.chunks if chunk.samples])
    scheduler.check()
    return output


def shape(output):
    """Chunks as (request id, start, length, samples, is_decode)."""
    return [
        (c.request.request_id, c.start, c.length, c.samples, c.is_decode) for c in output.chunks
    ]


# -- next_chunk and finish_reason --


def test_a_chunk_ends_at_the_budget_or_at_the_last_token():
    """100 tokens, 64 computed."""
    request = make_request(num_prompt=100)
    request.num_computed_tokens, request.num_prefill_tokens = 64, 100
    assert (next_chunk(request, 20).length, next_chunk(request, 20).samples) == (20, False)
    assert (next_chunk(request, 36).length, next_chunk(request, 36).samples) == (36, True)
    assert (next_chunk(request, 50).length, next_chunk(request, 50).samples) == (36, True)


def test_phase_is_told_and_not_guessed_from_the_length():
    """A prompt's last chunk may have one token: it is still prefill."""
    request = make_request(num_prompt=5)
    request.num_prefill_tokens, request.num_computed_tokens = 5, 4
    assert next_chunk(request, 8).length == 1
    assert not next_chunk(request, 8).is_decode
    request.token_ids.append(7)
    request.num_computed_tokens = 5
    assert next_chunk(request, 8).is_decode


def test_stop_goes_before_length():
    """The last token allowed is a stop token: the answer was complete."""
    request = make_request(num_prompt=2, max_tokens=2)
    request.token_ids.append(5)
    assert finish_reason(request) is None
    request.token_ids.append(5)
    assert finish_reason(request) == "length"
    request.token_ids[-1] = STOP
    assert finish_reason(request) == "stop"


# -- order and budget --


def test_a_prompt_is_computed_at_once_then_one_token_a_step():
    """Prefill of 4 tokens samples the first token of the answer; then decoding."""
    scheduler = make_scheduler(requests=[make_request("a")])
    assert shape(step(scheduler)) == [("a", 0, 4, True, False)]
    assert shape(step(scheduler)) == [("a", 4, 1, True, True)]
    assert shape(step(scheduler)) == [("a", 5, 1, True, True)]


def test_decodes_go_first_and_prompts_fill_the_rest():
    """Budget 10: one decode, then 9 tokens of a prompt of 20."""
    scheduler = make_scheduler(budget=10, requests=[make_request("a")])
    step(scheduler)
    scheduler.add_request(make_request("b", num_prompt=20))
    assert shape(step(scheduler)) == [("a", 4, 1, True, True), ("b", 0, 9, False, False)]
    assert shape(step(scheduler)) == [("a", 5, 1, True, True), ("b", 9, 9, False, False)]
    assert shape(step(scheduler)) == [("a", 6, 1, True, True), ("b", 18, 2, True, False)]
    assert shape(step(scheduler)) == [("a", 7, 1, True, True), ("b", 20, 1, True, True)]


def test_the_budget_is_never_exceeded_and_never_wasted():
    """While prompts wait, every step computes exactly the budget."""
    requests = [make_request(str(i), num_prompt=7) for i in range(6)]
    scheduler = make_scheduler(budget=10, requests=requests)
    for _ in range(4):
        assert step(scheduler).num_tokens == 10


def test_prompts_are_admitted_in_order_of_arrival():
    """Nobody overtakes: a small request behind a big one waits for it."""
    requests = [make_request("big", num_prompt=90), make_request("small", num_prompt=2)]
    scheduler = make_scheduler(max_tokens=100, requests=[make_request("first", 20), *requests])
    assert [c.request.request_id for c in step(scheduler).chunks] == ["first"]
    assert [r.request_id for r in scheduler.waiting] == ["big", "small"]


def test_no_more_requests_run_than_there_are_rows():
    """Two rows, three requests."""
    scheduler = make_scheduler(max_num_seqs=2, requests=[make_request(str(i)) for i in range(3)])
    assert len(step(scheduler).chunks) == 2
    assert len(scheduler.waiting) == 1


def test_every_step_advances_every_running_answer():
    """A stream of long prompts must not starve those that are answering."""
    scheduler = make_scheduler(budget=8, max_num_seqs=4, requests=[make_request("a", 4, 30)])
    step(scheduler)
    for number in range(20):
        scheduler.add_request(make_request(f"long-{number}", num_prompt=50, max_tokens=1))
        output = step(scheduler)
        assert output.chunks[0].request.request_id == "a", "the answer under way goes first"
        assert output.num_tokens == 8, "and the prompts get all the rest"


# -- the end --


def test_an_answer_ends_at_max_tokens():
    """Two tokens asked for: one from the prefill, one from a decode."""
    request = make_request("a", max_tokens=2)
    scheduler = make_scheduler(requests=[request])
    step(scheduler)
    assert not request.is_finished
    step(scheduler)
    assert request.finish_reason == "length"
    assert request.output_token_ids == [5, 5]
    assert not scheduler.has_unfinished_requests


def test_an_answer_ends_at_a_stop_token():
    """The stop token belongs to the answer's ids."""
    request = make_request("a")
    scheduler = make_scheduler(requests=[request])
    step(scheduler)
    step(scheduler, token_id=STOP)
    assert request.finish_reason == "stop"
    assert request.output_token_ids == [5, STOP]


def test_a_finished_request_gives_its_memory_back():
    """And the next one is admitted in the following step."""
    requests = [make_request("a", 4, max_tokens=1), make_request("b", 4)]
    scheduler = make_scheduler(max_tokens=5, requests=requests)
    assert [c.request.request_id for c in step(scheduler).chunks] == ["a"]
    assert [c.request.request_id for c in step(scheduler).chunks] == ["b"]


@pytest.mark.parametrize("steps_before", [0, 1, 2])
def test_abort_frees_waiting_and_running_requests(steps_before):
    """Whenever it comes, nothing of the request is left."""
    request = make_request("a", num_prompt=20)
    scheduler = make_scheduler(budget=16, requests=[request])
    for _ in range(steps_before):
        step(scheduler)
    assert scheduler.abort("a") is request
    assert request.finish_reason == "abort"
    assert not scheduler.has_unfinished_requests
    assert scheduler.memory.tokens_of == {}


def test_abort_of_an_unknown_or_finished_request_is_no_error():
    """It may have finished a moment before: the answer is None."""
    scheduler = make_scheduler(requests=[make_request("a", max_tokens=1)])
    step(scheduler)
    assert scheduler.abort("a") is None
    assert scheduler.abort("never seen") is None


# -- memory runs out --


def test_the_newest_request_is_preempted_and_comes_back_first():
    """Room for 12 tokens: two prompts of 5 fit, their answers do not."""
    old, new = make_request("old", 5), make_request("new", 5)
    scheduler = make_scheduler(max_tokens=12, requests=[old, new])
    scheduler.add_request(make_request("later", 5))
    step(scheduler)
    step(scheduler)
    output = step(scheduler)
    assert output.preempted == [new]
    assert [r.request_id for r in scheduler.waiting] == ["new", "later"]
    assert [c.request.request_id for c in output.chunks] == ["old"]


def test_a_preempted_request_is_computed_again_with_its_answer_so_far():
    """Its lengths are taken anew at its second admission."""
    old, new = make_request("old", 5, max_tokens=3), make_request("new", 5)
    scheduler = make_scheduler(max_tokens=12, requests=[old, new])
    for _ in range(3):
        step(scheduler)
    assert old.is_finished
    assert (new.num_computed_tokens, len(new.token_ids)) == (0, 7)
    assert shape(step(scheduler)) == [("new", 0, 7, True, False)]
    assert new.num_preemptions == 1


def test_nobody_overtakes_the_one_thrown_out():
    """There is room for a tiny request, but the preempted one stands before it."""
    requests = [make_request("a", 5), make_request("b", 5), make_request("tiny", 1)]
    scheduler = make_scheduler(max_tokens=17, max_num_seqs=3, requests=requests[:2])
    for _ in range(4):
        step(scheduler)
    scheduler.waiting.appendleft(requests[2])
    output = step(scheduler)
    assert [r.request_id for r in output.preempted] == ["b"]
    assert [c.request.request_id for c in output.chunks] == ["a"]


def test_a_preempted_request_is_prefilled_up_to_its_last_token():
    """7 tokens with a budget of 6: the seventh is still prefill, though it is an answer's."""
    old, new = make_request("old", 5, max_tokens=3), make_request("new", 5)
    scheduler = make_scheduler(max_tokens=12, budget=10, requests=[old, new])
    for _ in range(3):
        step(scheduler)
    scheduler.max_num_batched_tokens = 6
    assert shape(step(scheduler)) == [("new", 0, 6, False, False)]
    assert shape(step(scheduler)) == [("new", 6, 1, True, False)]
    assert shape(step(scheduler)) == [("new", 7, 1, True, True)]


def test_with_nobody_running_no_reserve_is_kept():
    """A prompt that needs every block is admitted alone instead of waiting for ever."""
    memory = BlockManager(4, 4, watermark=0.5)
    scheduler = Scheduler(memory, 8, 64)
    scheduler.add_request(make_request("a", 13, max_tokens=2))
    scheduler.add_request(make_request("b", 13, max_tokens=2))
    assert shape(step(scheduler)) == [("a", 0, 13, True, False)]
    assert shape(step(scheduler)) == [("a", 13, 1, True, True)]
    assert shape(step(scheduler)) == [("b", 0, 13, True, False)]


def test_a_request_that_can_never_fit_fails_alone():
    """Those before and behind it finish."""
    requests = [make_request("a", 4), make_request("huge", 50), make_request("b", 4)]
    scheduler = make_scheduler(max_tokens=20, requests=requests)
    failed = []
    for _ in range(40):
        failed += step(scheduler).failed
    assert [r.request_id for r in failed] == ["huge"]
    assert requests[1].finish_reason == "error"
    assert "50 tokens" in requests[1].error
    assert "(20)" in requests[1].error
    assert [requests[0].finish_reason, requests[2].finish_reason] == ["length", "length"]
    assert not scheduler.has_unfinished_requests


def test_a_running_request_that_outgrows_all_memory_fails_alone():
    """Nobody is left to preempt: it ends with an error, the next one runs."""
    big, small = make_request("big", 8, max_tokens=20), make_request("small", 4, max_tokens=2)
    scheduler = make_scheduler(max_tokens=10, requests=[big, small])
    for _ in range(8):
        step(scheduler)
    assert big.finish_reason == "error"
    assert len(big.output_token_ids) == 3, "tokens that fit are not lost"
    assert small.finish_reason == "length"


# -- a step is launched before the last one is read --


def test_a_step_can_be_scheduled_before_the_last_one_is_read():
    """The token in flight counts, though its id is not known yet."""
    request = make_request("a", max_tokens=3)
    scheduler = make_scheduler(requests=[request])
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert shape(second) == [("a", 4, 1, True, True)]
    assert scheduler.update(first, [5]) == []
    third = scheduler.schedule()
    assert shape(third) == [("a", 5, 1, True, True)]
    assert scheduler.schedule().chunks == [], "three tokens are on their way: no fourth"
    scheduler.update(second, [6])
    assert scheduler.update(third, [7]) == [request]
    assert request.output_token_ids == [5, 6, 7]


def test_the_step_behind_a_stop_token_is_thrown_away_and_blocks_wait_for_it():
    """Memory is freed only when no step in flight writes to it."""
    request = make_request("a")
    scheduler = make_scheduler(requests=[request])
    first, second = scheduler.schedule(), scheduler.schedule()
    assert scheduler.update(first, [STOP]) == [request]
    assert scheduler.memory.tokens_of == {"a": 5}
    assert scheduler.schedule().chunks == []
    assert scheduler.update(second, [6]) == []
    assert scheduler.memory.tokens_of == {}
    assert request.output_token_ids == [STOP]


def test_abort_in_flight_frees_after_the_flight():
    """The step still writes to the request's blocks."""
    request = make_request("a")
    scheduler = make_scheduler(requests=[request])
    output = scheduler.schedule()
    scheduler.abort("a")
    assert scheduler.memory.tokens_of == {"a": 4}
    assert scheduler.update(output, [5]) == []
    assert scheduler.memory.tokens_of == {}
    assert request.output_token_ids == []


def test_a_preempted_request_waits_for_its_token_in_flight():
    """It is computed again only with the token that was on its way."""
    old, new = make_request("old", 5, max_tokens=9), make_request("new", 5, max_tokens=9)
    scheduler = make_scheduler(max_tokens=12, requests=[old, new])
    scheduler.update(scheduler.schedule(), [1, 2])
    flying = scheduler.schedule()
    second = scheduler.schedule()
    assert second.preempted == [new]
    scheduler.memory.max_tokens = 100
    scheduler.abort("old")
    scheduler.update(second, [5])
    assert scheduler.schedule().chunks == [], "its token is still in flight"
    scheduler.update(flying, [3, 4])
    assert new.output_token_ids == [2, 4]
    assert shape(scheduler.schedule()) == [("new", 0, 7, True, False)]


def test_a_preempted_request_may_finish_with_its_token_in_flight():
    """It was thrown out a moment too early: it has all its tokens and is not computed again."""
    old, new = make_request("old", 5, max_tokens=9), make_request("new", 5, max_tokens=2)
    scheduler = make_scheduler(max_tokens=12, requests=[old, new])
    scheduler.update(scheduler.schedule(), [1, 2])
    flying = scheduler.schedule()
    second = scheduler.schedule()
    assert second.preempted == [new]
    assert scheduler.update(flying, [3, 4]) == [new]
    assert not scheduler.waiting
    assert new.output_token_ids == [2, 4]
    scheduler.update(second, [5])


def test_rollback_forgets_a_step_that_broke_off():
    """The same step can be scheduled once more."""
    scheduler = make_scheduler(budget=5, requests=[make_request("a"), make_request("b")])
    first = scheduler.schedule()
    scheduler.rollback(first)
    assert shape(scheduler.schedule()) == shape(first)


# -- policy and cost, on whole workloads --


def simulate(scheduler, requests):
    """Run requests to their end; returns (preemptions, tokens computed beyond the necessary)."""
    for request in requests:
        scheduler.add_request(request)
    computed = 0
    while scheduler.has_unfinished_requests:
        output = scheduler.schedule()
        computed += output.num_tokens
        scheduler.update(output, [5 for chunk in output.chunks if chunk.samples])
    needed = sum(r.num_tokens - 1 for r in requests)
    return sum(r.num_preemptions for r in requests), computed - needed


def test_watermark_keeps_preemptions_few_on_a_small_pool():
    """nano-vllm's benchmark on 45,000 tokens of KV: no worse than 18 preemptions and 10,700
    tokens computed again (blocks of 16, the default watermark, budget 16,384, 512 rows)."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    requests = [
        make_request(str(i), token_ids=prompt, max_tokens=rng.randint(100, 1024))
        for i, prompt in enumerate(prompts)
    ]
    memory = BlockManager(45_000 // 16, 16, watermark=EngineConfig().watermark)
    preemptions, recomputed = simulate(Scheduler(memory, 512, 16384), requests)
    assert all(r.finish_reason == "length" for r in requests)
    assert preemptions <= 18
    assert recomputed <= 10_700


def count_calls(num_waiting, context):
    """Python function calls of one decode step with 4 running requests."""
    memory = BlockManager(100_000, 16)
    scheduler = Scheduler(memory, 4, 8192)
    for number in range(4 + num_waiting):
        scheduler.add_request(make_request(str(number), num_prompt=context, max_tokens=100))
    for _ in range(1 + 4 * context // 8192):
        step(scheduler)
    calls = 0

    def profile(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        output = scheduler.schedule()
        scheduler.update(output, [5] * len(output.chunks))
    finally:
        sys.setprofile(None)
    assert len(output.chunks) == 4
    return calls


def test_cost_of_a_step_does_not_grow_with_the_queue_or_the_context():
    """Counted in function calls, so the machine's mood does not matter."""
    base = count_calls(num_waiting=1, context=33)
    assert count_calls(num_waiting=1000, context=33) <= base
    assert count_calls(num_waiting=1, context=4001) <= base
