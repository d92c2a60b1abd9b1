"""The whole engine against a plain oracle on random traces: nothing may ever change an answer.

The traces contain what breaks engines: equal prompts, lengths that are multiples of the
block, second turns, pools so small that requests are preempted, aborts, one-token prompts.
"""

import random

import pytest
from stand_in import EOS, MAX_LEN, VOCAB_SIZE, expected_answer, make_engine, make_request

NUM_SEEDS = 500
SEEDS_PER_TEST = 50


def random_prompt(rng, block_size, earlier):
    """A new prompt, an old one again, or an old one with its answer and a second turn."""
    kind = rng.random()
    if earlier and kind < 0.25:
        return list(rng.choice(earlier)[0])
    if earlier and kind < 0.5:
        prompt, answer = rng.choice(earlier)
        turn = [*prompt, *answer, *(rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, 5)))]
        return turn[: MAX_LEN - 8]
    length = rng.choice([1, block_size - 1, block_size, block_size + 1, 2 * block_size, 13])
    # Few different tokens, so that prompts share beginnings by chance.
    return [rng.randrange(1, 4) for _ in range(max(1, length))]


def run_trace(seed):
    """One random workload on one random engine; returns the number of preemptions.

    Odd seeds run the overlapped loop, even ones the serial loop.
    """
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 8])
    engine = make_engine(
        # The smallest pool still holds the longest request: it is never refused.
        num_blocks=MAX_LEN // block_size + rng.choice([0, 0, 1, 5]),
        block_size=block_size,
        max_num_seqs=rng.choice([1, 3, 5, 5]),
        budget=rng.choice([5, 8, 64]),
        caching=rng.random() < 0.75,
        watermark=rng.choice([0, 0.1]),
    )
    step = engine.step_overlapped if seed % 2 else engine.step
    expected, earlier, results, added = {}, [], {}, []
    num_requests = rng.randint(3, 8)
    while len(added) < num_requests or engine.has_unfinished_requests:
        while len(added) < num_requests and rng.random() < 0.5:
            prompt = random_prompt(rng, block_size, earlier)
            max_tokens = rng.randint(1, 16)
            request = make_request(len(added), prompt, max_tokens)
            expected[request.request_id] = expected_answer(prompt, max_tokens)
            earlier.append((prompt, expected[request.request_id]))
            added.append(request)
            engine.scheduler.add_request(request)
        if rng.random() < 0.03 and added:
            victim = rng.choice(added)
            if engine.abort(victim.request_id):
                del expected[victim.request_id]
        if engine.has_unfinished_requests:
            for request in step():
                results[request.request_id] = request
    assert {i: r.output_token_ids for i, r in results.items()} == expected
    for request in results.values():
        assert len(request.metrics.token_times) == request.num_output_tokens
        assert request.finish_reason == ("stop" if request.token_ids[-1] == EOS else "length")
    engine.memory.check([])
    assert engine.memory.pool.num_free == engine.memory.pool.num_blocks
    assert not engine.runner.rows.row_of
    return sum(request.num_preemptions for request in added)


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_answers_equal_the_oracle_on_random_traces(first):
    """Chunks, batches, preemptions, prefix hits and aborts change when, never what."""
    for seed in range(first, first + SEEDS_PER_TEST):
        run_trace(seed)


@pytest.mark.long
def test_traces_contain_what_they_are_for():
    """Preemptions happen in a fair share of them."""
    assert sum(run_trace(seed) > 0 for seed in range(0, 20, 2)) >= 2
    assert sum(run_trace(seed) > 0 for seed in range(1, 20, 2)) >= 2
