"""Products of the codes in int8 pages by matrix instructions (Intel AMX), as LLVM IR; only inside jitted code.

A tile register holds up to 16 rows of 64 bytes. `tdpb…` multiplies A (rows of 64 bytes) by B (row i holds elements 4i
to 4i + 3 of all columns) and adds to 32-bit sums, which are exact. What meets the codes is cut into digits (digits.py),
and the digits' sums are put together again (digit_sums.py). See `kernels.SOURCES`.
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


def bytes_of(context, builder, array_type, array):
    """Return where an array begins, as the address of a byte."""
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


@intrinsic
def multiply_keys(_context, sums, digits, i, keys, rows, _k):
    """Line _k + j of `sums` = 12 sums of key rows[_k + j] with a block's digits[i :], for j < LANES.

    See `split_queries` for the digits. `sums` are lines of 64 bytes, TILE of them and LANES more to work in.
    """

    def codegen(context, builder, signature, args):
        digits, source, numbers = (data_of(context, builder, signature.args[a], args[a]) for a in (1, 3, 4))
        k, length = args[5], row_length(context, builder, signature.args[3], args[3])
        sums = bytes_of(context, builder, signature.args[0], args[0])
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
        a, b = builder.bitcast(a, words), builder.bitcast(b, words)
        found += [builder.bitcast(_unpack(builder, a, b, half), LINE) for half in (0, 1)]
    return found


@intrinsic
def multiply_values(_context, sums, digits, tiles, width):
    """Fill `sums` with those of weights' digits (`split_weights`) with `width` columns of values (`interleave`)."""

    def codegen(context, builder, signature, args):
        digits, tiles = (data_of(context, builder, signature.args[a], args[a]) for a in (1, 2))
        sums = bytes_of(context, builder, signature.args[0], args[0])
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
