"""Cuts queries and weights into digits of 8 bits that meet the codes of int8 pages in amx.py, as LLVM IR.

A row becomes integers over one factor, those of a query ±(2²³ - 2¹⁵), those of weights 0 to 2²³: of three digits to the base 256
each, the most significant first. So a number is off by 2⁻²⁴ of its row's largest for queries, 2⁻²³ for weights, and all
that follows up to the putting together of the digits' sums is exact. See `kernels.SOURCES`.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from contbatch.plugins.paged_attention.amx import BYTE, DIGITS, FOUR, ROWS
from contbatch.plugins.paged_attention.gather import EXACT
from contbatch.plugins.paged_attention.intrinsics import (
    FLOAT,
    INT32,
    INT64,
    TILE,
    VECTOR,
    data_of,
    halved,
    shuffle,
    splat,
    turned,
)
from contbatch.plugins.paged_attention.softmax import WORDS, lanes_between, vector_at

LARGEST = np.float32(0x7F7F7E)
"""Of three digits of -128 to 127, less one: a product with the inverse may be rounded up."""
LEAST = np.uint32(27 << 23)
"""Bits of 2⁻¹⁰⁰: rows that are smaller are cut as if that were their largest number, which is far below any tolerance."""
ABSOLUTE, INFINITE = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
CENTRE = 0x808080
"""Added to an integer it makes its digits unsigned, each more by 128."""
POINT = 8388608.0
"""2²³: the sum with a smaller float32 ≥ 0 is that number, rounded to an integer, in the low 23 bits."""
EXPONENT, MANTISSA_BITS = 0xFF << 23, 23


@njit(**EXACT)
def split_queries(query, first_row, num_rows, digits, first_block, factors):
    """Cut rows of `query` into digits, in blocks of ROWS, as `amx.multiply_keys` wants them.

    digits[first_block :] are of shape (chunks of 64 dimensions, 16, 64); row r of a block has digit d of dimension 4i + j of a chunk in
    [chunk, i, 4 · (d · ROWS + r) + j]. factors[ROWS · first_block + r] is what the integers are to be multiplied by, NaN if
    not all of the row is finite.
    """
    inverse = np.empty(ROWS, np.float32)
    head_size = query.shape[1]
    for row in range(0, num_rows, ROWS):
        block = first_block + row // ROWS
        for r in range(ROWS):
            highest = LEAST
            if row + r < num_rows:
                for x in query[first_row + row + r]:
                    highest = max(highest, np.uint32(np.float32(x).view(np.uint32) & ABSOLUTE))
            largest = np.uint32(highest).view(np.float32)
            inverse[r] = LARGEST / largest
            factors[ROWS * block + r] = largest / LARGEST if highest < INFINITE else np.float32(np.nan)
        for column in range(0, head_size, TILE):
            _split_rows(
                digits, block * head_size * 16 + column * 16, query, (first_row + row) * head_size + column, head_size, inverse
            )


@intrinsic
def _split_rows(_context, digits, i, query, _j, step, inverse):
    """Cut query[_j + r · step :][:TILE] · inverse[r], for ROWS rows r, into the 1024 bytes of digits[i :]."""

    def codegen(context, builder, signature, args):
        digits, inverse = (data_of(context, builder, signature.args[a], args[a]) for a in (0, 5))
        numbers = []
        for r in range(ROWS):
            first = builder.add(args[3], builder.mul(args[4], INT64(r)))
            row = builder.load(vector_at(context, builder, signature.args[2], args[2], first), align=4)
            factor = splat(builder, builder.load(builder.gep(inverse, [INT64(r)])), TILE)
            kind = ir.FunctionType(VECTOR, [VECTOR])
            rint = builder.module.declare_intrinsic(f"llvm.rint.v{TILE}f32", (), kind)
            number = builder.fptosi(builder.call(rint, [builder.fmul(row, factor)]), WORDS)
            numbers.append(builder.add(number, ir.Constant(WORDS, [CENTRE] * TILE)))
        bytes_ = ir.VectorType(BYTE, TILE)
        words = ir.VectorType(INT32, TILE // 4)
        for d in range(DIGITS):
            rows = [builder.xor(_digit(builder, n, d), ir.Constant(bytes_, [-128] * TILE)) for n in numbers]
            for i, vector in enumerate(turned(builder, [builder.bitcast(row, words) for row in rows])):
                for lane in range(4):
                    four = shuffle(builder, vector, vector, range(4 * lane, 4 * lane + 4))
                    address = builder.gep(digits, [builder.add(args[1], INT64(64 * (4 * lane + i) + 16 * d))])
                    builder.store(four, builder.bitcast(address, FOUR.as_pointer()), align=16)
        return context.get_dummy_value()

    return types.void(digits, i, query, _j, step, inverse), codegen


def _digit(builder, numbers, d):
    bits = MANTISSA_BITS // 8 * 8 - 8 * d
    shifted = builder.lshr(numbers, ir.Constant(WORDS, [bits] * TILE)) if bits else numbers
    return builder.trunc(shifted, ir.VectorType(BYTE, TILE))


@intrinsic
def split_weights(_context, digits, row, weights, _i, first, stop):
    """Cut weights[_i : _i + TILE], as if 0 before `first` and from `stop` on, into digits[64 · (d · ROWS + row) :].

    Return what the integers are to be multiplied by: a power of two, NaN if not all weights are finite.
    """

    def codegen(context, builder, signature, args):
        digits = data_of(context, builder, signature.args[0], args[0])
        seen = lanes_between(builder, args[4], args[5])
        weights = builder.load(vector_at(context, builder, signature.args[2], args[2], args[3]), align=4)
        weights = builder.select(seen, weights, ir.Constant(VECTOR, [0.0] * TILE))
        bits = builder.and_(builder.bitcast(weights, WORDS), ir.Constant(WORDS, [int(ABSOLUTE)] * TILE))
        found = halved(builder, bits, lambda a, b: builder.select(builder.icmp_unsigned(">", a, b), a, b))
        found = builder.select(builder.icmp_unsigned(">", found, INT32(int(LEAST))), found, INT32(int(LEAST)))
        exponent = builder.and_(found, INT32(EXPONENT))  # of the largest: 2**exponent ≤ largest < 2 · 2**exponent
        inverse = builder.bitcast(builder.sub(INT32((2 * 127 + 22) << 23), exponent), FLOAT)
        point = ir.Constant(VECTOR, [POINT] * TILE)
        product = builder.fmul(weights, splat(builder, inverse, TILE), flags=["contract"])
        numbers = builder.bitcast(builder.fadd(product, point, flags=["contract"]), WORDS)
        for d in range(DIGITS):
            offset = builder.add(builder.mul(args[1], INT64(64)), INT64(64 * ROWS * d))
            address = builder.bitcast(builder.gep(digits, [offset]), ir.VectorType(BYTE, TILE).as_pointer())
            builder.store(_digit(builder, numbers, d), address, align=64)
        factor = builder.bitcast(builder.sub(exponent, INT32(22 << 23)), FLOAT)
        finite = builder.icmp_unsigned("<", found, INT32(int(INFINITE)))
        return builder.select(finite, factor, FLOAT(float("nan")))

    return types.float32(digits, row, weights, _i, first, stop), codegen
