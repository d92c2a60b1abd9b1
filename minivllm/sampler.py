"""Logits to token ids: greedy, temperature, top-k, top-p, min-p, and a seed per request.

Leaves out what happens to the logits before (`logits_processors`), the filters (`filters`), the
draw itself (`drawing`) and where random numbers come from (`noise`). Notebook 10.
Letters: N rows that sample, V vocabulary.

A token's noise is a hash of its request's seed and its position, never a shared generator,
and no operation mixes rows: a row's token depends on that row alone. The CPU form spends one
random number a row (`sample`), the GPU form one per row and token (`sample_gumbel`): for one
seed they give different tokens, of the same distribution.

A captured CUDA graph can hold what has the same shapes in every step and asks the host
nothing: greedy, temperature and seed. All else takes the uncaptured path. top_k, top_p and
min_p look on the host whether the candidates sufficed; logit_bias, min_tokens, the penalties
and logprobs work on as many rows and positions as ask for them in this step.
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
    """Choose the next token of each row. `logits` are left as they are.

    logits [N, V] of any float type, positions [N] int64 -> token ids [N] int64. `positions` are
    those of the tokens to be chosen: after a prompt of 5 tokens the first is 5.
    All applies in vLLM's order: biases, penalties, temperature, min_p, top_k, top_p; so greedy
    takes penalties in, and top_p is a share of what the other filters left. A row of NaN gets
    some valid id and disturbs no other row.
    """
    logits = process_logits(logits.float(), settings, positions)
    if not settings.any_random:
        return pick_greedy(logits)
    uniforms = to_uniform(hash_counter(settings.seed, positions))
    token_ids = torch.empty_like(positions)
    # A CPU works on a few rows at once, again and again in the same memory: fresh memory costs
    # it more, in page faults and cache misses, than the work itself.
    step = max(1, CPU_LOGITS // logits.shape[1]) if logits.is_cpu else len(logits)
    buffer = torch.empty_like(logits[:step])
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        token_ids[rows] = choose(logits[rows], settings[rows], uniforms[rows], buffer)
    return token_ids


def choose(logits: Tensor, settings: SamplingRows, uniforms: Tensor, buffer: Tensor) -> Tensor:
    """Choose the next token of each row: drawn by `draw` and `draw_filtered` from its weights, at
    temperature 0 the largest logit. A row's token depends on that row alone.

    logits [N, V] float32, left as they are; uniforms [N] float64, one for each row; `buffer`
    [at least N, V] float32 is memory for the weights -> token ids [N] int64.
    `settings.any_filter` says whether a row filters at all: if none does, looking is wasted.
    [[0., ln 3]] with 0.2 -> [0] at temperature 1, [1] at 0.5, where the first has .1; [1] at 0.
    """
    weights = weigh(logits, settings.temperature, out=buffer[: len(logits)])
    drawn = draw(weights, uniforms)
    if settings.any_filter:
        drawn = draw_filtered(drawn, logits, weights, settings, uniforms)
    return torch.where(settings.temperature > 0, drawn, pick_greedy(logits))


def pick_greedy(logits: Tensor) -> Tensor:
    """The id of each row's largest logit, the lowest id where several are largest.

    logits [N, V] -> [N] int64. [[1., 3., 3.]] -> [1]. Same result as `logits.argmax(-1)`.
    """
    # torch's argmax on a CPU is scalar, its maximum is vectorised (0.2 against 1.9 ms for 32
    # rows of 49,152): so find the block with the maximum, then search that block only.
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
    """`sample` for a GPU: no softmax but for rows that filter. `gumbel` draws all others, by
    default `gumbel_sample`; the Triton kernel of that name needs no more than the logits' memory.
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
    """Draw one token per row with probability softmax(logits / temperature): the argmax of
    logits / temperature + noise; at temperature 0 the argmax of the logits.

    logits [N, V] of any float type, -inf where a token cannot be; temperature [N] float32;
    seeds, positions [N] int64 -> [N] int64. No sum over V, one pass: the form for a GPU kernel,
    and its oracle. `gumbel_noise` makes a token's noise, in float64, of bits that are
    `hash_counter(row_bits, token_id)`; a row's bits are `hash_counter(seed, position)`.
    Not the tokens of `sample` for the same seed, but the same distribution.
    Idea: Gumbel 1954; Maddison, Tarlow and Minka 2014, "A* Sampling".
    """
    row_bits = hash_counter(seeds, positions)[:, None]
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    noise = gumbel_noise(hash_counter(row_bits, token_ids))
    is_random = (temperature > 0)[:, None]
    divided = logits.double() / torch.where(is_random, temperature[:, None].double(), 1.0)
    return (divided + torch.where(is_random, noise, 0.0)).argmax(-1)
