"""A step, from chunks to tokens."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from stand_in import (
    STAND_IN_OPS,
    VOCAB_SIZE,
    StandInModel,
    make_engine,
    make_request,
    next_token,
)

from minivllm.logits_processors import process_logits, rank_tokens
from minivllm.model_runner import Pending
from minivllm.request import Chunk, Logprob, SamplingParams
from minivllm.rows import TokenLogprobs


def run_chunks(parts, num_tokens=9):
    """The token sampled after a prompt computed in these parts."""
    engine = make_engine()
    request = make_request("a", [(7 * i) % 50 for i in range(num_tokens)], 5)
    engine.memory.allocate(request, num_tokens)
    start = 0
    for length in parts:
        samples = start + length == num_tokens
        pending = engine.runner.launch([Chunk(request, start, length, samples, False)])
        assert len(pending.wait()) == samples
        start += length
    return pending.wait(), request


def forward_of(*chunks):
    """A runner's logits of a step, by the token that each row of them names."""
    engine = make_engine()
    for chunk in chunks:
        engine.memory.allocate(chunk.request, chunk.end)
    return engine.runner.forward(engine.runner.plan(chunks))


@pytest.mark.exercise("model_runner.ModelRunner.forward")
def test_the_new_keys_are_stored_before_anybody_looks():
    """In each layer, into that layer's caches, with the step's slots and metadata."""
    engine, request, calls = make_engine(), make_request("a", [3, 1], 5), []
    runner = engine.runner

    def store(k, v, k_cache, v_cache, slots):
        same = k_cache.data_ptr() == runner.kv_cache[0, 0].data_ptr()
        calls.append(("store", same, slots.tolist()))

    def attention(q, k_cache, v_cache, metadata, scale):
        same = v_cache.data_ptr() == runner.kv_cache[0, 1].data_ptr()
        calls.append(("look", same, metadata.seq_lens.tolist()))
        return q

    runner.ops = SimpleNamespace(
        slot_mapping=STAND_IN_OPS.slot_mapping, store_kv=store, attention=attention
    )
    engine.memory.allocate(request, 2)
    runner.forward(runner.plan([Chunk(request, 0, 2, True, False)]))
    slots = [4 * request.block_table[0], 4 * request.block_table[0] + 1]
    assert calls[:1] == [("store", True, slots)], (
        "the new keys must be in the cache before a query looks: do you store first?"
    )
    assert calls[1:] == [("look", True, [2])], "then attention, with the caches of this layer"


@pytest.mark.exercise("model_runner.ModelRunner.forward")
def test_a_prompt_gives_the_logits_after_its_last_token():
    """One row, whatever the prompt's length."""
    logits = forward_of(Chunk(make_request("a", [3, 1, 4], 5), 0, 3, True, False))
    assert len(logits) == 1, "one chunk samples: are there logits for its last token alone?"
    assert logits.argmax(-1).tolist() == [next_token([3, 1, 4])], (
        "the logits after 3, 1, 4: are they those of the last token, and did its query see the keys"
        " of this step?"
    )


@pytest.mark.exercise("model_runner.ModelRunner.forward")
def test_every_chunk_that_samples_has_its_own_last_token():
    """Three chunks, of which the one in the middle samples nothing."""
    texts = [[5, 9], [7, 8, 9], [1, 2, 3, 4]]
    requests = [make_request(str(i), text, 5) for i, text in enumerate(texts)]
    chunks = [Chunk(r, 0, len(r.token_ids), r is not requests[1], False) for r in requests]
    logits = forward_of(*chunks)
    assert len(logits) == 2, "two of three chunks sample: are there logits for their tokens alone?"
    assert logits.argmax(-1).tolist() == [next_token(texts[0]), next_token(texts[2])], (
        "the chunks' last tokens are in places 1 and 8 of the step: whose logits are these?"
    )


@pytest.mark.exercise("model_runner.ModelRunner.forward")
def test_a_step_that_samples_nothing_gives_no_logits():
    """The model runs, its keys and values are stored, and the vocabulary is left alone."""
    request, seen = make_request("a", [3, 1, 4], 5), []

    class Counting(StandInModel):
        def logits(self, hidden):
            seen.append(len(hidden))
            return super().logits(hidden)

    engine = make_engine()
    engine.runner.model = Counting()
    engine.memory.allocate(request, 3)
    first = engine.runner.forward(engine.runner.plan([Chunk(request, 0, 2, False, False)]))
    assert len(first) == 0, "no chunk samples: is there a row of logits all the same?"
    assert seen == [], "no chunk samples: is the product with the vocabulary left out?"
    last = engine.runner.forward(engine.runner.plan([Chunk(request, 2, 1, True, False)]))
    assert last.argmax(-1).tolist() == [next_token([3, 1, 4])], (
        "the second half of the prompt reads the keys of the first: were they stored?"
    )


@pytest.mark.exercise("model_runner.ModelRunner.forward")
def test_each_layer_has_its_own_caches():
    """Three layers: what the first one stored must not be what the last one reads."""
    engine, request, seen = make_engine(), make_request("a", [3, 1], 5), []
    runner = engine.runner
    runner.kv_cache = torch.zeros(3, *runner.kv_cache.shape[1:])

    class ThreeLayers(StandInModel):
        def __call__(self, input_ids, positions, attend):
            keys = torch.ones(len(input_ids), 1, 1)
            for layer in range(3):
                hidden = attend(layer, keys, keys, keys)[:, 0]
            return hidden

    def layer_of(k_cache, v_cache):
        keys = [runner.kv_cache[layer, 0].data_ptr() for layer in range(3)]
        values = [runner.kv_cache[layer, 1].data_ptr() for layer in range(3)]
        return keys.index(k_cache.data_ptr()), values.index(v_cache.data_ptr())

    def store(k, v, k_cache, v_cache, slots):
        seen.append(layer_of(k_cache, v_cache))

    def attention(q, k_cache, v_cache, metadata, scale):
        seen.append(layer_of(k_cache, v_cache))
        return q

    runner.model = ThreeLayers()
    runner.ops = SimpleNamespace(
        slot_mapping=STAND_IN_OPS.slot_mapping, store_kv=store, attention=attention
    )
    engine.memory.allocate(request, 2)
    runner.forward(runner.plan([Chunk(request, 0, 2, True, False)]))
    assert seen == [(0, 0), (0, 0), (1, 1), (1, 1), (2, 2), (2, 2)], (
        "three layers store and look, one after the other: does each use the caches of its number?"
    )


@pytest.mark.parametrize("parts", [[9], [4, 5], [1] * 9, [8, 1], [3, 3, 3]])
def test_a_prompt_in_any_chunks_gives_one_token(parts):
    """One prefill, chunks, single tokens: all the same to the model."""
    token_ids, request = run_chunks(parts)
    assert token_ids == [next_token(request.token_ids)]


def test_the_next_step_reads_the_sampled_token_from_the_row():
    """The host does not tell the device what the device has sampled."""
    engine = make_engine()
    request = make_request("a", [3, 1, 4], 5)
    engine.memory.allocate(request, 5)
    engine.runner.launch([Chunk(request, 0, 3, True, False)])
    second = engine.runner.launch([Chunk(request, 3, 1, True, True)])
    expected = [3, 1, 4, next_token([3, 1, 4])]
    assert second.wait() == [next_token(expected)]


def test_a_step_without_chunks_gives_no_tokens():
    """An empty step isn't an error here: the engine judges that."""
    assert make_engine().runner.launch([]).wait() == []


def test_logits_are_computed_for_sampling_rows_only():
    """A prompt's middle costs no product with the vocabulary."""
    seen = []

    class Counting(StandInModel):
        def logits(self, hidden):
            seen.append(len(hidden))
            return super().logits(hidden)

    engine = make_engine()
    engine.runner.model = Counting()
    first, second = make_request("a", [1, 2, 3], 5), make_request("b", [4, 5, 6], 5)
    for request in (first, second):
        engine.memory.allocate(request, 3)
    engine.runner.launch([Chunk(first, 0, 3, True, False), Chunk(second, 0, 2, False, False)])
    assert seen == [1]
    engine.runner.launch([Chunk(second, 2, 1, False, False)])
    assert seen == [1]


def test_operations_are_handed_in():
    """The runner calls the operations it was given, by vLLM's names."""
    assert make_engine().runner.ops is STAND_IN_OPS


# -- penalties and logprobs ------------------------------------------------------------------


def make_sampling_engine():
    """An engine whose runner applies biases and penalties, greedily, and ranks tokens."""
    engine = make_engine()
    engine.runner.sample = lambda logits, settings, positions: process_logits(
        logits, settings, positions
    ).argmax(-1)
    engine.runner.rank_tokens = rank_tokens
    return engine


def launch_all(engine, request, num_answers):
    """Launch the prompt and the steps behind it without reading any of them."""
    num_prompt = request.num_prompt_tokens
    engine.memory.allocate(request, num_prompt + num_answers)
    pending = [engine.runner.launch([Chunk(request, 0, num_prompt, True, False)])]
    for position in range(num_prompt, num_prompt + num_answers - 1):
        pending.append(engine.runner.launch([Chunk(request, position, 1, True, True)]))
    return [step.wait()[0] for step in pending]


class Favourites(StandInModel):
    """Whatever the text: token 3 is best, then 2, then 1, then 0."""

    def logits(self, hidden):
        logits = torch.zeros(len(hidden), VOCAB_SIZE)
        logits[:, :4] = torch.tensor([0.5, 1.0, 1.5, 2.0])
        return logits


@pytest.mark.parametrize(
    ("penalty", "expected"),
    [
        ({"presence_penalty": 1.25}, [3, 2, 1, 3, 3, 3]),
        ({"frequency_penalty": 0.75}, [3, 2, 3, 1, 2, 0]),
        ({"repetition_penalty": 1e3}, [3, 2, 1, 3, 3, 3]),
    ],
)
def test_penalties_see_the_tokens_of_unread_steps(penalty, expected):
    """Six steps in flight: each knows what those before it sampled, from the rows alone.

    The prompt has token 0, whose 0.5 only repetition minds. 2 - 1.25 is 0.75, and 2 - 2 x 0.75 is
    0.5 like that of token 0.
    """
    engine = make_sampling_engine()
    engine.runner.model = Favourites()
    request = make_request("a", [0, 0, 0], 9)
    request.sampling_params = SamplingParams(temperature=0, **penalty)
    assert launch_all(engine, request, 6) == expected


def test_min_tokens_hold_in_unread_steps():
    """The stop token is the favourite, and comes third at the earliest."""
    engine = make_sampling_engine()
    engine.runner.model = Favourites()
    request = make_request("a", [5, 5], 9)
    request.sampling_params = SamplingParams(temperature=0, min_tokens=2)
    request.stop_token_ids = frozenset([3])
    assert launch_all(engine, request, 4) == [2, 2, 3, 3]


def test_logprobs_are_those_of_the_raw_logits():
    """A bias changes which token is chosen, and not how probable the model found it."""
    engine = make_sampling_engine()
    engine.runner.model = Favourites()
    asking, plain = make_request("a", [5], 9), make_request("b", [6], 9)
    asking.sampling_params = SamplingParams(temperature=0, logprobs=1, logit_bias={1: 9.0})
    for request in (asking, plain):
        engine.memory.allocate(request, 2)
    chunks = [Chunk(request, 0, 1, True, False) for request in (plain, asking)]
    pending = engine.runner.launch(chunks)
    assert pending.wait() == [3, 1]
    logprobs = Favourites().logits([0]).log_softmax(-1)[0]
    nothing, found = pending.logprobs()
    assert nothing is None
    assert found == {
        1: Logprob(pytest.approx(logprobs[1].item()), 3),
        3: Logprob(pytest.approx(logprobs[3].item()), 1),
    }


def test_each_row_has_as_many_logprobs_as_it_asked_for():
    """Rows that want 0, none and 2: the columns of the widest do not show in the others."""
    ranked = TokenLogprobs(
        token_ids=torch.tensor([[7, 8, 9], [4, 5, 4]]),
        logprobs=torch.tensor([[-3.0, -1.0, -2.0], [-2.0, -0.5, -2.0]]),
        ranks=torch.tensor([[3, 1, 2], [2, 1, 2]]),
    )
    pending = Pending(torch.tensor([7, 1, 4]), ranked, [0, None, 2])
    assert pending.logprobs() == [
        {7: Logprob(-3.0, 3)},
        None,
        {4: Logprob(-2.0, 2), 5: Logprob(-0.5, 1)},
    ]
    assert Pending(torch.tensor([7, 1])).logprobs() == [None, None]
    assert Pending(torch.tensor([], dtype=torch.int64)).logprobs() == []


def test_rows_that_ask_for_no_logprobs_cost_no_ranking():
    """The function is called with the asking rows alone, and not at all without any."""
    engine = make_sampling_engine()
    seen = []

    def spy(logits, token_ids, k):
        seen.append((len(logits), token_ids.tolist(), k))
        return rank_tokens(logits, token_ids, k)

    engine.runner.rank_tokens = spy
    requests = [make_request(name, [1, 2], 5) for name in "abc"]
    for request, k in zip(requests, (None, 0, 4)):
        request.sampling_params = SamplingParams(temperature=0, logprobs=k)
        engine.memory.allocate(request, 2)
    token = next_token([1, 2])
    engine.runner.launch([Chunk(requests[0], 0, 2, True, False)])
    assert seen == []
    engine.runner.launch([Chunk(request, 0, 2, True, False) for request in requests])
    assert seen == [(2, [token, token], 4)]


def test_logprobs_without_a_function_for_them_are_our_own_mistake():
    """The engine hands one in; a runner without it says so."""
    engine = make_engine()
    request = make_request("a", [1, 2], 5)
    request.sampling_params = SamplingParams(temperature=0, logprobs=1)
    engine.memory.allocate(request, 2)
    with pytest.raises(AssertionError, match="rank_tokens"):
        engine.runner.launch([Chunk(request, 0, 2, True, False)])
