"""The KV pages of the CPU runner."""

import math
from collections.abc import Sequence

import numpy as np

from contbatch.model import ModelConfig
from contbatch.plugins.paged_attention.cpu import StepPlan
from contbatch.runners.page_memory import require_memory
from contbatch.runners.page_moves import move_pages
from contbatch.step import PageMove

PAGE_DTYPES: dict[str, type[np.generic]] = {"f32": np.float32, "bf16": np.uint16}
"""Type of a page's elements by precision: bfloat16 is stored as its 16 bits."""


class CPUPages:
    """Keys and values of all layers, and the step being computed: what the graph's attention nodes share.

    Parameters
    ----------
    config : ModelConfig
    num_pages, page_size, num_host_pages : int
    precision : {"f32", "bf16"}
    """

    def __init__(
        self, config: ModelConfig, num_pages: int, page_size: int, num_host_pages: int, precision: str
    ) -> None:
        page = (page_size, config.kv_num_heads, config.head_size)
        self.shape = (num_pages, *page)
        dtype, layers = PAGE_DTYPES[precision], config.num_layers
        page_bytes = 2 * layers * math.prod(page) * np.dtype(dtype).itemsize  # keys and values
        require_memory(num_pages, num_host_pages, page_bytes)
        self.key_caches, self.value_caches = (np.zeros((layers, num_pages, *page), dtype) for _ in range(2))
        self._host = [np.zeros((num_host_pages, layers, *page), dtype) for _ in range(2)]
        self.plan: StepPlan | None = None
        self.error: BaseException | None = None
        self.nodes: list[object] = []
        """The Python halves of attention nodes made so far: of the graph, then of copies that live for one step."""

    def move(self, moves: Sequence[PageMove]) -> None:
        """Move the content of pages; see `move_pages`."""
        move_pages(moves, [caches.swapaxes(0, 1) for caches in (self.key_caches, self.value_caches)], self._host)
