"""One task: the query rows of a block of tokens take in their keys. See `kernels.SOURCES`."""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import numpy as np
from numba import njit, types
from numba.extending import overload

from contbatch.plugins.paged_attention.amx import ROWS, close_tiles, open_tiles
from contbatch.plugins.paged_attention.codes import attend_codes, make_code_room, prepare_codes
from contbatch.plugins.paged_attention.elements import write_row
from contbatch.plugins.paged_attention.gather import EXACT, INNER, locate, locate_first
from contbatch.plugins.paged_attention.intrinsics import TILE, lines
from contbatch.plugins.paged_attention.rotary import rotate
from contbatch.plugins.paged_attention.tile import (
    MASKED,
    ROWS_AT_MOST,
    SPAN,
    ZERO,
    add_part,
    attend_floats,
    make_room,
    prepare,
)


def _either(with_matrices, without):
    """Make a function that, called with `matrices` before the arguments of both, is one of them; see `kernels.attend`.

    They are chosen between when code is made, for one has instructions that not all machines know.
    """

    def choose(matrices, *args):
        raise NotImplementedError(f"a choice by {matrices!r} for {args} outside jitted code")

    @overload(choose, strict=False, jit_options={"forceinline": True})
    def _choose(matrices, *args):  # noqa: ARG001
        chosen = without if isinstance(matrices, types.NoneType) else with_matrices
        return lambda matrices, *args: chosen(*args)  # noqa: ARG005

    return choose


@njit(**INNER)
def _open():
    open_tiles()


@njit(**INNER)
def _close():
    close_tiles()


@njit(**INNER)
def _nothing():
    pass


open_matrices, close_matrices = _either(_open, _nothing), _either(_close, _nothing)
_make_room, _prepare = _either(make_code_room, make_room), _either(prepare_codes, prepare)
_attend = _either(attend_codes, attend_floats)


@njit(**EXACT)
def make_sums(num_rows, width):
    """Return, for so many rows, empty sums of weights and of values over 2 to the power of the second, the top."""
    return np.zeros(num_rows, np.float32), np.full(num_rows, MASKED), np.zeros((num_rows, width), np.float32)


@njit(**EXACT)
def make_scratch(matrices, num_rows, num_heads, head_size):
    """Return what `attend_block` works in: queries, scores, scales, room for a tile, and rows twice."""
    query = np.empty((num_rows + ROWS - 1, head_size), np.float32)  # a block of rows may be read beyond its last
    score = lines(ROWS_AT_MOST * TILE * 4).view(np.float32)
    room = _make_room(matrices, num_rows, num_heads, head_size)
    return query, score, np.ones(3 * TILE, np.float32), room, np.empty((2, TILE), np.int64)


@njit(**INNER)
def attend_block(task, following, turn, step, pages, output, parts, scratch, span, sums):
    """Work on a task, whose first tile is in rows[turn] of scratch; return where the first of the following is.

    `span` and `sums` are empty sums, and are left so. See `kernels._work` for `step` and `pages`.
    """
    qkv, block_table, cos, sin, (group, factor, softcap, window, interleaved), matrices = step
    query, rows, head_size = scratch[0], scratch[4], pages[2].shape[1]
    first_head, heads, token, num_rows = task[1], task[2] - task[1], task[3], group * task[4]
    position, first, end, part, column = task[5], task[6], task[7], task[8], first_head * group * head_size
    whole = part < 0 and first // SPAN == (end - 1) // SPAN
    for row in range(heads * num_rows):
        t, start = token + row % num_rows // group, column + (row // num_rows * group + row % group) * head_size
        rotate(qkv[t, start : start + head_size], cos[t], sin[t], interleaved, factor, query[row])
    _prepare(matrices, heads, num_rows, query, scratch[3])
    for base in range(first - first % TILE, end, TILE):
        here, count = rows[turn], min(TILE, end - base)
        ahead = rows[1 - turn], *_look_ahead(rows[1 - turn], task, base + TILE, following, block_table, pages)
        _attend(
            matrices, heads, num_rows, group, position, window, base, count, softcap, pages, here, ahead, scratch, span
        )  # fmt: skip
        turn = 1 - turn
        if not whole and ((base + TILE) % SPAN == 0 or base + TILE >= end):
            _put_away(heads * num_rows, span, sums, parts, part)
    if part < 0:
        write(heads * num_rows, num_rows, group, span if whole else sums, output, token, column, head_size)
    return turn


@njit(**INNER)
def _look_ahead(rows, task, base, following, block_table, pages):
    """Locate the tile at `base`, or the first of the following task; return its number of keys and of kv heads."""
    page_size, kv_num_heads = pages[:2]
    if base < task[7]:
        count = min(TILE, task[7] - base)
        locate(rows, base, base, base + count, block_table[task[0]], page_size, kv_num_heads, task[1])
        return count, task[2] - task[1]
    if len(following):
        return locate_first(rows, following, block_table, page_size, kv_num_heads), following[2] - following[1]
    return 0, 0


@njit(**INNER)
def _put_away(num_rows, span, sums, parts, first_part):
    """Add the sums of a span to those of the task, or keep them in `parts` from first_part on; begin anew."""
    total, top, mix = span
    for row in range(num_rows):
        if first_part < 0:
            add_part(sums[0], sums[1], sums[2], row, total, top, mix, row)
        else:
            parts[0][first_part + row], parts[1][first_part + row] = total[row], top[row]
            kept = parts[2][first_part + row]
            for d in range(len(kept)):
                kept[d] = mix[row, d]
    total[:num_rows], top[:num_rows], mix[:num_rows] = ZERO, MASKED, ZERO


@njit(**INNER)
def write(num_rows, per_head, group, sums, output, token, column, head_size):
    """Fill the output (see `write_row`) of a task's rows, so many per kv head, and empty their sums."""
    total, top, mix = sums
    for row in range(num_rows):
        t, start = token + row % per_head // group, column + (row // per_head * group + row % group) * head_size
        write_row(output, t, start, head_size, mix[row], total[row])
    total[:num_rows], top[:num_rows], mix[:num_rows] = ZERO, MASKED, ZERO
