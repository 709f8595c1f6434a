"""The file of weights that OpenVINO has mapped into memory, given back where its content lies elsewhere as well."""

import ctypes
import mmap
import re
from bisect import bisect_left
from pathlib import Path

import openvino as ov

from contbatch.garbage import trim_heap

_MAPS = Path("/proc/self/maps")


class MappedWeights:
    """A graph's weights as their file has them.

    OpenVINO packs them anew when it first multiplies with so many rows, and reads the file no more but for rows of the
    embedding. What it has read would stay resident, beside the packed copy, as long as the system has memory to spare.

    Parameters
    ----------
    path : path
        The file; where it isn't mapped, or the system isn't Linux, nothing is given back.
    graph : ov.Model
        As it was read, before it is compiled.
    """

    def __init__(self, path: Path, graph: ov.Model) -> None:
        self._ranges: list[tuple[int, int]] = []
        # A mapping lives as long as a constant in it, so holding one of each makes sure that none is somebody else's.
        self._held: list[ov.Node] = []
        if not hasattr(mmap, "MADV_DONTNEED") or not _MAPS.exists():
            return
        self._madvise = ctypes.CDLL(None).madvise
        constants = {node.data.ctypes.data: node for node in graph.get_ops() if node.get_type_name() == "Constant"}
        known = sorted(constants)
        maps = _MAPS.read_text(encoding="utf-8", errors="surrogateescape")
        # Shared and never written: the file has all of it.
        pattern = rf"^(\w+)-(\w+) r--s +\S+ +\S+ +\S+ +{re.escape(str(path.resolve()))}$"
        for addresses in re.findall(pattern, maps, re.MULTILINE):
            start, end = (int(address, 16) for address in addresses)
            nth = bisect_left(known, start)
            if nth < len(known) and known[nth] < end:
                self._ranges.append((start, end - start))
                self._held.append(constants[known[nth]])

    def release(self) -> None:
        """Give the memory back, and what packing has left; who reads the file again finds it in the system's cache."""
        for start, length in self._ranges:
            self._madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED)
        trim_heap()
