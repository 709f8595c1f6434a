"""The threads of one step: the caller's leads them from layer to layer, without the interpreter's lock."""

import time
from typing import Any, Self

import numpy as np

from contbatch.plugins.paged_attention.amx_permission import may_use_matrices
from contbatch.plugins.paged_attention.bell import BELL, LOOKS, POSIX
from contbatch.plugins.paged_attention.helpers import call_helper, keep_helpers_off_this_cpu
from contbatch.plugins.paged_attention.kernels import (
    COUNTS,
    all_finished,
    close,
    combine,
    dismiss,
    follow,
    lead,
    open_bells,
)
from contbatch.plugins.paged_attention.step_plan import StepPlan
from contbatch.plugins.paged_attention.tile import TILE

Pages = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Keys, values, and the scales of both, of all layers: (num_layers, *`StepPlan.pages_shape`), scales without its last
size, and `NO_SCALES` unless they are int8."""


class Team:
    """Computes the attention of a step, layer by layer; used as a context manager, which calls the helpers.

    A helper is called once for a step. From layer to layer a bell wakes it, inside machine code: Python's lock would
    have to pass to it and back, which takes 30 µs a layer. One that comes late finds all tasks claimed, so nobody waits
    for it.

    Parameters
    ----------
    plan : StepPlan
    pages : Pages
        Updated in place. Nothing is checked: see `cpu.paged_attention`.
    qkv_type : dtype
        float32, or uint16 holding bfloat16.
    steps : float32 array
        (num_layers,), of a layer whose output is int8 the distance between two codes.
    """

    def __init__(self, plan: StepPlan, pages: Pages, qkv_type: np.dtype, steps: np.ndarray) -> None:
        self._bells = np.zeros((plan.num_helpers if POSIX else 0, BELL), np.int64)
        layers, head_size = len(pages[0]), plan.pages_shape[3]
        self._plan, self._progress, self._steps = plan, np.zeros((layers, COUNTS), np.int64), steps
        self._like = np.empty(0, qkv_type)
        self._parts = _parts(plan.splits, head_size) if len(plan.splits) else _NO_PARTS
        self._work: tuple[Any, ...] = (
            self._progress, np.zeros((layers, 3), np.int64), plan.tasks, *pages, plan.block_table, plan.cos, plan.sin,
            plan.num_heads, plan.scale, plan.softcap, plan.window, plan.interleaved, _matrices(pages[0]), self._parts,
            plan.slots, steps,
        )  # fmt: skip

    def __enter__(self) -> Self:
        if len(self._bells):
            open_bells(self._bells)
            try:
                for bell in self._bells:
                    call_helper(follow, bell, self._plan.num_rows, self._like, *self._work)
            except BaseException:  # an interrupt: `with` would call `__exit__` for what comes after this only
                self.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the helpers go; idempotent."""
        if len(self._bells):
            dismiss(self._bells)

    def attend(self, layer: int, qkv: np.ndarray, output: np.ndarray) -> None:
        """Store a layer's keys and values in its pages, then fill `output`; layers come in their order.

        Parameters
        ----------
        layer : int
        qkv, output : array
            As in `cpu.paged_attention`.
        """
        plan, output = self._plan, output.view(np.int8)
        if plan.num_rows > plan.slots.size:
            output[plan.slots.size :] = 0
        if not plan.slots.size:
            return
        if layer == 0 and len(self._bells):
            keep_helpers_off_this_cpu()
        finished = False
        try:
            finished = lead(layer, qkv, output, self._bells, *self._work, plan.splits, LOOKS)
        finally:  # after an interrupt too, helpers must be done with the arrays
            if not finished:
                claimed = close(self._progress[layer], len(plan.tasks), plan.slots.size)
                while not all_finished(self._progress[layer], claimed, LOOKS):
                    time.sleep(0)
        if not finished:
            group = plan.num_heads // plan.pages_shape[2]
            step = self._steps[layer]
            combine(plan.splits, self._parts, output, step, group, plan.num_heads, plan.pages_shape[3])


def _matrices(cache: np.ndarray) -> bool | None:
    """Return `matrices` of the kernels."""
    return True if cache.dtype == np.int8 and cache.shape[-1] % TILE == 0 and may_use_matrices() else None


def _parts(splits: np.ndarray, head_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make room for the sums of split tasks: of weights, their tops, and of values."""
    num_parts = int((splits[:, 2] * splits[:, 4]).sum())
    total, top = np.empty((2, num_parts), np.float32)
    return total, top, np.empty((num_parts, -(-head_size // TILE) * TILE), np.float32)


NO_SCALES = np.empty((0, 0, 0), np.float32)
_NO_PARTS = _parts(np.empty((0, 5), np.int64), TILE)
