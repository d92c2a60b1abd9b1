"""Right answers in other styles, for `test_course_alternatives`; read as text, never imported."""


@answer("kernels.tile_places")
@triton.jit
def tile_places(tile, size, TILE: tl.constexpr):
    start = tile * TILE
    line = tl.arange(0, TILE)
    mask = line < size - start
    return start + line, mask


@answer("kernels.slots_of")
@triton.jit
def slots_of(table, positions, mask, BLOCK_SIZE: tl.constexpr):
    index = positions // BLOCK_SIZE
    block_ids = tl.load(table + index, mask, other=0)
    first_slots = block_ids.to(tl.int64) * BLOCK_SIZE
    return first_slots + (positions - index * BLOCK_SIZE)


@answer("kernels.slot_mapping_kernel")
@triton.jit(do_not_specialize=["num_tokens"])
def slot_mapping_kernel(
    block_tables, owners, positions, slots, num_tokens, table_stride,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(axis=0)
    tokens = program * TILE + tl.arange(0, TILE)
    is_token = tokens < num_tokens
    rows = tl.load(owners + tokens, mask=is_token, other=0)
    where = tl.load(positions + tokens, mask=is_token, other=0)
    found = slots_of(block_tables + rows * table_stride, where, is_token, BLOCK_SIZE)
    tl.store(slots + tokens, value=found, mask=is_token)


@answer("kernels.rms_norm_kernel")
@triton.jit
def rms_norm_kernel(x, weight, out, eps, SIZE: tl.constexpr, TILE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * SIZE
    line = tl.arange(0, TILE)
    mask = line < SIZE
    row = tl.load(x + start + line, mask=mask, other=0).to(tl.float32)
    mean = tl.sum(row * row, axis=0) / SIZE
    normed = (row / tl.sqrt(mean + eps)).to(out.dtype.element_ty)
    scale = tl.load(weight + line, mask=mask, other=0)
    tl.store(out + start + line, scale * normed, mask=mask)


@answer("decode_attention.softmax_step")
@triton.jit
def softmax_step(scores, values, best, total, acc, PRECISION: tl.constexpr):
    largest = tl.max(scores, 1)
    new_best = tl.where(largest > best, largest, best)
    factor = tl.exp2(best - new_best)
    powers = tl.exp2(scores - new_best[:, None])
    added = tl.dot(powers.to(values.dtype), values, input_precision=PRECISION)
    return new_best, factor * total + tl.sum(powers, 1), factor[:, None] * acc + added


@answer("decode_attention.attend_tile")
@triton.jit
def attend_tile(
    queries, k_cache, v_cache, table, positions, mask, seen, head, scale, best, total, acc,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    slots = slots_of(table, positions, mask, BLOCK_SIZE=BLOCK_SIZE)
    keys = load_tile(k_cache, slots, mask, head, WIDTH, D, DIMS)
    values = load_tile(v_cache, slots, mask, head, WIDTH, D, DIMS)
    products = tl.dot(queries, keys.trans(), input_precision=PRECISION)
    scores = products * scale * LOG2_E
    hidden = tl.where(seen, scores, -float("inf"))
    return softmax_step(hidden, values, best, total, acc, PRECISION=PRECISION)


@answer("decode_attention.merge_parts")
@triton.jit
def merge_parts(best, total, acc, part_best, part_total, part_acc):
    both = tl.where(best > part_best, best, part_best)
    old = tl.exp2(best - both)
    new = tl.exp2(part_best - both)
    return both, old * total + new * part_total, old * acc + new * part_acc


@answer("decode_attention.attend_keys")
@triton.jit
def attend_keys(
    queries, k_cache, v_cache, table, start, end, head, scale,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr,
    DIMS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    total = tl.zeros([QUERIES], tl.float32)
    best = total - float("inf")
    acc = tl.zeros([QUERIES, DIMS], tl.float32)
    for tile in range(tl.cdiv(end - start, KEYS)):
        positions = start + tile * KEYS + tl.arange(0, KEYS)
        is_key = positions < end
        best, total, acc = attend_tile(
            queries, k_cache, v_cache, table, positions, is_key, is_key[None, :], head, scale,
            best, total, acc, BLOCK_SIZE, WIDTH, D, DIMS, PRECISION,
        )  # fmt: skip
    return best, total, acc


@answer("kernels.silu_mul")
def silu_mul(gate_up: Tensor) -> Tensor:
    rows, both = gate_up.shape
    out = torch.empty((rows, both // 2), dtype=gate_up.dtype, device=gate_up.device)
    tile = triton.next_power_of_2(both // 2)
    silu_mul_kernel[rows, 1](gate_up, out, both // 2, tile)
    return out


@answer("kernels.silu_mul")
def silu_mul(gate_up):
    half = gate_up.shape[-1] // 2
    out = torch.zeros_like(gate_up[:, :half]).contiguous()

    def grid(meta):
        return len(gate_up), -(-half // meta["TILE"])

    silu_mul_kernel[grid](gate_up, out, WIDTH=half, TILE=64)
    return out
