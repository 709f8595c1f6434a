"""The KV pages of a model in a GPU's memory, and the pages of those who wait in pinned host memory."""

import math
from collections.abc import Sequence

from contbatch.checks import is_int, is_real, require
from contbatch.errors import DeviceError, RunnerError
from contbatch.model import ModelConfig
from contbatch.runners.device import Device
from contbatch.step import PageMove

ALIGNMENT = 256
"""Bytes, which TensorRT wants of every address it is given."""


class DevicePages:
    """One allocation for the pages of all layers; make and use it within `device.current()`.

    It holds, one after the other, key and value cache of layer 0, of layer 1, and so on, each an array (num_pages,
    page_size, kv_num_heads, head_size). A host page holds its parts of all of them side by side.

    Parameters
    ----------
    device : Device
    config : ModelConfig
    num_pages : int or float
        So many pages, or as many as fit in this fraction, in (0, 1), of the memory that is free now, up to `most`.
    page_size : int
    num_host_pages : int
    itemsize : int
        Bytes per element.
    spare : bool
        Allocate as much again, to which an engine that does not work in place writes all pages. A fraction of the
        memory is that of both.
    most : float
        Pages of a fraction.

    Raises
    ------
    InvalidRequestError
        A count out of its range.
    DeviceError
        They don't fit in the GPU's memory or in what the host can pin.
    """

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        num_pages: int | float,
        page_size: int,
        num_host_pages: int = 0,
        itemsize: int = 2,
        *,
        spare: bool = False,
        most: float = math.inf,
    ) -> None:
        fraction = isinstance(num_pages, float) and is_real(num_pages) and 0 < num_pages < 1
        require(fraction or is_int(num_pages, 1), "num_pages", num_pages, "an integer ≥ 1 or a fraction in (0, 1)")
        require(is_int(num_host_pages, 0), "num_host_pages", num_host_pages, "an integer ≥ 0")
        self._device, self._num_caches = device, 2 * config.num_layers
        self._part_bytes = page_size * config.kv_num_heads * config.head_size * itemsize
        """Bytes of a page in one cache."""
        page_bytes, pools = self._part_bytes * self._num_caches, 1 + spare
        free = device.free_bytes()
        fitting = math.floor(free * num_pages / (page_bytes * pools))
        self.num_pages = int(min(fitting, most)) if fraction else int(num_pages)
        self.num_host_pages = num_host_pages
        self._cache_bytes = -(-self.num_pages * self._part_bytes // ALIGNMENT) * ALIGNMENT
        self._spare = self._cache_bytes * self._num_caches if spare else 0
        """How far behind each cache its spare one is."""
        needed = self._cache_bytes * self._num_caches * pools
        if self.num_pages == 0 or needed > free:
            what = f"num_pages {num_pages} of {page_bytes * pools:,} bytes each"
            raise DeviceError(f"{what} don't fit in the {free:,} bytes that are free on {device.name}")
        self._base = device.allocate(needed, f"{self.num_pages} pages")
        host = device.pinned(num_host_pages * page_bytes, f"{num_host_pages} host pages")
        self._host = host[: num_host_pages * page_bytes].reshape(num_host_pages, self._num_caches, self._part_bytes)

    def addresses(self) -> dict[str, int]:
        """Return where each cache begins, by names of the engine's inputs and outputs: key_cache.0, key_cache_out.0.

        An output is the same place as its input, or the spare cache.
        """
        parts = [(kind, layer) for layer in range(self._num_caches // 2) for kind in ("key", "value")]
        inputs = {f"{kind}_cache.{layer}": self._address(i, 0) for i, (kind, layer) in enumerate(parts)}
        return inputs | {name.replace("cache", "cache_out"): at + self._spare for name, at in inputs.items()}

    def take_over(self) -> None:
        """Queue a copy of all that is in the spare caches."""
        self._device.copy(self._base, self._base + self._spare, self._spare)

    def move(self, moves: Sequence[PageMove]) -> None:
        """Queue page moves in their order; `RunnerError`, and nothing queued, for a page that isn't there."""
        limits = {"copy": (self.num_pages,) * 2, "out": (self.num_pages, self.num_host_pages)}
        limits["in"] = limits["out"][::-1]
        for move in moves:
            for page, limit in zip((move.source, move.target), limits[move.kind], strict=True):
                if not 0 <= page < limit:
                    raise RunnerError(f"{move}: page {page} is not in [0, {limit})")
        for kind, source, target in moves:
            for cache in range(self._num_caches):
                if kind == "copy":
                    addresses = self._address(cache, target), self._address(cache, source)
                    self._device.copy(*addresses, self._part_bytes)
                elif kind == "out":
                    self._device.download(self._host[target, cache], self._address(cache, source))
                else:
                    self._device.upload(self._address(cache, target), self._host[source, cache])

    def _address(self, cache: int, page: int) -> int:
        return self._base + cache * self._cache_bytes + page * self._part_bytes
