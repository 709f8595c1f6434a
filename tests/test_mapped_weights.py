"""A file of weights is given back once it is packed, and nothing else is."""

import gc
from pathlib import Path

import numpy as np
import pytest
from ragged import step

from contbatch.export import export_onnx
from contbatch.model import random_model
from contbatch.runners.cpu import CPUModel
from contbatch.runners.mapped_weights import MappedWeights

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="memory in use is read from /proc")
ONE = step(([1, 2, 3], 0), table=[[0]])
MANY = step((np.arange(40), 0), table=[range(3)], logits=range(40))


def resident(path):
    """MB of a file that this process has in memory through mappings."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.endswith("kB") and inside and line.startswith("Rss:"):
            total += int(line.split()[1])
        elif not line.endswith("kB"):
            inside = line.endswith(str(path))
    return total * 1024 / 1e6


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    model = random_model(0, hidden_size=512, intermediate_size=2048, num_layers=2, head_size=128)
    return export_onnx(model, tmp_path_factory.mktemp("wide") / "m.onnx")


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_weights_are_given_back_and_steps_keep_their_bits(wide, precision, monkeypatch):
    data, size = Path(f"{wide}.data"), Path(f"{wide}.data").stat().st_size / 1e6
    assert size > 30
    with monkeypatch.context() as kept:
        kept.setattr(MappedWeights, "release", lambda self: None)
        model = CPUModel(wide, 4, precision=precision)
        wanted = [model.forward(inputs).copy() for inputs in (ONE, MANY, ONE)]
        held = resident(data)
        model.close()
    gc.collect()
    assert precision == "bf16" or held > 0.8 * size  # bf16 is folded while it is compiled
    model = CPUModel(wide, 4, precision=precision)
    for inputs, logits in zip((ONE, MANY, ONE), wanted, strict=True):
        assert np.array_equal(model.forward(inputs), logits)
        assert resident(data) < 0.2 * size
    model.close()


def test_what_is_mapped_after_a_model_has_gone_is_not_touched(wide):
    gone, other = CPUModel(wide, 4), CPUModel(wide, 4)
    wanted = other.forward(MANY).copy()
    weights = gone._weights
    gone.close()
    del gone
    gc.collect()
    memory = [np.ones(1 << 22, np.uint8) for _ in range(16)]  # big enough to lie where a mapping was
    weights.release()
    other._weights.release()
    assert all(part.all() for part in memory)
    assert np.array_equal(other.forward(MANY), wanted)
    other.close()
