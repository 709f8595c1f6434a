"""One GPU through PyCUDA: its memory, pinned host memory, and a stream of copies."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contbatch.errors import DeviceError, MissingDependencyError


class Device:
    """The primary context of a GPU, which TensorRT uses too, and one stream on which everything happens in order.

    All methods but the constructor and `close` must be called within `with device.current():`, from any thread.
    Copies are queued: host memory given to one must stay as it is until `synchronize`.

    Parameters
    ----------
    ordinal : int
        Number of the GPU, as CUDA counts those that CUDA_VISIBLE_DEVICES leaves.

    Raises
    ------
    MissingDependencyError
        PyCUDA is not installed, or finds no driver library.
    DeviceError
        There is no usable GPU of that number.
    """

    def __init__(self, ordinal: int = 0) -> None:
        self._cuda = cuda = _import_pycuda()
        self._memory: dict[int, Any] = {}
        self._pinned: list[NDArray[np.uint8]] = []
        try:
            cuda.init()
            if ordinal >= (count := cuda.Device.count()):
                raise DeviceError(f"GPU {ordinal} asked for, CUDA finds {count}")
            gpu = cuda.Device(ordinal)
            self.name: str = gpu.name()
            self.sm: int = int("{}{}".format(*gpu.compute_capability()))
            self.driver: int = cuda.get_driver_version()
            self._context: Any = gpu.retain_primary_context()
        except cuda.Error as error:
            raise DeviceError(f"no usable GPU: {error}") from error
        try:
            with self.current():
                self._stream: Any = cuda.Stream()
                self.stream: int = self._stream.handle
                """Address of the stream, as TensorRT takes it."""
        except BaseException:
            self._context.detach()
            raise

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the context that of the calling thread; errors of CUDA become `DeviceError`."""
        if self._context is None:
            raise DeviceError("the GPU was used after close()")
        try:
            self._context.push()
            try:
                yield
            finally:
                self._cuda.Context.pop()
        except self._cuda.Error as error:
            raise DeviceError(f"CUDA on {self.name}: {error}") from error

    def free_bytes(self) -> int:
        """Return how much of the GPU's memory nobody has."""
        return int(self._cuda.mem_get_info()[0])

    def total_bytes(self) -> int:
        """Return how much memory the GPU has."""
        return int(self._cuda.mem_get_info()[1])

    def allocate(self, num_bytes: int, what: str) -> int:
        """Allocate memory of the GPU, aligned to 256 bytes, and return its address; `what` is for the error."""
        try:
            allocation = self._cuda.mem_alloc(max(num_bytes, 1))
        except self._cuda.MemoryError as error:
            free = f"{self.free_bytes():,} bytes of {self.name} are free"
            raise DeviceError(f"no memory for {what}: {num_bytes:,} bytes wanted, {free}") from error
        self._memory[int(allocation)] = allocation
        return int(allocation)

    def pinned(self, num_bytes: int, what: str) -> NDArray[np.uint8]:
        """Allocate host memory that the GPU copies from and to by itself; it is gone after `close`."""
        try:
            array: NDArray[np.uint8] = self._cuda.pagelocked_empty(max(num_bytes, 1), np.uint8)
        except self._cuda.Error as error:
            raise DeviceError(f"no pinned host memory for {what}: {num_bytes:,} bytes wanted ({error})") from error
        self._pinned.append(array)
        return array

    def upload(self, address: int, array: NDArray[np.uint8]) -> None:
        """Queue a copy from pinned host memory."""
        self._cuda.memcpy_htod_async(address, array, self._stream)

    def download(self, array: NDArray[np.uint8], address: int) -> None:
        """Queue a copy to pinned host memory."""
        self._cuda.memcpy_dtoh_async(array, address, self._stream)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Queue a copy within the GPU's memory."""
        self._cuda.memcpy_dtod_async(target, source, num_bytes, self._stream)

    def synchronize(self) -> None:
        """Wait until all that is queued is done; an error of any of it is raised here."""
        self._stream.synchronize()

    def drain(self) -> None:
        """Wait as `synchronize` does, whatever became of the work: an error that is on its way matters more."""
        with suppress(self._cuda.Error):
            self.synchronize()

    def close(self) -> None:
        """Free all memory and let go of the GPU; idempotent, and possible after an error."""
        if self._context is None:
            return
        # After a failed kernel every call fails, these too: the driver frees what is left when the process ends.
        with suppress(DeviceError), self.current():
            self.drain()
            for allocation in (*self._memory.values(), *(array.base for array in self._pinned)):
                with suppress(self._cuda.Error):
                    allocation.free()
            self._memory, self._pinned, self._stream = {}, [], None
        context, self._context = self._context, None
        with suppress(self._cuda.Error):
            context.detach()


def _import_pycuda() -> Any:
    try:
        import pycuda.driver as cuda
    except (ImportError, OSError) as error:  # OSError: libcuda.so.1 is missing
        hint = "pip install 'contbatch[tensorrt]' on a machine with an NVIDIA driver"
        raise MissingDependencyError(f"the backend 'tensorrt' needs PyCUDA: {hint} ({error})") from error
    return cuda
