"""Where a step's inputs and results are: on the GPU, and in pinned host memory that they are copied from and to."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contbatch.inputs import TYPES
from contbatch.runners.device import Device
from contbatch.tensorrt_limits import Range

TOP = ("top_logits", "top_ids", "log_total")
"""What tells of a row of logits in few bytes, see `contbatch.tensorrt_graph.write_tensorrt_onnx`."""


class StepBuffers:
    """Buffers for the largest step of any profile; make and use them within `device.current()`.

    Parameters
    ----------
    device : Device
    profiles : mapping
        See `contbatch.tensorrt_limits.EngineLimits.profiles`.
    vocab_size, top_k : int
        Logits of a row, and those of them that `TOP` has.
    """

    def __init__(
        self, device: Device, profiles: Mapping[str, Mapping[str, Range]], vocab_size: int, top_k: int
    ) -> None:
        self._device, self.addresses = device, dict[str, int]()
        self._staging: dict[str, NDArray[np.uint8]] = {}
        for name, (dtype, _) in TYPES.items():
            largest = max(math.prod(ranges[name][2]) for ranges in profiles.values()) * dtype.itemsize
            self._staging[name] = device.pinned(largest, name)
            self.addresses[name] = device.allocate(largest, name)
        most_rows = max(ranges["logits_indices"][2][0] for ranges in profiles.values())
        widths = {"logits": vocab_size, "top_logits": top_k, "top_ids": top_k, "log_total": 1}
        self._results: dict[str, NDArray[Any]] = {}
        for name, width in widths.items():
            num_bytes, kind = most_rows * width * 4, np.int32 if name == "top_ids" else np.float32
            self._results[name] = device.pinned(num_bytes, name)[:num_bytes].view(kind).reshape(most_rows, width)
            self.addresses[name] = device.allocate(num_bytes, name)

    def upload(self, name: str, array: np.ndarray) -> None:
        """Queue a copy of an input to the GPU."""
        staged = self._staging[name][: array.nbytes]
        staged.view(array.dtype).reshape(array.shape)[...] = array
        self._device.upload(self.addresses[name], staged)

    def download(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Queue a copy of rows of a result; they are in the array returned when the stream has been waited for."""
        rows = self._results[name][start:stop]
        if len(rows):
            self._device.download(rows.view(np.uint8), self.addresses[name] + start * self._results[name].strides[0])
        return rows

    def download_each(self, name: str, rows: Sequence[int]) -> NDArray[Any]:
        """Wait for a copy of single rows of a result, in any order and more than once; return it."""
        for row in sorted(set(rows)):
            self.download(name, row, row + 1)
        self._device.synchronize()
        return self._results[name][list(rows)]
