"""Random numbers that are a function of a seed and a counter, with no state in between.

Leaves out what they are used for (`sampler`). Notebook 10.
"""

from __future__ import annotations

import torch
from torch import Tensor

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


def gumbel_noise(bits: Tensor) -> Tensor:
    """-log(-log(u)) of the upper 52 bits as a number u in (0, 1), both ends excluded.

    int64 -> float64, finite for all bits: 0 -> -3.604, -1 (all ones) -> 36.737.
    """
    # 52 and a half: with 53 bits the largest u would round to 1, and its noise be inf.
    uniform = (_shift_right(bits, 12).double() + 0.5) * 2**-52
    return -torch.log(-torch.log(uniform))
