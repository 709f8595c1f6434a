"""Blocks of a row of logits in registers, as LLVM IR; only inside jitted code. See `draw.SOURCES`.

A block is `BLOCK` float32 at an address (int64) of any alignment. Every sum runs in an order of its own, whatever
registers the machine has.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# ruff: noqa: ARG001 - what an intrinsic's arguments are for is in its code

import math
import os

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from contbatch.plugins.paged_attention.intrinsics import INT32, INT64, TILE, VECTOR, halved, splat
from contbatch.plugins.paged_attention.softmax import EXP2_POLYNOMIAL, ROUNDS, WORDS

BLOCK = 2 * TILE
LEAST_EXPONENT = -125.0
"""Powers of two are computed from here on."""
ADDRESS, FLOAT32 = types.int64, types.float32


def _tile(builder, address, number=0):
    """Load a tile of a block, the first or the second."""
    start = builder.add(address, INT64(4 * TILE * number))
    return builder.load(builder.inttoptr(start, VECTOR.as_pointer()), align=4)


def _mask(builder, lanes):
    return builder.bitcast(lanes, ir.IntType(TILE))


def _powers(builder, logits, largest, scale):
    """Return bits of 2**((logit - largest) · scale), within 2 ulp, 1 for the largest, where ≥ 2**LEAST_EXPONENT.

    Products are fused with sums explicitly: a CPU that can't gives the same bits, slowly.
    """
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    fused = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{TILE}f32")

    def multiply_add(a, b, c):
        return builder.call(fused, [a, b, c])

    below, scale = builder.fsub(logits, splat(builder, largest, TILE)), splat(builder, scale, TILE)
    shifted = multiply_add(below, scale, _all(ROUNDS))
    fraction = multiply_add(below, scale, builder.fsub(_all(ROUNDS), shifted))
    power = _all(EXP2_POLYNOMIAL[0])
    for coefficient in EXP2_POLYNOMIAL[1:]:
        power = multiply_add(power, fraction, _all(coefficient))
    exponents = builder.shl(builder.bitcast(shifted, WORDS), ir.Constant(WORDS, [23] * TILE))
    return builder.add(builder.bitcast(power, WORDS), exponents)


def _all(value):
    return ir.Constant(VECTOR, [value] * TILE)


@intrinsic
def peak(_context, address):
    """Return the largest of a block, NaN if any is."""

    def codegen(_context, builder, _signature, args):
        first, second = _tile(builder, args[0]), _tile(builder, args[0], 1)
        top = halved(
            builder,
            builder.select(builder.fcmp_ordered(">", first, second), first, second),
            lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b),
        )
        nan = builder.icmp_unsigned("!=", _mask(builder, builder.fcmp_unordered("uno", first, second)), INT64(0))
        return builder.select(nan, ir.Constant(top.type, math.nan), top)

    return FLOAT32(ADDRESS), codegen


@intrinsic
def mass(_context, address, largest, scale, cut):
    """Return the sum of 2**((logit - largest) · scale) over those of a block that are at least `cut`."""

    def codegen(_context, builder, _signature, args):
        address, largest, scale, cut = args
        parts = []
        for number in (0, 1):
            logits = _tile(builder, address, number)
            kept = builder.fcmp_ordered(">=", logits, splat(builder, cut, TILE))
            powers = _powers(builder, logits, largest, scale)
            parts.append(builder.bitcast(builder.select(kept, powers, ir.Constant(WORDS, [0] * TILE)), VECTOR))
        return halved(builder, builder.fadd(*parts), builder.fadd)

    return FLOAT32(ADDRESS, FLOAT32, FLOAT32, FLOAT32), codegen


@intrinsic
def weigh(_context, address, largest, scale, weights):
    """Write 2**((logit - largest) · scale) of a block to the address `weights`."""

    def codegen(context, builder, _signature, args):
        address, largest, scale, weights = args
        for number in (0, 1):
            powers = builder.bitcast(_powers(builder, _tile(builder, address, number), largest, scale), VECTOR)
            start = builder.add(weights, INT64(4 * TILE * number))
            builder.store(powers, builder.inttoptr(start, VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(ADDRESS, FLOAT32, FLOAT32, ADDRESS), codegen


@intrinsic
def weight(_context, logit, largest, scale):
    """Return what `mass` counts for one logit."""

    def codegen(_context, builder, _signature, args):
        logit, largest, scale = args
        bits = builder.extract_element(_powers(builder, splat(builder, logit, TILE), largest, scale), INT32(0))
        return builder.bitcast(bits, ir.FloatType())

    return FLOAT32(FLOAT32, FLOAT32, FLOAT32), codegen


@intrinsic
def float_at(_context, address):
    """Return the float32 at an address."""

    def codegen(_context, builder, _signature, args):
        return builder.load(builder.inttoptr(args[0], ir.FloatType().as_pointer()), align=4)

    return FLOAT32(ADDRESS), codegen


@intrinsic
def at_least(_context, address, cut):
    """Return a bit for each of TILE floats at an address, the lowest for the first: whether it is at least `cut`."""

    def codegen(_context, builder, _signature, args):
        return _mask(builder, builder.fcmp_ordered(">=", _tile(builder, args[0]), splat(builder, args[1], TILE)))

    return types.uint64(ADDRESS, FLOAT32), codegen


@intrinsic
def ones(_context, mask):
    """Return how many bits are set."""
    return types.int64(types.uint64), lambda _context, builder, _signature, args: builder.ctpop(args[0])


@intrinsic
def lowest(_context, mask):
    """Return the number of the lowest bit that is set, of at least one."""
    no = ir.Constant(ir.IntType(1), 1)
    return types.int64(types.uint64), lambda _context, builder, _signature, args: builder.cttz(args[0], no)


@intrinsic
def give_way(_context):
    """Let another thread of the machine run here, where POSIX says how."""

    def codegen(context, builder, _signature, _args):
        if os.name == "posix":
            kind = ir.FunctionType(INT32, [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def high_product(_context, a, b):
    """Return the upper half of the 128 bits of a product."""

    def codegen(_context, builder, _signature, args):
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(arg, wide) for arg in args))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), INT64)

    return types.uint64(types.uint64, types.uint64), codegen
