"""The operations of a step as Triton kernels, built from small helpers. Notebook 07.

Each public function has the name and signature of the torch operation in `ops` that its tests
compare it with; `gpu.ops` collects them for the engine. Does not handle matrix products (the
vendor's library is hard to beat), prefill attention (see `gpu.prefill_attention`) or sampling (see
`gpu.sampling_kernels`). With TRITON_INTERPRET=1 set before Triton is imported, the kernels run on a
CPU, slowly.

Tensor letters: T tokens, N requests, H query heads, K key/value heads, G = H // K query heads
per key/value head, D head dimension, I MLP width, B block size.
Rules for every kernel: the size of a tile is a power of two, and a mask says which places are
used; offsets into a cache are 64-bit, since it may hold more than 2^31 numbers; arguments that
change from step to step are not specialised, since Triton would compile again for 1 and for
multiples of 16.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

# Places of a tile in the elementwise kernels.
TILE = 1024
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def refuse_interpreted_bfloat16(x: Tensor) -> None:
    """Raise ValueError for bfloat16 in Triton's interpreter, whose numpy has no such type: it would
    compute with the bits as whole numbers."""
    if IS_INTERPRETED and x.dtype == torch.bfloat16:
        raise ValueError(
            "Triton's interpreter (TRITON_INTERPRET=1) computes bfloat16 wrongly; use float32"
        )


# -- helpers: where to read and write -------------------------------------------------------------


@triton.jit
def tile_places(tile, size, TILE: tl.constexpr):
    """Return the places of tile number `tile` (from 0), and a mask of those below `size`.

    Both are blocks of TILE numbers, TILE a power of two. With size 6 and TILE 4, tile 1 has the
    places 4 5 6 7 and the mask 1 1 0 0. Accesses no memory.
    """
    places = tile * TILE + tl.arange(0, TILE)
    return places, places < size


@triton.jit
def slots_of(table, positions, mask, BLOCK_SIZE: tl.constexpr):
    """Return the slots in the cache of a block of `positions`, as int64: there may be over 2^31.

    `table` points at the first entry (int32) of a block table: one pointer for all positions, or a
    block of pointers, one for each. Where `mask` is 0 no entry is read, and the slot is undefined.
    Example: table [7, 3], blocks of 16: position 17 is in block 3, slot 49.
    """
    # Converted before the product, which can overflow 32 bits.
    block_ids = tl.load(table + positions // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    return block_ids * BLOCK_SIZE + positions % BLOCK_SIZE


# -- slot mapping ---------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_tokens"])
def slot_mapping_kernel(
    block_tables, owners, positions, slots, num_tokens, table_stride,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """slots[t] = the slot of position `positions[t]` of the request in row `owners[t]`.

    `owners`, `positions`, `slots` point at `num_tokens` int64 each; rows of the block tables
    (int32) are `table_stride` entries apart. Program j handles tile j of the tokens, and accesses
    nothing past the last token.
    """
    tokens, mask = tile_places(tl.program_id(0), num_tokens, TILE)
    owner = tl.load(owners + tokens, mask=mask, other=0).to(tl.int64)
    position = tl.load(positions + tokens, mask=mask, other=0)
    table = block_tables + owner * table_stride
    tl.store(slots + tokens, slots_of(table, position, mask, BLOCK_SIZE), mask=mask)


def slot_mapping(
    block_tables: Tensor, owners: Tensor, positions: Tensor, block_size: int
) -> Tensor:
    """Return the slot in the cache of each token: int64 `[T]`; see `ops.slot_mapping`."""
    slots = torch.empty(len(positions), dtype=torch.int64, device=positions.device)
    slot_mapping_kernel[(triton.cdiv(len(positions), TILE),)](
        block_tables, owners, positions, slots, len(positions), block_tables.stride(0),
        BLOCK_SIZE=block_size, TILE=TILE,
    )  # fmt: skip
    return slots


# -- storing keys and values ----------------------------------------------------------------------


@triton.jit
def store_kv_kernel(
    k, v, k_cache, v_cache, slots, k_stride, v_stride, WIDTH: tl.constexpr, TILE: tl.constexpr
):
    """k_cache[slots[t]] = k[t], v_cache[slots[t]] = v[t]; program t handles token t, all heads."""
    token = tl.program_id(0).to(tl.int64)
    places, mask = tile_places(0, WIDTH, TILE)
    slot = tl.load(slots + token).to(tl.int64)
    key = tl.load(k + token * k_stride + places, mask=mask)
    value = tl.load(v + token * v_stride + places, mask=mask)
    tl.store(k_cache + slot * WIDTH + places, key, mask=mask)
    tl.store(v_cache + slot * WIDTH + places, value, mask=mask)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write `k, v [T, K, D]` into the slots `slot_mapping [T]` of the caches, in place; see
    `ops.store_kv`. The heads of a token must be contiguous, the tokens need not be."""
    width = k.shape[1] * k.shape[2]
    store_kv_kernel[(len(k),)](
        k, v, k_cache, v_cache, slot_mapping, k.stride(0), v.stride(0),
        WIDTH=width, TILE=triton.next_power_of_2(width),
    )  # fmt: skip


# -- layers ---------------------------------------------------------------------------------------


@triton.jit
def scale_to_rms_1(x, eps, SIZE: tl.constexpr):
    """Divide the float32 tile `x`, zero outside its SIZE places, by its root mean square."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)


@triton.jit
def rms_norm_kernel(x, weight, out, eps, SIZE: tl.constexpr, TILE: tl.constexpr):
    """out = weight * x / sqrt(mean(x * x) + eps) for each row; program t handles row t.

    `x` and `out` point at contiguous rows of SIZE numbers, `weight` at SIZE numbers, all of any
    float type; TILE is a power of two >= SIZE. Computed in float32, then rounded to the type of
    `out`, then multiplied by `weight`. Example: row [3, 4], weight [1, 10], eps 0 -> [0.85, 11.3].
    """
    row = tl.program_id(0).to(tl.int64) * SIZE
    places, mask = tile_places(0, SIZE, TILE)
    wide = tl.load(x + row + places, mask=mask, other=0.0).to(tl.float32)
    # Rounded before the product with the weight, as Llama does.
    scaled = scale_to_rms_1(wide, eps, SIZE).to(out.dtype.element_ty)
    tl.store(out + row + places, scaled * tl.load(weight + places, mask=mask), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale to root mean square 1 along the last axis, then by `weight`; see `ops.rms_norm`."""
    refuse_interpreted_bfloat16(x)
    x = x.contiguous()
    out = torch.empty_like(x)
    size = x.shape[-1]
    rms_norm_kernel[(x.numel() // size,)](
        x, weight, out, eps, SIZE=size, TILE=triton.next_power_of_2(size)
    )
    return out


@triton.jit
def _add_rms_norm_kernel(x, y, weight, total, out, eps, SIZE: tl.constexpr, TILE: tl.constexpr):
    """total = x + y, then as `rms_norm_kernel`; program t handles row t."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    places, mask = tile_places(0, SIZE, TILE)
    a = tl.load(x + row + places, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(y + row + places, mask=mask, other=0.0).to(tl.float32)
    # The next layer reads the stored, rounded sum, so that is what is normalised.
    rounded = (a + b).to(total.dtype.element_ty)
    tl.store(total + row + places, rounded, mask=mask)
    scaled = scale_to_rms_1(rounded.to(tl.float32), eps, SIZE).to(out.dtype.element_ty)
    tl.store(out + row + places, scaled * tl.load(weight + places, mask=mask), mask=mask)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `x + y` `[T, n]` and its `rms_norm`; see `ops.add_rms_norm`. `x` and `y` must be
    contiguous."""
    refuse_interpreted_bfloat16(x)
    total = torch.empty_like(x)
    out = torch.empty_like(x)
    size = x.shape[-1]
    _add_rms_norm_kernel[(len(x),)](
        x, y, weight, total, out, eps, SIZE=size, TILE=triton.next_power_of_2(size)
    )
    return total, out


@triton.jit
def silu_mul_kernel(gate_up, out, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """out = silu(gate_up[:, :WIDTH]) * gate_up[:, WIDTH:]; program (t, j) does tile j of row t.

    `gate_up` points at contiguous rows of 2 * WIDTH numbers, `out` at rows of WIDTH.
    """
    row = tl.program_id(0).to(tl.int64)
    places, mask = tile_places(tl.program_id(1), WIDTH, TILE)
    gate = tl.load(gate_up + row * 2 * WIDTH + places, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + places, mask=mask, other=0.0)
    silu = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)
    tl.store(out + row * WIDTH + places, silu * up, mask=mask)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`gate_up [T, 2I]` -> silu(gate) * up `[T, I]`, in the same dtype; see `ops.silu_mul`.

    One launch of `silu_mul_kernel` over a grid of two dimensions, with tiles of TILE places.
    """
    refuse_interpreted_bfloat16(gate_up)
    num_tokens = len(gate_up)
    width = gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, width)
    silu_mul_kernel[(num_tokens, triton.cdiv(width, TILE))](gate_up, out, WIDTH=width, TILE=TILE)
    return out


@triton.jit
def turn_heads(
    x, weight, cos, sin, out, eps, NUM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    TILE: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Normalise (with HAS_NORM) and rotate NUM heads of 2 * HALF numbers each: one tile
    `[HEADS, TILE]` for their first halves, one for their second halves."""
    heads = tl.arange(0, HEADS)[:, None]
    places = tl.arange(0, TILE)[None, :]
    mask = (heads < NUM) & (places < HALF)
    offsets = heads * 2 * HALF + places
    first = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * HALF)
        scale = tl.rsqrt(mean + eps)[:, None]
        # Rounded before the product with the weight, as in `rms_norm`.
        first = (first * scale).to(out.dtype.element_ty)
        second = (second * scale).to(out.dtype.element_ty)
        first *= tl.load(weight + places, mask=places < HALF)
        second *= tl.load(weight + HALF + places, mask=places < HALF)
        first = first.to(tl.float32)
        second = second.to(tl.float32)
    c = tl.load(cos + places, mask=places < HALF, other=0.0)
    s = tl.load(sin + places, mask=places < HALF, other=0.0)
    tl.store(out + offsets, first * c - second * s, mask=mask)
    tl.store(out + offsets + HALF, second * c + first * s, mask=mask)


@triton.jit
def _norm_rope_kernel(
    q, k, q_weight, k_weight, cos, sin, q_out, k_out, eps, q_stride, k_stride,
    H: tl.constexpr, K: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    HALF: tl.constexpr, TILE: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Program t handles the query heads and the key heads of token t."""
    token = tl.program_id(0).to(tl.int64)
    cos += token * HALF
    sin += token * HALF
    q += token * q_stride
    q_out += token * (H * 2 * HALF)
    turn_heads(q, q_weight, cos, sin, q_out, eps, H, Q_HEADS, HALF, TILE, HAS_NORM)
    k += token * k_stride
    k_out += token * (K * 2 * HALF)
    turn_heads(k, k_weight, cos, sin, k_out, eps, K, K_HEADS, HALF, TILE, HAS_NORM)


def norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Normalise each head where there are weights, then rotate it, all heads in one launch; see
    `ops.norm_rope`. The heads of a token must be contiguous, the tokens need not be."""
    refuse_interpreted_bfloat16(q)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    q_out = q.new_empty(q.shape)
    k_out = k.new_empty(k.shape)
    _norm_rope_kernel[(num_tokens,)](
        q, k, q_weight, k_weight, cos, sin, q_out, k_out, eps, q.stride(0), k.stride(0),
        H=num_heads, K=num_kv_heads, Q_HEADS=triton.next_power_of_2(num_heads),
        K_HEADS=triton.next_power_of_2(num_kv_heads), HALF=head_dim // 2,
        TILE=triton.next_power_of_2(head_dim // 2), HAS_NORM=q_weight is not None,
    )  # fmt: skip
    return q_out, k_out
