"""Cuts queries and weights into digits of 8 bits that meet the codes of int8 pages in amx.py, as LLVM IR.

A row becomes integers times one factor: within ±0x7F7F7E for a query, 0 to 2²³ for weights, each of three digits to the
base 256, the most significant first. So a number is off by about 2⁻²⁴ of its row's largest for queries, by 2⁻²³ for
weights, and the sums of digits with codes are exact. See `kernels.SOURCES`.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, call-arg"

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from contbatch.plugins.paged_attention.amx import BYTE, DIGITS, ROWS
from contbatch.plugins.paged_attention.gather import INNER
from contbatch.plugins.paged_attention.intrinsics import (
    FLOAT,
    INT32,
    INT64,
    LANES,
    TILE,
    VECTOR,
    data_of,
    halved,
    lanes_turned,
    shuffle,
    splat,
    turned,
)
from contbatch.plugins.paged_attention.softmax import WORDS, exp2_of, lanes_between, vector_at

LARGEST = np.float32(0x7F7F7E)
"""Of three digits of -128 to 127, less one: a product with the inverse may be rounded up."""
LEAST = np.uint32(27 << 23)
"""Bits of 2⁻¹⁰⁰: smaller rows are cut as if that were their largest number."""
ABSOLUTE, INFINITE = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
CENTRE = 0x808080
"""Added to an integer it makes its digits unsigned, each more by 128."""
POINT = 8388608.0
"""2²³: the sum with a smaller float32 ≥ 0 is that number, rounded to an integer, in the low 23 bits."""
EXPONENT = 0xFF << 23


@njit(**INNER)
def split_queries(query, first_row, num_rows, digits, first_block, factors, inverses):
    """Cut rows of `query` into digits, in blocks of ROWS, as `amx.multiply_keys` wants them.

    digits[first_block] is of shape (chunks of 64 dimensions, 16, 64): row r of the block has digit d of a chunk's
    dimension 4i + j in [chunk, i, 4 · (d · ROWS + r) + j]. factors[ROWS · first_block + r] is what the integers are to
    be multiplied by, NaN if not all of the row is finite. `inverses` is room for ROWS floats.
    """
    size = query.shape[1]
    for row in range(0, num_rows, ROWS):
        block = first_block + row // ROWS
        for r in range(ROWS):
            start, highest = (first_row + row + r) * size, LEAST
            for column in range(start, start + size, TILE):
                highest = max(highest, _largest_bits(query, column))
            largest = np.uint32(highest).view(np.float32)
            inverses[r] = LARGEST / largest
            factors[ROWS * block + r] = largest / LARGEST if highest < INFINITE else np.float32(np.nan)
        for column in range(0, size, TILE):
            start = (first_row + row) * size + column
            _split_rows(digits, 16 * (block * size + column), query, start, size, inverses)


@intrinsic
def _largest_bits(_context, array, _i):
    """Return the bits of the greatest |x| of TILE floats from _i on; they sort as numbers do, infinity and NaN last."""

    def codegen(context, builder, signature, args):
        row = builder.load(vector_at(context, builder, signature.args[0], args[0], args[1]), align=4)
        return _highest_bits(builder, row)

    return types.uint32(array, types.int64), codegen


def _highest_bits(builder, vector):
    bits = builder.and_(builder.bitcast(vector, WORDS), ir.Constant(WORDS, [int(ABSOLUTE)] * TILE))
    return halved(builder, bits, lambda a, b: builder.select(builder.icmp_unsigned(">", a, b), a, b))


@intrinsic
def _split_rows(_context, digits, _i, query, _j, _step, inverses):
    """Cut query[_j + r · _step :][:TILE] · inverses[r], for ROWS rows r, into the 1024 bytes of digits[_i :]."""

    def codegen(context, builder, signature, args):
        digits, inverses = (data_of(context, builder, signature.args[a], args[a]) for a in (0, 5))
        numbers = []
        for r in range(ROWS):
            first = builder.add(args[3], builder.mul(args[4], INT64(r)))
            row = builder.load(vector_at(context, builder, signature.args[2], args[2], first), align=4)
            factor = splat(builder, builder.load(builder.gep(inverses, [INT64(r)])), TILE)
            kind = ir.FunctionType(VECTOR, [VECTOR])
            rint = builder.module.declare_intrinsic(f"llvm.rint.v{TILE}f32", (), kind)
            number = builder.fptosi(builder.call(rint, [builder.fmul(row, factor)]), WORDS)
            numbers.append(builder.add(number, ir.Constant(WORDS, [CENTRE] * TILE)))
        flipped = ir.Constant(WORDS, [CENTRE] * TILE)
        parts = [_quarters(builder, builder.xor(number, flipped)) for number in numbers]
        for q, rows in enumerate(zip(*parts, strict=True)):
            by_digit = turned(builder, [_bytes_by_digit(builder, row) for row in rows])
            for i, line in enumerate(lanes_turned(builder, by_digit)):
                address = builder.gep(digits, [builder.add(args[1], INT64(64 * (4 * q + i)))])
                builder.store(line, builder.bitcast(address, line.type.as_pointer()), align=64)
        return context.get_dummy_value()

    return types.void(digits, types.int64, query, types.int64, types.int64, inverses), codegen


def _quarters(builder, vector):
    return [shuffle(builder, vector, vector, range(first, first + LANES)) for first in range(0, TILE, LANES)]


def _bytes_by_digit(builder, words):
    """Return LANES words with the bytes of each 4 in another order: all third ones, second ones, first ones, fourth."""
    codes = builder.bitcast(words, ir.VectorType(BYTE, 4 * LANES))
    order = [lane + 4 * word + digit for lane in range(0, 4 * LANES, 16) for digit in (2, 1, 0, 3) for word in range(4)]
    return builder.bitcast(shuffle(builder, codes, codes, order), words.type)


@intrinsic
def split_weights(_context, digits, factors, _row, scores, _i, highest, scales, _j, first, stop):
    """Cut the weights 2**(scores[_i :] - highest) · scales[_j :] of TILE keys into digits[64 · (d · ROWS + _row) :].

    They count as 0 before `first` and from `stop` on, where scores must be -inf. Of each 16 bytes the four fours come
    from four quarters of the tile, see `interleave`. factors[_row] becomes what the integers are to be multiplied by: a
    power of two, NaN if not all weights are finite. Return the sum of the powers, see `exp_scores`.
    """

    def codegen(context, builder, signature, args):
        digits, factors = (data_of(context, builder, signature.args[a], args[a]) for a in (0, 1))
        seen = lanes_between(builder, args[8], args[9])
        score, scale = (
            builder.load(vector_at(context, builder, signature.args[a], args[a], args[a + 1]), align=4) for a in (3, 6)
        )
        powers = exp2_of(builder, builder.fsub(score, splat(builder, args[5], TILE)))
        weights = builder.select(seen, builder.fmul(powers, scale), ir.Constant(VECTOR, [0.0] * TILE))
        found = _highest_bits(builder, weights)
        found = builder.select(builder.icmp_unsigned(">", found, INT32(int(LEAST))), found, INT32(int(LEAST)))
        exponent = builder.and_(found, INT32(EXPONENT))  # of the largest: 2**exponent ≤ largest < 2 · 2**exponent
        inverse = builder.bitcast(builder.sub(INT32((2 * 127 + 22) << 23), exponent), FLOAT)
        product = builder.fmul(weights, splat(builder, inverse, TILE), flags=["contract"])
        numbers = builder.fadd(product, ir.Constant(VECTOR, [POINT] * TILE), flags=["contract"])
        quarters = [_bytes_by_digit(builder, q) for q in _quarters(builder, builder.bitcast(numbers, WORDS))]
        for d, line in enumerate(turned(builder, quarters)[:DIGITS]):
            offset = builder.add(builder.mul(args[2], INT64(64)), INT64(64 * ROWS * d))
            builder.store(line, builder.bitcast(builder.gep(digits, [offset]), line.type.as_pointer()), align=64)
        factor = builder.bitcast(builder.sub(exponent, INT32(22 << 23)), FLOAT)
        finite = builder.icmp_unsigned("<", found, INT32(int(INFINITE)))
        builder.store(builder.select(finite, factor, FLOAT(float("nan"))), builder.gep(factors, [args[2]]))
        return halved(builder, powers, builder.fadd)

    return types.float32(digits, factors, _row, scores, _i, highest, scales, _j, first, stop), codegen
