"""What OpenVINO makes of an exported graph: the nodes a step consists of, and the same numbers by other ways."""

from collections import Counter

import numpy as np
import pytest
from quantised import export_w8a8

from contbatch.calibrate import whole
from contbatch.errors import RunnerError
from contbatch.export import export_onnx
from contbatch.model import random_model
from contbatch.runners import cpu_graph
from contbatch.runners.cpu import CPUModel
from contbatch.runners.reference import ReferenceModel

STEP = whole(np.random.default_rng(0).integers(0, 256, 40).tolist())
CORE = cpu_graph.core()
needs_bfloat16 = pytest.mark.skipif(
    "BF16" not in CORE.get_property("CPU", "OPTIMIZATION_CAPABILITIES"), reason="this CPU has no bfloat16"
)


class Older:
    """OpenVINO on a CPU that doesn't know bfloat16, as far as it says so."""

    def get_property(self, _device, _name):
        return ["FP32", "INT8"]

    def __getattr__(self, name):
        return getattr(CORE, name)


def run(path, precision):
    """Return a step's logits, and how many nodes the graph has of each kind and type of output."""
    model = CPUModel(path, 8, 16, precision=precision)
    logits = model.forward(STEP).copy()
    nodes = [node.get_rt_info() for node in model._request.get_compiled_model().get_runtime_model().get_ops()]
    model.close()
    names = ("layerType", "outputPrecisions")
    return logits, Counter(tuple(node[name].astype(str) for name in names) for node in nodes)


def near(logits, wanted, tolerance):
    return np.sqrt(np.mean(np.square(logits - wanted))) < tolerance * np.sqrt(np.mean(np.square(wanted)))


@needs_bfloat16
def test_eight_bits_are_taken_and_given_without_nodes_in_between(tmp_path):
    path = export_w8a8(random_model(0), tmp_path, "float32", keep=["layers.1.attention", "layers.0.gated"])
    logits, nodes = run(path, "w8a8")
    kinds = Counter[str]()
    for (kind, _), count in nodes.items():
        kinds[kind] += count
    assert not kinds["FakeQuantize"]
    assert nodes["Reorder", "f32"] == 0  # of what is widened only to be rounded
    assert (nodes["Reference", "i8"], nodes["Reference", "bf16"]) == (1, 1)
    assert nodes["Eltwise", "i8"] == 5 + 1  # after the norms, and the `gated` that is rounded
    assert nodes["Eltwise", "bf16"] == 4 + 1  # residuals, and the `gated` that is not
    wanted = ReferenceModel(path, 8, 16).forward(STEP)
    assert near(logits, wanted, 0.1)


@needs_bfloat16
def test_bfloat16_makes_no_difference_to_attention(tmp_path, monkeypatch):
    path = export_onnx(random_model(0), tmp_path / "model.onnx")
    logits, nodes = run(path, "bf16")
    assert nodes["Reference", "bf16"] == 2
    monkeypatch.setattr(cpu_graph, "core", Older)
    same, others = run(path, "bf16")
    assert others["Reference", "f32"] == 2
    assert sum(others.values()) > sum(nodes.values())
    assert near(same, logits, 0.01)  # nearly always the same bits, but how a rotation is fused is the compiler's choice


def test_eight_bits_where_there_is_no_bfloat16(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_graph, "core", Older)
    path = export_w8a8(random_model(0), tmp_path, "float32")
    logits, nodes = run(path, "w8a8")
    assert nodes["Reference", "i8"] == 2
    wanted = ReferenceModel(path, 8, 16).forward(STEP)
    assert near(logits, wanted, 0.1)


def test_rows_of_another_type_are_refused(tmp_path):
    model = CPUModel(export_onnx(random_model(0), tmp_path / "model.onnx"), 8, 16, precision="f32")
    model._pages.qkv_type = np.dtype(np.uint16)
    with pytest.raises(RunnerError, match="rows of float32, asked for were those of uint16"):
        model.forward(STEP)
    model.close()
