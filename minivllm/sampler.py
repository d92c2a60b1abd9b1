"""Logits to token ids: greedy, temperature, top-k, top-p, min-p, and a seed per request.

Leaves out on purpose penalties, logprobs and logit bias. Notebook 10.
Letters: N rows that sample, V vocabulary, M rows that filter, C candidates of a row.

A token's noise is a hash of its request's seed and its position, never a shared generator,
and no operation mixes rows: a row's token depends on that row alone. The CPU form spends one
random number a row (`draw`), the GPU form one per row and token (`gumbel_sample`): for one
seed they give different tokens, of the same distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.rows import SamplingRows

# Candidates a filter looks at, first and second; a row they do not settle sorts all of V.
CANDIDATES = (256, 4096)
# Logits a CPU works on at once, so that each pass finds them in the cache: 1.5 MiB of float32.
CPU_LOGITS = 3 * 2**17
# Neighbouring tokens that are first looked at as one. Divides the usual vocabulary sizes.
BLOCK = 128


def sample(logits: Tensor, settings: SamplingRows, positions: Tensor) -> Tensor:
    """Choose the next token of each row. `logits` are left as they are.

    logits [N, V] float32, positions [N] int64 -> token ids [N] int64. `positions` are those
    of the tokens to be chosen: after a prompt of 5 tokens the first is 5.
    The filters apply in vLLM's order: temperature, min_p, top_k, top_p; so top_p is a share
    of what the others left. A row of NaN gets some valid id and disturbs no other row.
    With filters the host looks at device values, which a CUDA graph cannot capture.
    """
    token_ids = pick_greedy(logits)
    if not settings.any_random:
        return token_ids
    uniforms = to_uniform(hash_counter(settings.seed, positions))
    # Big temporaries cost a CPU more in page faults and cache misses than the work itself.
    step = max(1, CPU_LOGITS // logits.shape[1] if logits.is_cpu else len(logits))
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        drawn = draw(next_token_probs(logits[rows], settings[rows]), uniforms[rows])
        is_random = settings.temperature[rows] > 0
        token_ids[rows] = torch.where(is_random, drawn, token_ids[rows])
    return token_ids


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


# -- the distribution --------------------------------------------------------------------


def next_token_probs(logits: Tensor, settings: SamplingRows) -> Tensor:
    """The distribution that `sample` draws from, up to a factor per row.

    logits [N, V] float32 -> [N, V] float32: the softmax at the row's temperature (at 1 where
    that is 0), with zeros for the tokens that its filters removed.
    Logits of probabilities .5, .3, .2 with top_k=2 -> [.5, .3, 0].
    """
    probs = probs_at_temperature(logits, settings.temperature)
    return filter_probs(logits, probs, settings) if settings.any_filter else probs


def probs_at_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """softmax(logits / temperature), finite at every temperature; 0 counts as 1.

    logits [N, V] float32, temperature [N] float32 -> [N, V] float32.
    [[0., ln 3]] at 1 -> [[.25, .75]], at 0.5 -> [[.1, .9]], at 1e-38 -> [[0., 1.]].
    """
    temperature = torch.where(temperature > 0, temperature, 1.0)
    # The maximum goes first: 20 / 1e-38 would be inf, and inf - inf NaN. This way the largest
    # is 0 / 1e-38 = 0, and the others may well become -inf.
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted.div_(temperature[:, None]).softmax(-1)


def filter_probs(
    logits: Tensor, probs: Tensor, settings: SamplingRows, candidates: Sequence[int] = CANDIDATES
) -> Tensor:
    """Set the probability of all tokens to 0 that a row's min_p, top_k and top_p remove.

    logits, probs [N, V] float32 -> [N, V] float32, not renormalised; at least one token a
    row stays. What stays is a beginning of the row's tokens in the order of `sort_candidates`.
    `candidates` are the sizes to try before all of V: they change the time, never the result.
    """
    vocab_size = logits.shape[1]
    filtered = probs.clone()
    rows = _rows_that_filter(settings, vocab_size)
    for size in [size for size in (*candidates, vocab_size) if size <= vocab_size]:
        if not len(rows):
            break
        # index_select and index_copy_ move whole rows, several times faster than [rows] does.
        some_logits, some_probs = logits.index_select(0, rows), probs.index_select(0, rows)
        kept, is_settled = _filter_among(some_logits, some_probs, settings[rows], size)
        filtered.index_copy_(0, rows, kept)  # what is not settled is soon overwritten
        rows = rows[~is_settled]
    return filtered


def _rows_that_filter(settings: SamplingRows, vocab_size: int) -> Tensor:
    top_k = (settings.top_k > 0) & (settings.top_k < vocab_size)
    some_filter = top_k | (settings.top_p < 1) | (settings.min_p > 0)
    return (some_filter & (settings.temperature > 0)).nonzero()[:, 0]


def _filter_among(
    logits: Tensor, probs: Tensor, settings: SamplingRows, size: int
) -> tuple[Tensor, Tensor]:
    """Filter by looking at `size` candidates: probs [M, V], and for whom [M] that was enough."""
    values, ids = sort_candidates(logits, size)
    sorted_probs = probs.gather(1, ids)
    limits = torch.minimum(
        count_min_p(sorted_probs, settings.min_p), count_top_k(settings.top_k, size)
    )
    counts = torch.minimum(limits, count_top_p(sorted_probs, limits, settings.top_p))
    return keep_first(probs, ids, counts), _is_settled(values, limits, counts, settings, logits)


def _is_settled(
    values: Tensor, limits: Tensor, counts: Tensor, settings: SamplingRows, logits: Tensor
) -> Tensor:
    """Whether the whole vocabulary, sorted, would give the same `counts` and the same ids."""
    size = values.shape[1]
    if size == logits.shape[1]:
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
    ids = logits.topk(size, sorted=False).indices.sort(dim=-1).values
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def count_min_p(sorted_probs: Tensor, min_p: Tensor) -> Tensor:
    """How many tokens are at least `min_p` times as probable as the most probable one.

    sorted_probs [M, C] float32, most probable first; min_p [M] -> [M] int64, at least 1.
    [[.5, .3, .2]] with 0.5 -> [2]: .2 is below 0.5 * .5. With 0 -> [3].
    Idea: Nguyen et al. 2024, "Turning Up the Heat: Min-p Sampling".
    """
    threshold = min_p[:, None] * sorted_probs[:, :1]
    return (sorted_probs >= threshold).sum(-1).clamp(min=1)


def count_top_k(top_k: Tensor, size: int) -> Tensor:
    """How many of `size` tokens top_k leaves.

    top_k [M] int64, 0 for off -> [M] int64. [0, 2, 9] of 5 tokens -> [5, 2, 5].
    """
    return torch.where(top_k > 0, top_k, size).clamp(max=size)


def count_top_p(sorted_probs: Tensor, limits: Tensor, top_p: Tensor) -> Tensor:
    """How many tokens it takes to reach the share `top_p` of the mass of the first `limits`.

    sorted_probs [M, C] float32, most probable first; limits [M] int64, where C means that
    nothing else limits the row, so its mass is 1; top_p [M] -> [M] int64, from 1 to C.
    The token that reaches the share counts. [[.5, .3, .2]]: 0.7 -> [2], 0.1 -> [1], and
    with limits [2], so of a mass of .8: 0.6 -> [1]. At 1 top_p is off -> [C].
    Idea: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section 3.1.
    """
    size = sorted_probs.shape[1]
    cdf = sorted_probs.cumsum(-1, dtype=torch.float64)
    mass = torch.where(limits < size, cdf.gather(1, limits[:, None] - 1)[:, 0], 1.0)
    counts = torch.searchsorted(cdf, (top_p * mass)[:, None])[:, 0] + 1
    # Off is a rule of its own: a rounded sum may reach 1 early, or never.
    return torch.where(top_p < 1, counts, size).clamp(max=size)


def keep_first(probs: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    """Zero all of a row but the first `counts` of its `ids`; the others keep their places.

    probs [M, V] float32, ids [M, C] int64, counts [M] int64 -> [M, V] float32.
    [[.2, .5, .3]], [[1, 2]], [1] -> [[0, .5, 0]].
    """
    is_kept = torch.arange(ids.shape[1], device=ids.device) < counts[:, None]
    kept = torch.where(is_kept, probs.gather(1, ids), 0.0)
    return torch.zeros_like(probs).scatter_(1, ids, kept)


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row with the row's probabilities; never one of probability 0.

    probs [N, V] float32, need not sum to 1; uniforms [N] float64 in [0, 1) -> [N] int64.
    [[.5, 0, .5]] with 0.49 -> 0, with 0.5 -> 2. A row of NaN gives some id.
    """
    # First a block, then a token of it, with what the first draw left of the uniform: the
    # running sums of a few blocks are several times cheaper than those of a vocabulary.
    blocks = _split_blocks(probs, 0.0)
    block_ids, uniforms = invert_cdf(blocks.sum(-1), uniforms)
    rows = torch.arange(len(probs), device=probs.device)
    places, _ = invert_cdf(blocks[rows, block_ids], uniforms)
    return (block_ids * BLOCK + places).clamp(max=probs.shape[1] - 1)


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


# -- the noise ---------------------------------------------------------------------------

# SplitMix64's numbers, as int64: what is over 2^63 wraps around to below zero.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio, the step of the counter
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64


def mix_bits(x: Tensor) -> Tensor:
    """Scramble 64 bits, one to one: a change of any input bit flips about half the output.

    int64 -> int64, same shape; 0 -> 0, 1 -> 6238072747940578789.
    Idea: the finaliser of SplitMix64, Steele, Lea and Flood 2014, "Fast Splittable
    Pseudorandom Number Generators", with the constants of its variant 13.
    """
    x = (x ^ _shift_right(x, 30)) * MIX_1  # int64 products wrap around
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # `>>` on int64 copies the sign bit in from the left; the mask clears those copies.
    return (x >> bits) & (2 ** (64 - bits) - 1)


def hash_counter(seeds: Tensor, counters: Tensor) -> Tensor:
    """64 random bits that depend on (seed, counter) and on nothing else.

    seeds, counters int64, of shapes that broadcast -> int64: number `counters` (from 0) of
    the SplitMix64 sequence of the scrambled seed (the sequences of raw seeds overlap).
    (0, 0) -> -6411193824288604561, (0, 1) -> -5511663747979980962.
    """
    return mix_bits(mix_bits(seeds + GOLDEN) + (counters + 1) * GOLDEN)


def to_uniform(bits: Tensor) -> Tensor:
    """The upper 53 bits as a number in [0, 1).

    int64 -> float64. 0 -> 0.0, 2**62 -> 0.25, -1 (all ones) -> 1 - 2**-53.
    """
    return _shift_right(bits, 11).double() * 2**-53


# -- the GPU form ------------------------------------------------------------------------


def gumbel_noise(bits: Tensor) -> Tensor:
    """-log(-log(u)) of the upper 52 bits as a number u in (0, 1), both ends excluded.

    int64 -> float64, finite for all bits: 0 -> -3.604, -1 (all ones) -> 36.737.
    """
    # 52 and a half: with 53 bits the largest u would round to 1, and its noise be inf.
    uniform = (_shift_right(bits, 12).double() + 0.5) * 2**-52
    return -torch.log(-torch.log(uniform))


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
