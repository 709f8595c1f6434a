"""A closed or forgotten model gives its memory back, and steps take none."""

import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ragged import step

from contbatch.errors import RunnerError
from contbatch.export import export_onnx
from contbatch.model import random_model
from contbatch.runners.cpu import CPUModel
from contbatch.runners.reference import ReferenceModel

GOOD = step(([1, 2, 3], 0), table=[[0]])
SCRIPT = """
import gc, sys
import numpy as np
sys.path.insert(0, {tests!r})
from ragged import step
from contbatch.runners.cpu import CPUModel

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

def use(close):
    model = CPUModel({wide!r}, 400)
    model.forward(step((np.ones(400, int), 0), table=[range(25)], logits=[0]))
    for array in model._pages.arrays:
        array.fill(1)
    if close:
        model.close()
        leftovers.append(model)

gc.disable()
leftovers = []
use(False), use(True)
before = resident()
for i in range(6):
    use(close=i % 2)
print(resident() - before)

model = CPUModel({deep!r}, 40)
arrays = [step((np.ones(n, int), 0), table=[range(4)], logits=[0]) for n in range(1, 50)]
for i in range(49):
    model.forward(arrays[i % 49])
growth = []
for _ in range(7):
    before = resident()
    for i in range(100):
        model.forward(arrays[i % 49])
    growth.append(resident() - before)
print(sorted(growth)[3])  # the allocator takes a few MB at once, at some time
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory in use is read from /proc")
def test_models_and_steps_leave_no_memory_behind(tmp_path):
    """OpenVINO holds Python operators for ever by itself: that would be 60 MB a model here, and 7 MB in 100 steps."""
    wide = random_model(0, hidden_size=512, intermediate_size=2048, num_layers=2, head_size=128)
    wide, deep = (
        export_onnx(m, tmp_path / f"{m.config.num_layers}.onnx") for m in (wide, random_model(0, num_layers=12))
    )
    assert wide.with_name("2.onnx.data").stat().st_size > 30e6
    script = SCRIPT.format(tests=str(Path(__file__).parent), wide=str(wide), deep=str(deep))
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    models, steps = map(float, done.stdout.split())
    assert models < 60
    assert steps < 0.4


def test_an_interrupt_after_models_that_came_and_went_in_turn(tmp_path):
    """OpenVINO changes the stack of signal handlers when a model is loaded first, and when the last one goes."""
    path = export_onnx(random_model(0), tmp_path / "m.onnx")
    script = f"""
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a script starts in the background
from contbatch.runners.cpu import CPUModel
old = CPUModel({str(path)!r}, 2)
new = CPUModel({str(path)!r}, 2)
del old
new.close()
del new
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


def test_models_that_nobody_closed_go_before_python_does(tmp_path):
    """Later OpenVINO frees the nodes' Python halves without Python's lock; a function keeps the models until then."""
    path = export_onnx(random_model(0), tmp_path / "m.onnx")
    script = f"""
import atexit
atexit.register(lambda: print(model._request))
from contbatch.runners.cpu import CPUModel
from contbatch.runners.cpu_pages import CPUPages
from contbatch.runners.model_runner import ModelRunner
model = CPUModel({str(path)!r}, 2)
runner = ModelRunner(model)
CPUPages.kept = lambda: None
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "None\n", "")


@pytest.mark.parametrize("kind", [CPUModel, ReferenceModel])
def test_a_model_goes_with_its_last_reference(kind, tmp_path):
    freed = []

    class Watched(kind):
        def __del__(self):
            freed.append(True)

    path = export_onnx(random_model(0), tmp_path / "m.onnx")
    gc.disable()
    try:
        model = Watched(path, 2, 16)
        model.forward(GOOD)
        with pytest.raises(RunnerError):
            model.forward(GOOD | {"block_table": np.array([[-4]], np.int32)})
        model = None
        assert freed == [True]
    finally:
        gc.enable()


def test_a_step_asks_for_no_copy_of_an_attention_node(tmp_path):
    """OpenVINO made one in each layer of each step while it had to ask the operator for its shape."""
    model = CPUModel(export_onnx(random_model(0, qk_norm=True), tmp_path / "model.onnx"), 8)
    assert model._pages is not None
    made = len(model._pages.nodes)
    assert made >= model.config.num_layers
    for tokens in ([1, 2, 3], [1, 2, 3], [4]):
        model.forward(step((tokens, 0), table=[[0]]))
    assert len(model._pages.nodes) == made
