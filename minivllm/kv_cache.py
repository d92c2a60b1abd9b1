"""The KV cache: how many blocks fit, how long a request can become, and the tensor itself.

Does not track who owns which block (see `block_manager`) or measure the machine's memory (see
`assembly.devices`). Notebook 06.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.config import EngineConfig, known
from minivllm.model_config import ModelConfig

CPU_MEMORY_SHARE = 0.25  # of the available memory, so that a laptop does not swap
CPU_MEMORY_CAP = 2**30  # bytes
GPU_MEMORY_SHARE = 0.9  # of all memory


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block: keys and values of all layers.

    SmolLM2-135M (30 layers, 3 KV heads of 64) in bfloat16 with blocks of 16 tokens:
    `30 * 2 * 16 * 3 * 64 * 2 = 368640`.
    """
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return per_token * block_size * dtype.itemsize


def activation_bytes(
    config: ModelConfig, num_tokens: int, num_seqs: int, dtype: torch.dtype
) -> int:
    """Return the peak bytes of a step of `num_tokens` tokens and `num_seqs` samples: the hidden
    state, the widest product of a layer, the logits. Weights and KV cache do not count.
    """
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    widest = max(heads, 3 * config.intermediate_size)
    per_token = (3 * config.hidden_size + widest) * dtype.itemsize
    return num_tokens * per_token + sampler_bytes(config.vocab_size, num_seqs)


def sampler_bytes(vocab_size: int, num_seqs: int) -> int:
    """Return the peak bytes for choosing `num_seqs` tokens: float32 logits, a copy that penalties
    change, and three more tensors of their size."""
    return 5 * num_seqs * vocab_size * 4


def num_blocks_that_fit(budget_bytes: int, block_bytes: int, max_blocks: int) -> int:
    """Return the number of blocks for a KV cache of at most `budget_bytes`, at most `max_blocks`.

    The padding block comes out of the budget too, but is not counted."""
    return max(0, min(budget_bytes // block_bytes - 1, max_blocks))


def longest_request(
    num_blocks: int, block_size: int, wanted: int | None, model_max: int, memory: str = ""
) -> int:
    """Return the `max_model_len` (tokens) to use: `wanted`, or else `model_max`, the length that
    the model was trained for, but at most what `num_blocks` blocks hold.

    Raises ValueError if `wanted` is too long. The message names the length that would fit and ends
    with `memory`, a sentence on how the memory is used.
    """
    fits = num_blocks * block_size
    if num_blocks == 0:
        raise ValueError(
            "no block of the KV cache fits into memory; raise memory_utilization or set"
            f" num_kv_blocks, or use a smaller model or dtype. {memory}"
        )
    if wanted is not None and wanted > fits:
        raise ValueError(
            f"max_model_len={wanted} does not fit the KV cache of {num_blocks} blocks of"
            f" {block_size} tokens; max_model_len={fits} would fit. Lower it, or raise"
            f" num_kv_blocks or memory_utilization. {memory}"
        )
    return min(wanted or model_max, fits)


def memory_sentence(weights: int, activations: int, budget: int, block_bytes: int) -> str:
    """Return a sentence on how the memory is used, for error messages. Arguments in bytes."""
    mib = 2**20
    return (
        f"Weights take {weights / mib:.0f} MiB, activations up to {activations / mib:.0f} MiB;"
        f" the KV cache may take {max(budget, 0) / mib:.0f} MiB, and a block takes"
        f" {block_bytes / mib:.2f} MiB."
    )


def allocate_kv_cache(model_config: ModelConfig, config: EngineConfig) -> Tensor:
    """Allocate keys and values of all layers, `[layers, 2, num_kv_blocks + 1, B, K, D]`, all zero.

    The last block is reserved for padding.
    """
    # Not uninitialised memory: attention multiplies masked entries by 0, and 0 times NaN is NaN.
    shape = (
        model_config.num_layers,
        2,
        known(config.num_kv_blocks) + 1,
        config.block_size,
        model_config.num_kv_heads,
        model_config.head_dim,
    )
    return torch.zeros(shape, dtype=getattr(torch, config.dtype), device=config.device)
