"""The execution contexts of a TensorRT engine, and the CUDA graphs of steps that are always of one size."""

from collections.abc import Mapping, Sequence
from typing import Any

from contbatch.errors import EngineBuildError, RunnerError
from contbatch.runners.cuda_graphs import CudaGraphs
from contbatch.runners.device import Device
from contbatch.tensorrt_limits import Shape


class Execution:
    """Queues steps; addresses are told once, shapes when they change. Use it where its device is current.

    Parameters
    ----------
    context : tensorrt.IExecutionContext
        Its profile and scratch memory are set.
    log : Any
        TensorRT's words, see `contbatch.tensorrt_library.new_log`.
    graphs : CudaGraphs, optional
        Given where all steps have the same shapes: the first is queued as it is, since TensorRT has things to do after
        a change of shapes that can't be captured; then its work is captured, to be launched for all others.
    """

    def __init__(self, context: Any, log: Any, graphs: CudaGraphs | None = None) -> None:
        self._context, self._log, self._graphs = context, log, graphs
        self._shapes: dict[str, Shape] = {}
        self._graph: Any = None

    def bind(self, addresses: Mapping[str, int]) -> None:
        """Say where all inputs and outputs are, for good."""
        for name, address in addresses.items():
            self._require(self._context.set_tensor_address(name, address), f"set_tensor_address {name}")

    def set_shape(self, name: str, shape: Shape) -> None:
        """Say what shape an input has from now on."""
        if self._shapes.get(name) != shape:
            self._require(self._context.set_input_shape(name, shape), f"set_input_shape {name} {shape}")
            self._shapes[name] = shape

    def queue(self, stream: int) -> None:
        """Queue a step of the shapes last told."""
        if self._graphs is not None and self._graph is not None:
            self._graphs.launch(self._graph)
        else:
            self._execute(stream)

    def capture(self, stream: int) -> None:
        """Capture the step that was done last, unless that was done or has failed before; nothing may be queued."""
        if self._graphs is not None and self._graph is None:
            self._graph = self._graphs.capture(lambda: self._execute(stream))

    def close(self) -> None:
        """Let go of the context, before the memory that it was told of; its graph must be destroyed already."""
        self._context = None

    def _execute(self, stream: int) -> None:
        self._require(self._context.execute_async_v3(stream), "execute_async_v3")

    def _require(self, done: bool, call: str) -> None:
        if not done:
            raise RunnerError(f"TensorRT refuses {call}: {self._log.words()}")


def executions(
    trt: Any, engine: Any, log: Any, device: Device, profiles: Sequence[str], fixed: Mapping[int, CudaGraphs]
) -> dict[str | int, Execution]:
    """Make an execution for each profile, or for "decode" one for each size of step in `fixed`, whose graphs those are.

    They share scratch memory, as only one of them runs at a time. `EngineBuildError` if TensorRT makes none.
    """
    sizes = [engine.get_device_memory_size_for_profile_v2(i) for i in range(len(profiles))]
    scratch = device.allocate(max(sizes), "activations")
    wanted: dict[str | int, str] = {name: name for name in profiles if name != "decode" or not fixed}
    made: dict[str | int, Execution] = {}
    try:
        for key, profile in (wanted | dict.fromkeys(fixed, "decode")).items():
            context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
            if context is None:
                raise EngineBuildError(f"TensorRT makes no execution context: {log.words()}")
            if not context.set_optimization_profile_async(profiles.index(profile), device.stream):
                raise EngineBuildError(f"TensorRT refuses the profile {profile}: {log.words()}")
            made[key] = Execution(context, log, fixed.get(key) if isinstance(key, int) else None)
            context.set_device_memory(scratch, max(sizes))
        device.synchronize()
    except BaseException:
        for execution in made.values():
            execution.close()
        raise
    return made
