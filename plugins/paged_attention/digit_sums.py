"""Puts the sums of digits with codes together, see digits.py and amx.py, as LLVM IR; only inside jitted code.

See `kernels.SOURCES`.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from contbatch.plugins.paged_attention.amx import DIGITS, ROWS, bytes_of
from contbatch.plugins.paged_attention.intrinsics import (
    FLOAT,
    INT32,
    INT64,
    LANES,
    TILE,
    data_of,
    lanes_turned,
    shuffle,
    splat,
    turned,
)

FLOATS, FOUR = ir.VectorType(FLOAT, LANES), ir.VectorType(INT32, 4)


@intrinsic
def put_scores(_context, out, sums, factors, _j, _k):
    """out[r · TILE + _k :][:LANES] = factors[_j + r] · what lines _k to _k + LANES of `sums` say, for ROWS rows r."""

    def codegen(context, builder, signature, args):
        out, factors = (data_of(context, builder, signature.args[a], args[a]) for a in (0, 2))
        sums = bytes_of(context, builder, signature.args[1], args[1])
        lines = builder.gep(sums, [builder.mul(args[4], INT64(64))])
        found = [_packed_sums(builder, lines, digit) for digit in range(DIGITS)]
        scores = turned(builder, [_joined(builder, column) for column in zip(*found, strict=True)])
        for r, score in enumerate(scores):
            factor = splat(builder, builder.load(builder.gep(factors, [builder.add(args[3], INT64(r))])), LANES)
            target = builder.gep(out, [builder.add(args[4], INT64(r * TILE))])
            builder.store(builder.fmul(score, factor), builder.bitcast(target, FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(out, sums, factors, _j, _k), codegen


def _packed_sums(builder, sums, digit):
    """Return 4 vectors: one digit's sums with ROWS rows, of tokens r, r + 4, … for vector r."""

    def load(token):
        address = builder.gep(sums, [INT64(64 * token + 16 * digit)])
        return builder.load(builder.bitcast(address, FOUR.as_pointer()), align=16)

    found = []
    for r in range(4):
        vectors = [load(token) for token in range(r, LANES, 4)]
        while len(vectors) > 1:
            width = range(2 * vectors[0].type.count)
            vectors = [shuffle(builder, a, b, width) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        found += vectors
    return found


@intrinsic
def add_values(_context, out, i, width, sums, factors, shrinks, _j, n):
    """Row by row, for n rows r: out[i + r · width :][:width] = that · shrinks[_j + r] + factors[_j + r] · sums.

    The sums are those of row _j + r of a block, see `multiply_values`.
    """

    def codegen(context, builder, signature, args):
        out, factors, shrinks = (data_of(context, builder, signature.args[a], args[a]) for a in (0, 4, 5))
        sums = bytes_of(context, builder, signature.args[3], args[3])
        i, width, j, n = (args[a] for a in (1, 2, 6, 7))
        with cgutils.for_range(builder, n) as row:
            number = builder.add(j, row.index)
            factor, shrink = (splat(builder, builder.load(builder.gep(a, [number])), LANES) for a in (factors, shrinks))
            with cgutils.for_range(builder, builder.sdiv(width, INT64(64))) as chunk:
                at = builder.add(builder.mul(chunk.index, INT64(4096)), builder.mul(number, INT64(64)))
                target = builder.add(builder.add(i, builder.mul(row.index, width)), builder.mul(chunk.index, INT64(64)))
                for t, product in enumerate(_sums_of_row(builder, builder.gep(sums, [at]))):
                    address = builder.gep(out, [builder.add(target, INT64(LANES * t))])
                    address = builder.bitcast(address, FLOATS.as_pointer())
                    kept = builder.fmul(builder.load(address, align=4), shrink)
                    # Exact, for the factor is a power of two: no matter whether it is fused.
                    added = builder.fmul(product, factor, flags=["contract"])
                    builder.store(builder.fadd(added, kept, flags=["contract"]), address, align=4)
        return context.get_dummy_value()

    return types.void(out, i, width, sums, factors, shrinks, _j, n), codegen


def _sums_of_row(builder, sums):
    """Return a row's 64 sums, from 4 tiles at `sums`, as 4 vectors in the order of columns."""

    def load(t, digit):
        address = builder.gep(sums, [INT64(1024 * t + 64 * ROWS * digit)])
        return builder.load(builder.bitcast(address, ir.VectorType(INT32, LANES).as_pointer()), align=64)

    return lanes_turned(builder, [_joined(builder, [load(t, digit) for digit in range(DIGITS)]) for t in range(4)])


def _joined(builder, digits):
    """Return vectors of sums, the most significant digit's first, as floats: rounded twice."""
    total = builder.sitofp(digits[0], FLOATS)
    for digit in digits[1:]:
        # The product is exact, so it makes no difference whether it is rounded before the sum.
        product = builder.fmul(total, ir.Constant(FLOATS, [256.0] * LANES), flags=["contract"])
        total = builder.fadd(product, builder.sitofp(digit, FLOATS), flags=["contract"])
    return total
