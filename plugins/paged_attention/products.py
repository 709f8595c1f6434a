"""Products of query rows with keys and of weights with values, as LLVM IR; only inside jitted code.

A sum runs in one order, fused, whether its matrix is a tile (`add_product`) or lies in the pages (`score_rows`,
`add_rows`) and however many rows are computed at once: the same bits in every case.
See `kernels.SOURCES`.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from contbatch.plugins.paged_attention.intrinsics import (
    FLOAT,
    INT32,
    INT64,
    LANES,
    TILE,
    VECTOR,
    columns,
    data_of,
    row_length,
    row_starts,
    shuffle,
)


def _accumulate(builder, sums, n, step):
    """Run `step(k, sums)` for k below n; return what is left in the sums."""
    before, body, after = (
        builder.block,
        builder.append_basic_block("product"),
        builder.append_basic_block("product.end"),
    )
    builder.cbranch(builder.icmp_signed(">", n, INT64(0)), body, after)

    builder.position_at_end(body)
    k, totals = builder.phi(INT64), [builder.phi(total.type) for total in sums]
    found = step(k, totals)
    following = builder.add(k, INT64(1))
    for phi, first, new in zip((k, *totals), (INT64(0), *sums), (following, *found), strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(new, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, n), body, after)
    body = builder.block

    builder.position_at_end(after)
    results = [builder.phi(total.type) for total in sums]
    for result, first, new in zip(results, sums, found, strict=True):
        result.add_incoming(first, before)
        result.add_incoming(new, body)
    return results


def _add_scaled(builder, total, factor, vector):
    """Return total + the float at `factor` · vector, rounded once."""
    undefined = ir.Constant(vector.type, ir.Undefined)
    one = builder.insert_element(undefined, builder.load(factor), INT32(0))
    product = builder.fmul(shuffle(builder, one, undefined, [0] * vector.type.count), vector, flags=["contract"])
    return builder.fadd(product, total, flags=["contract"])


def _addresses(builder, data, first, step, num_rows):
    return [builder.gep(data, [builder.add(first, builder.mul(step, INT64(r)))]) for r in range(num_rows)]


def _add_products(num_rows):
    """Make `add_product` for so many rows: each has sums of its own, so one need not wait for another's."""

    @intrinsic
    def add_products(_context, out, i, out_step, x, j, x_step, n, matrix, k):
        def codegen(context, builder, signature, args):
            out_data, x_data, matrix_data = (data_of(context, builder, signature.args[a], args[a]) for a in (0, 3, 7))
            i, out_step, j, x_step, n, k = (args[a] for a in (1, 2, 4, 5, 6, 8))
            targets = _targets(builder, out_data, i, out_step, num_rows, VECTOR)
            factors = _addresses(builder, x_data, j, x_step, num_rows)
            rows = builder.gep(builder.bitcast(matrix_data, VECTOR.as_pointer()), [k])

            def step(k, totals):
                row = builder.load(builder.gep(rows, [k]), align=4)
                at = [builder.gep(factor, [k]) for factor in factors]
                return [_add_scaled(builder, total, f, row) for total, f in zip(totals, at, strict=True)]

            _update(builder, targets, n, step)
            return context.get_dummy_value()

        return types.void(out, i, out_step, x, j, x_step, n, matrix, k), codegen

    return add_products


def _targets(builder, data, first, step, num_rows, vector):
    return [builder.bitcast(a, vector.as_pointer()) for a in _addresses(builder, data, first, step, num_rows)]


def _update(builder, targets, n, step):
    """Do as `_accumulate` with the sums at `targets`."""
    results = _accumulate(builder, [builder.load(target, align=4) for target in targets], n, step)
    for result, target in zip(results, targets, strict=True):
        builder.store(result, target, align=4)


def _add_rows(num_rows):
    @intrinsic
    def add_rows(_context, out, i, out_step, x, j, x_step, n, matrix, rows, column):
        def codegen(context, builder, signature, args):
            out_data, x_data, source, numbers = (
                data_of(context, builder, signature.args[a], args[a]) for a in (0, 3, 7, 8)
            )
            i, out_step, j, x_step, n, column = (args[a] for a in (1, 2, 4, 5, 6, 9))
            length = row_length(context, builder, signature.args[7], args[7])
            targets = _targets(builder, out_data, i, out_step, num_rows, VECTOR)
            factors = _addresses(builder, x_data, j, x_step, num_rows)

            def step(k, totals):
                number = builder.load(builder.gep(numbers, [k]))
                row = _widened(builder, builder.gep(source, [builder.add(builder.mul(number, length), column)]))
                at = [builder.gep(factor, [k]) for factor in factors]
                return [_add_scaled(builder, total, f, row) for total, f in zip(totals, at, strict=True)]

            _update(builder, targets, n, step)
            return context.get_dummy_value()

        return types.void(out, i, out_step, x, j, x_step, n, matrix, rows, column), codegen

    return add_rows


def _widened(builder, address):
    """Return TILE elements from `address` on as floats."""
    kind = address.type.pointee
    words = ir.VectorType(INT32, TILE)
    stored = builder.load(
        builder.bitcast(address, ir.VectorType(kind, TILE).as_pointer()), align=kind.width // 8 if kind != FLOAT else 4
    )
    if kind == FLOAT:
        return stored
    if kind.width == 8:
        return builder.sitofp(builder.sext(stored, words), VECTOR)
    return builder.bitcast(builder.shl(builder.zext(stored, words), ir.Constant(words, [16] * TILE)), VECTOR)


def _score_rows(num_rows):
    @intrinsic
    def score_rows(_context, out, i, out_step, x, j, x_step, matrix, rows, k):
        def codegen(context, builder, signature, args):
            out_data, x_data, source, numbers = (
                data_of(context, builder, signature.args[a], args[a]) for a in (0, 3, 6, 7)
            )
            i, out_step, j, x_step, k = (args[a] for a in (1, 2, 4, 5, 8))
            length = row_length(context, builder, signature.args[6], args[6])
            starts = row_starts(builder, source, length, builder.gep(numbers, [k]))
            factors = _addresses(builder, x_data, j, x_step, num_rows)
            floats = ir.VectorType(FLOAT, LANES)
            per_chunk = 16 // (matrix.dtype.bitwidth // 8)

            def step(chunk, totals):
                first = builder.mul(chunk, INT64(per_chunk))
                for d, column in enumerate(columns(builder, matrix.dtype, starts, first)):
                    at = [builder.gep(factor, [builder.add(first, INT64(d))]) for factor in factors]
                    totals = [_add_scaled(builder, total, f, column) for total, f in zip(totals, at, strict=True)]
                return totals

            zeros = [ir.Constant(floats, [0.0] * LANES)] * num_rows
            results = _accumulate(builder, zeros, builder.sdiv(length, INT64(per_chunk)), step)
            for result, target in zip(results, _targets(builder, out_data, i, out_step, num_rows, floats), strict=True):
                builder.store(result, target, align=4)
            return context.get_dummy_value()

        return types.void(out, i, out_step, x, j, x_step, matrix, rows, k), codegen

    return score_rows


add_product, add_product_2, add_product_3 = map(_add_products, (1, 2, 3))
"""add_product(out, i, out_step, x, j, x_step, n, matrix, k) for 1, 2 or 3 rows r of flat float32 `out` and `x`:

out[i + r·out_step :][:TILE] += x[j + r·x_step :][:n] @ matrix[k : k + n], where `matrix` is float32 (…, TILE).
"""
add_rows, add_rows_2, add_rows_3, add_rows_4 = map(_add_rows, (1, 2, 3, 4))
"""add_rows(out, i, out_step, x, j, x_step, n, matrix, rows, column) for 1 to 4 rows:

out[i + r·out_step :][:TILE] += x[j + r·x_step :][:n] @ matrix[rows[:n], column : column + TILE], a page's elements.
"""
score_rows, score_rows_2, score_rows_3, score_rows_4 = map(_score_rows, (1, 2, 3, 4))
"""score_rows(out, i, out_step, x, j, x_step, matrix, rows, k) for 1 to 4 rows:

out[i + r·out_step :][:LANES] = matrix[rows[k : k + LANES]] @ x[j + r·x_step :][: row length], a multiple of 16 bytes.
"""
