"""Page moves on arrays in main memory."""

from collections.abc import Sequence

import numpy as np

from contbatch.errors import RunnerError
from contbatch.step import PageMove


def move_pages(moves: Sequence[PageMove], device: Sequence[np.ndarray], host: Sequence[np.ndarray]) -> None:
    """Do page moves one after the other.

    Parameters
    ----------
    moves : sequence of PageMove
    device, host : sequences of ndarray, each (pages, ...)
        What the pages of each side consist of, such as keys and values of each layer; pairwise of one dtype and of
        equal shapes but for the number of pages.

    Raises
    ------
    RunnerError
        A page is not on its side; nothing is moved then.
    """
    sides = {"copy": (device, device), "out": (device, host), "in": (host, device)}
    for move in moves:
        for page, arrays in zip((move.source, move.target), sides[move.kind], strict=True):
            if not 0 <= page < len(arrays[0]):
                where = "device" if arrays is device else "host"
                raise RunnerError(f"{move}: {where} page {page} is not in [0, {len(arrays[0])})")
    for kind, source, target in moves:
        for source_array, target_array in zip(*sides[kind], strict=True):
            target_array[target] = source_array[source]
