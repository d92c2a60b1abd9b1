"""Random numbers from a seed and a counter, and one token per row drawn with them.

The noise is a hash: a function of its seed and counter, without state. Does not decide which
tokens can be drawn (see `filters`). Notebook 10.

Letters: N rows that sample, V vocabulary, C places.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# Logits that a CPU processes at once, so that they stay in its cache: 3 MiB of float32.
CPU_LOGITS = 3 * 2**18
# Neighbouring tokens that are first treated as one. Divides the usual vocabulary sizes.
BLOCK = 128


# -- noise: a seed and a counter to random bits ----------------------------------------------------

# SplitMix64's constants as int64: values from 2^63 on become negative.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio, the step of the counter
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64


def mix_bits(x: Tensor) -> Tensor:
    """Scramble 64 bits, one to one: a change of any input bit flips about half the output bits.

    int64 -> int64, same shape; 0 -> 0, 1 -> 6238072747940578789.
    Source: the finaliser of SplitMix64, Steele, Lea and Flood 2014, "Fast Splittable
    Pseudorandom Number Generators", with the constants of its variant 13.
    """
    x = (x ^ _shift_right(x, 30)) * MIX_1  # int64 products wrap around
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # `>>` on int64 fills with copies of the sign bit; the mask clears them.
    return (x >> bits) & (2 ** (64 - bits) - 1)


def hash_counter(seeds: Tensor, counters: Tensor) -> Tensor:
    """Return 64 random bits that depend only on (seed, counter).

    seeds, counters int64, broadcast against each other -> int64: number `counters` (from 0) of
    the SplitMix64 sequence of the scrambled seed (the sequences of raw seeds overlap).
    (0, 0) -> -6411193824288604561, (0, 1) -> -5511663747979980962.
    """
    return mix_bits(mix_bits(seeds + GOLDEN) + (counters + 1) * GOLDEN)


def to_uniform(bits: Tensor) -> Tensor:
    """Return the upper 53 bits as a number in [0, 1).

    int64 -> float64. 0 -> 0.0, 2**62 -> 0.25, -1 (all ones) -> 1 - 2**-53.
    """
    return _shift_right(bits, 11).double() * 2**-53


def gumbel_noise(bits: Tensor) -> Tensor:
    """Return -log(-log(u)) of the upper 52 bits as a number u in (0, 1), both ends excluded.

    int64 -> float64, finite for all bits: 0 -> -3.604, -1 (all ones) -> 36.737.
    """
    # 52 bits and a half: with 53 bits the largest u would round to 1, with infinite noise.
    uniform = (_shift_right(bits, 12).double() + 0.5) * 2**-52
    return -torch.log(-torch.log(uniform))


# -- drawing from weights --------------------------------------------------------------------------


def weigh(logits: Tensor, temperature: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the probabilities of the tokens up to one factor per row: the largest weight is 1.

    logits [N, V] float32, temperature [N] float32, both unchanged -> [N, V] float32. Temperature 0
    counts as 1. The weights are in [0, 1] at every temperature, never NaN, and a row's weights do
    not depend on other rows. `out` [N, V] float32, if given, is memory that the result may use.
    [[0., ln 3]] at 1 -> [[1/3, 1]], at 0.5 -> [[1/9, 1]], at 1e-38 -> [[0., 1.]].
    """
    temperature = torch.where(temperature > 0, temperature, 1.0)
    # Subtracting first makes the largest 0 / 1e-38 = 0. Dividing first would give 20 / 1e-38 = inf,
    # and inf - inf = NaN.
    shifted = torch.sub(logits, logits.amax(-1, keepdim=True), out=out)
    exponents = shifted.div_((temperature * math.log(2))[:, None])
    # exp(x) = 2^(x / ln 2), and powers of 2 are twice as fast on a CPU. Vectorised code rounds the
    # last few numbers of a tensor differently, so each row is a tensor of its own: then a row is
    # the same alone and in a batch.
    for rows in exponents if exponents.is_cpu else (exponents,):
        rows.exp2_()
    return exponents


def split_blocks(x: Tensor, padding: float) -> Tensor:
    """Split each row into blocks, the last one padded: [N, V] -> [N, ceil(V / BLOCK), BLOCK]."""
    missing = -x.shape[1] % BLOCK
    if missing:
        x = F.pad(x, (0, missing), value=padding)
    return torch.unflatten(x, 1, (-1, BLOCK))


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row, with probabilities proportional to the weights.

    weights [N, V] float32; uniforms [N] float64 in [0, 1) -> [N] int64. A token of weight 0 is
    never drawn. [[5, 0, 5]] with 0.49 -> 0, with 0.5 -> 2. A row of NaN gives any valid id.
    """
    # First a block, then a token of it, with what the first draw left of the uniform: the
    # running sums of a few blocks are several times cheaper than those of a vocabulary.
    blocks = split_blocks(weights, 0.0)
    block_ids, uniforms = invert_cdf(blocks.sum(-1), uniforms)
    rows = torch.arange(len(weights), device=weights.device)
    places, _ = invert_cdf(blocks[rows, block_ids], uniforms)
    return (block_ids * BLOCK + places).clamp(max=weights.shape[1] - 1)


def invert_cdf(masses: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each row, the place whose mass contains the share `uniforms` of the whole mass,
    and how far into that place's mass the share falls, from 0 to 1.

    masses [N, C] float32, uniforms [N] float64 in [0, 1) -> [N] int64, [N] float64 in [0, 1).
    [[.5, 0, .5]] with 0.25 -> [0], [0.5]; with 0.5 -> [2], [0.0]. A place of mass 0 is never
    chosen. The error is that of float64. A row of NaN gives any valid place.
    """
    # In float64, u * total < total for every u < 1, so the target is never past the end.
    cdf = masses.cumsum(-1, dtype=torch.float64)
    targets = uniforms[:, None] * cdf[:, -1:]
    # right=True: the first sum *above* the target, so the mass of that place is not 0.
    places = torch.searchsorted(cdf, targets, right=True).clamp(max=masses.shape[1] - 1)  # NaN
    mass = masses.gather(1, places).double()
    rest = (targets - (cdf.gather(1, places) - mass)) / mass
    return places[:, 0], rest[:, 0].clamp(0.0, 1 - 2**-53)  # rounding may leave [0, 1)
