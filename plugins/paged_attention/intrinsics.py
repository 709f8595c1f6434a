"""The few operations of the CPU kernel that Numba cannot express, as LLVM IR; only inside jitted code.

The vectors are `TILE` floats wide: LLVM splits them into whatever registers the machine has (8 × 256 bits, 16 × 128…).
Numba's on-disk cache watches only the file of the kernel itself: after a change here, touch kernels.py.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

TILE = 64
"""Positions handled at once, and columns of a matrix of `add_product`."""

INT32, INT64, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
VECTOR = ir.VectorType(FLOAT, TILE)


def _data(context, builder, array_type, array):
    return context.make_array(array_type)(context, builder, array).data


def _row_length(context, builder, array_type, array):
    return builder.extract_value(context.make_array(array_type)(context, builder, array).shape, 1)


def _shuffle(builder, a, b, mask):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT32, len(mask)), list(mask)))


@intrinsic
def claim(_context, counter):
    """Add 1 to counter[0] (int64 array) atomically and return its former value."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", _data(context, builder, signature.args[0], args[0]), INT64(1), "monotonic")

    return types.int64(counter), codegen


@intrinsic
def prefetch(_context, matrix, row, column):
    """Ask for the line of matrix[row, column] to be in the second-level cache soon; never faults."""

    def codegen(context, builder, signature, args):
        index = builder.add(builder.mul(args[1], _row_length(context, builder, signature.args[0], args[0])), args[2])
        byte_pointer = ir.IntType(8).as_pointer()
        data = _data(context, builder, signature.args[0], args[0])
        kind = ir.FunctionType(ir.VoidType(), [byte_pointer, INT32, INT32, INT32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte_pointer], kind)
        address = builder.bitcast(builder.gep(data, [index]), byte_pointer)
        builder.call(function, [address, INT32(0), INT32(2), INT32(1)])
        return context.get_dummy_value()

    return types.void(matrix, row, column), codegen


@intrinsic
def add_product(_context, out, i, x, j, n, matrix, k):
    """out[i : i + TILE] += x[j : j + n] @ matrix[k : k + n], for flat float32 `out`, `x` and (…, TILE) `matrix`.

    The sum runs in the order of n for every column, whatever the machine's vector width.
    """

    def codegen(context, builder, signature, args):
        out_data, x_data, matrix_data = (_data(context, builder, signature.args[a], args[a]) for a in (0, 2, 5))
        target = builder.bitcast(builder.gep(out_data, [args[1]]), VECTOR.as_pointer())
        x_data = builder.gep(x_data, [args[3]])
        rows = builder.gep(builder.bitcast(matrix_data, VECTOR.as_pointer()), [args[6]])
        before, start = builder.block, builder.load(target, align=4)
        body, after = builder.append_basic_block("product"), builder.append_basic_block("product.end")
        builder.cbranch(builder.icmp_signed(">", args[4], INT64(0)), body, after)

        builder.position_at_end(body)
        step, total = builder.phi(INT64), builder.phi(VECTOR)
        undefined = ir.Constant(VECTOR, ir.Undefined)
        factor = builder.insert_element(undefined, builder.load(builder.gep(x_data, [step])), INT32(0))
        factor = _shuffle(builder, factor, undefined, [0] * TILE)
        product = builder.fmul(factor, builder.load(builder.gep(rows, [step]), align=4), flags=["contract"])
        new_total, new_step = builder.fadd(product, total, flags=["contract"]), builder.add(step, INT64(1))
        for phi, first, following in ((step, INT64(0), new_step), (total, start, new_total)):
            phi.add_incoming(first, before)
            phi.add_incoming(following, body)
        builder.cbranch(builder.icmp_signed("<", new_step, args[4]), body, after)

        builder.position_at_end(after)
        result = builder.phi(VECTOR)
        result.add_incoming(start, before)
        result.add_incoming(new_total, body)
        builder.store(result, target, align=4)
        return context.get_dummy_value()

    return types.void(out, i, x, j, n, matrix, k), codegen


def _reduction(name, start, flags):
    @intrinsic
    def reduce(_context, x, i):
        def codegen(context, builder, signature, args):
            data = builder.gep(_data(context, builder, signature.args[0], args[0]), [args[1]])
            vector = builder.load(builder.bitcast(data, VECTOR.as_pointer()), align=4)
            kind = ir.FunctionType(FLOAT, [*(FLOAT for _ in start), VECTOR])
            function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.{name}.v{TILE}f32")
            return builder.call(function, [*map(FLOAT, start), vector], fastmath=flags)

        return types.float32(x, i), codegen

    return reduce


row_max = _reduction("fmax", [], [])
"""row_max(x, i): the greatest of x[i : i + TILE], x flat float32."""
row_sum = _reduction("fadd", [0.0], ["reassoc"])
"""row_sum(x, i): the sum of x[i : i + TILE] in an order that is fixed on one machine."""


@intrinsic
def transpose_8(_context, out, column, matrix, d, r0, r1, r2, r3, r4, r5, r6, r7):
    """out[d : d + n, column : column + 8] = rows r0…r7 of matrix[:, d : d + n] as columns; n elements are 16 bytes.

    `matrix` is float32 (n = 4), or uint16 holding bfloat16 (n = 8), which moves as pairs and is widened at the end.
    """
    bfloat16 = matrix.dtype == types.uint16

    def codegen(context, builder, signature, args):
        four, eight = ir.VectorType(INT32, 4), ir.VectorType(INT32, 8)
        row_length = _row_length(context, builder, signature.args[2], args[2])
        source, target = (_data(context, builder, signature.args[a], args[a]) for a in (2, 0))

        def load(r):
            index = builder.add(builder.mul(args[4 + r], row_length), args[3])
            return builder.load(builder.bitcast(builder.gep(source, [index]), four.as_pointer()), align=2)

        def store(i, words):
            index = builder.add(builder.mul(builder.add(args[3], INT64(i)), INT64(TILE)), args[1])
            builder.store(words, builder.bitcast(builder.gep(target, [index]), eight.as_pointer()), align=4)

        # Rows r and r + 4 share a register, so that the interleaving below stays within 128-bit lanes, which is cheap.
        rows = [_shuffle(builder, load(r), load(r + 4), range(8)) for r in range(4)]
        low, high = (0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15)
        pairs = [_shuffle(builder, rows[r], rows[r + 2], half) for half in (low, high) for r in (0, 1)]
        for i in range(4):
            first = i - i % 2
            words = _shuffle(builder, pairs[first], pairs[first + 1], (low, high)[i % 2])
            if bfloat16:
                store(2 * i, builder.shl(words, ir.Constant(eight, [16] * 8)))
                store(2 * i + 1, builder.and_(words, ir.Constant(eight, [0xFFFF0000] * 8)))
            else:
                store(i, words)
        return context.get_dummy_value()

    return types.void(out, column, matrix, d, r0, r1, r2, r3, r4, r5, r6, r7), codegen
