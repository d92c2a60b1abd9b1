"""Sampling in two launches against `sampler.gumbel_sample`: on a GPU if there is one, else in
Triton's interpreter."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
if find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton; Linux only)", allow_module_level=True)

import triton
import triton.language as tl

from minivllm import drawing, sampler
from minivllm.gpu.sampling_kernels import TILE, gumbel, gumbel_sample, hash_counter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = float("inf")

# -- random numbers --


@triton.jit
def _hash_kernel(seeds, counters, out, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    bits = hash_counter(tl.load(seeds + places), tl.load(counters + places))
    tl.store(out + places, bits)


@triton.jit
def _gumbel_kernel(bits, out, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(out + places, gumbel(tl.load(bits + places)))


def noise_of(bits: Tensor) -> Tensor:
    """What the kernel makes of each number."""
    out = torch.empty(len(bits), device=DEVICE)
    _gumbel_kernel[(1,)](bits.to(DEVICE), out, SIZE=len(bits))
    return out.cpu().double()


def test_the_bits_are_those_of_the_oracle() -> None:
    """Small, large and negative seeds and counters; all 64 bits."""
    ends = torch.tensor([0, 1, -1, 2**31, 2**32 + 5, 2**63 - 1, -(2**63), 12345])
    seeds, counters = ends.repeat_interleave(8), ends.repeat(8)
    out = torch.empty(64, dtype=torch.int64, device=DEVICE)
    _hash_kernel[(1,)](seeds.to(DEVICE), counters.to(DEVICE), out, SIZE=64)
    assert out.tolist() == drawing.hash_counter(seeds, counters).tolist()
    assert out[0].item() == -6411193824288604561


def test_the_noise_is_that_of_the_oracle() -> None:
    """Also where u is all but 1: these are the tokens that win in a large vocabulary."""
    bits = drawing.hash_counter(torch.tensor(7), torch.arange(4096))
    torch.testing.assert_close(noise_of(bits), drawing.gumbel_noise(bits), atol=1e-4, rtol=0)
    near_one = -(torch.arange(1, 1025) * 2**44)  # u = 1 - 2^-20 and less
    given = noise_of(near_one)
    torch.testing.assert_close(given, drawing.gumbel_noise(near_one), atol=1e-3, rtol=0)
    assert given[0] > 13.8 and len(given.unique()) == 1024


def test_the_noise_is_finite_for_all_bits() -> None:
    """All zeros and all ones: infinite noise would choose any token, or none."""
    bits = torch.tensor([0, 1, -1, -2, 2**63 - 1, -(2**63), -(2**32), 2**32 - 1])
    given = noise_of(bits)
    assert given.isfinite().all() and given.min() < -3 and given.max() > 22


# -- tokens --


def run(logits: Tensor, temperature: list[float], seeds: list[int], positions: list[int]) -> Tensor:
    """The kernels on the device; the arguments may be shorter than the batch, and repeat."""
    columns = [torch.tensor(values * (len(logits) // len(values))).to(DEVICE)
               for values in (seeds, positions)]  # fmt: skip
    heat = torch.tensor(temperature * (len(logits) // len(temperature)), dtype=torch.float32)
    return gumbel_sample(logits.to(DEVICE), heat.to(DEVICE), *columns).cpu()


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("vocab_size", [7, TILE - 1, TILE, TILE + 1, 2 * TILE + 5])
def test_tokens_are_those_of_the_oracle(vocab_size: int) -> None:
    """Around the border of a tile, hot, cold and greedy rows in one batch. Noise differs in the
    last bits, so a tie might go another way; in these batches there is none."""
    logits = 3 * random(12, vocab_size)
    temperature, seeds, positions = [1.0, 0.0, 0.3, 5.0], [3, -9, 2**62], list(range(12))
    expected = sampler.gumbel_sample(
        logits, torch.tensor(temperature * 3), torch.tensor(seeds * 4), torch.tensor(positions)
    )
    given = run(logits, temperature, seeds, positions)
    assert given.dtype == torch.int64 and given.tolist() == expected.tolist()
    assert len(set(given.tolist())) > 3


def test_temperature_0_is_the_argmax_and_the_lowest_of_equals() -> None:
    """[1, 3, 3] gives 1; equal numbers in different tiles count as well."""
    logits = torch.zeros(4, 2 * TILE + 5)
    logits[0, 1:3], logits[1, [TILE + 7, 2 * TILE + 4]], logits[2, 2 * TILE + 4] = 3, 1, 0.5
    logits[3] = -torch.arange(2 * TILE + 5.0)
    assert run(logits, [0.0], [1], [1]).tolist() == [1, TILE + 7, 2 * TILE + 4, 0]


def test_a_token_depends_on_seed_and_position_alone() -> None:
    """Not on the row it is in, nor on the others."""
    logits = random(1, 500).expand(6, 500).contiguous()
    together = run(logits, [1.0], [5, 6, 5], [9, 9, 8, 8, 9, 9]).tolist()
    assert together[0] == run(logits[:1], [1.0], [5], [9]).item() and together[0] != together[2]
    assert together[4] == run(logits[:1], [1.0], [6], [9]).item() and together[1] == together[4]


def test_impossible_tokens_are_never_drawn() -> None:
    """One possible token is drawn whatever its logit; -inf is never drawn, however hot."""
    logits = torch.full((8, TILE + 50), -INF)
    logits[:, TILE + 33] = -1000.0
    assert run(logits, [0.0, 0.01, 1.0, 100.0], [1], list(range(8))).tolist() == [TILE + 33] * 8


def test_a_row_of_nan_gets_a_valid_token_and_disturbs_no_other() -> None:
    """Greedy and random, a whole tile and a part of one; one NaN alone is not drawn."""
    vocab_size = TILE + 100
    logits = random(4, vocab_size)
    good = run(logits, [0.0, 1.0], [1], [2]).tolist()
    logits[0], logits[1], logits[2, 7] = float("nan"), float("nan"), float("nan")
    given = run(logits, [0.0, 1.0], [1], [2]).tolist()
    assert 0 <= given[0] < vocab_size and 0 <= given[1] < vocab_size
    assert given[2] == logits[2].nan_to_num(-INF).argmax() and given[3] == good[3]


def test_logits_of_another_type_are_read_as_float32() -> None:
    """float16 gives what the same numbers give in float32."""
    logits = random(4, 300).half()
    assert torch.equal(run(logits, [1.0], [1], [2]), run(logits.float(), [1.0], [1], [2]))


def test_rows_may_be_longer_than_the_vocabulary() -> None:
    """Of the logits of several ranks the padding was cut off: the next row begins behind it."""
    padded = torch.full((3, 12), 9.0)
    padded[:, :10] = torch.arange(10.0)
    padded[torch.arange(3), torch.tensor([4, 0, 7])] = 8.5
    zeros = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    heat = torch.zeros(3, device=DEVICE)
    chosen = gumbel_sample(padded.to(DEVICE)[:, :9], heat, zeros, zeros)
    assert chosen.tolist() == [4, 0, 7]
