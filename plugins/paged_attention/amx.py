"""Products of the codes in int8 pages by matrix instructions (Intel AMX), as LLVM IR; only inside jitted code.

A tile register holds up to 16 rows of 64 bytes. `tdpb…` multiplies A (rows of 64 bytes) by B (row i holds elements 4i to
4i + 3 of all columns) and adds to 32-bit sums, which are exact. The numbers that meet codes are cut into digits, see
digits.py, and their sums put together here. See `kernels.SOURCES`.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from contbatch.plugins.paged_attention.intrinsics import (
    FLOAT,
    INT32,
    INT64,
    LANES,
    TILE,
    data_of,
    row_length,
    row_starts,
    shuffle,
    splat,
    turned,
)

ROWS = 4
"""Query rows whose digits share a tile register."""
DIGITS = 3
KEY_SUMS, KEYS, QUERIES, WEIGHTS, VALUES, VALUE_SUMS = 0, 1, 2, 3, 4, 6
"""Numbers of tile registers; of the last two there are two each, used in turns."""
SHAPES = (16, 48), (16, 64), (16, 48), (12, 64), (16, 64), (16, 64), (12, 64), (12, 64)
"""Their rows and bytes a row."""
BYTE, LINE = ir.IntType(8), ir.VectorType(ir.IntType(8), 64)
FLOATS, FOUR = ir.VectorType(FLOAT, LANES), ir.VectorType(INT32, 4)


def _run(builder, name, *args):
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(builder.module.declare_intrinsic(f"llvm.x86.{name}", (), kind), args)


def _load_tile(builder, register, address, stride=64):
    stride = INT64(stride) if isinstance(stride, int) else stride
    _run(builder, "tileloadd64", BYTE(register), address, stride)


def _bytes_of(context, builder, array_type, array):
    return builder.bitcast(data_of(context, builder, array_type, array), BYTE.as_pointer())


def _line(builder, address):
    return builder.bitcast(address, LINE.as_pointer())


@intrinsic
def open_tiles(_context):
    """Give this thread's tile registers the shapes of `SHAPES`, in the format of the instruction LDTILECFG."""
    table = [1] + [0] * 63
    for register, (rows, row_bytes) in enumerate(SHAPES):
        table[16 + 2 * register], table[48 + register] = row_bytes, rows

    def codegen(context, builder, _signature, _args):
        where = cgutils.global_constant(builder, "tiles", ir.Constant(LINE, table))
        _run(builder, "ldtilecfg", builder.bitcast(where, BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def close_tiles(_context):
    """Leave the tile registers as a thread finds them that never used any: others expect nothing else."""

    def codegen(context, builder, _signature, _args):
        _run(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


def _joined(builder, digits):
    """Return vectors of sums, the most significant digit's first, as floats: rounded twice."""
    total = builder.sitofp(digits[0], FLOATS)
    for digit in digits[1:]:
        # The product is exact, so it makes no difference whether it is rounded before the sum.
        product = builder.fmul(total, ir.Constant(FLOATS, [256.0] * LANES), flags=["contract"])
        total = builder.fadd(product, builder.sitofp(digit, FLOATS), flags=["contract"])
    return total


@intrinsic
def multiply_keys(_context, sums, digits, i, keys, rows, _k):
    """Line k + j of `sums` = 12 sums of key rows[_k + j] with a block's digits[i :], see `split_queries`, for j < LANES.

    `sums` are lines of 64 bytes, TILE of them and LANES more to work in.
    """

    def codegen(context, builder, signature, args):
        digits, source, numbers = (data_of(context, builder, signature.args[a], args[a]) for a in (1, 3, 4))
        k, length = args[5], row_length(context, builder, signature.args[3], args[3])
        sums = _bytes_of(context, builder, signature.args[0], args[0])
        copied = builder.gep(sums, [INT64(64 * TILE)])
        numbers, digits = builder.gep(numbers, [k]), builder.gep(digits, [args[2]])
        starts = row_starts(builder, source, length, numbers)
        step, regular = _regular(builder, numbers)
        stride = builder.select(regular, builder.mul(step, length), INT64(64))

        _run(builder, "tilezero", BYTE(KEY_SUMS))
        with cgutils.for_range(builder, builder.sdiv(length, INT64(64))) as chunk:
            column = builder.mul(chunk.index, INT64(64))
            with builder.if_then(builder.not_(regular)):
                for r, start in enumerate(starts):
                    line = builder.load(_line(builder, builder.gep(start, [column])), align=1)
                    builder.store(line, _line(builder, builder.gep(copied, [INT64(64 * r)])), align=64)
            address = builder.select(regular, builder.gep(starts[0], [column]), copied)
            _load_tile(builder, QUERIES, builder.gep(digits, [builder.mul(chunk.index, INT64(1024))]))
            _load_tile(builder, KEYS, address, stride)
            _run(builder, "tdpbssd", BYTE(KEY_SUMS), BYTE(KEYS), BYTE(QUERIES))
        _run(builder, "tilestored64", BYTE(KEY_SUMS), builder.gep(sums, [builder.mul(k, INT64(64))]), INT64(64))
        return context.get_dummy_value()

    return types.void(sums, digits, i, keys, rows, _k), codegen


@intrinsic
def put_scores(_context, out, sums, factors, _j, _k):
    """out[r · TILE + _k :][:LANES] = factors[_j + r] · what lines _k to _k + LANES of `sums` say, for ROWS rows r."""

    def codegen(context, builder, signature, args):
        out, factors = (data_of(context, builder, signature.args[a], args[a]) for a in (0, 2))
        sums = _bytes_of(context, builder, signature.args[1], args[1])
        lines = builder.gep(sums, [builder.mul(args[4], INT64(64))])
        found = [_packed_sums(builder, lines, digit) for digit in range(DIGITS)]
        scores = turned(builder, [_joined(builder, column) for column in zip(*found, strict=True)])
        for r, score in enumerate(scores):
            factor = splat(builder, builder.load(builder.gep(factors, [builder.add(args[3], INT64(r))])), LANES)
            target = builder.gep(out, [builder.add(args[4], INT64(r * TILE))])
            builder.store(builder.fmul(score, factor), builder.bitcast(target, FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(out, sums, factors, _j, _k), codegen


def _regular(builder, numbers):
    """Return the distance of the first two of LANES numbers, and whether all others follow each other at that."""
    eight = ir.VectorType(INT64, 8)

    def load(first):
        return builder.load(builder.bitcast(builder.gep(numbers, [INT64(first)]), eight.as_pointer()), align=8)

    steps = [builder.sub(load(first + 1), load(first)) for first in (0, 7)]
    step = builder.extract_element(steps[0], INT32(0))
    same = shuffle(builder, steps[0], steps[0], [0] * 8)
    alike = builder.and_(*(builder.icmp_signed("==", found, same) for found in steps))
    return step, builder.icmp_signed("==", builder.bitcast(alike, BYTE), BYTE(255))


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
def interleave(_context, out, values, rows, n):
    """Bring rows rows[:4 · n] of `values` into `out` (bytes) as `add_codes` wants them.

    That is, for each 64 columns, 4 tiles of n rows, of 4 bytes for each of their 16 columns: tile t has columns 4t to
    4t + 3 of each 16, which takes no moves between 128-bit lanes.
    """

    def codegen(context, builder, signature, args):
        out, source, numbers = (data_of(context, builder, signature.args[a], args[a]) for a in range(3))
        length = row_length(context, builder, signature.args[1], args[1])
        with cgutils.for_range(builder, args[3]) as group:
            first = builder.gep(numbers, [builder.mul(group.index, INT64(4))])
            starts = [
                builder.gep(source, [builder.mul(builder.load(builder.gep(first, [INT64(r)])), length)])
                for r in range(4)
            ]
            line = builder.or_(  # the order that `split_weights` leaves them in
                builder.lshr(group.index, INT64(2)), builder.shl(builder.and_(group.index, INT64(3)), INT64(2))
            )
            to = builder.gep(out, [builder.mul(line, INT64(64))])
            with cgutils.for_range(builder, builder.sdiv(length, INT64(64))) as chunk:
                column = builder.mul(chunk.index, INT64(64))
                rows = [builder.load(_line(builder, builder.gep(start, [column])), align=1) for start in starts]
                to_chunk = builder.gep(builder.bitcast(to, BYTE.as_pointer()), [builder.mul(column, INT64(64))])
                for t, tile in enumerate(_interleaved(builder, rows)):
                    builder.store(tile, _line(builder, builder.gep(to_chunk, [INT64(1024 * t)])), align=64)
        return context.get_dummy_value()

    return types.void(out, values, rows, n), codegen


def _unpack(builder, a, b, half):
    """Return elements of `a` and `b` by turns, from the lower (0) or upper (1) halves of their 128-bit lanes."""
    count = a.type.count
    lane = count // 4
    mask = [first + i + side * count for first in range(0, count, lane) for i in range(lane // 2) for side in (0, 1)]
    return shuffle(builder, a, b, [m + half * lane // 2 for m in mask])


def _interleaved(builder, rows):
    pairs = [[_unpack(builder, rows[i], rows[i + 1], half) for i in (0, 2)] for half in (0, 1)]
    words = ir.VectorType(ir.IntType(16), 32)
    found = []
    for a, b in pairs:
        a, b = builder.bitcast(a, words), builder.bitcast(b, words)  # noqa: PLW2901
        found += [builder.bitcast(_unpack(builder, a, b, half), LINE) for half in (0, 1)]
    return found


@intrinsic
def multiply_values(_context, sums, digits, tiles, width):
    """Fill `sums` with those of weights' digits, see `split_weights`, with `width` columns of values, see `interleave`."""

    def codegen(context, builder, signature, args):
        digits, tiles = (data_of(context, builder, signature.args[a], args[a]) for a in (1, 2))
        sums = _bytes_of(context, builder, signature.args[0], args[0])
        _load_tile(builder, WEIGHTS, digits)
        with cgutils.for_range(builder, builder.sdiv(args[3], INT64(64))) as chunk:
            for t in range(4):
                values, total = VALUES + t % 2, VALUE_SUMS + t % 2
                at = builder.add(builder.mul(chunk.index, INT64(4096)), INT64(1024 * t))
                _run(builder, "tilezero", BYTE(total))
                _load_tile(builder, values, builder.gep(tiles, [at]))
                _run(builder, "tdpbusd", BYTE(total), BYTE(WEIGHTS), BYTE(values))
                _run(builder, "tilestored64", BYTE(total), builder.gep(sums, [at]), INT64(64))
        return context.get_dummy_value()

    return types.void(sums, digits, tiles, width), codegen


@intrinsic
def add_values(_context, out, i, width, sums, factors, shrinks, _j, n):
    """Row by row, for n rows r: out[i + r · width :][:width] = that · shrinks[_j + r] + factors[_j + r] · sums.

    The sums are those of row _j + r of a block, see `multiply_values`.
    """

    def codegen(context, builder, signature, args):
        out, factors, shrinks = (data_of(context, builder, signature.args[a], args[a]) for a in (0, 4, 5))
        sums = _bytes_of(context, builder, signature.args[3], args[3])
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


def lanes_turned(builder, vectors):
    """Return 4 vectors of LANES words as 4 others: 128-bit lane i of each is vector i of the result, in that order."""
    pairs = [
        shuffle(
            builder, vectors[t], vectors[t + 1], [i + side * LANES for lane in lanes for side in (0, 1) for i in lane]
        )
        for lanes in ([range(4), range(4, 8)], [range(8, 12), range(12, 16)])
        for t in (0, 2)
    ]
    return [
        shuffle(builder, a, b, [*half, *(i + LANES for i in half)])
        for a, b in (pairs[:2], pairs[2:])
        for half in (range(8), range(8, 16))
    ]
