"""Wrong answers that people really give, each with the words that its check must say.

Read as text, never imported: the names in the bodies are those of `minivllm/kernels.py` and
`minivllm/decode_attention.py`. Above each stands the rule of the lesson that the answer breaks.
"""

# -- tile_places --


# rule 1
@mistake("kernels.tile_places", "every tile begins at place 0: where does `tile` come in?")
@triton.jit
def tile_places(tile, size, TILE: tl.constexpr):
    places = tl.arange(0, TILE)
    return places, places < size


# rule 1
@mistake("kernels.tile_places", "tile 2 begins TILE places behind tile 1: do you multiply?")
@triton.jit
def tile_places(tile, size, TILE: tl.constexpr):
    places = tile + tl.arange(0, TILE)
    return places, places < size


# rule 2
@mistake("kernels.tile_places", "the last of 6 places is 5: < or <=?")
@triton.jit
def tile_places(tile, size, TILE: tl.constexpr):
    places = tile * TILE + tl.arange(0, TILE)
    return places, places <= size


# rule 2
@mistake(
    "kernels.tile_places",
    "the mask asks whether a place is below the size: which places are these?",
)
@triton.jit
def tile_places(tile, size, TILE: tl.constexpr):
    line = tl.arange(0, TILE)
    return tile * TILE + line, line < size


# -- slots_of --


# rule 4
@mistake(
    "kernels.slots_of", "the product has overflowed already: widen the ids before you multiply"
)
@triton.jit
def slots_of(table, positions, mask, BLOCK_SIZE: tl.constexpr):
    block_ids = tl.load(table + positions // BLOCK_SIZE, mask=mask, other=0)
    return (block_ids * BLOCK_SIZE + positions % BLOCK_SIZE).to(tl.int64)


# rule 2
@mistake("kernels.slots_of", "places with mask 0 have no entry in the table: does tl.load know?")
@triton.jit
def slots_of(table, positions, mask, BLOCK_SIZE: tl.constexpr):
    block_ids = tl.load(table + positions // BLOCK_SIZE).to(tl.int64)
    return block_ids * BLOCK_SIZE + positions % BLOCK_SIZE


# rule 3
@mistake("kernels.slots_of", "/ divides with a fraction: which operator counts whole blocks?")
@triton.jit
def slots_of(table, positions, mask, BLOCK_SIZE: tl.constexpr):
    block_ids = tl.load(table + (positions / BLOCK_SIZE), mask=mask, other=0).to(tl.int64)
    return block_ids * BLOCK_SIZE + positions % BLOCK_SIZE


# rule 3
@mistake("kernels.slots_of", "a slot is not a block: how many slots lie before block 3?")
@triton.jit
def slots_of(table, positions, mask, BLOCK_SIZE: tl.constexpr):
    block_ids = tl.load(table + positions // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    return block_ids + positions % BLOCK_SIZE


# -- slot_mapping_kernel --


# rule 2
@mistake(
    "kernels.slot_mapping_kernel", "tl.store writes all of its block unless it is given the mask"
)
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
@mistake("kernels.slot_mapping_kernel", "all programs do tile 0: which number tells them apart?")
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
@mistake("kernels.slot_mapping_kernel", "every token looks into row 0: where does its owner go?")
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
@mistake("kernels.rms_norm_kernel", "TILE counts masked places, too: the row has SIZE numbers")
@triton.jit
def rms_norm_kernel(x, weight, out, eps, SIZE: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE
    places, mask = tile_places(0, SIZE, TILE)
    wide = tl.load(x + row + places, mask=mask, other=0.0).to(tl.float32)
    scaled = scale_to_rms_1(wide, eps, TILE).to(out.dtype.element_ty)
    tl.store(out + row + places, scaled * tl.load(weight + places, mask=mask), mask=mask)


# rule 5
@mistake(
    "kernels.rms_norm_kernel", "a masked load without `other=` gives garbage, and you sum it up"
)
@triton.jit
def rms_norm_kernel(x, weight, out, eps, SIZE: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE
    places, mask = tile_places(0, SIZE, TILE)
    wide = tl.load(x + row + places, mask=mask).to(tl.float32)
    scaled = scale_to_rms_1(wide, eps, SIZE).to(out.dtype.element_ty)
    tl.store(out + row + places, scaled * tl.load(weight + places, mask=mask), mask=mask)


# rule 6
@mistake("kernels.rms_norm_kernel", "300 * 300 is infinite in float16: do you widen what you load?")
@triton.jit
def rms_norm_kernel(x, weight, out, eps, SIZE: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE
    places, mask = tile_places(0, SIZE, TILE)
    scaled = scale_to_rms_1(tl.load(x + row + places, mask=mask, other=0.0), eps, SIZE)
    scaled = scaled.to(out.dtype.element_ty)
    tl.store(out + row + places, scaled * tl.load(weight + places, mask=mask), mask=mask)


# rule 6
@mistake("kernels.rms_norm_kernel", "Llama rounds first and multiplies by the weight afterwards")
@triton.jit
def rms_norm_kernel(x, weight, out, eps, SIZE: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE
    places, mask = tile_places(0, SIZE, TILE)
    wide = tl.load(x + row + places, mask=mask, other=0.0).to(tl.float32)
    scaled = scale_to_rms_1(wide, eps, SIZE) * tl.load(weight + places, mask=mask).to(tl.float32)
    tl.store(out + row + places, scaled, mask=mask)


# -- softmax_step --


# rule 7
@mistake("decode_attention.softmax_step", "the sum so far was made with the old best: shrink acc")
@triton.jit
def softmax_step(scores, values, best, total, acc, PRECISION: tl.constexpr):
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    shrink = tl.exp2(best - new_best)
    weights = tl.exp2(scores - new_best[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    return new_best, total, acc


# rule 7
@mistake("decode_attention.softmax_step", "the best of all tiles, not of this one alone")
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
@mistake("decode_attention.softmax_step", "the old best is the smaller one: which minus which?")
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
@mistake("decode_attention.attend_tile", "a score of 0 weighs 2^0 = 1: which score weighs nothing?")
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
@mistake("decode_attention.attend_tile", "e^x is 2^(x * LOG2_E): is the factor there?")
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
@mistake("decode_attention.attend_tile", "position 2 is not slot 2: who knows where it lies?")
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


# -- merge_parts --


# rule 8
@mistake(
    "decode_attention.merge_parts", "two totals with different bests cannot be added as they are"
)
@triton.jit
def merge_parts(best, total, acc, part_best, part_total, part_acc):
    return tl.maximum(best, part_best), total + part_total, acc + part_acc


# rule 8
@mistake(
    "decode_attention.merge_parts", "the part may be the one with the smaller best: it shrinks, too"
)
@triton.jit
def merge_parts(best, total, acc, part_best, part_total, part_acc):
    new_best = tl.maximum(best, part_best)
    shrink = tl.exp2(best - new_best)
    return new_best, total * shrink + part_total, acc * shrink + part_acc
