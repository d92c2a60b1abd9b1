"""Vector instructions for `cpu_kernels` that LLVM does not find by itself, written in its own
language through numba's `intrinsic`.

A packed group of 32 weights is 16 bytes of codes (4 bits each: the low halves of the bytes are
weights 0-15, the high halves weights 16-31) or 32 bytes (8 bits each). LLVM unrolls the short
loop over them into single numbers; written as vectors, eight weights cost about five
instructions. The vectors are as long as half a group; LLVM cuts them into what the CPU has.
Leaves out everything that a plain loop does as fast. Given (no notebook builds it).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

GROUP = 32  # weights that share a scale and a minimum; see `packed`
I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
LANES = GROUP // 2
BYTES, FLOATS = ir.VectorType(ir.IntType(8), LANES), ir.VectorType(F32, LANES)
ANY_ORDER = ("fast",)


def _spread(builder: Any, scalar: Any) -> Any:
    """The scalar in every lane."""
    first = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, LANES), [0] * LANES))


def _at(builder: Any, address: Any, offset: Any, kind: Any) -> Any:
    """A pointer to `kind`, `offset` bytes behind the integer `address`."""
    return builder.inttoptr(builder.add(address, offset), kind.as_pointer())


def _load_group(builder: Any, codes: Any, scales: Any, group: Any, bits: int) -> list[Any]:
    """The weights of one group, code * scale + minimum, as two vectors."""
    place = _at(builder, scales, builder.mul(group, I64(8)), F32)
    scale = _spread(builder, builder.load(place))
    minimum = _spread(builder, builder.load(builder.gep(place, [I64(1)])))
    place = _at(builder, codes, builder.mul(group, I64(GROUP * bits // 8)), BYTES)
    halves = [builder.load(place, align=1)]
    if bits == 4:
        low, high = ir.Constant(BYTES, [15] * LANES), ir.Constant(BYTES, [4] * LANES)
        halves = [builder.and_(halves[0], low), builder.lshr(halves[0], high)]
    else:
        halves.append(builder.load(builder.gep(place, [I64(1)]), align=1))
    scaled = [builder.fmul(builder.uitofp(h, FLOATS), scale, flags=ANY_ORDER) for h in halves]
    return [builder.fadd(weights, minimum, flags=ANY_ORDER) for weights in scaled]


def _make_unpack(bits: int) -> Any:
    @intrinsic
    def unpack(context, codes, scales, target, num_groups):  # type: ignore[no-untyped-def]
        """Write the float32 weights of `num_groups` groups to `target` (all are addresses)."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            codes, scales, target, num_groups = arguments
            with cgutils.for_range(builder, num_groups) as loop:
                halves = _load_group(builder, codes, scales, loop.index, bits)
                place = _at(builder, target, builder.mul(loop.index, I64(4 * GROUP)), FLOATS)
                for k, half in enumerate(halves):
                    builder.store(half, builder.gep(place, [I64(k)]), align=4)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp, types.intp), generate

    return unpack


def _make_dot(bits: int) -> Any:
    @intrinsic
    def dot(context, x, codes, scales, num_groups):  # type: ignore[no-untyped-def]
        """The sum of x * weight over `num_groups` groups (the first three are addresses)."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, codes, scales, num_groups = arguments
            zero = ir.Constant(FLOATS, [0.0] * LANES)
            sums = [cgutils.alloca_once_value(builder, zero) for _ in range(2)]
            with cgutils.for_range(builder, num_groups) as loop:
                halves = _load_group(builder, codes, scales, loop.index, bits)
                place = _at(builder, x, builder.mul(loop.index, I64(4 * GROUP)), FLOATS)
                for k, (total, half) in enumerate(zip(sums, halves)):
                    part = builder.load(builder.gep(place, [I64(k)]), align=4)
                    part = builder.fmul(part, half, flags=ANY_ORDER)
                    builder.store(builder.fadd(builder.load(total), part, flags=ANY_ORDER), total)
            total = builder.fadd(builder.load(sums[0]), builder.load(sums[1]), flags=ANY_ORDER)
            kind = ir.FunctionType(F32, [F32, FLOATS])
            name = f"llvm.vector.reduce.fadd.v{LANES}f32"
            add_lanes = cgutils.get_or_insert_function(builder.module, kind, name)
            return builder.call(add_lanes, [F32(0.0), total], fastmath=ANY_ORDER)

        return types.float32(types.intp, types.intp, types.intp, types.intp), generate

    return dot


@intrinsic
def _add_rows(context, target, rows, stride, weights, count, num_vectors):  # type: ignore[no-untyped-def]
    """target += the sum of weights[s] * row s for s below `count`.

    All but the last two are addresses or, `stride`, the bytes from one row to the next; a row
    is `num_vectors` times 16 floats. LLVM's own loop would store and load the target once for
    every row, after a check that it overlaps none.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, rows, stride, weights, count, num_vectors = arguments
        with cgutils.for_range(builder, num_vectors) as part:
            offset = builder.mul(part.index, I64(4 * LANES))
            place = _at(builder, target, offset, FLOATS)
            total = cgutils.alloca_once(builder, FLOATS)
            builder.store(builder.load(place, align=4), total)
            with cgutils.for_range(builder, count) as loop:
                skip = builder.add(offset, builder.mul(loop.index, stride))
                row = builder.load(_at(builder, rows, skip, FLOATS), align=4)
                weight = builder.load(_at(builder, weights, builder.mul(loop.index, I64(4)), F32))
                row = builder.fmul(row, _spread(builder, weight), flags=ANY_ORDER)
                builder.store(builder.fadd(builder.load(total), row, flags=ANY_ORDER), total)
            builder.store(builder.load(total), place, align=4)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6), generate


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
float_of_bits: Any = _float_of_bits
