"""noise: the same numbers everywhere, and no pattern along seeds, positions or bits."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from sampling_cases import assert_fits

from minivllm import drawing
from minivllm.drawing import gumbel_noise, hash_counter, mix_bits, to_uniform

ALL_ONES = -1  # all 64 bits set


def python_mix(x: int) -> int:
    """The same in Python's integers, which have as many bits as they need."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def test_mix_bits_is_splitmix64() -> None:
    """The first numbers of the published generator from state 0, and Python's integers."""
    states = torch.tensor([1, 2, 3]) * drawing.GOLDEN
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [x % 2**64 for x in mix_bits(states).tolist()] == published
    for x in (0, 1, 2**62 + 12345, 2**63 - 1, -1, -(2**63)):
        assert mix_bits(torch.tensor(x)).item() % 2**64 == python_mix(x % 2**64)


def test_hash_counter_is_a_sequence_of_the_scrambled_seed() -> None:
    """The numbers do not depend on the machine or the version, so a seed lasts."""
    golden = drawing.GOLDEN % 2**64
    for seed, counter in ((0, 0), (0, 1), (5, 0), (2**63 - 1, 2**20)):
        start = python_mix((seed + golden) % 2**64)
        expected = python_mix((start + (counter + 1) * golden) % 2**64)
        bits = hash_counter(torch.tensor(seed), torch.tensor(counter)).item()
        assert bits % 2**64 == expected
    assert hash_counter(torch.tensor(0), torch.tensor(0)).item() == -6411193824288604561


def test_one_input_bit_flips_half_the_output_bits() -> None:
    """On average over inputs, for each of the 64 input bits."""
    inputs = hash_counter(torch.tensor(1), torch.arange(500))
    for bit in range(64):
        flip = torch.tensor(2**bit if bit < 63 else -(2**63))
        changed = mix_bits(inputs) ^ mix_bits(inputs ^ flip)
        ones = sum((changed >> i & 1).sum().item() for i in range(64))
        assert 0.48 < ones / (500 * 64) < 0.52, bit


def test_seed_0_at_position_0_is_as_random_as_any() -> None:
    """No fixed point of the hash: neither zero nor near the ends."""
    bits = hash_counter(torch.tensor([0]), torch.tensor([0]))
    assert bits.item() != 0
    assert 0.01 < to_uniform(bits).item() < 0.99


def test_uniforms_lie_in_0_to_1() -> None:
    """0 can be, 1 cannot: not even for the largest of all bit patterns."""
    bits = torch.tensor([0, 2**62, -(2**63), ALL_ONES])
    assert to_uniform(bits).dtype == torch.float64
    assert to_uniform(bits).tolist() == [0.0, 0.25, 0.5, 1 - 2**-53]


@pytest.mark.parametrize("direction", ["seeds", "positions"])
def test_hash_is_uniform_along(direction: str) -> None:
    """50,000 neighbours fall evenly into 64 bins, by their upper and by their lower bits."""
    line, fixed = torch.arange(50_000), torch.tensor(0)
    bits = hash_counter(line, fixed) if direction == "seeds" else hash_counter(fixed, line)
    upper = (to_uniform(bits) * 64).long()
    assert_fits(upper.bincount(minlength=64), [1 / 64] * 64)
    assert_fits((bits & 63).bincount(minlength=64), [1 / 64] * 64)


@pytest.mark.parametrize("step", [(0, 1), (1, 0), (1, -1), (1, 1)])
def test_neighbours_are_independent(step: tuple[int, int]) -> None:
    """(seed, position) and its neighbour fill an 8 x 8 grid of pairs evenly."""
    seeds, positions = torch.arange(200)[:, None], torch.arange(1, 201)[None, :]
    here = (to_uniform(hash_counter(seeds, positions)) * 8).long()
    there = (to_uniform(hash_counter(seeds + step[0], positions + step[1])) * 8).long()
    pairs = (here * 8 + there).flatten()
    assert_fits(pairs.bincount(minlength=64), [1 / 64] * 64)


def test_no_two_of_many_counters_collide() -> None:
    """500 seeds by 500 positions: as many different hashes."""
    bits = hash_counter(torch.arange(500)[:, None], torch.arange(500)[None, :])
    assert len(set(bits.flatten().tolist())) == 250_000


def test_gumbel_noise_is_finite_for_all_bits() -> None:
    """A uniform of exactly 0 or 1 would be inf, and inf - inf NaN."""
    noise = gumbel_noise(torch.tensor([0, 1, 2**62, -(2**63), ALL_ONES]))
    assert noise.isfinite().all()
    assert noise[2].item() == pytest.approx(-math.log(-math.log(0.25)))
    assert noise.tolist()[0] == pytest.approx(-3.604, abs=1e-3)
    assert noise.tolist()[-1] == pytest.approx(36.737, abs=1e-3)
