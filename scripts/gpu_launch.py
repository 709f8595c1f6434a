"""For gpu_check.py: steps of the op on random pages, and what computes them, a GPU or the executable spec."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from contbatch.plugins.paged_attention.reference import paged_attention
from contbatch.runners.device import Device

SIZES = {"num_heads": 32, "kv_num_heads": 8, "head_size": 128, "hidden_size": 256, "intermediate_size": 256}
PAGE_SIZE, GUARD, COPIED = 16, 2, 2**30


@dataclass
class Step:
    """One step of the op: its inputs by name, the caches between `GUARD` pages on either side that nobody may touch."""

    inputs: dict[str, np.ndarray]
    caches: tuple[np.ndarray, np.ndarray]

    def expected(self, attributes: dict[str, Any]) -> list[np.ndarray]:
        """Return output and caches as the executable spec has them, which computes in float64."""
        i, inside = self.inputs, [cache[GUARD:-GUARD] for cache in self.caches]
        indices = i["cumulative"], i["past"], i["table"], i["cos"], i["sin"]
        return list(paged_attention(i["query"], None, None, *inside, *indices, **attributes))


def make_step(lengths: list[tuple[int, int]], filled: bool = True) -> Step:
    """Scatter sequences over pages at random; not `filled`: pages of zeros, which is quicker."""
    rng, heads, kv, size = np.random.default_rng(0), SIZES["num_heads"], SIZES["kv_num_heads"], SIZES["head_size"]
    past, new = np.array(lengths, np.int32).T
    used = -(-(past + new) // PAGE_SIZE)
    pages = rng.permutation(int(used.sum()))
    table = np.full((len(past), int(used.max())), -1, np.int32)
    for row, ids in zip(table, np.split(pages, np.cumsum(used)[:-1]), strict=True):
        row[: len(ids)] = ids
    shape = len(pages) + 2 * GUARD, PAGE_SIZE, kv, size
    keys, values = (np.zeros(shape, np.float16) for _ in range(2))
    if filled:
        keys[...], values[...] = rng.standard_normal((2, *shape), np.float32)
    angles = np.arange(16384)[:, None] * 1e4 ** (-np.arange(0, size, 2) / size)
    query = rng.standard_normal((int(new.sum()), (heads + 2 * kv) * size), np.float32).astype(np.float16)
    cumulative = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    tables = {"cos": np.cos(angles).astype(np.float16), "sin": np.sin(angles).astype(np.float16)}
    inputs = {"query": query, "cumulative": cumulative, "past": past, "table": table, **tables}
    return Step(inputs, (keys, values))


def attributes_of(kernel: dict[str, Any]) -> dict[str, Any]:
    """Return the op's attributes that a kernel was compiled for."""
    names = "num_heads", "kv_num_heads", "scale", "softcap", "local_window_size"
    return {name: kernel["variant"][name] for name in names} | {"do_rotary": 1}


class DryRun:
    """The executable spec in place of a GPU."""

    name = "no GPU: dry run on the executable spec"

    def launch(self, kernel: dict[str, Any], _ptx: bytes, step: Step) -> tuple[np.ndarray]:
        """Compute a step in place on its caches; return the output."""
        output, *caches = step.expected(attributes_of(kernel))
        for cache, new in zip(step.caches, caches, strict=True):
            cache[GUARD:-GUARD] = new
        return (output,)


class GPU:
    """Launches kernels by PyCUDA."""

    def __init__(self) -> None:
        import pycuda.driver

        self.cuda: Any = pycuda.driver
        self.device = Device()
        self.name = f"{self.device.name}, SM {self.device.sm}, driver {self.device.driver}"

    def launch(self, kernel: dict[str, Any], ptx: bytes, step: Step) -> tuple[np.ndarray, Callable[[], float], Any]:
        """Compute a step in place on its caches; return output, a function that times it, and one that queues it."""
        cuda, i = self.cuda, step.inputs
        function = cuda.module_from_buffer(ptx).get_function(kernel["name"])
        keys, values = (cuda.to_device(cache) for cache in step.caches)
        inside = [np.intp(int(cache) + GUARD * step.caches[0][0].nbytes) for cache in (keys, values)]
        others = {name: cuda.to_device(np.ascontiguousarray(array)) for name, array in i.items()}
        output = np.full((len(i["query"]), SIZES["num_heads"] * SIZES["head_size"]), np.nan, np.float16)
        target = cuda.to_device(output)
        tokens, seqs = len(i["query"]), len(i["past"])
        sizes = tokens, seqs, len(step.caches[0]) - 2 * GUARD, i["table"].shape[1], len(i["cos"])
        query, *rest = others.values()
        arguments = [query, *inside, *rest, *map(np.int32, sizes), target, *inside]
        grid = tokens // kernel["block_tokens"] + seqs + 1, kernel["grid_y"], kernel["grid_z"]
        shape = {"block": (kernel["num_threads"], 1, 1), "grid": grid, "shared": kernel["shared_memory"]}

        def queue(stream: Any = None) -> None:
            function(*arguments, **shape, stream=stream)

        def timed() -> float:
            begin, end = cuda.Event(), cuda.Event()
            begin.record()
            for _ in range(20):
                queue()
            end.record()
            end.synchronize()
            return float(end.time_since(begin)) / 1e3 / 20

        queue()
        cuda.memcpy_dtoh(output, target)
        for cache, memory in zip(step.caches, (keys, values), strict=True):
            cuda.memcpy_dtoh(cache, memory)
        return output, timed, (queue, target)

    def copy_rate(self) -> float:
        """Bytes per second that a copy of `COPIED` bytes reads and writes: what memory really gives."""
        cuda, size = self.cuda, COPIED
        source, target, begin, end = cuda.mem_alloc(size), cuda.mem_alloc(size), cuda.Event(), cuda.Event()
        cuda.memcpy_dtod_async(target, source, size)
        begin.record()
        for _ in range(10):
            cuda.memcpy_dtod_async(target, source, size)
        end.record()
        end.synchronize()
        return 20 * size / (float(end.time_since(begin)) / 1e3)
