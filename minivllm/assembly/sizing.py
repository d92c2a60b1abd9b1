"""The settings that depend on the machine: how many requests, tokens and KV blocks it can hold.

Takes the measurements; the arithmetic is in `kv_cache` (Notebook 06). Not built in the course.
"""

from __future__ import annotations

from pathlib import Path

import torch

from minivllm.assembly.devices import free_bytes, kv_budget, step_tokens
from minivllm.block_manager import blocks_for
from minivllm.config import EngineConfig, known, replace
from minivllm.kv_cache import (
    CPU_MEMORY_SHARE,
    GPU_MEMORY_SHARE,
    activation_bytes,
    kv_block_bytes,
    longest_request,
    memory_sentence,
    num_blocks_that_fit,
    sampler_bytes,
)
from minivllm.model import CausalLM


def fill_in(
    config: EngineConfig, path: Path, model: CausalLM, num_sharing: int = 1
) -> EngineConfig:
    """Return the settings with every None replaced by the value that is used. Call it when the
    weights are loaded, since it measures the free memory; `num_sharing` ranks share a CPU's.

    Raises ValueError for a length or a number of blocks that the memory does not hold, and for
    recorded steps of kernels that cannot be recorded.
    """
    if config.attention_backend == "cpu" and config.enforce_eager is False:
        raise ValueError(
            "enforce_eager=False: the kernels of attention_backend='cpu' cannot be recorded; take"
            " attention_backend='torch', or leave enforce_eager out (on a CPU nothing is lost)"
        )
    weight = next(model.parameters())
    is_cpu = weight.device.type == "cpu"
    num_seqs = config.max_num_seqs or (32 if is_cpu else 256)
    num_tokens = config.max_num_batched_tokens or max(step_tokens(weight.device), num_seqs)
    config = replace(
        config,
        model_path=str(path),
        dtype=str(weight.dtype).removeprefix("torch."),
        device=str(weight.device),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_tokens,
    )
    require_room(config, model)
    num_blocks, max_len = size_kv_cache(config, model, num_sharing)
    share = CPU_MEMORY_SHARE if is_cpu else GPU_MEMORY_SHARE
    return replace(
        config,
        num_kv_blocks=num_blocks,
        max_model_len=max_len,
        memory_utilization=config.memory_utilization or share,
        overlap=config.overlap if config.overlap is not None else not is_cpu,
        enforce_eager=config.enforce_eager if config.enforce_eager is not None else is_cpu,
    )


def require_trained_length(config: EngineConfig, max_position: int) -> int:
    """Return the positions that the model's tables need: `max_model_len`, or what the model was
    trained for (`max_position`). Raises ValueError for more than that, before anything is
    allocated."""
    wanted = config.max_model_len
    if wanted is not None and wanted > max_position:
        raise ValueError(
            f"max_model_len={wanted} is more than the model was trained for ({max_position}"
            f" tokens); lower it to {max_position}"
        )
    return wanted or max_position


def require_room(config: EngineConfig, model: CausalLM) -> None:
    """Raise ValueError for a setting whose tensors alone are larger than the free memory, before
    they are allocated."""
    weight = next(model.parameters())
    shape = model.config
    num_tokens = known(config.max_num_batched_tokens)
    num_seqs = known(config.max_num_seqs)
    max_len = config.max_model_len or shape.max_position
    num_entries = max_len + blocks_for(max_len, config.block_size)  # int32, of tokens and blocks
    row = sampler_bytes(shape.vocab_size, 1) + 4 * num_entries
    token = activation_bytes(shape, 1, 0, weight.dtype)
    block = kv_block_bytes(shape, config.block_size, weight.dtype)
    for name, count, size in (
        ("max_num_seqs", num_seqs, row),
        ("max_num_batched_tokens", num_tokens, token),
        ("num_kv_blocks", config.num_kv_blocks or 0, block),
    ):
        free = free_bytes(weight.device)
        if count * size > free:
            raise ValueError(
                f"{name}={count} needs {count * size / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB"
                f" are free on {weight.device}; lower it to {free // size} or less"
            )


def size_kv_cache(config: EngineConfig, model: CausalLM, num_sharing: int = 1) -> tuple[int, int]:
    """Number of blocks, and the `max_model_len` (tokens) that goes with them."""
    weight = next(model.parameters())
    shape = model.config
    block_bytes = kv_block_bytes(shape, config.block_size, weight.dtype)
    num_tokens = known(config.max_num_batched_tokens)
    num_seqs = known(config.max_num_seqs)
    activations = activation_bytes(shape, num_tokens, num_seqs, weight.dtype)
    if weight.is_cuda:
        activations = max(activations, measure_activations(model, num_tokens, num_seqs))
    budget = kv_budget(config.memory_utilization, weight.device)
    if not weight.is_cuda:
        budget //= num_sharing
    budget -= activations
    # More than this is never used: every row filled to the longest length.
    wanted_len = config.max_model_len or shape.max_position
    useful = num_seqs * blocks_for(wanted_len, config.block_size)
    num_blocks = config.num_kv_blocks or num_blocks_that_fit(budget, block_bytes, useful)
    weights = sum(p.numel() * p.itemsize for p in model.parameters())
    max_len = longest_request(
        num_blocks,
        config.block_size,
        config.max_model_len,
        shape.max_position,
        memory_sentence(weights, activations, budget, block_bytes),
    )
    return num_blocks, max_len


@torch.inference_mode()
def measure_activations(model: CausalLM, num_tokens: int, num_seqs: int) -> int:
    """Return the bytes that the largest step takes on a GPU in addition to weights and KV cache.

    Runs such a step without attention; the sampler's share is computed.
    """
    device = next(model.parameters()).device
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    hidden = model(token_ids, token_ids, lambda layer_index, q, k, v: q)
    model.logits(hidden[:num_seqs])
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()  # what is only kept for reuse is free memory
    return peak + sampler_bytes(model.config.vocab_size, num_seqs)
