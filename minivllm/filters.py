"""top_k, top_p and min_p: which tokens may be drawn at all.

Leaves out drawing (`drawing`) and what changes logits before (`logits_processors`). Notebook 10.
Letters: N rows that sample, V vocabulary, M rows that filter, C candidates of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minivllm.drawing import CPU_LOGITS, invert_cdf, split_blocks
from minivllm.rows import SamplingRows

# Candidates a filter looks at, first and second; a row they do not settle sorts all of V.
CANDIDATES = (256, 4096)
# Tokens of a group of which at first only the largest is looked at. See `find_largest`.
GROUP = 16


def draw_filtered(
    token_ids: Tensor,
    logits: Tensor,
    weights: Tensor,
    settings: SamplingRows,
    uniforms: Tensor,
    candidates: Sequence[int] = CANDIDATES,
) -> Tensor:
    """`token_ids`, those of the rows that filter drawn anew among what their filters leave.

    token_ids [N] int64, logits, weights [N, V] float32, uniforms [N] float64 -> [N] int64.
    `candidates`: how many tokens to look at before all of V. They change the time alone.
    """
    token_ids, vocab_size = token_ids.clone(), logits.shape[1]
    rows = _rows_that_filter(settings, vocab_size)
    for size in [size for size in (*candidates, vocab_size) if size <= vocab_size]:
        unsettled = [rows[:0]]  # a few rows at once, for sorting takes many times their memory
        for some in rows.split(max(1, CPU_LOGITS // size)) if len(rows) else ():
            ids, kept, is_settled = filter_among(logits, weights, settings, some, size)
            places, _ = invert_cdf(kept, uniforms[some])
            token_ids[some] = ids.gather(1, places[:, None])[:, 0]  # of the unsettled, for now
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
    """Filter the `size` most probable tokens of some rows: what stays is a beginning of these.

    logits, weights [N, V] float32, rows [M] int64, ascending -> token ids [M, size] in the
    order of `sort_candidates`, their weights [M, size] with zeros for what a filter removed
    (never the first), and for which of the rows [M] this is what all of V would give.
    """
    settings = settings[rows]
    masses = split_blocks(weights, 0.0).sum(-1).sum(-1, dtype=torch.float64)[rows]
    is_all = len(rows) == len(logits)  # then do without a copy
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
    """Whether the whole vocabulary, sorted, would give the same `counts` and the same ids."""
    size = values.shape[1]
    if size == vocab_size:
        return torch.ones_like(counts, dtype=torch.bool)
    # 1. The cut is inside, not among equals of the last candidate, of which more are outside.
    cut_inside = values.gather(1, counts[:, None] - 1)[:, 0] > values[:, -1]
    # 2. The mass that top_p is a share of is known: that of all tokens, or of `limits` tokens.
    unlimited = (settings.top_k == 0) & (settings.min_p == 0)
    return cut_inside & (unlimited | (limits < size))


def sort_candidates(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The `size` largest logits of each row, largest first, equal ones by ascending id.

    logits [N, V] -> values [N, size], ids [N, size] int64.
    [[1., 3., 2., 3.]], 3 -> [[3., 3., 2.]], [[1, 3, 2]]. Which of the equals of the last
    value are inside is not defined.
    """
    if size == logits.shape[1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids
    # topk leaves the order of equals open: so sort by id, then by value, stably.
    ids = find_largest(logits, size).sort(dim=-1).values
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def find_largest(logits: Tensor, size: int) -> Tensor:
    """The ids of the `size` largest logits of each row, in any order: [N, V] -> [N, size].

    As topk, and several times faster: they are in the `size` groups with the largest maxima.
    """
    num_groups = logits.shape[1] // GROUP
    if logits.shape[1] % GROUP or num_groups < 2 * size:
        return logits.topk(size, sorted=False).indices
    # Group g is the ids g, g + num_groups, ...: a CPU finds maxima across rows of memory fast,
    # and the frequent tokens, neighbours in most vocabularies, are in different groups.
    maxima = logits.unflatten(1, (GROUP, num_groups)).amax(1)
    groups = maxima.topk(size, sorted=False).indices
    members = torch.arange(0, logits.shape[1], num_groups, device=logits.device)
    ids = (groups[:, None] + members[:, None]).flatten(1)
    return ids.gather(1, logits.gather(1, ids).topk(size, sorted=False).indices)


def count_min_p(sorted_weights: Tensor, min_p: Tensor) -> Tensor:
    """How many tokens are at least `min_p` times as probable as the most probable one.

    sorted_weights [M, C] float32, most probable first; min_p [M] -> [M] int64, at least 1.
    [[.5, .3, .2]] with 0.5 -> [2]: .2 is below 0.5 * .5. With 0 -> [3].
    Idea: Nguyen et al. 2024, "Turning Up the Heat: Min-p Sampling".
    """
    threshold = min_p[:, None] * sorted_weights[:, :1]
    return (sorted_weights >= threshold).sum(-1).clamp(min=1)


def count_top_k(top_k: Tensor, size: int) -> Tensor:
    """How many of `size` tokens top_k leaves.

    top_k [M] int64, 0 for off -> [M] int64. [0, 2, 9] of 5 tokens -> [5, 2, 5].
    """
    return torch.where(top_k > 0, top_k, size).clamp(max=size)


def count_top_p(sorted_weights: Tensor, limits: Tensor, masses: Tensor, top_p: Tensor) -> Tensor:
    """How many tokens it takes to reach the share `top_p` of the mass of the first `limits`.

    sorted_weights [M, C] float32, most probable first; limits [M] int64, where C means that
    nothing else limits the row: then its mass is `masses` [M] float64, that of all tokens;
    top_p [M] -> [M] int64, from 1 to C.
    The token that reaches the share counts. [[5, 3, 2]] of mass 10: 0.7 -> [2], 0.1 -> [1], and
    with limits [2], so of a mass of 8: 0.6 -> [1]. At 1 top_p is off -> [C].
    Idea: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section 3.1.
    """
    size = sorted_weights.shape[1]
    cdf = sorted_weights.cumsum(-1, dtype=torch.float64)
    masses = torch.where(limits < size, cdf.gather(1, limits[:, None] - 1)[:, 0], masses)
    counts = torch.searchsorted(cdf, (top_p * masses)[:, None])[:, 0] + 1
    # Off is a rule of its own: a rounded sum may reach the mass early, or never.
    return torch.where(top_p < 1, counts, size).clamp(max=size)


def keep_first(weights: Tensor, counts: Tensor) -> Tensor:
    """Zero all of a row but its first `counts` weights.

    weights [M, C] float32, counts [M] int64 -> [M, C]. [[5, 3, 2]], [2] -> [[5, 3, 0]].
    """
    places = torch.arange(weights.shape[1], device=weights.device)
    return torch.where(places < counts[:, None], weights, 0.0)
