"""The few operations of the CPU kernel that Numba cannot express, as LLVM IR; only inside jitted code.

Products are in products.py, the softmax is in softmax.py. The vectors are `TILE` floats wide: LLVM splits them into
whatever registers the machine has (8 × 256 bits, 16 × 128…).
See `kernels.SOURCES` for what else to do after a change.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

TILE = 64
"""Positions handled at once, and columns of a matrix of `add_product`."""

LANES = 16
"""Rows transposed at once: a register of the widest machines."""

INT32, INT64, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
VECTOR = ir.VectorType(FLOAT, TILE)


def data_of(context, builder, array_type, array):
    """Return where an array's elements begin."""
    return context.make_array(array_type)(context, builder, array).data


def row_length(context, builder, array_type, array):
    """Return how many elements a row of a matrix has."""
    return builder.extract_value(context.make_array(array_type)(context, builder, array).shape, 1)


def shuffle(builder, a, b, mask):
    """Return the elements of two vectors that are numbered in `mask`."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT32, len(mask)), list(mask)))


def splat(builder, value, count):
    """Return a vector of `count` times the value."""
    undefined = ir.Constant(ir.VectorType(value.type, count), ir.Undefined)
    return shuffle(builder, builder.insert_element(undefined, value, INT32(0)), undefined, [0] * count)


@intrinsic
def atomic_add(_context, array, _i, _n):
    """Add _n to array[_i] (int64), return its former value; who sees the new one sees all that was written before."""

    def codegen(context, builder, signature, args):
        address = builder.gep(data_of(context, builder, signature.args[0], args[0]), [args[1]])
        return builder.atomic_rmw("add", address, args[2], "seq_cst")

    return types.int64(array, types.int64, types.int64), codegen


@intrinsic
def fma(_context, a, b, c):
    """Return a · b + c of three float32, rounded once."""

    def codegen(_context, builder, _signature, args):
        return builder.fma(*args)

    return types.float32(a, b, c), codegen


@intrinsic
def prefetch(_context, array, _i):
    """Ask for the line of element _i of an array, seen as flat, to be in the second-level cache soon; never faults."""

    def codegen(context, builder, signature, args):
        byte_pointer = ir.IntType(8).as_pointer()
        data = data_of(context, builder, signature.args[0], args[0])
        kind = ir.FunctionType(ir.VoidType(), [byte_pointer, INT32, INT32, INT32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte_pointer], kind)
        address = builder.bitcast(builder.gep(data, [args[1]]), byte_pointer)
        builder.call(function, [address, INT32(0), INT32(2), INT32(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


@njit
def lines(num_bytes):
    """Return so many bytes that begin at a cache line, with anything in them."""
    found = np.empty(num_bytes + 63, np.uint8)
    return found[-found.ctypes.data % 64 :][:num_bytes]


@intrinsic
def pointer(_context, address):
    """Return an address (int64) as a pointer."""

    def codegen(_context, builder, _signature, args):
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(address), codegen


def halved(builder, vector, join):
    """Return one number: the halves of a vector joined, then the halves of that, and so on."""
    while vector.type.count > 1:
        half = vector.type.count // 2
        vector = join(*(shuffle(builder, vector, vector, range(first, first + half)) for first in (0, half)))
    return builder.extract_element(vector, INT32(0))


@intrinsic
def transpose(_context, out, column, matrix, d, rows):
    """out[d : d + n, column : column + LANES] = matrix[rows[column : column + LANES], d : d + n] as columns.

    n elements are 16 bytes. `matrix` is float32 (n = 4), uint16 holding bfloat16 (n = 8) or int8 (n = 16).
    """

    def codegen(context, builder, signature, args):
        out_data, source, row_data = (data_of(context, builder, signature.args[a], args[a]) for a in (0, 2, 4))
        out_column, first = args[1], args[3]
        length = row_length(context, builder, signature.args[2], args[2])
        starts = row_starts(builder, source, length, builder.gep(row_data, [out_column]))
        for i, vector in enumerate(columns(builder, matrix.dtype, starts, first)):
            index = builder.add(builder.mul(builder.add(first, INT64(i)), INT64(TILE)), out_column)
            address = builder.bitcast(builder.gep(out_data, [index]), vector.type.as_pointer())
            builder.store(vector, address, align=4)
        return context.get_dummy_value()

    return types.void(out, column, matrix, d, rows), codegen


def row_starts(builder, source, length, rows):
    """Return the addresses of LANES rows, of so many elements each, whose numbers lie at `rows`."""
    numbers = [builder.load(builder.gep(rows, [INT64(r)])) for r in range(LANES)]
    return [builder.gep(source, [builder.mul(number, length)]) for number in numbers]


def columns(builder, kind, starts, first):
    """Return the columns from `first` on, 16 bytes of each of the LANES rows that begin at `starts`, as float vectors.

    They move as words of four bytes that are widened at the end.
    """
    four, floats, words = (ir.VectorType(t, n) for t, n in ((INT32, 4), (FLOAT, LANES), (INT32, LANES)))

    def load(start):
        return builder.load(builder.bitcast(builder.gep(start, [first]), four.as_pointer()), align=1)

    def shift(how, vector, bits):
        return how(vector, ir.Constant(words, [bits] * LANES)) if bits else vector

    found = []
    for vector in _transposed(builder, [load(start) for start in starts]):
        if kind == types.int8:
            for byte in range(4):
                code = shift(builder.ashr, shift(builder.shl, vector, 24 - 8 * byte), 24)
                found.append(builder.sitofp(code, floats))
        elif kind == types.uint16:
            upper = builder.and_(vector, ir.Constant(words, [0xFFFF0000] * LANES))
            found += [builder.bitcast(bits, floats) for bits in (shift(builder.shl, vector, 16), upper)]
        else:
            found.append(builder.bitcast(vector, floats))
    return found


def _transposed(builder, rows):
    """Return 4 vectors of LANES words: word i of each of the LANES rows of 4 words."""
    # Rows r, r + 4, … share a register, so that the interleaving below stays within 128-bit lanes, which is cheap.
    packed = [rows[r::4] for r in range(4)]
    while len(packed[0]) > 1:
        width = 2 * packed[0][0].type.count
        packed = [[shuffle(builder, a, b, range(width)) for a, b in zip(p[::2], p[1::2], strict=True)] for p in packed]
    return turned(builder, [vectors[0] for vectors in packed])


def turned(builder, vectors):
    """Return 4 vectors of LANES words as 4 others: in each 128-bit lane, word i of each is vector i of the result."""
    low, high = (
        [lane + side * LANES + i for lane in range(0, LANES, 4) for i in half for side in (0, 1)]
        for half in ((0, 1), (2, 3))
    )
    pairs = [shuffle(builder, vectors[r], vectors[r + 2], half) for half in (low, high) for r in (0, 1)]
    return [shuffle(builder, pairs[i - i % 2], pairs[i - i % 2 + 1], (low, high)[i % 2]) for i in range(4)]


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
