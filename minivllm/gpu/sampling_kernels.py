"""Sampling on a GPU in two launches: the largest of logits + noise. Not built in the course.

Gumbel-max (`sampler.gumbel_sample` is the oracle): no softmax, no sum over the vocabulary, one
pass. The noise of a token is a hash of seed, position and token id, so it is the same in any
batch. Temperature 0 adds no noise. Does not handle filters or penalties.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.drawing import GOLDEN as _GOLDEN
from minivllm.drawing import MIX_1 as _MIX_1
from minivllm.drawing import MIX_2 as _MIX_2
from minivllm.kernels import refuse_interpreted_bfloat16

GOLDEN, MIX_1, MIX_2 = tl.constexpr(_GOLDEN), tl.constexpr(_MIX_1), tl.constexpr(_MIX_2)
TILE = 4096  # tokens of a program


@triton.jit
def shift_right(x, BITS: tl.constexpr):
    """`x >> BITS` of int64 with zeros from the left."""
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def mix_bits(x):
    """Scramble 64 bits, one to one; see `noise.mix_bits`."""
    x = (x ^ shift_right(x, 30)) * MIX_1
    x = (x ^ shift_right(x, 27)) * MIX_2
    return x ^ shift_right(x, 31)


@triton.jit
def hash_counter(seed, counter):
    """64 random bits of (seed, counter); see `noise.hash_counter`."""
    return mix_bits(mix_bits(seed + GOLDEN) + (counter + 1) * GOLDEN)


@triton.jit
def gumbel(bits):
    """-log(-log(u)) in float32, with the upper 32 bits as u in (0, 1); see `noise.gumbel_noise`.

    The tokens that win have u near 1, and float32 has few numbers there: u would be rounded to 1,
    whose noise is infinite. So 1 - u is made from the bits, exactly, and never u.
    """
    rest = ((~bits >> 32).to(tl.uint32).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    # -log(1 - rest): its series where rest is below 2^-6; elsewhere a rest of 1 would give -inf.
    series = rest * (1 + rest * (0.5 + rest * (0.33333333 + rest * 0.25)))
    minus_log = tl.where(rest < 0.015625, series, -tl.log(tl.maximum(1 - rest, 1e-10)))
    return -tl.log(minus_log)


@triton.jit(do_not_specialize=["num_tiles"])
def _best_of_tile_kernel(
    logits, temperatures, seeds, positions, best, best_ids, row_stride, vocab_size, num_tiles,
    TILE: tl.constexpr,
):  # fmt: skip
    """The largest of logits / temperature + noise in one tile of one row; program (tile, row)."""
    tile, row = tl.program_id(0), tl.program_id(1)
    tokens = tile * TILE + tl.arange(0, TILE)
    mask = tokens < vocab_size
    place = logits + row.to(tl.int64) * row_stride + tokens
    scores = tl.load(place, mask=mask, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        bits = hash_counter(tl.load(seeds + row), tl.load(positions + row).to(tl.int64))
        scores = scores / temperature + gumbel(hash_counter(bits, tokens.to(tl.int64)))
    # NaN counts as -inf: its row gets some valid token, never one past the end of the vocabulary.
    scores = tl.where(mask & (scores == scores), scores, float("-inf"))
    winner = tl.argmax(scores, axis=0)
    tl.store(best + row * num_tiles + tile, tl.max(scores, axis=0))
    tl.store(best_ids + row * num_tiles + tile, tile * TILE + winner)


@triton.jit(do_not_specialize=["num_tiles"])
def _best_tile_kernel(best, best_ids, token_ids, num_tiles, TILES: tl.constexpr):
    """The winner of the tiles' winners; program n does row n."""
    row = tl.program_id(0)
    tiles = tl.arange(0, TILES)
    scores = tl.load(best + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    winner = tl.argmax(scores, axis=0)
    tl.store(token_ids + row, tl.load(best_ids + row * num_tiles + winner).to(tl.int64))


def gumbel_sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one token per row of `logits [N, V]` at its `temperature [N]`, 0 for the largest.

    seeds, positions [N] int64 -> [N] int64. In float32, so a tie in the last bits may go
    another way than in the oracle's float64.
    """
    refuse_interpreted_bfloat16(logits)
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, TILE)
    best = torch.empty(num_rows, num_tiles, device=logits.device)
    best_ids = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=logits.device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    # Rows may be longer than the vocabulary: of several ranks' logits the padding was cut off.
    sizes = (logits.stride(0), vocab_size, num_tiles)
    _best_of_tile_kernel[(num_tiles, num_rows)](
        logits, temperature, seeds, positions, best, best_ids, *sizes, TILE=TILE
    )
    _best_tile_kernel[(num_rows,)](
        best, best_ids, token_ids, num_tiles, TILES=triton.next_power_of_2(num_tiles)
    )
    return token_ids
