"""`cuda.bindings.driver`, as far as CUDA graphs go, for the streams of a `fake_cuda.Driver`.

What is captured does not run; a launch queues it again. Checked are: that the stream is not capturing already and ends
in the thread in which it began, that graphs and executables are live, and destroyed once, before their contexts.
`test_the_fake_has_functions_of_the_real_one` compares it with NVIDIA's bindings.
"""

import enum
import threading


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901


class CUstreamCaptureMode(enum.IntEnum):
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1


OK = CUresult.CUDA_SUCCESS


class GraphDriver:
    """`failing` names functions that return an error instead of doing anything; a failing end of capture ends it."""

    CUstreamCaptureMode = CUstreamCaptureMode

    def __init__(self, driver):
        self.driver, self.failing, self.calls = driver, set(), []
        self.graphs, self.executables, self.threads = {}, {}, {}

    def _begin(self, call):
        assert self.driver.current_stack(), f"{call} without a current context"
        self.calls.append(call)
        return call in self.failing

    def _stream(self, handle):
        [stream] = [stream for stream in self.driver.streams if stream.handle == handle]
        return stream

    def cuStreamBeginCapture(self, hStream, mode):
        assert mode is CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        stream = self._stream(hStream)
        assert stream.captured is None
        if self._begin("cuStreamBeginCapture"):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        stream.captured, self.threads[hStream] = [], threading.get_ident()
        return (OK,)

    def cuStreamEndCapture(self, hStream):
        stream = self._stream(hStream)
        assert self.threads.pop(hStream) == threading.get_ident()
        work, stream.captured = stream.captured, None
        assert work is not None
        if self._begin("cuStreamEndCapture"):
            return CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, None
        handle = 0x6000 + len(self.calls)
        self.graphs[handle] = work
        return OK, handle

    def cuGraphInstantiate(self, hGraph, flags):
        assert flags == 0
        work = self.graphs[hGraph]
        if self._begin("cuGraphInstantiate"):
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        handle = 0x7000 + len(self.calls)
        self.executables[handle] = work
        return OK, handle

    def cuGraphLaunch(self, hGraphExec, hStream):
        work = self.executables[hGraphExec]
        if self._begin("cuGraphLaunch"):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        assert self._stream(hStream).captured is None
        self._stream(hStream).queue += work
        return (OK,)

    def cuGraphDestroy(self, hGraph):
        self._begin("cuGraphDestroy")
        del self.graphs[hGraph]
        return (OK,)

    def cuGraphExecDestroy(self, hGraphExec):
        self._begin("cuGraphExecDestroy")
        assert not any(stream.queue for stream in self.driver.streams), "destroyed while it may run"
        for step in self.executables.pop(hGraphExec):
            assert step.context() is not None, "a graph outlived its context"
        return (OK,)
