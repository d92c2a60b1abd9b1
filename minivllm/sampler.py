"""Logits to token ids: greedy, temperature, top-k, top-p, min-p, and a seed per request.

Leaves out what happens to the logits before (`logits_processors`) and where random numbers
come from (`noise`). Notebook 10.
Letters: N rows that sample, V vocabulary, M rows that filter, C candidates of a row.

A token's noise is a hash of its request's seed and its position, never a shared generator,
and no operation mixes rows: a row's token depends on that row alone. The CPU form spends one
random number a row (`draw`), the GPU form one per row and token (`gumbel_sample`): for one
seed they give different tokens, of the same distribution.

A captured CUDA graph can hold what has the same shapes in every step and asks the host
nothing: greedy, temperature and seed. All else takes the uncaptured path. top_k, top_p and
min_p look on the host whether the candidates sufficed; logit_bias, min_tokens, the penalties
and logprobs work on as many rows and positions as ask for them in this step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.logits_processors import process_logits
from minivllm.noise import gumbel_noise, hash_counter, to_uniform
from minivllm.rows import SamplingRows

# Candidates a filter looks at, first and second; a row they do not settle sorts all of V.
CANDIDATES = (256, 4096)
# Logits a CPU works on at once, so that each pass finds them in the cache: 3 MiB of float32.
CPU_LOGITS = 3 * 2**18
# Neighbouring tokens that are first looked at as one. Divides the usual vocabulary sizes.
BLOCK = 128
# Tokens of a group of which at first only the largest is looked at. See `find_largest`.
GROUP = 16


def sample(logits: Tensor, settings: SamplingRows, positions: Tensor) -> Tensor:
    """Choose the next token of each row. `logits` are left as they are.

    logits [N, V] float32, positions [N] int64 -> token ids [N] int64. `positions` are those
    of the tokens to be chosen: after a prompt of 5 tokens the first is 5.
    All applies in vLLM's order: biases, penalties, temperature, min_p, top_k, top_p; so greedy
    takes penalties in, and top_p is a share of what the other filters left. A row of NaN gets
    some valid id and disturbs no other row.
    """
    logits = process_logits(logits, settings, positions)
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
    """Like `sample`, with uniforms [N] float64; `buffer` [at least N, V] is overwritten."""
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
    blocks = _split_blocks(logits, -torch.inf)
    best = blocks.amax(-1).argmax(-1)
    rows = torch.arange(len(logits), device=logits.device)
    return best * BLOCK + blocks[rows, best].argmax(-1)


def _split_blocks(x: Tensor, padding: float) -> Tensor:
    """[N, V] -> [N, V / BLOCK, BLOCK], rounded up."""
    missing = -x.shape[1] % BLOCK
    if missing:
        x = F.pad(x, (0, missing), value=padding)
    return torch.unflatten(x, 1, (-1, BLOCK))


def weigh(logits: Tensor, temperature: Tensor, out: Tensor | None = None) -> Tensor:
    """exp((logits - the row's largest) / temperature): probabilities, up to a factor per row.

    logits [N, V] float32, temperature [N] float32, where 0 counts as 1 -> [N, V] float32 in
    [0, 1], finite at every temperature; written to `out` if given. The largest has weight 1.
    [[0., ln 3]] at 1 -> [[1/3, 1]], at 0.5 -> [[1/9, 1]], at 1e-38 -> [[0., 1.]].
    """
    temperature = torch.where(temperature > 0, temperature, 1.0)
    # The maximum goes first: 20 / 1e-38 would be inf, and inf - inf NaN. This way the largest
    # is 0 / 1e-38 = 0, and the others may well become -inf.
    shifted = torch.sub(logits, logits.amax(-1, keepdim=True), out=out)
    exponents = shifted.div_((temperature * math.log(2))[:, None])
    # exp(x) = 2^(x / ln 2), and powers of 2 take a CPU half the time. It rounds the last few
    # numbers of a tensor differently, so each row is one: alone and in a batch it is the same.
    for rows in exponents if exponents.is_cpu else (exponents,):
        rows.exp2_()
    return exponents


# -- the filters -------------------------------------------------------------------------


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
    masses = _split_blocks(weights, 0.0).sum(-1).sum(-1, dtype=torch.float64)[rows]
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


# -- drawing -----------------------------------------------------------------------------


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row with probabilities in proportion to its weights; never a 0.

    weights [N, V] float32; uniforms [N] float64 in [0, 1) -> [N] int64.
    [[5, 0, 5]] with 0.49 -> 0, with 0.5 -> 2. A row of NaN gives some id.
    """
    # First a block, then a token of it, with what the first draw left of the uniform: the
    # running sums of a few blocks are several times cheaper than those of a vocabulary.
    blocks = _split_blocks(weights, 0.0)
    block_ids, uniforms = invert_cdf(blocks.sum(-1), uniforms)
    rows = torch.arange(len(weights), device=weights.device)
    places, _ = invert_cdf(blocks[rows, block_ids], uniforms)
    return (block_ids * BLOCK + places).clamp(max=weights.shape[1] - 1)


def invert_cdf(masses: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The first place whose running sum exceeds `uniforms` of the whole sum, and how far into
    that place's mass this share falls. A place of mass 0 is never chosen.

    masses [N, C] float32, uniforms [N] float64 in [0, 1) -> [N] int64, [N] float64 in [0, 1).
    [[.5, 0, .5]] (running sums .5, .5, 1) with 0.25 -> [0], [0.5]; with 0.5 -> [2], [0.0].
    The second is again uniform, and independent of the first.
    """
    # float64, in which u * total < total for every u < 1: so the end is never passed.
    cdf = masses.cumsum(-1, dtype=torch.float64)
    targets = uniforms[:, None] * cdf[:, -1:]
    # right=True: the first sum *above* the target, so it rose there: not a place of mass 0.
    places = torch.searchsorted(cdf, targets, right=True).clamp(max=masses.shape[1] - 1)  # NaN
    mass = masses.gather(1, places).double()
    rest = (targets - (cdf.gather(1, places) - mass)) / mass
    return places[:, 0], rest[:, 0].clamp(0.0, 1 - 2**-53)  # rounding may leave [0, 1)


# -- the GPU form ------------------------------------------------------------------------


def gumbel_sample(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one token per row with probability softmax(logits): the argmax of logits + noise.

    logits [N, V] float32, already divided by the temperature, -inf where a filter removed a
    token; seeds, positions [N] int64 -> [N] int64. The noise is a function of (seed,
    position, token id). No sum over V, one pass: the form for a GPU kernel, and its oracle.
    Not the tokens of `sample` for the same seed, but the same distribution.
    Idea: Gumbel 1954; Maddison, Tarlow and Minka 2014, "A* Sampling".
    """
    row_bits = hash_counter(seeds, positions)[:, None]
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    return (logits + gumbel_noise(hash_counter(row_bits, token_ids))).argmax(-1)
