"""`pycuda.driver` on host memory: queued work runs only when the stream is waited for, and every call is checked.

A copy that reads a buffer which has been overwritten since, or a result read before the stream was waited for, gives
wrong bytes here as it would on a GPU. Calls outside a current context, addresses outside an allocation, memory freed
twice or while work on it is queued, and use after detach are errors of the fake: AssertionError, which nothing catches.
"""

import threading
from types import SimpleNamespace

import numpy as np
from fake_graphs import GraphDriver


class Error(Exception):
    pass


class OutOfMemoryError(Error):
    pass


class LaunchError(Error):
    pass


class LogicError(Error):
    pass


class Driver:
    """One machine with GPUs; `install` puts it where `import pycuda.driver` finds it.

    `failing` maps a name of a call to the number of times that it still succeeds; then it and all later ones fail.
    """

    Error, MemoryError, LaunchError, LogicError = Error, OutOfMemoryError, LaunchError, LogicError

    def __init__(self, total=1 << 26, sm=(9, 0), gpus=1):
        self.total, self.sm, self.gpus = total, sm, gpus
        self.memory, self.pinned, self.streams, self.calls = {}, {}, [], []
        self.next_address, self.retained, self.stack = 0x7F0000000000, 0, threading.local()
        self.failing, self.broken, self.started = {}, False, False
        self.graphs = GraphDriver(self)
        driver = self

        class Device:
            def __init__(self, ordinal):
                assert driver.started
                self.ordinal = ordinal

            @staticmethod
            def count():
                return driver.gpus

            def name(self):
                return f"Fake GPU {self.ordinal}"

            def compute_capability(self):
                return driver.sm

            def retain_primary_context(self):
                return Context()

        class Context:
            def __init__(self):
                driver.retained += 1
                self.live = True

            def push(self):
                assert self.live
                driver.current_stack().append(self)

            @staticmethod
            def pop():
                driver.current_stack().pop()

            def detach(self):
                assert self.live
                assert self not in driver.current_stack()
                driver.retained, self.live = driver.retained - 1, False

        self.Device, self.Context, self.Stream = Device, Context, lambda: Stream(driver)

    def install(self, monkeypatch):
        import sys

        monkeypatch.setitem(sys.modules, "pycuda", SimpleNamespace(driver=self))
        monkeypatch.setitem(sys.modules, "pycuda.driver", self)
        monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=self.graphs))
        return self

    def current_stack(self):
        if not hasattr(self.stack, "contexts"):
            self.stack.contexts = []
        return self.stack.contexts

    def check(self, call, kind=LaunchError):
        """Note a call; it needs a current context, and fails if it is told to."""
        assert self.current_stack(), f"{call} without a current context"
        allowed = ("execute_async_v3", "launch")
        assert call in allowed or all(s.captured is None for s in self.streams), f"{call} while a stream is captured"
        self.calls.append(call)
        if call in self.failing:
            self.failing[call] -= 1
            if self.failing[call] < 0:
                self.broken = self.broken or kind is not OutOfMemoryError
                raise kind(f"{call} failed: made to fail")
        if self.broken:
            raise LaunchError(f"{call} failed: an earlier launch failed")

    def init(self):
        if not self.gpus:
            raise LogicError("cuInit failed: no CUDA-capable device is detected")
        self.started = True

    def get_driver_version(self):
        return 13000

    def mem_get_info(self):
        self.check("mem_get_info")
        return self.total - sum(len(a.bytes) for a in self.memory.values()), self.total

    def mem_alloc(self, num_bytes):
        self.check("mem_alloc", OutOfMemoryError)
        if num_bytes > self.mem_get_info()[0]:
            raise OutOfMemoryError("cuMemAlloc failed: out of memory")
        return Allocation(self, num_bytes)

    def pagelocked_empty(self, shape, dtype):
        self.check("pagelocked_empty", OutOfMemoryError)
        return Pinned(self, shape).array

    def at(self, address, num_bytes):
        """Return the bytes of an allocation from an address on."""
        for base, allocation in self.memory.items():
            if base <= address and address + num_bytes <= base + len(allocation.bytes):
                return allocation.bytes[address - base :][:num_bytes]
        raise AssertionError(f"{num_bytes} bytes at {address:#x} are in no allocation")

    def _require_pinned(self, array):
        assert array.flags.c_contiguous
        inside = [p for p in self.pinned.values() if np.may_share_memory(p.whole, array)]
        assert len(inside) == 1, "host memory of an asynchronous copy must be pinned"

    def memcpy_htod_async(self, target, source, stream):
        self.check("memcpy_htod_async")
        self._require_pinned(source)
        memory = self.at(target, source.nbytes)
        stream.queue.append(lambda: memory.__setitem__(slice(None), source.reshape(-1).view(np.uint8)))

    def memcpy_dtoh_async(self, target, source, stream):
        self.check("memcpy_dtoh_async")
        self._require_pinned(target)
        memory = self.at(source, target.nbytes)
        stream.queue.append(lambda: target.reshape(-1).view(np.uint8).__setitem__(slice(None), memory))

    def memcpy_dtod_async(self, target, source, num_bytes, stream):
        self.check("memcpy_dtod_async")
        to, of = self.at(target, num_bytes), self.at(source, num_bytes)
        stream.queue.append(lambda: to.__setitem__(slice(None), of))

    def require_clean(self):
        """Nothing is allocated, retained or current."""
        assert (self.memory, self.pinned, self.retained, self.current_stack()) == ({}, {}, 0, [])
        assert (self.graphs.graphs, self.graphs.executables) == ({}, {})


class Stream:
    def __init__(self, driver):
        driver.check("Stream")
        self.driver, self.queue, self.handle = driver, [], 0x5000 + len(driver.streams)
        self.captured = None
        driver.streams.append(self)

    def append(self, work):
        """Queue work, or capture it if that is going on."""
        (self.queue if self.captured is None else self.captured).append(work)

    def synchronize(self):
        queue, self.queue = self.queue, []  # after an error the rest is never done
        self.driver.check("synchronize")
        for work in queue:
            work()


class Allocation:
    """Memory of the GPU, at first full of NaN; around it lies nothing."""

    def __init__(self, driver, num_bytes):
        self.driver, self.address = driver, driver.next_address
        self.bytes = np.full(num_bytes, 255, np.uint8)
        driver.memory[self.address] = self
        driver.next_address += (num_bytes // 512 + 2) * 512

    def __int__(self):
        return self.address

    def free(self):
        self.driver.check("free")
        assert not any(stream.queue for stream in self.driver.streams), "freed while work is queued"
        del self.driver.memory[self.address]


class Pinned:
    """What an array of pagelocked_empty has as its base."""

    def __init__(self, driver, num_bytes):
        self.driver, self.whole = driver, np.full(num_bytes, 255, np.uint8)
        self.__array_interface__ = self.whole.__array_interface__
        self.array = np.asarray(self)
        assert self.array.base is self
        driver.pinned[id(self)] = self

    def free(self):
        self.driver.check("free")
        del self.driver.pinned[id(self)]
