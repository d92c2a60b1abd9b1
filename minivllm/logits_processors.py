"""Biases and penalties, which change logits, and log-probabilities, which report them.

Does not choose the token (see `sampler`, which calls `process_logits` first). Notebook 10.
Letters: N rows that sample, V vocabulary, M rows with penalties or logprobs, L positions, E biases,
K alternatives.

Nothing here reads the host's token lists, which may not contain the last step's token yet. No
operation mixes rows, so a row's logits depend on that row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.rows import Biases, Penalties, SamplingRows, TokenLogprobs


def process_logits(logits: Tensor, settings: SamplingRows, positions: Tensor) -> Tensor:
    """Return the logits with the step's biases, then its penalties applied (vLLM's order).

    logits [N, V] float32, positions [N] int64 of the tokens to be chosen -> [N, V] float32:
    `logits` itself if no row has biases or penalties, else a copy. `logits` are not changed.
    """
    if settings.biases is not None:
        logits = add_biases(logits, settings.biases)
    if settings.penalties is not None:
        logits = apply_penalties(logits, settings.penalties, positions)
    return logits


# -- logit_bias and min_tokens -----------------------------------------------------------


def add_biases(logits: Tensor, biases: Biases) -> Tensor:
    """Return a copy of the logits with each bias added to its logit.

    logits [N, V] float32 -> [N, V] float32.
    [[1, 1], [1, 1]] with rows 0, 1, tokens 1, 0, values 2, -inf -> [[1, 3], [-inf, 1]].
    `min_tokens` is a bias too: minus infinity for tokens that would end the answer too early.
    Source: `logit_bias` in OpenAI's API reference.
    """
    where = (biases.rows, biases.token_ids)
    return logits.index_put(where, biases.values, accumulate=True)


# -- penalties ---------------------------------------------------------------------------


def apply_penalties(logits: Tensor, penalties: Penalties, positions: Tensor) -> Tensor:
    """Return a copy of the logits with the repetition, then frequency, then presence penalties.

    logits [N, V] float32, positions [N] int64 of the tokens to be chosen -> [N, V] float32. A row's
    text is its tokens before that position: prompt and answer for repetition, the answer alone for
    frequency and presence. Rows that are not in `penalties.rows` keep their logits.
    Prompt [0, 1], answer [1, 2, 2], all logits 8: repetition 2 -> [4, 4, 4, 8]; frequency 1.5 ->
    [8, 6.5, 5, 8]; presence 1.5 -> [8, 6.5, 6.5, 8].
    """
    ends = positions[penalties.rows]
    vocab_size = logits.shape[1]
    token_ids = tokens_before(penalties.token_ids, ends)
    in_answer = count_tokens(penalties.token_ids, penalties.num_prompt_tokens, ends, vocab_size)
    counts = in_answer.gather(1, token_ids)
    # A text has far fewer tokens than the vocabulary, so only the logits of its tokens are
    # computed. A token that occurs twice is written twice, with the same value.
    where = (penalties.rows[:, None], token_ids)
    seen = penalize_repetition(logits[where], penalties.repetition)
    seen = penalize_frequency(seen, counts, penalties.frequency)
    return logits.index_put(where, penalize_presence(seen, counts, penalties.presence))


def tokens_before(token_ids: Tensor, ends: Tensor) -> Tensor:
    """Replace the tokens from position `ends` on by the first token, which is in the text.

    token_ids [M, L] int32, ends [M] int64, at least 1 -> [M, L] int64.
    [[5, 1, 7, 9]] with end 2 -> [[5, 1, 5, 5]].
    """
    places = torch.arange(token_ids.shape[1], device=token_ids.device)
    return torch.where(places < ends[:, None], token_ids, token_ids[:, :1]).long()


def count_tokens(token_ids: Tensor, starts: Tensor, ends: Tensor, vocab_size: int) -> Tensor:
    """Count how often each token of the vocabulary occurs at positions `starts` to `ends` - 1.

    token_ids [M, L] int32; starts, ends [M] int64, at most L -> [M, V] float32.
    [[5, 1, 5, 5, 9]] from 1 to 4 -> 1 for token 1, 2 for token 5, 0 for all others.
    """
    places = torch.arange(token_ids.shape[1], device=token_ids.device)
    counted = (places >= starts[:, None]) & (places < ends[:, None])
    counts = torch.zeros(len(token_ids), vocab_size, device=token_ids.device)
    # Positions outside add 0, so it does not matter which token is there.
    return counts.scatter_add_(1, token_ids.long(), counted.float())


def penalize_repetition(logits: Tensor, penalty: Tensor) -> Tensor:
    """Make tokens that occur less probable: divide positive logits, multiply negative ones.

    logits [M, L] float32 of tokens of prompt and answer, penalty [M] -> [M, L].
    [[2, -2]], penalty 2 -> [[1, -4]].
    Source: Keskar et al. 2019, "CTRL", section 4.1; the case below 0 is transformers'.
    """
    penalty = penalty[:, None]
    return torch.where(logits > 0, logits / penalty, logits * penalty)


def penalize_frequency(logits: Tensor, counts: Tensor, penalty: Tensor) -> Tensor:
    """Subtract `penalty` from a token's logit for each time it occurs in the answer.

    logits [M, L] float32 of some tokens, their counts [M, L], penalty [M] -> [M, L].
    [[2, 2, -2]], counts [[0, 1, 3]], penalty 0.5 -> [[2, 1.5, -3.5]].
    Source: `frequency_penalty` in OpenAI's API reference.
    """
    return logits - penalty[:, None] * counts


def penalize_presence(logits: Tensor, counts: Tensor, penalty: Tensor) -> Tensor:
    """Subtract `penalty` from a token's logit once if it occurs in the answer.

    logits [M, L] float32 of some tokens, their counts [M, L], penalty [M] -> [M, L].
    [[2, 2, -2]], counts [[0, 1, 3]], penalty 0.5 -> [[2, 1.5, -2.5]].
    Source: `presence_penalty` in OpenAI's API reference.
    """
    return logits - penalty[:, None] * (counts > 0)


# -- log-probabilities -------------------------------------------------------------------


def rank_tokens(logits: Tensor, token_ids: Tensor, k: int) -> TokenLogprobs:
    """Return log-probability and rank of each row's chosen token and of the `k` most probable ones.

    logits [M, V] float32 as the model returned them, token_ids [M] int64 -> [M, 1 + k] each, the
    chosen token first, then the most probable one. At most V alternatives are returned.
    Probabilities .5, .3, .2, chosen 2, k = 1 -> tokens 2, 0; ln .2, ln .5; ranks 3, 1.
    """
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    values, ids = logprobs.topk(min(k, logits.shape[1]))
    # Equal logits share a rank, so it does not matter which of them topk returns.
    return TokenLogprobs(
        token_ids=torch.cat([token_ids[:, None], ids], dim=1),
        logprobs=torch.cat([chosen, values], dim=1),
        ranks=torch.cat([count_above(logprobs, chosen), count_above(values, values)], dim=1) + 1,
    )


def count_above(values: Tensor, limits: Tensor) -> Tensor:
    """Count, for each of a row's `limits`, how many of its `values` are larger.

    values [M, V], limits [M, K] -> [M, K] int64. [[1, 3, 3, 2]], limits [[3, 2]] -> [[0, 2]].
    """
    return (values[:, None, :] > limits[:, :, None]).sum(-1)
