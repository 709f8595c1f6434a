"""Scores of a tile → weights, in registers, as LLVM IR; only inside jitted code. See `kernels.SOURCES`."""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import math

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from contbatch.plugins.paged_attention.intrinsics import INT32, TILE, VECTOR, data_of, halved, splat

WORDS = ir.VectorType(INT32, TILE)
EXP2_POLYNOMIAL = (1.5353362e-4, 1.33988739e-3, 9.61843692e-3, 5.55033237e-2, 0.240226477, 0.693147182, 1.0)
"""A minimax polynomial for 2**f, |f| ≤ ½, highest power first."""
LEAST_EXPONENT = -127.0
ROUNDS = 12582912.0
"""1.5·2²³: a float32 that meets it is rounded to an integer, which then sits in the low bits."""


def vector_at(context, builder, array_type, array, first):
    """Return the address of TILE floats of a flat array, from `first` on."""
    address = builder.gep(data_of(context, builder, array_type, array), [first])
    return builder.bitcast(address, VECTOR.as_pointer())


def _float(value):
    return ir.Constant(VECTOR, [value] * TILE)


def lanes_between(builder, first, stop):
    """Return which of TILE lanes are in first..stop-1."""
    first, stop = (splat(builder, builder.trunc(bound, INT32), TILE) for bound in (first, stop))
    lanes = ir.Constant(WORDS, list(range(TILE)))
    return builder.and_(builder.icmp_signed(">=", lanes, first), builder.icmp_signed("<", lanes, stop))


@intrinsic
def mask_scores(_context, scores, _i, _first, _stop, factors, _j):
    """scores[_i : _i + TILE] *= factors[_j : _j + TILE], -inf before _first and from _stop on; return the greatest.

    All are flat float32. A NaN is kept, but need not be what is returned.
    """

    def codegen(context, builder, signature, args):
        target = vector_at(context, builder, signature.args[0], args[0], args[1])
        factor = builder.load(vector_at(context, builder, signature.args[4], args[4], args[5]), align=4)
        seen = lanes_between(builder, args[2], args[3])
        product = builder.fmul(builder.load(target, align=4), factor)
        masked = builder.select(seen, product, _float(-math.inf))
        builder.store(masked, target, align=4)
        return halved(builder, masked, lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))

    return types.float32(scores, types.int64, types.int64, types.int64, factors, types.int64), codegen


@intrinsic
def exp_scores(_context, scores, _i, _highest, factors, _j):
    """scores[_i : _i + TILE] = 2**(scores - _highest) · factors[_j : _j + TILE]; return the sum of the powers.

    A power is exact at 0, within 1 ulp elsewhere, exactly 0 from about -126.5 down; NaN stays NaN. The sum takes halves
    together, then the halves of that, and so on.
    """

    def codegen(context, builder, signature, args):
        target = vector_at(context, builder, signature.args[0], args[0], args[1])
        factor = builder.load(vector_at(context, builder, signature.args[3], args[3], args[4]), align=4)
        powers = exp2_of(builder, builder.fsub(builder.load(target, align=4), splat(builder, args[2], TILE)))
        builder.store(builder.fmul(powers, factor), target, align=4)
        return halved(builder, powers, builder.fadd)

    return types.float32(scores, types.int64, types.float32, factors, types.int64), codegen


def exp2_of(builder, x):
    """Return 2**x, of TILE floats ≤ 0, as `tile.exp2` does."""
    x = builder.select(builder.fcmp_ordered("<", x, _float(LEAST_EXPONENT)), _float(LEAST_EXPONENT), x)
    shifted = builder.fadd(x, _float(ROUNDS))
    fraction = builder.fsub(x, builder.fsub(shifted, _float(ROUNDS)))
    power = _float(EXP2_POLYNOMIAL[0])
    for coefficient in EXP2_POLYNOMIAL[1:]:
        product = builder.fmul(power, fraction, flags=["contract"])
        power = builder.fadd(product, _float(coefficient), flags=["contract"])
    biased = builder.add(builder.bitcast(shifted, WORDS), ir.Constant(WORDS, [127] * TILE))
    return builder.fmul(power, builder.bitcast(builder.shl(biased, ir.Constant(WORDS, [23] * TILE)), VECTOR))
