"""How much memory the KV cache gets, and what fits into it."""

from types import SimpleNamespace

import pytest
import torch

from minivllm.assembly.devices import kv_budget
from minivllm.kv_cache import (
    CPU_MEMORY_CAP,
    activation_bytes,
    allocate_kv_cache,
    kv_block_bytes,
    longest_request,
    memory_sentence,
    num_blocks_that_fit,
)

SMOLLM2 = SimpleNamespace(num_layers=30, num_kv_heads=3, head_dim=64)


def test_bytes_of_a_block_count_keys_and_values_of_all_layers():
    """SmolLM2: 30 layers x 2 x 16 tokens x 3 heads x 64 x 2 bytes."""
    assert kv_block_bytes(SMOLLM2, 16, torch.bfloat16) == 368_640
    assert kv_block_bytes(SMOLLM2, 16, torch.float32) == 737_280


def test_blocks_fill_the_budget_and_no_more_than_is_useful():
    """10 bytes a block."""
    assert num_blocks_that_fit(99, 10, max_blocks=100) == 8, "one more is for padding"
    assert num_blocks_that_fit(99, 10, max_blocks=4) == 4
    assert num_blocks_that_fit(19, 10, max_blocks=4) == 0
    assert num_blocks_that_fit(-5, 10, max_blocks=4) == 0


def test_longest_request_is_what_was_asked_for_trained_for_or_fits():
    """10 blocks of 16 hold 160 tokens."""
    assert longest_request(10, 16, None, model_max=8192) == 160
    assert longest_request(10, 16, None, model_max=100) == 100
    assert longest_request(10, 16, 150, model_max=8192) == 150
    with pytest.raises(ValueError, match="max_model_len=161 does not fit.*max_model_len=160"):
        longest_request(10, 16, 161, model_max=8192)


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
    """Two tokens, one sample: 2 x (3 x 8 + 3 x 10) x 4 bytes, and 5 x 100 x 4 for the logits."""
    shape = SimpleNamespace(
        num_heads=2, num_kv_heads=1, head_dim=4, intermediate_size=10, hidden_size=8, vocab_size=100
    )
    assert activation_bytes(shape, 2, 1, torch.float32) == 432 + 2000
    assert activation_bytes(shape, 2, 3, torch.float32) == 432 + 6000


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
    assert cache.shape == (30, 2, 4, 4, 3, 64), "three blocks, and one for padding"
    assert cache.dtype == torch.bfloat16
    assert not cache.any()
