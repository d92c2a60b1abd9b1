"""top_k, top_p and min_p: which tokens can be drawn.

Does not draw (see `drawing`) or change logits (see `logits_processors`). Notebook 10.
Letters: N rows that sample, V vocabulary, M rows that filter, C candidates of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minivllm.drawing import CPU_LOGITS, invert_cdf, split_blocks
from minivllm.rows import SamplingRows

# Candidates in a filter's first and second attempt; a row that needs more sorts all of V.
CANDIDATES = (256, 4096)
# Tokens of a group; at first only the largest of each group matters. See `find_largest`.
GROUP = 16


def draw_filtered(
    token_ids: Tensor,
    logits: Tensor,
    weights: Tensor,
    settings: SamplingRows,
    uniforms: Tensor,
    candidates: Sequence[int] = CANDIDATES,
) -> Tensor:
    """Return `token_ids` with those of the rows that filter drawn again, from the tokens that pass
    their filters.

    token_ids [N] int64, logits, weights [N, V] float32, uniforms [N] float64 -> [N] int64.
    `candidates`: how many tokens to try before all of V; affects only the time.
    """
    token_ids = token_ids.clone()
    vocab_size = logits.shape[1]
    rows = _rows_that_filter(settings, vocab_size)
    for size in [size for size in (*candidates, vocab_size) if size <= vocab_size]:
        unsettled = [rows[:0]]  # a few rows at once: sorting takes many times their memory
        for some in rows.split(max(1, CPU_LOGITS // size)) if len(rows) else ():
            ids, kept, is_settled = filter_among(logits, weights, settings, some, size)
            places, _ = invert_cdf(kept, uniforms[some])
            token_ids[some] = ids.gather(1, places[:, None])[
                :, 0
            ]  # replaced later for unsettled rows
            unsettled.append(some[~is_settled])
        rows = torch.cat(unsettled)
    return token_ids


def _rows_that_filter(settings: SamplingRows, vocab_size: int) -> Tensor:
    top_k = (settings.top_k > 0) & (settings.top_k < vocab_size)
    some_filter = top_k | (settings.top_p < 1) | (settings.min_p > 0)
    return (some_filter & (settings.temperature > 0)).nonzero()[:, 0]


def filter_among(
    logits: Tensor, weights: Tensor, settings: SamplingRows, rows: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Filter the `size` most probable tokens of some rows: each row keeps the first few of them.

    logits, weights [N, V] float32, rows [M] int64, ascending -> token ids [M, size] in the
    order of `sort_candidates`, their weights [M, size] with zeros for removed tokens (never the
    first), and for which of the rows [M] the result is that of all of V.
    """
    settings = settings[rows]
    masses = split_blocks(weights, 0.0).sum(-1).sum(-1, dtype=torch.float64)[rows]
    is_all = len(rows) == len(logits)  # saves a copy
    values, ids = sort_candidates(logits if is_all else logits.index_select(0, rows), size)
    sorted_weights = weights[rows[:, None], ids]
    limits = torch.minimum(
        count_min_p(sorted_weights, settings.min_p), count_top_k(settings.top_k, size)
    )
    counts = torch.minimum(limits, count_top_p(sorted_weights, limits, masses, settings.top_p))
    is_settled = _is_settled(values, limits, counts, settings, logits.shape[1])
    return ids, keep_first(sorted_weights, counts), is_settled


def _is_settled(
    values: Tensor, limits: Tensor, counts: Tensor, settings: SamplingRows, vocab_size: int
) -> Tensor:
    """Whether sorting the whole vocabulary would give the same `counts` and the same ids."""
    size = values.shape[1]
    if size == vocab_size:
        return torch.ones_like(counts, dtype=torch.bool)
    # 1. The last kept token is larger than the last candidate, which may have equals outside.
    cut_inside = values.gather(1, counts[:, None] - 1)[:, 0] > values[:, -1]
    # 2. The mass that top_p refers to is known: that of all tokens, or of `limits` tokens.
    unlimited = (settings.top_k == 0) & (settings.min_p == 0)
    return cut_inside & (unlimited | (limits < size))


def sort_candidates(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the `size` largest logits of each row, largest first, equal ones by ascending id.

    logits [N, V] -> values [N, size], ids [N, size] int64.
    [[1., 3., 2., 3.]], 3 -> [[3., 3., 2.]], [[1, 3, 2]]. If several logits equal the last value,
    it is undefined which of them are included.
    """
    if size == logits.shape[1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids
    # topk returns equal values in any order, so sort by id, then stably by value.
    ids = find_largest(logits, size).sort(dim=-1).values
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def find_largest(logits: Tensor, size: int) -> Tensor:
    """Return the ids of the `size` largest logits of each row, in any order: [N, V] -> [N, size].

    Several times faster than topk: they are all in the `size` groups with the largest maxima.
    """
    num_groups = logits.shape[1] // GROUP
    if logits.shape[1] % GROUP or num_groups < 2 * size:
        return logits.topk(size, sorted=False).indices
    # Group g contains the ids g, g + num_groups, ...: a CPU computes maxima across rows of memory
    # fast, and frequent tokens, neighbours in most vocabularies, are in different groups.
    maxima = logits.unflatten(1, (GROUP, num_groups)).amax(1)
    groups = maxima.topk(size, sorted=False).indices
    members = torch.arange(0, logits.shape[1], num_groups, device=logits.device)
    ids = (groups[:, None] + members[:, None]).flatten(1)
    return ids.gather(1, logits.gather(1, ids).topk(size, sorted=False).indices)


def count_min_p(sorted_weights: Tensor, min_p: Tensor) -> Tensor:
    """Return how many tokens are at least `min_p` times as probable as the most probable one.

    sorted_weights [M, C] float32, most probable first; min_p [M] -> [M] int64, at least 1.
    [[.5, .3, .2]] with 0.5 -> [2]: .2 is below 0.5 * .5. With 0 -> [3].
    Source: Nguyen et al. 2024, "Turning Up the Heat: Min-p Sampling".
    """
    threshold = min_p[:, None] * sorted_weights[:, :1]
    return (sorted_weights >= threshold).sum(-1).clamp(min=1)


def count_top_k(top_k: Tensor, size: int) -> Tensor:
    """Return how many of `size` tokens top_k keeps.

    top_k [M] int64, 0: off -> [M] int64. [0, 2, 9] of 5 tokens -> [5, 2, 5].
    """
    return torch.where(top_k > 0, top_k, size).clamp(max=size)


def count_top_p(sorted_weights: Tensor, limits: Tensor, masses: Tensor, top_p: Tensor) -> Tensor:
    """Return the size of the smallest set of most probable tokens with the share `top_p` of a mass.

    sorted_weights [M, C] float32, most probable first; top_p [M] in (0, 1], 1: off -> [M] int64,
    1 to C. The mass is that of the tokens other filters left, the first `limits` [M] int64; if
    these are all C candidates, it is `masses` [M] float64, which includes tokens beyond them.
    [[5, 3, 2]], masses [10], limits [3]: 0.7 -> [2], 0.1 -> [1], 1 -> [3]; limits [2], 0.6 -> [1].
    Source: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section 3.1.
    """
    size = sorted_weights.shape[1]
    cdf = sorted_weights.cumsum(-1, dtype=torch.float64)
    masses = torch.where(limits < size, cdf.gather(1, limits[:, None] - 1)[:, 0], masses)
    counts = torch.searchsorted(cdf, (top_p * masses)[:, None])[:, 0] + 1
    # Off is a separate case: a rounded sum may reach the mass too early, or never.
    return torch.where(top_p < 1, counts, size).clamp(max=size)


def keep_first(weights: Tensor, counts: Tensor) -> Tensor:
    """Set all but the first `counts` weights of each row to zero.

    weights [M, C] float32, counts [M] int64 -> [M, C]. [[5, 3, 2]], [2] -> [[5, 3, 0]].
    """
    places = torch.arange(weights.shape[1], device=weights.device)
    return torch.where(places < counts[:, None], weights, 0.0)
