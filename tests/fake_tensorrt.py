"""`tensorrt` without TensorRT: its engines run the exported graph and the op's executable spec on a `fake_cuda.Driver`.

What a caller can do wrong is checked: a missing preview feature, incomplete or impossible profiles, shapes outside the
profile, addresses that are missing, unaligned or not aliased, scratch memory that is too small, contexts that outlive
their memory. `test_the_fake_has_only_names_of_the_real_one` compares its names with those of NVIDIA's bindings.
"""

import enum
import io
import json
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from contbatch.plugins.paged_attention.reference import paged_attention

SCRATCH = 4096
PLUGIN = "contbatch.plugins.paged_attention.tensorrt_plugin"


class PagedAttention(OpRun):
    op_domain = "contbatch"

    def _run(self, query, *rest, **attributes):
        return paged_attention(query, None, None, *rest, **attributes)


def install(monkeypatch, driver, version="11.4.0.106", **faults):
    """Put a fake where `import tensorrt` finds it; `faults`: see `Builder` and `Runtime`."""
    trt = SimpleNamespace(**{name: globals()[name] for name in EXPORTED}, __version__=version)
    state = SimpleNamespace(driver=driver, registered=[], faults=faults, contexts=0, built=[], log=[])
    for name in ("Builder", "OnnxParser", "Runtime"):
        setattr(trt, name, type(name, (globals()[name],), {"state": state}))
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    monkeypatch.setitem(sys.modules, PLUGIN, SimpleNamespace(register=state.registered.append))
    return state


class ILogger:
    class Severity(enum.Enum):
        INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class IProgressMonitor:
    pass


class NetworkDefinitionCreationFlag(enum.IntEnum):
    STRONGLY_TYPED = 1


class PreviewFeature(enum.Enum):
    ALIASED_PLUGIN_IO_10_03 = 0


class MemoryPoolType(enum.Enum):
    WORKSPACE = 0


class ProfilingVerbosity(enum.Enum):
    LAYER_NAMES_ONLY, NONE, DETAILED = range(3)


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


class Builder:
    """Faults: "build" makes it refuse, with that message in the log; "phases" are told to the progress monitor."""

    def __init__(self, logger):
        assert isinstance(logger, ILogger)
        assert self.state.driver.current_stack(), "the builder works on the current context"
        if "start" in self.state.faults:
            logger.log(ILogger.Severity.ERROR, self.state.faults["start"])
            raise TypeError("pybind11::init(): factory function returned nullptr")  # the bindings' way to say so
        self.logger = logger

    def create_network(self, flags):
        assert flags == 1 << NetworkDefinitionCreationFlag.STRONGLY_TYPED
        return SimpleNamespace(proto=None)

    def create_builder_config(self):
        return IBuilderConfig(self.state)

    def create_optimization_profile(self):
        return IOptimizationProfile()

    def build_serialized_network(self, network, config):
        assert PreviewFeature.ALIASED_PLUGIN_IO_10_03 in config.features
        assert config.profiles
        for profile in config.profiles:
            profile.require_complete(network.proto.graph)
        if "build" in self.state.faults:
            self.logger.log(ILogger.Severity.ERROR, self.state.faults["build"])
            return None
        if not all(self._phase(config.progress_monitor, *phase) for phase in (("Top", None), ("Part", "Top"))):
            return None
        self.state.built.append(config)
        ranges = [profile.ranges for profile in config.profiles]
        return json.dumps([ranges, network.proto.SerializeToString().hex()]).encode()

    def _phase(self, monitor, name, parent):
        monitor.phase_start(name, parent, 3)
        done = all(monitor.step_complete(name, step) for step in range(3))
        monitor.phase_finish(name)
        return done


class IBuilderConfig:
    def __init__(self, state):
        self.state, self.profiles, self.features, self.limits = state, [], set(), {}
        self.progress_monitor = self.cache = None
        self.profiling_verbosity = ProfilingVerbosity.LAYER_NAMES_ONLY

    def set_memory_pool_limit(self, pool, pool_size):
        self.limits[pool] = pool_size

    def set_preview_feature(self, feature, enable):
        self.features |= {feature} if enable else set()

    def create_timing_cache(self, serialized_timing_cache):
        return ITimingCache(serialized_timing_cache)

    def set_timing_cache(self, cache, ignore_mismatch):
        assert not ignore_mismatch
        if cache.content not in (b"", b"timings"):
            return False
        self.cache = cache
        return True

    def add_optimization_profile(self, profile):
        self.profiles.append(profile)
        return -1 if "profile" in self.state.faults else len(self.profiles) - 1


class ITimingCache:
    def __init__(self, content):
        self.content = content

    def serialize(self):
        return b"timings"


class IOptimizationProfile:
    def __init__(self):
        self.ranges = {}

    def set_shape(self, name, *limits):
        assert len(limits) == 3
        self.ranges[name] = [tuple(shape) for shape in limits]

    def require_complete(self, graph):
        assert {value.name for value in graph.input} == set(self.ranges)
        for value in graph.input:
            dims = [d.dim_value or None for d in value.type.tensor_type.shape.dim]
            for known, *limits in zip(dims, *self.ranges[value.name], strict=True):
                assert 0 <= limits[0] <= limits[1] <= limits[2], value.name
                assert known is None or limits == [known] * 3, value.name


class OnnxParser:
    def __init__(self, network, logger):
        self.network, self.errors = network, []

    def parse_from_file(self, model):
        proto = onnx.load(model)
        domains = {node.domain for node in proto.graph.node}
        known = {"", "contbatch"} if self.state.registered else {""}
        if domains - known or "parse" in self.state.faults:
            self.errors.append(SimpleNamespace(desc=lambda: f"no importer for {sorted(domains)}"))
        self.network.proto = proto
        return not self.errors

    @property
    def num_errors(self):
        return len(self.errors)

    def get_error(self, index):
        return self.errors[index]


class Runtime:
    """Faults: "load" makes it refuse, "start" not begin."""

    def __init__(self, logger):
        if "start" in self.state.faults:
            logger.log(ILogger.Severity.ERROR, self.state.faults["start"])
            raise TypeError("pybind11::init(): factory function returned nullptr")  # the bindings' way to say so
        self.logger = logger

    def deserialize_cuda_engine(self, serialized_engine):
        assert self.state.driver.current_stack()
        if "load" in self.state.faults:
            self.logger.log(ILogger.Severity.ERROR, self.state.faults["load"])
            return None
        ranges, proto = json.loads(serialized_engine)
        return ICudaEngine(weakref.ref(self), ranges, onnx.load(io.BytesIO(bytes.fromhex(proto))))


class ICudaEngine:
    def __init__(self, runtime, ranges, proto):
        self.runtime, self.state, self.ranges, self.graph = runtime, runtime().state, ranges, proto.graph
        self.evaluator = ReferenceEvaluator(proto, new_ops=[PagedAttention])

    def get_device_memory_size_for_profile_v2(self, profile_index):
        return SCRATCH * (profile_index + 1)

    def create_execution_context(self, strategy):
        assert strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        return IExecutionContext(self)


class IExecutionContext:
    def __init__(self, engine):
        self.engine, self.state, self.driver = engine, engine.state, engine.state.driver
        self.profile = self.scratch = None
        self.shapes, self.addresses, self.settled = {}, {}, None
        self.state.contexts += 1

    def __del__(self):
        self.state.contexts -= 1
        assert self.scratch is None or self.driver.broken or self.driver.at(*self.scratch).size

    def set_optimization_profile_async(self, profile_index, stream_handle):
        assert stream_handle in [stream.handle for stream in self.driver.streams]
        self.profile = self.engine.ranges[profile_index]
        return True

    def set_device_memory(self, memory, size):
        assert size >= self.engine.get_device_memory_size_for_profile_v2(self.engine.ranges.index(self.profile))
        self.scratch = memory, size
        self.driver.at(memory, size)

    def set_input_shape(self, name, shape):
        low, _, high = self.profile[name]
        inside = len(shape) == len(low) and all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))
        assert self.shapes.get(name) != tuple(shape), f"{name}: set again for nothing"
        self.shapes[name] = tuple(shape)
        self.state.log.append(("shape", name))
        return inside and self.state.faults.get("shape") != name

    def set_tensor_address(self, name, memory):
        assert memory % 256 == 0
        assert name not in self.addresses, f"{name}: the address is set once"
        self.addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle):
        assert self.engine.runtime() is not None, "the runtime must outlive its engines and their contexts"
        self.driver.check("execute_async_v3")
        [stream] = [stream for stream in self.driver.streams if stream.handle == stream_handle]
        graph = self.engine.graph
        assert set(self.shapes) == {value.name for value in graph.input}
        assert set(self.addresses) == {value.name for value in [*graph.input, *graph.output]}
        shapes, profile = dict(self.shapes), self.engine.ranges.index(self.profile)
        if stream.captured is None:
            self.state.log.append(("run", profile))
            stream.append(lambda: self._compute(shapes))
            self.settled = shapes
        else:
            assert self.settled == shapes, "what TensorRT does after a change of shapes can't be captured"
            self.state.log.append(("capture", profile))
            stream.append(Captured(self, shapes))
        for name, address in self.addresses.items():
            if "_cache." in name:
                in_place = any(node.domain == "contbatch" for node in graph.node)  # ONNX's own operators are not
                assert (self.addresses[name.replace("cache", "cache_out")] == address) == in_place
        return "run" not in self.state.faults and (stream.captured is None or "capture" not in self.state.faults)

    def _compute(self, shapes):
        graph = self.engine.graph
        dtypes = {v.name: onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type) for v in graph.input}
        feed = {}
        for name, dtype in dtypes.items():
            num_bytes = int(np.prod(shapes[name])) * dtype.itemsize
            feed[name] = self.driver.at(self.addresses[name], num_bytes).view(dtype).reshape(shapes[name])
        with np.errstate(over="ignore", invalid="ignore"):
            results = self.engine.evaluator.run(None, feed)
        for value, result in zip(graph.output, results, strict=True):
            self.driver.at(self.addresses[value.name], result.nbytes)[:] = result.reshape(-1).view(np.uint8)


class Captured:
    """A step of a CUDA graph: it has the shapes and addresses of the capture, and does not keep its context alive."""

    def __init__(self, context, shapes):
        self.context, self.shapes, self.addresses = weakref.ref(context), shapes, dict(context.addresses)

    def __call__(self):
        context = self.context()
        assert context is not None, "a graph outlived its context"
        assert (context.shapes, context.addresses) == (self.shapes, self.addresses), "changed since the capture"
        context.state.log.append(("launch", self.shapes["input_ids"][0]))
        context._compute(self.shapes)


EXPORTED = [
    "ILogger", "IProgressMonitor", "NetworkDefinitionCreationFlag", "PreviewFeature", "MemoryPoolType",
    "ProfilingVerbosity", "ExecutionContextAllocationStrategy",
]  # fmt: skip
SAME_NAMES = [
    *EXPORTED, "Builder", "IBuilderConfig", "ITimingCache", "IOptimizationProfile", "OnnxParser", "Runtime",
    "ICudaEngine", "IExecutionContext",
]  # fmt: skip
INNER = {"state", "require_complete", "driver"}


def public_names():
    """Names of the fake's classes and members, for a comparison with the real ones."""
    own = {name: vars(globals()[name]) for name in SAME_NAMES}
    return {name: {member for member in members if member[0] != "_"} - INNER for name, members in own.items()}
