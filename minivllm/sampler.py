"""Logits to token ids: greedy, temperature, top-k, top-p, min-p, and a seed per request.

Biases and penalties are in `logits_processors`, top-k, top-p and min-p in `filters`, random numbers
and draws in `drawing`. Notebook 10.
Letters: N rows that sample, V vocabulary.

A token's noise is a hash of its request's seed and its position, not a shared generator, and no
operation mixes rows: a row's token depends on that row alone. The CPU form uses one random number
per row (`sample`), the GPU form one per row and token (`sample_gumbel`): for the same seed they
give different tokens from the same distribution.

Greedy, temperature and seed can be part of a captured CUDA graph: they have the same shapes in
every step and need nothing from the host. Other settings take the uncaptured path: top_k, top_p
and min_p check on the host whether the candidates were enough; the shapes of logit_bias,
min_tokens, penalties and logprobs depend on the rows that use them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minivllm.drawing import (
    BLOCK,
    CPU_LOGITS,
    draw,
    gumbel_noise,
    hash_counter,
    split_blocks,
    to_uniform,
    weigh,
)
from minivllm.filters import draw_filtered
from minivllm.logits_processors import process_logits
from minivllm.rows import SamplingRows


def sample(logits: Tensor, settings: SamplingRows, positions: Tensor) -> Tensor:
    """Choose the next token of each row. `logits` are not changed.

    logits [N, V] of any float type, positions [N] int64 -> token ids [N] int64. `positions` are
    those of the tokens to be chosen: after a prompt of 5 tokens the first is 5.
    Settings apply in vLLM's order: biases, penalties, temperature, min_p, top_k, top_p. So
    penalties affect greedy rows too, and top_p refers to what the other filters left. A row of NaN
    gets any valid id and does not affect other rows.
    """
    logits = process_logits(logits.float(), settings, positions)
    if not settings.any_random:
        return pick_greedy(logits)
    uniforms = to_uniform(hash_counter(settings.seed, positions))
    token_ids = torch.empty_like(positions)
    # A CPU processes a few rows at a time in the same memory: page faults and cache misses of new
    # memory would cost more than the work itself.
    step = max(1, CPU_LOGITS // logits.shape[1]) if logits.is_cpu else len(logits)
    buffer = torch.empty_like(logits[:step])
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        token_ids[rows] = choose(logits[rows], settings[rows], uniforms[rows], buffer)
    return token_ids


def choose(logits: Tensor, settings: SamplingRows, uniforms: Tensor, buffer: Tensor) -> Tensor:
    """Choose the next token of each row: drawn from its weights, or greedy at temperature 0.

    logits [N, V] float32, unchanged; uniforms [N] float64; `buffer` [at least N, V] float32, memory
    for the weights -> token ids [N] int64. A row depends on itself alone: greedy, random and
    filtering rows can be mixed. If no row filters (`settings.any_filter`), no filter code runs.
    [[0., ln 3]] with 0.2 -> [0] at temperature 1; [1] at 0.5, where the weights are 1/9 and 1.
    """
    weights = weigh(logits, settings.temperature, out=buffer[: len(logits)])
    drawn = draw(weights, uniforms)
    if settings.any_filter:
        drawn = draw_filtered(drawn, logits, weights, settings, uniforms)
    return torch.where(settings.temperature > 0, drawn, pick_greedy(logits))


def pick_greedy(logits: Tensor) -> Tensor:
    """Return the id of each row's largest logit, the lowest id if several are largest.

    logits [N, V] -> [N] int64. [[1., 3., 3.]] -> [1]. Same result as `logits.argmax(-1)`.
    """
    # torch's argmax is scalar on a CPU, its maximum is vectorised (0.2 against 1.9 ms for 32
    # rows of 49,152): so find the block with the maximum, then search only that block.
    blocks = split_blocks(logits, -torch.inf)
    best = blocks.amax(-1).argmax(-1)
    rows = torch.arange(len(logits), device=logits.device)
    return best * BLOCK + blocks[rows, best].argmax(-1)


# -- the GPU form ------------------------------------------------------------------------


def sample_gumbel(
    logits: Tensor,
    settings: SamplingRows,
    positions: Tensor,
    gumbel: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """`sample` for a GPU: only rows that filter need a softmax. `gumbel` draws for all others:
    `gumbel_sample` or the Triton kernel of that name, which allocates no `[N, V]` memory.
    """
    gumbel = gumbel or gumbel_sample
    if settings.biases is not None or settings.penalties is not None:
        logits = process_logits(logits.float(), settings, positions)
    token_ids = gumbel(logits, settings.temperature, settings.seed, positions)
    if not settings.any_filter:
        return token_ids
    logits = logits.float()
    weights = weigh(logits, settings.temperature)
    uniforms = to_uniform(hash_counter(settings.seed, positions))
    return draw_filtered(token_ids, logits, weights, settings, uniforms)


def gumbel_sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one token per row with probabilities softmax(logits / temperature), without a softmax.

    logits [N, V] of any float type, -inf for impossible tokens; temperature [N] float32, 0: greedy;
    seeds, positions [N] int64 -> [N] int64. A token's noise is `gumbel_noise`, in float64, of
    `hash_counter(row_bits, token_id)`, a row's bits are `hash_counter(seed, position)`. For the
    same seed the tokens are not those of `sample`, but have the same distribution.
    Source: Gumbel 1954; Maddison, Tarlow and Minka 2014, "A* Sampling".
    """
    row_bits = hash_counter(seeds, positions)[:, None]
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    noise = gumbel_noise(hash_counter(row_bits, token_ids))
    is_random = (temperature > 0)[:, None]
    divided = logits.double() / torch.where(is_random, temperature[:, None].double(), 1.0)
    return (divided + torch.where(is_random, noise, 0.0)).argmax(-1)
