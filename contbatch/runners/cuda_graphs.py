"""CUDA graphs: what is queued on a stream, recorded once and launched by one call. Through cuda-bindings, nothing else.

Never run on a GPU: docs/tensorrt.md lists what is unchecked.
"""

import logging
from collections.abc import Callable
from typing import Any

from contbatch.errors import DeviceError

logger = logging.getLogger("contbatch")
_WITHOUT = "steps are queued kernel by kernel"


class CudaGraphs:
    """The graphs of one stream; use it where the stream's context is current. The first failure is told, and the last.

    Parameters
    ----------
    driver : module
        `cuda.bindings.driver`: each function returns a tuple of a CUresult and what it gives.
    stream : int
        Address of the stream; not the default stream, which can't be captured.
    """

    def __init__(self, driver: Any, stream: int) -> None:
        self._driver, self._stream = driver, stream
        self._executables: list[Any] = []
        self._failed = False

    def capture(self, queue: Callable[[], None]) -> Any | None:
        """Return what `queue` queues as a graph to `launch`; nothing of it runs now. None, and a warning, if it fails.

        `queue` must neither allocate nor wait, and everything it names must stay where it is as long as the graph.
        """
        if self._failed:
            return None
        try:
            return self._capture(queue)
        except RuntimeError as error:  # ours of CUDA and TensorRT, or cuda-bindings' of a function that is missing
            self._failed = True
            logger.warning("no CUDA graphs: %s; %s", error, _WITHOUT)
            return None

    def _capture(self, queue: Callable[[], None]) -> Any:
        # Thread-local: allocations of other threads do no harm to it.
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", self._stream, mode)
        try:
            queue()
        except BaseException:
            failed, graph = self._driver.cuStreamEndCapture(self._stream)  # else the stream could never be used again
            if not int(failed):
                self._driver.cuGraphDestroy(graph)
            raise
        graph = self._call("cuStreamEndCapture", self._stream)
        try:
            executable = self._call("cuGraphInstantiate", graph, 0)
        finally:
            self._driver.cuGraphDestroy(graph)
        self._executables.append(executable)
        return executable

    def launch(self, graph: Any) -> None:
        """Queue a captured graph; `DeviceError` if CUDA refuses."""
        self._call("cuGraphLaunch", graph, self._stream)

    def close(self) -> None:
        """Destroy all graphs, none of which may be running: before the execution contexts they were captured from."""
        for executable in self._executables:
            self._driver.cuGraphExecDestroy(executable)
        self._executables = []

    def _call(self, name: str, *arguments: Any) -> Any:
        result, *values = getattr(self._driver, name)(*arguments)
        if int(result):
            raise DeviceError(f"CUDA: {name} failed: {result.name}")
        return values[0] if values else None


def cuda_graphs(stream: int) -> CudaGraphs | None:
    """Return the graphs of a stream; None, and a warning, where cuda-bindings is missing."""
    try:
        from cuda.bindings import driver
    except (ImportError, OSError) as error:
        logger.warning("no CUDA graphs: pip install 'contbatch[tensorrt]' (%s); %s", error, _WITHOUT)
        return None
    return CudaGraphs(driver, stream)
