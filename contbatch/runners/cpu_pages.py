"""The KV pages of the CPU runner."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from contbatch.errors import RunnerError
from contbatch.model import ModelConfig
from contbatch.plugins.paged_attention.step_plan import StepPlan
from contbatch.plugins.paged_attention.team import NO_SCALES, Team
from contbatch.runners.page_memory import require_memory
from contbatch.runners.page_moves import move_pages
from contbatch.step import PageMove

PAGE_DTYPES: dict[str, type[np.generic]] = {"f32": np.float32, "bf16": np.uint16, "int8": np.int8}
"""Type of a page's elements: bfloat16 is stored as its 16 bits, int8 has a float32 scale for each token and head."""


class CPUPages:
    """Keys and values of all layers, and the step being computed: what the graph's attention nodes share.

    Parameters
    ----------
    config : ModelConfig
    num_pages, page_size, num_host_pages : int
    kv_dtype : {"f32", "bf16", "int8"}
    """

    def __init__(self, config: ModelConfig, num_pages: int, page_size: int, num_host_pages: int, kv_dtype: str) -> None:
        slots = (page_size, config.kv_num_heads)
        self.shape = (num_pages, *slots, config.head_size)
        layers, vectors = config.num_layers, (self.shape[1:], np.dtype(PAGE_DTYPES[kv_dtype]))
        parts: list[tuple[tuple[int, ...], np.dtype[Any]]] = [vectors, vectors]  # of a page: its keys and values
        if kv_dtype == "int8":
            parts += [(slots, np.dtype(np.float32))] * 2
        page_bytes = layers * sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts)
        require_memory(num_pages, num_host_pages, page_bytes)
        self.arrays = [_zeros((layers, num_pages, *shape), dtype) for shape, dtype in parts]
        no_scales = np.repeat(NO_SCALES[None], layers, axis=0)
        self.layers = self.arrays if len(self.arrays) == 4 else [*self.arrays, no_scales, no_scales]
        """See `plugins.paged_attention.team.Pages`."""
        self._host = [np.zeros((num_host_pages, layers, *shape), dtype) for shape, dtype in parts]
        self.qkv_type: np.dtype[Any] = np.dtype(np.float32)
        """Of the rows that attention takes: float32, or uint16 holding bfloat16."""
        self.steps = np.zeros(layers, np.float32)
        """Of a layer whose attention is to come out as int8 the distance between two codes."""
        self.team: Team | None = None
        self.error: BaseException | None = None
        """What the first attention node of the step to fail raised; those after it do nothing."""
        self.layers_done = 0
        """Attention nodes that were asked, since somebody set this to 0."""
        self.between_layers: Callable[[], None] | None = None
        self.nodes: list[object] = []
        """The Python halves of the graph's attention nodes, and of copies that OpenVINO made when it compiled."""

    def begin(self, plan: StepPlan) -> Team:
        """Make the team of the next step."""
        self.rest()
        self.team = Team(plan, self.layers, self.qkv_type, self.steps)
        self.error = None
        return self.team

    def rest(self) -> None:
        """Have no team: attention nodes do nothing, their output is whatever is there."""
        self.close()
        self.team = None

    def close(self) -> None:
        """Let the helpers of the last step go, unless they are gone: an interrupt may have kept its team from that."""
        if self.team is not None:
            self.team.close()

    def attend(self, layer: int, qkv: np.ndarray, output: np.ndarray) -> None:
        """Compute one layer's attention of the step that `team` is at, see `Team.attend`."""
        if self.team is None:
            return
        if qkv.itemsize != self.qkv_type.itemsize:  # on a CPU that we don't know
            raise RunnerError(f"OpenVINO hands over rows of {qkv.dtype}, asked for were those of {self.qkv_type}")
        self.team.attend(layer, qkv.view(self.qkv_type), output)

    def move(self, moves: Sequence[PageMove]) -> None:
        """Move the content of pages; see `move_pages`."""
        move_pages(moves, [array.swapaxes(0, 1) for array in self.arrays], self._host)


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return zeros that begin at a cache line: 64 codes are one line then, and not parts of two."""
    room = np.zeros(math.prod(shape) * dtype.itemsize + 63, np.uint8)
    lines: np.ndarray = room[-room.ctypes.data % 64 :][: math.prod(shape) * dtype.itemsize]
    return lines.view(dtype).reshape(shape)
