"""What the fake TensorRT offers is offered by NVIDIA's bindings too; what we call takes the arguments we give."""

import importlib.util
import inspect
import re
import shutil

import fake_tensorrt
import pytest
import stubbed_tensorrt

from contbatch import tensorrt_library, tensorrt_progress
from contbatch.errors import EngineBuildError

if not importlib.util.find_spec("tensorrt_bindings"):
    pytest.skip("TensorRT's bindings are missing: pip install 'contbatch[ptx]'", allow_module_level=True)
if not shutil.which("cc"):
    pytest.skip("the stub libraries need a C compiler", allow_module_level=True)


def absent_from_the_real_one(names):
    import tensorrt as trt

    return [f"{name}.{m}" for name, members in names.items() for m in members if not hasattr(getattr(trt, name), m)]


def test_the_fake_has_only_names_of_the_real_one():
    names = fake_tensorrt.public_names()
    assert sum(map(len, names.values())) > 25
    assert stubbed_tensorrt.submit(absent_from_the_real_one, names) == []
    assert stubbed_tensorrt.submit(absent_from_the_real_one, {"Builder": ["make_it_fast"]}) == ["Builder.make_it_fast"]


def documented(names):
    import tensorrt as trt

    return {f"{name}.{m}": getattr(trt, name).__dict__[m].__doc__ for name, members in names.items() for m in members}


def test_methods_take_as_many_arguments_as_the_real_ones():
    methods = {
        name: {m for m in members if inspect.isfunction(getattr(getattr(fake_tensorrt, name), m))}
        for name, members in fake_tensorrt.public_names().items()
    }
    compared = 0
    for name, text in stubbed_tensorrt.submit(documented, methods).items():
        kind, method = name.split(".")
        ours = len(inspect.signature(getattr(getattr(fake_tensorrt, kind), method)).parameters)
        if inspect.signature(getattr(getattr(fake_tensorrt, kind), method)).parameters.keys() >= {"limits"}:
            ours += 2  # *limits are three
        theirs = [len(arguments.split(": ")) - 1 for arguments in re.findall(rf"{method}\((self: .*?)\) ->", text)]
        assert ours in theirs, f"{name} has {ours} parameters, the real one {theirs}"
        compared += 1
    assert compared > 20


def logged_and_monitored():
    """Subclass the real interfaces, and call them as the library does."""
    import tensorrt as trt

    log = tensorrt_library.new_log(trt)
    log.log(trt.ILogger.Severity.ERROR, "too big")
    log.log(trt.ILogger.Severity.INFO, "chatter")
    first, second = log.words(), log.words()
    stopped = []
    with tensorrt_progress.new_monitor(trt, False, lambda: bool(stopped)) as monitor:
        monitor.phase_start("Building", None, 2)
        monitor.phase_start("Timing", "Building", 5)
        going = monitor.step_complete("Timing", 4), monitor.step_complete("Building", 0)
        monitor.phase_finish("Timing")
        stopped.append(True)
        going = *going, monitor.step_complete("Building", 1)
    return isinstance(log, trt.ILogger), first, second, going, isinstance(monitor, trt.IProgressMonitor)


def test_logger_and_monitor_derive_from_the_real_interfaces():
    expected = True, "too big", "TensorRT gave no reason", (True, True, False), True
    assert stubbed_tensorrt.submit(logged_and_monitored) == expected


def started_on_nothing():
    """The stub libraries return NULL where a real one has no driver, for instance."""
    import tensorrt as trt

    told = []
    for kind in (trt.Builder, trt.Runtime):
        try:
            tensorrt_library.started(kind, tensorrt_library.new_log(trt))
        except EngineBuildError as error:
            told.append(str(error))
    return told


def test_a_library_that_does_not_start_is_told():
    assert stubbed_tensorrt.submit(started_on_nothing) == ["TensorRT doesn't start: TensorRT gave no reason"] * 2


def attention_names():
    import tensorrt as trt

    there = trt.IAttentionInputLayer.attention, trt.IAttention.decomposable, trt.LayerType.ATTENTION_INPUT
    return len(there), trt.INetworkDefinition.get_layer.__doc__.partition("\n")[0]


def test_what_gathering_engines_need_of_attention_is_there():
    count, signature = stubbed_tensorrt.submit(attention_names)
    assert count == 3
    assert "index" in signature
