"""Wrong answers that people really give, each with the words that its check must say.

Read as text, never imported: the names in the bodies are those of `minivllm/kernels.py` and
`minivllm/decode_attention.py`. Above each stands the rule of the lesson that the answer breaks.
"""

# -- tile_places --


# rule 1
@mistake(
    "kernels.tile_places",
    "tile 2 of 4 places each begins at place 8: what do tiles 0 and 1 have?",
)
@triton.jit
def tile_places(tile, size, TILE: tl.constexpr):
    places = tl.arange(0, TILE)
    return places, places < size


# rule 1
@mistake(
    "kernels.tile_places",
    "tile 2 of 4 places each begins at place 8: what do tiles 0 and 1 have?",
)
@triton.jit
def tile_places(tile, size, TILE: tl.constexpr):
    places = tile + tl.arange(0, TILE)
    return places, places < size


# rule 2
@mistake("kernels.tile_places", "places 4 and 5 are below 6, places 6 and 7 are not")
@triton.jit
def tile_places(tile, size, TILE: tl.constexpr):
    places = tile * TILE + tl.arange(0, TILE)
    return places, places <= size


# rule 2
@mistake("kernels.tile_places", "places 4 and 5 are below 6, places 6 and 7 are not")
@triton.jit
def tile_places(tile, size, TILE: tl.constexpr):
    line = tl.arange(0, TILE)
    return tile * TILE + line, line < size


# -- slots_of --


# rule 4
@mistake("kernels.slots_of", "the product of id and block size needs 64 bits")
@triton.jit
def slots_of(table, positions, mask, BLOCK_SIZE: tl.constexpr):
    block_ids = tl.load(table + positions // BLOCK_SIZE, mask=mask, other=0)
    return (block_ids * BLOCK_SIZE + positions % BLOCK_SIZE).to(tl.int64)


# rule 2
@mistake("kernels.slots_of", "of `table`, which has the places 0 to 1: is it masked?")
@triton.jit
def slots_of(table, positions, mask, BLOCK_SIZE: tl.constexpr):
    block_ids = tl.load(table + positions // BLOCK_SIZE).to(tl.int64)
    return block_ids * BLOCK_SIZE + positions % BLOCK_SIZE


# rule 3
@mistake("kernels.slots_of", "`/` divides with a fraction: which operator counts whole blocks?")
@triton.jit
def slots_of(table, positions, mask, BLOCK_SIZE: tl.constexpr):
    block_ids = tl.load(table + (positions / BLOCK_SIZE), mask=mask, other=0).to(tl.int64)
    return block_ids * BLOCK_SIZE + positions % BLOCK_SIZE


# rule 3
@mistake(
    "kernels.slots_of",
    "position 17 is place 1 of block 3, and 3 blocks of 16 lie before it: slot 49",
)
@triton.jit
def slots_of(table, positions, mask, BLOCK_SIZE: tl.constexpr):
    block_ids = tl.load(table + positions // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    return block_ids + positions % BLOCK_SIZE


# -- slot_mapping_kernel --


# rule 2
@mistake("kernels.slot_mapping_kernel", "of `slots`, which has the places 0 to 4: is it masked?")
@triton.jit(do_not_specialize=["num_tokens"])
def slot_mapping_kernel(
    block_tables, owners, positions, slots, num_tokens, table_stride,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tokens, mask = tile_places(tl.program_id(0), num_tokens, TILE)
    owner = tl.load(owners + tokens, mask=mask, other=0)
    position = tl.load(positions + tokens, mask=mask, other=0)
    table = block_tables + owner * table_stride
    tl.store(slots + tokens, slots_of(table, position, mask, BLOCK_SIZE))


# rule 1
@mistake(
    "kernels.slot_mapping_kernel", "-1: no program wrote there. Which tile does program 1 handle?"
)
@triton.jit(do_not_specialize=["num_tokens"])
def slot_mapping_kernel(
    block_tables, owners, positions, slots, num_tokens, table_stride,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tokens, mask = tile_places(0, num_tokens, TILE)
    owner = tl.load(owners + tokens, mask=mask, other=0)
    position = tl.load(positions + tokens, mask=mask, other=0)
    table = block_tables + owner * table_stride
    tl.store(slots + tokens, slots_of(table, position, mask, BLOCK_SIZE), mask=mask)


# rule 3
@mistake(
    "kernels.slot_mapping_kernel",
    "token 3 is row 1's: how many entries lie between the first ones of two rows?",
)
@triton.jit(do_not_specialize=["num_tokens"])
def slot_mapping_kernel(
    block_tables, owners, positions, slots, num_tokens, table_stride,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tokens, mask = tile_places(tl.program_id(0), num_tokens, TILE)
    position = tl.load(positions + tokens, mask=mask, other=0)
    slot = slots_of(block_tables, position, mask, BLOCK_SIZE)
    tl.store(slots + tokens, slot, mask=mask)


# -- rms_norm_kernel --


# rule 5
@mistake(
    "kernels.rms_norm_kernel",
    "SIZE is 3 and TILE is 4: does a masked place add to the sum, or to the count?",
)
@triton.jit
def rms_norm_kernel(x, weight, out, eps, SIZE: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE
    places, mask = tile_places(0, SIZE, TILE)
    wide = tl.load(x + row + places, mask=mask, other=0.0).to(tl.float32)
    scaled = scale_to_rms_1(wide, eps, TILE).to(out.dtype.element_ty)
    tl.store(out + row + places, scaled * tl.load(weight + places, mask=mask), mask=mask)


# rule 5
@mistake(
    "kernels.rms_norm_kernel",
    "SIZE is 3 and TILE is 4: does a masked place add to the sum, or to the count?",
)
@triton.jit
def rms_norm_kernel(x, weight, out, eps, SIZE: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE
    places, mask = tile_places(0, SIZE, TILE)
    wide = tl.load(x + row + places, mask=mask).to(tl.float32)
    scaled = scale_to_rms_1(wide, eps, SIZE).to(out.dtype.element_ty)
    tl.store(out + row + places, scaled * tl.load(weight + places, mask=mask), mask=mask)


# rule 6
@mistake(
    "kernels.rms_norm_kernel",
    "300 * 300 is infinite in float16: is the row float32 before it is squared?",
)
@triton.jit
def rms_norm_kernel(x, weight, out, eps, SIZE: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE
    places, mask = tile_places(0, SIZE, TILE)
    scaled = scale_to_rms_1(tl.load(x + row + places, mask=mask, other=0.0), eps, SIZE)
    scaled = scaled.to(out.dtype.element_ty)
    tl.store(out + row + places, scaled * tl.load(weight + places, mask=mask), mask=mask)


# rule 6
@mistake(
    "kernels.rms_norm_kernel",
    "one step of float16 off: is it rounded to the type of `out` before the weight?",
)
@triton.jit
def rms_norm_kernel(x, weight, out, eps, SIZE: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE
    places, mask = tile_places(0, SIZE, TILE)
    wide = tl.load(x + row + places, mask=mask, other=0.0).to(tl.float32)
    scaled = scale_to_rms_1(wide, eps, SIZE) * tl.load(weight + places, mask=mask).to(tl.float32)
    tl.store(out + row + places, scaled, mask=mask)


# -- softmax_step --


# rule 7
@mistake("decode_attention.softmax_step", "the best score rises by 2: 2 / 4 + 1 and 6 / 4 + 5.")
@triton.jit
def softmax_step(scores, values, best, total, acc, PRECISION: tl.constexpr):
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    shrink = tl.exp2(best - new_best)
    weights = tl.exp2(scores - new_best[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    return new_best, total, acc


# rule 7
@mistake("decode_attention.softmax_step", "the best score so far is 3, and the tile's is 1")
@triton.jit
def softmax_step(scores, values, best, total, acc, PRECISION: tl.constexpr):
    new_best = tl.max(scores, axis=1)
    shrink = tl.exp2(best - new_best)
    weights = tl.exp2(scores - new_best[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    return new_best, total, acc


# rule 7
@mistake("decode_attention.softmax_step", "all dimensions of a value are treated alike")
@triton.jit
def softmax_step(scores, values, best, total, acc, PRECISION: tl.constexpr):
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    shrink = tl.exp2(new_best - best)
    weights = tl.exp2(scores - new_best[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    return new_best, total, acc


# rule 7: one best for all queries, so that small scores of others vanish
@mistake("decode_attention.softmax_step", "along which axis do you take the largest and the sum?")
@triton.jit
def softmax_step(scores, values, best, total, acc, PRECISION: tl.constexpr):
    new_best = tl.maximum(best, tl.max(scores))
    shrink = tl.exp2(best - new_best)
    weights = tl.exp2(scores - new_best[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    return new_best, total, acc


# -- attend_tile --


# rule 5
@mistake("decode_attention.attend_tile", "weights e^0 = 1 and e^1.0986 = 3 of the values 0 and 4")
@triton.jit
def attend_tile(
    queries, k_cache, v_cache, table, positions, mask, seen, head, scale, best, total, acc,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    slots = slots_of(table, positions, mask, BLOCK_SIZE)
    keys = load_tile(k_cache, slots, mask, head, WIDTH, D, DIMS)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * (scale * LOG2_E)
    scores = tl.where(seen, scores, 0.0)
    values = load_tile(v_cache, slots, mask, head, WIDTH, D, DIMS)
    return softmax_step(scores, values, best, total, acc, PRECISION)


# rule 7
@mistake("decode_attention.attend_tile", "weights e^0 = 1 and e^1.0986 = 3 of the values 0 and 4")
@triton.jit
def attend_tile(
    queries, k_cache, v_cache, table, positions, mask, seen, head, scale, best, total, acc,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    slots = slots_of(table, positions, mask, BLOCK_SIZE)
    keys = load_tile(k_cache, slots, mask, head, WIDTH, D, DIMS)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
    scores = tl.where(seen, scores, float("-inf"))
    values = load_tile(v_cache, slots, mask, head, WIDTH, D, DIMS)
    return softmax_step(scores, values, best, total, acc, PRECISION)


# rule 3
@mistake("decode_attention.attend_tile", "weights e^0 = 1 and e^1.0986 = 3 of the values 0 and 4")
@triton.jit
def attend_tile(
    queries, k_cache, v_cache, table, positions, mask, seen, head, scale, best, total, acc,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    keys = load_tile(k_cache, positions, mask, head, WIDTH, D, DIMS)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * (scale * LOG2_E)
    scores = tl.where(seen, scores, float("-inf"))
    values = load_tile(v_cache, positions, mask, head, WIDTH, D, DIMS)
    return softmax_step(scores, values, best, total, acc, PRECISION)


# -- attend_keys --


# rule 7: each tile starts from nothing
@mistake("decode_attention.attend_keys", "7.5 is the mean of the first tile alone, 23.5 that of")
@triton.jit
def attend_keys(
    queries, k_cache, v_cache, table, start, end, head, scale,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr,
    DIMS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    for first in tl.range(start, end, KEYS, num_stages=STAGES):
        best = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        acc = tl.zeros([QUERIES, DIMS], tl.float32)
        positions = first + tl.arange(0, KEYS)
        mask = positions < end
        best, total, acc = attend_tile(
            queries, k_cache, v_cache, table, positions, mask, mask[None, :], head, scale,
            best, total, acc, BLOCK_SIZE, WIDTH, D, DIMS, PRECISION,
        )  # fmt: skip
    return best, total, acc


# rule 1: one tile
@mistake("decode_attention.attend_keys", "7.5 is the mean of the first tile alone, 23.5 that of")
@triton.jit
def attend_keys(
    queries, k_cache, v_cache, table, start, end, head, scale,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr,
    DIMS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIMS], tl.float32)
    positions = start + tl.arange(0, KEYS)
    mask = positions < end
    best, total, acc = attend_tile(
        queries, k_cache, v_cache, table, positions, mask, mask[None, :], head, scale,
        best, total, acc, BLOCK_SIZE, WIDTH, D, DIMS, PRECISION,
    )  # fmt: skip
    return best, total, acc


# rule 5
@mistake("decode_attention.attend_keys", "which keys of the third tile are real?")
@triton.jit
def attend_keys(
    queries, k_cache, v_cache, table, start, end, head, scale,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr,
    DIMS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIMS], tl.float32)
    for first in tl.range(start, end, KEYS, num_stages=STAGES):
        positions = first + tl.arange(0, KEYS)
        mask = positions < first + KEYS
        best, total, acc = attend_tile(
            queries, k_cache, v_cache, table, positions, mask, mask[None, :], head, scale,
            best, total, acc, BLOCK_SIZE, WIDTH, D, DIMS, PRECISION,
        )  # fmt: skip
    return best, total, acc


# rule 8
@mistake("decode_attention.attend_keys", "the values 16 to 39: is a key before `start` read?")
@triton.jit
def attend_keys(
    queries, k_cache, v_cache, table, start, end, head, scale,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr,
    DIMS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIMS], tl.float32)
    for first in tl.range(0, end, KEYS, num_stages=STAGES):
        positions = first + tl.arange(0, KEYS)
        mask = positions < end
        best, total, acc = attend_tile(
            queries, k_cache, v_cache, table, positions, mask, mask[None, :], head, scale,
            best, total, acc, BLOCK_SIZE, WIDTH, D, DIMS, PRECISION,
        )  # fmt: skip
    return best, total, acc


# rule 1: a step of 16, whatever KEYS is
@mistake("decode_attention.attend_keys", "with KEYS = 32: how far does the loop go in one step?")
@triton.jit
def attend_keys(
    queries, k_cache, v_cache, table, start, end, head, scale,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr,
    DIMS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIMS], tl.float32)
    for first in tl.range(start, end, 16, num_stages=STAGES):
        positions = first + tl.arange(0, KEYS)
        mask = positions < end
        best, total, acc = attend_tile(
            queries, k_cache, v_cache, table, positions, mask, mask[None, :], head, scale,
            best, total, acc, BLOCK_SIZE, WIDTH, D, DIMS, PRECISION,
        )  # fmt: skip
    return best, total, acc


# -- silu_mul --


# rule 1: one tile for each row
@mistake("kernels.silu_mul", "how many tiles has a row of 1,100 places?")
def silu_mul(gate_up: Tensor) -> Tensor:
    num_tokens = len(gate_up)
    width = gate_up.shape[1] // 2
    out = gate_up.new_zeros(num_tokens, width)
    silu_mul_kernel[(num_tokens, 1)](gate_up, out, WIDTH=width, TILE=TILE)
    return out


# rule 1: rounds down
@mistake("kernels.silu_mul", "one row of two gates and two ups: how many programs did you launch?")
def silu_mul(gate_up: Tensor) -> Tensor:
    num_tokens = len(gate_up)
    width = gate_up.shape[1] // 2
    out = gate_up.new_zeros(num_tokens, width)
    silu_mul_kernel[(num_tokens, width // TILE)](gate_up, out, WIDTH=width, TILE=TILE)
    return out


# the axes of the grid in the other order
@mistake("kernels.silu_mul", "which axis of the grid counts rows, and which counts tiles?")
def silu_mul(gate_up: Tensor) -> Tensor:
    num_tokens = len(gate_up)
    width = gate_up.shape[1] // 2
    out = gate_up.new_zeros(num_tokens, width)
    silu_mul_kernel[(triton.cdiv(width, TILE), num_tokens)](gate_up, out, WIDTH=width, TILE=TILE)
    return out


# the result has the shape of the input
@mistake("kernels.silu_mul", "gate and up together give one number for each pair")
def silu_mul(gate_up: Tensor) -> Tensor:
    num_tokens = len(gate_up)
    width = gate_up.shape[1] // 2
    out = torch.zeros_like(gate_up)
    silu_mul_kernel[(num_tokens, triton.cdiv(width, TILE))](gate_up, out, WIDTH=width, TILE=TILE)
    return out


# rounds to float32
@mistake("kernels.silu_mul", "float16 in: which dtype comes out?")
def silu_mul(gate_up: Tensor) -> Tensor:
    num_tokens = len(gate_up)
    width = gate_up.shape[1] // 2
    out = torch.empty(num_tokens, width, device=gate_up.device)
    silu_mul_kernel[(num_tokens, triton.cdiv(width, TILE))](gate_up, out, WIDTH=width, TILE=TILE)
    return out


# -- merge_parts --


# rule 8
@mistake(
    "decode_attention.merge_parts",
    "the best of both is 3: the first part shrinks by 2^(1 - 3), to 2 / 4 and 6 / 4",
)
@triton.jit
def merge_parts(best, total, acc, part_best, part_total, part_acc):
    return tl.maximum(best, part_best), total + part_total, acc + part_acc


# rule 8
@mistake(
    "decode_attention.merge_parts",
    "now the second part has the smaller best: does it shrink, too?",
)
@triton.jit
def merge_parts(best, total, acc, part_best, part_total, part_acc):
    new_best = tl.maximum(best, part_best)
    shrink = tl.exp2(best - new_best)
    return new_best, total * shrink + part_total, acc * shrink + part_acc
