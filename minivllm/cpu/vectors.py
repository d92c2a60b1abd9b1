"""Vector instructions for `cpu.kernels` that LLVM does not find by itself, written in its own
language through numba's `intrinsic`.

A packed group of 32 weights is eight numbers of four codes each: 16 bits wide for codes of 4 bits,
32 bits wide for codes of 8 bits. Code j of number i is weight 8j + i, so that a shift and a mask
give eight weights in their order, in the lanes of one vector. LLVM unrolls the short loop over
them into single numbers; written as vectors, eight weights cost about five instructions.
Leaves out everything that a plain loop does as fast. Given (no notebook builds it).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

GROUP = 32  # weights that share a scale and a minimum; see `cpu.packed`
ROWS = 6  # of a weight multiplied at a time: with COLUMNS, as many sums as 16 registers can hold
COLUMNS = 16  # numbers that share a weight: two vectors of AVX2, which LLVM cuts them into
I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
LANES = 8
CODES, WEIGHTS = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)
FLOATS = ir.VectorType(F32, COLUMNS)
ANY_ORDER = ("fast",)


def _constant(kind: Any, value: float) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _spread(builder: Any, scalar: Any, kind: Any = None) -> Any:
    """The scalar in every lane of a vector."""
    kind = kind or FLOATS
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(first, first, _constant(ir.VectorType(I32, kind.count), 0))


def _at(builder: Any, address: Any, offset: Any, kind: Any) -> Any:
    """A pointer to `kind`, `offset` bytes behind the integer `address`."""
    return builder.inttoptr(builder.add(address, offset), kind.as_pointer())


def _load(builder: Any, address: Any, offset: Any, kind: Any = None) -> Any:
    """What lies `offset` bytes behind `address`; a vector of 8 floats if nothing else is said."""
    return builder.load(_at(builder, address, offset, kind or WEIGHTS), align=4)


def _add_lanes(builder: Any, vector: Any) -> Any:
    """The sum of the eight lanes of a vector."""
    kind = ir.FunctionType(F32, [F32, WEIGHTS])
    name = f"llvm.vector.reduce.fadd.v{LANES}f32"
    add_lanes = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(add_lanes, [F32(0.0), vector], fastmath=ANY_ORDER)


def _multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return builder.fadd(builder.fmul(x, y, flags=ANY_ORDER), z, flags=ANY_ORDER)


def _load_group(builder: Any, codes: Any, scales: Any, group: Any, bits: int) -> list[Any]:
    """The weights of one group, code * scale + minimum, as four vectors."""
    place = _at(builder, scales, builder.mul(group, I64(8)), F32)
    scale = _spread(builder, builder.load(place), WEIGHTS)
    minimum = _spread(builder, builder.load(builder.gep(place, [I64(1)])), WEIGHTS)
    packed = ir.VectorType(ir.IntType(4 * bits), LANES)
    place = _at(builder, codes, builder.mul(group, I64(GROUP * bits // 8)), packed)
    numbers = builder.load(place, align=1)
    if bits == 4:
        numbers = builder.zext(numbers, CODES)
    weights = []
    for j in range(4):
        code = builder.lshr(numbers, _constant(CODES, j * bits))
        code = builder.and_(code, _constant(CODES, 2**bits - 1))
        weight = builder.sitofp(code, WEIGHTS)  # not uitofp: AVX2 converts signed numbers only
        weights.append(_multiply_add(builder, weight, scale, minimum))
    return weights


def _prefetch_group(
    builder: Any, codes: Any, scales: Any, group: Any, num_groups: Any, bits: int
) -> None:
    """What the same group of the row is, `ROWS` rows further: it is needed next."""
    further = builder.add(group, builder.mul(num_groups, I64(ROWS)))
    _prefetch(builder, codes, builder.mul(further, I64(GROUP * bits // 8)))
    _prefetch(builder, scales, builder.mul(further, I64(8)))


def _make_unpack(bits: int) -> Any:
    @intrinsic
    def unpack(context, codes, scales, target, num_groups):  # type: ignore[no-untyped-def]
        """Write the float32 weights of `num_groups` groups to `target` (all are addresses)."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            codes, scales, target, num_groups = arguments
            with cgutils.for_range(builder, num_groups) as loop:
                place = _at(builder, target, builder.mul(loop.index, I64(4 * GROUP)), WEIGHTS)
                _prefetch_group(builder, codes, scales, loop.index, num_groups, bits)
                for k, part in enumerate(_load_group(builder, codes, scales, loop.index, bits)):
                    builder.store(part, builder.gep(place, [I64(k)]), align=4)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp, types.intp), generate

    return unpack


def _make_dot(bits: int) -> Any:
    @intrinsic
    def dot(context, x, codes, scales, num_groups):  # type: ignore[no-untyped-def]
        """The sum of x * weight over `num_groups` groups (the first three are addresses)."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, codes, scales, num_groups = arguments
            zero = _constant(WEIGHTS, 0.0)
            sums = [cgutils.alloca_once_value(builder, zero) for _ in range(4)]
            with cgutils.for_range(builder, num_groups) as loop:
                parts = _load_group(builder, codes, scales, loop.index, bits)
                place = _at(builder, x, builder.mul(loop.index, I64(4 * GROUP)), WEIGHTS)
                for k, (total, part) in enumerate(zip(sums, parts)):
                    numbers = builder.load(builder.gep(place, [I64(k)]), align=4)
                    part = _multiply_add(builder, numbers, part, builder.load(total))
                    builder.store(part, total)
            total = zero
            for part in sums:
                total = builder.fadd(total, builder.load(part), flags=ANY_ORDER)
            return _add_lanes(builder, total)

        return types.float32(types.intp, types.intp, types.intp, types.intp), generate

    return dot


@intrinsic
def _multiply_rows(context, columns, weight, out, count):  # type: ignore[no-untyped-def]
    """out = weight @ columns for `columns [count, 16]`, `weight [6, count]` and `out [6, 16]`.

    All but the last are addresses. The 96 sums stay in registers, and no number of them has to be
    added across the lanes of a vector.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        columns, weight, out, count = arguments
        zero = _constant(FLOATS, 0.0)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in range(ROWS)]
        row_size = builder.mul(count, I64(4))
        rows = [builder.add(weight, builder.mul(row_size, I64(r))) for r in range(ROWS)]
        with cgutils.for_range(builder, count) as loop:
            offset = builder.mul(loop.index, I64(4 * COLUMNS))
            numbers = builder.load(_at(builder, columns, offset, FLOATS), align=4)
            for row, total in zip(rows, sums):
                one = builder.load(_at(builder, row, builder.mul(loop.index, I64(4)), F32))
                product = _multiply_add(
                    builder, numbers, _spread(builder, one), builder.load(total)
                )
                builder.store(product, total)
        for r, total in enumerate(sums):
            place = _at(builder, out, I64(4 * COLUMNS * r), FLOATS)
            builder.store(builder.load(total), place, align=4)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate


@intrinsic
def _score_keys(context, queries, query_stride, last_query, keys, stride, last_key, ahead,
                num_vectors, scale, scores, score_stride):  # type: ignore[no-untyped-def]  # fmt: skip
    """scores[g, s] = queries[g] @ keys[s] * scale for three g and four s.

    The strides are bytes; instead of queries and keys behind the last ones these are taken again,
    but the places of four scores are written. `num_vectors` times 8 floats are a key. What lies
    `ahead` bytes behind the keys will be needed next.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        queries, query_stride, last_query, keys, stride, last_key = arguments[:6]
        ahead, num_vectors, scale, scores, score_stride = arguments[6:]
        query_rows = _rows_up_to(builder, queries, query_stride, last_query, 3)
        score_rows = _rows_up_to(builder, scores, score_stride, last_query, 3)
        key_rows = _rows_up_to(builder, keys, stride, last_key, 4)
        zero = _constant(WEIGHTS, 0.0)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in range(12)]
        with cgutils.for_range(builder, num_vectors) as loop:
            offset = builder.mul(loop.index, I64(4 * LANES))
            numbers = [_load(builder, row, offset) for row in query_rows]
            for k, row in enumerate(key_rows):
                _prefetch(builder, builder.add(row, ahead), offset)
                key = _load(builder, row, offset)
                for total, query in zip(sums[k::4], numbers):
                    builder.store(_multiply_add(builder, key, query, builder.load(total)), total)
        for g, row in enumerate(score_rows):
            for k in range(4):
                score = _add_lanes(builder, builder.load(sums[4 * g + k]))
                place = _at(builder, row, I64(4 * k), F32)
                builder.store(builder.fmul(score, scale, flags=ANY_ORDER), place)
        return context.get_dummy_value()

    kinds = [types.intp] * 8 + [types.float32] + [types.intp] * 2
    return types.void(*kinds), generate


@intrinsic
def _add_rows(context, targets, target_stride, weights, weight_stride, last_target,
              rows, stride, ahead, count, num_vectors):  # type: ignore[no-untyped-def]  # fmt: skip
    """targets[g] += the sum of weights[g, s] * rows[s] for s below `count`, three g at a time.

    The strides are bytes; of targets behind `last_target` this one is taken again. A row is
    `num_vectors` times 16 floats. LLVM's own loop would store and load a target once for every
    row, after a check that it overlaps none.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        targets, target_stride, weights, weight_stride, last_target = arguments[:5]
        rows, stride, ahead, count, num_vectors = arguments[5:]
        target_rows = _rows_up_to(builder, targets, target_stride, last_target, 3)
        weight_rows = _rows_up_to(builder, weights, weight_stride, last_target, 3)
        sums = [cgutils.alloca_once(builder, FLOATS) for _ in target_rows]
        with cgutils.for_range(builder, num_vectors) as part:
            offset = builder.mul(part.index, I64(4 * COLUMNS))
            places = [_at(builder, row, offset, FLOATS) for row in target_rows]
            for place, total in zip(places, sums):
                builder.store(builder.load(place, align=4), total)
            with cgutils.for_range(builder, count) as loop:
                skip = builder.add(offset, builder.mul(loop.index, stride))
                _prefetch(builder, builder.add(rows, ahead), skip)
                row = _load(builder, rows, skip, FLOATS)
                for total, weight_row in zip(sums, weight_rows):
                    weight = _load(builder, weight_row, builder.mul(loop.index, I64(4)), F32)
                    sum_ = _multiply_add(
                        builder, row, _spread(builder, weight), builder.load(total)
                    )
                    builder.store(sum_, total)
            for place, total in zip(places, sums):
                builder.store(builder.load(total), place, align=4)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 10), generate


def _rows_up_to(builder: Any, first: Any, stride: Any, last: Any, count: int) -> list[Any]:
    """The addresses of `count` rows, row 0 at `first`; instead of rows behind `last`, this one."""
    indices = [I64(0)]
    for i in range(1, count):
        indices.append(builder.select(builder.icmp_signed("<", I64(i), last), I64(i), last))
    return [builder.add(first, builder.mul(stride, index)) for index in indices]


def _prefetch(builder: Any, address: Any, offset: Any) -> None:
    """Let the memory send the cache line there while something else is computed; the CPU does
    this by itself only where it can see where a block of the cache ends and which is next."""
    pointer = _at(builder, address, offset, ir.IntType(8))
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    builder.call(prefetch, [pointer, I32(0), I32(3), I32(1)])  # a read, of data needed soon


@intrinsic
def _float_of_bits(context, bits):  # type: ignore[no-untyped-def]
    """The float32 with the bits of an int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], F32)

    return types.float32(types.int32), generate


# Called with numbers by compiled code: numba knows their types, mypy does not.
unpack_4_bits: Any = _make_unpack(4)
unpack_8_bits: Any = _make_unpack(8)
dot_4_bits: Any = _make_dot(4)
dot_8_bits: Any = _make_dot(8)
add_rows: Any = _add_rows
score_keys: Any = _score_keys
multiply_rows: Any = _multiply_rows
float_of_bits: Any = _float_of_bits
