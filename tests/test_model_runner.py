"""KV-cache sizing, and a step from chunks to tokens."""

from types import SimpleNamespace

import pytest
import torch
from stand_in import STAND_IN_OPS, StandInModel, make_engine, make_request, next_token

from minivllm.engine import kv_budget
from minivllm.model_runner import (
    CPU_MEMORY_CAP,
    activation_bytes,
    allocate_kv_cache,
    kv_block_bytes,
    longest_request,
    memory_sentence,
    num_blocks_that_fit,
)
from minivllm.request import Chunk

SMOLLM2 = SimpleNamespace(num_layers=30, num_kv_heads=3, head_dim=64)


def test_bytes_of_a_block_count_keys_and_values_of_all_layers():
    """SmolLM2: 30 layers x 2 x 16 tokens x 3 heads x 64 x 2 bytes."""
    assert kv_block_bytes(SMOLLM2, 16, torch.bfloat16) == 368_640
    assert kv_block_bytes(SMOLLM2, 16, torch.float32) == 737_280


def test_blocks_fill_the_budget_and_no_more_than_is_useful():
    """10 bytes a block."""
    assert num_blocks_that_fit(99, 10, max_blocks=100) == 9
    assert num_blocks_that_fit(99, 10, max_blocks=4) == 4
    assert num_blocks_that_fit(9, 10, max_blocks=4) == 0
    assert num_blocks_that_fit(-5, 10, max_blocks=4) == 0


def test_longest_request_is_what_was_asked_for_trained_for_or_fits():
    """10 blocks of 16 hold 160 tokens."""
    assert longest_request(10, 16, None, model_max=8192) == 160
    assert longest_request(10, 16, None, model_max=100) == 100
    assert longest_request(10, 16, 150, model_max=8192) == 150
    with pytest.raises(ValueError, match="max_model_len=161 does not fit.*max_model_len=160"):
        longest_request(10, 16, 161, model_max=8192)
    with pytest.raises(ValueError, match="max_model_len=101 is more than.*lower it to 100"):
        longest_request(10, 16, 101, model_max=100)


def test_no_memory_at_all_is_said_with_numbers():
    """Zero blocks: the message tells what a block needs and what to change."""
    memory = memory_sentence(2**28, 2**26, -5, 2**20)
    assert memory == (
        "Weights take 256 MiB, activations up to 64 MiB; the KV cache may take 0 MiB, and a block"
        " takes 1.00 MiB."
    )
    with pytest.raises(ValueError, match=r"no block.*memory_utilization.*Weights take 256 MiB"):
        longest_request(0, 16, None, 8192, memory)


def test_activations_grow_with_tokens_and_include_logits_and_sampler():
    """Two tokens, one sample: 2 x (3 x 8 + 3 x 10) x 4 bytes, and 3 x 100 x 4 for the logits."""
    shape = SimpleNamespace(
        num_heads=2, num_kv_heads=1, head_dim=4, intermediate_size=10, hidden_size=8, vocab_size=100
    )
    assert activation_bytes(shape, 2, 1, torch.float32) == 432 + 1200
    assert activation_bytes(shape, 2, 3, torch.float32) == 432 + 3600


def test_on_a_cpu_the_cache_takes_a_share_of_available_memory_with_a_cap(monkeypatch):
    """An 8 GB laptop with 2 GB free gives 512 MiB; a big machine 1 GiB."""
    memory = SimpleNamespace(available=2 * 2**30)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    cpu = torch.device("cpu")
    assert kv_budget(None, cpu) == 2**29
    memory.available = 100 * 2**30
    assert kv_budget(None, cpu) == CPU_MEMORY_CAP
    assert kv_budget(0.5, cpu) == 50 * 2**30, "a share that was asked for has no cap"


def test_the_cache_is_finite_everywhere_from_the_start():
    """A masked entry is multiplied by 0, and 0 times NaN is NaN."""
    config = SimpleNamespace(num_kv_blocks=3, block_size=4, dtype="bfloat16", device="cpu")
    cache = allocate_kv_cache(SMOLLM2, config)
    assert cache.shape == (30, 2, 3, 4, 3, 64)
    assert cache.dtype == torch.bfloat16
    assert not cache.any()


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
    """Nothing to do is no error here: the engine judges that."""
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
