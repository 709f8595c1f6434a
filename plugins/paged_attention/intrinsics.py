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

LANES = 16
"""Rows transposed at once: a register of the widest machines."""

INT32, INT64, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
VECTOR = ir.VectorType(FLOAT, TILE)


def _data(context, builder, array_type, array):
    return context.make_array(array_type)(context, builder, array).data


def _row_length(context, builder, array_type, array):
    return builder.extract_value(context.make_array(array_type)(context, builder, array).shape, 1)


def _shuffle(builder, a, b, mask):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT32, len(mask)), list(mask)))


@intrinsic
def atomic_add(_context, array, _i, _n):
    """Add _n to array[_i] (int64), return its former value; who sees the new one sees all that was written before."""

    def codegen(context, builder, signature, args):
        address = builder.gep(_data(context, builder, signature.args[0], args[0]), [args[1]])
        return builder.atomic_rmw("add", address, args[2], "seq_cst")

    return types.int64(array, types.int64, types.int64), codegen


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


def _add_products(num_rows):
    """Make `add_product` for so many rows: each has sums of its own, so one need not wait for another's."""

    @intrinsic
    def add_products(_context, out, i, out_step, x, j, x_step, n, matrix, k):
        def codegen(context, builder, signature, args):
            out_data, x_data, matrix_data = (_data(context, builder, signature.args[a], args[a]) for a in (0, 3, 7))
            out_i, out_step, j, x_step, n, k = (args[a] for a in (1, 2, 4, 5, 6, 8))

            def address(data, first, step, row):
                return builder.gep(data, [builder.add(first, builder.mul(step, INT64(row)))])

            every = range(num_rows)
            targets = [builder.bitcast(address(out_data, out_i, out_step, r), VECTOR.as_pointer()) for r in every]
            factors = [address(x_data, j, x_step, r) for r in every]
            rows = builder.gep(builder.bitcast(matrix_data, VECTOR.as_pointer()), [k])
            before, starts = builder.block, [builder.load(target, align=4) for target in targets]
            body, after = builder.append_basic_block("product"), builder.append_basic_block("product.end")
            builder.cbranch(builder.icmp_signed(">", n, INT64(0)), body, after)

            builder.position_at_end(body)
            step, totals = builder.phi(INT64), [builder.phi(VECTOR) for _ in every]
            undefined, row = ir.Constant(VECTOR, ir.Undefined), builder.load(builder.gep(rows, [step]), align=4)
            sums = []
            for r in every:
                one = builder.insert_element(undefined, builder.load(builder.gep(factors[r], [step])), INT32(0))
                product = builder.fmul(_shuffle(builder, one, undefined, [0] * TILE), row, flags=["contract"])
                sums.append(builder.fadd(product, totals[r], flags=["contract"]))
            new_step = builder.add(step, INT64(1))
            for phi, first, following in zip((step, *totals), (INT64(0), *starts), (new_step, *sums), strict=True):
                phi.add_incoming(first, before)
                phi.add_incoming(following, body)
            builder.cbranch(builder.icmp_signed("<", new_step, n), body, after)

            builder.position_at_end(after)
            results = [builder.phi(VECTOR) for _ in every]
            for r, result in enumerate(results):
                result.add_incoming(starts[r], before)
                result.add_incoming(sums[r], body)
            for result, target in zip(results, targets, strict=True):
                builder.store(result, target, align=4)
            return context.get_dummy_value()

        return types.void(out, i, out_step, x, j, x_step, n, matrix, k), codegen

    return add_products


add_product, add_product_2, add_product_3 = map(_add_products, (1, 2, 3))
"""add_product(out, i, out_step, x, j, x_step, n, matrix, k) for 1, 2 or 3 rows r of flat float32 `out` and `x`:

out[i + r·out_step :][:TILE] += x[j + r·x_step :][:n] @ matrix[k : k + n], where `matrix` is float32 (…, TILE). Each sum
runs in the order of n for every column, whatever the machine's vector width and the number of rows.
"""


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
def transpose(_context, out, column, matrix, d, rows, factors):
    """out[d : d + n, column : column + LANES] = matrix[rows[column : column + LANES], d : d + n] as columns.

    n elements are 16 bytes. `matrix` is float32 (n = 4), uint16 holding bfloat16 (n = 8) or int8 (n = 16); it moves as
    words of four bytes that are widened at the end. int8 is multiplied by factors[column : column + LANES].
    """
    kind = matrix.dtype

    def codegen(context, builder, signature, args):
        out_data, source, row_data, factor_data = (
            _data(context, builder, signature.args[a], args[a]) for a in (0, 2, 4, 5)
        )
        out_column, first = args[1], args[3]
        row_length = _row_length(context, builder, signature.args[2], args[2])
        four, floats, words = (ir.VectorType(t, n) for t, n in ((INT32, 4), (FLOAT, LANES), (INT32, LANES)))

        def load(r):
            row = builder.load(builder.gep(row_data, [builder.add(out_column, INT64(r))]))
            address = builder.gep(source, [builder.add(builder.mul(row, row_length), first)])
            return builder.load(builder.bitcast(address, four.as_pointer()), align=1)

        def store(i, vector):
            index = builder.add(builder.mul(builder.add(first, INT64(i)), INT64(TILE)), out_column)
            address = builder.bitcast(builder.gep(out_data, [index]), vector.type.as_pointer())
            builder.store(vector, address, align=4)

        def shift(how, vector, bits):
            return how(vector, ir.Constant(words, [bits] * LANES)) if bits else vector

        if kind == types.int8:
            address = builder.gep(factor_data, [out_column])
            factor = builder.load(builder.bitcast(address, floats.as_pointer()), align=4)
        for i, vector in enumerate(_transposed(builder, [load(r) for r in range(LANES)])):
            if kind == types.int8:
                for byte in range(4):
                    code = shift(builder.ashr, shift(builder.shl, vector, 24 - 8 * byte), 24)
                    store(4 * i + byte, builder.fmul(builder.sitofp(code, floats), factor))
            elif kind == types.uint16:
                store(2 * i, shift(builder.shl, vector, 16))
                store(2 * i + 1, builder.and_(vector, ir.Constant(words, [0xFFFF0000] * LANES)))
            else:
                store(i, vector)
        return context.get_dummy_value()

    return types.void(out, column, matrix, d, rows, factors), codegen


def _transposed(builder, rows):
    """Return 4 vectors of LANES words: word i of each of the LANES rows of 4 words."""
    # Rows r, r + 4, … share a register, so that the interleaving below stays within 128-bit lanes, which is cheap.
    packed = [rows[r::4] for r in range(4)]
    while len(packed[0]) > 1:
        width = 2 * packed[0][0].type.count
        packed = [[_shuffle(builder, a, b, range(width)) for a, b in zip(p[::2], p[1::2], strict=True)] for p in packed]
    low, high = (
        [lane + side * LANES + i for lane in range(0, LANES, 4) for i in half for side in (0, 1)]
        for half in ((0, 1), (2, 3))
    )
    pairs = [_shuffle(builder, packed[r][0], packed[r + 2][0], half) for half in (low, high) for r in (0, 1)]
    return [_shuffle(builder, pairs[i - i % 2], pairs[i - i % 2 + 1], (low, high)[i % 2]) for i in range(4)]
