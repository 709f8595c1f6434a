"""The graph for TensorRT computes what the exported one does, and its nodes are what the plugins take."""

import importlib.util
import shutil

import numpy as np
import onnx
import pytest
import stubbed_tensorrt
from onnx.reference.op_run import OpRun
from ragged import prompts_for, run_steps

from contbatch.errors import InvalidRequestError, ModelFileError, UnsupportedModelError
from contbatch.export import export_onnx
from contbatch.model import random_model
from contbatch.plugins.paged_attention.reference import paged_attention
from contbatch.runners import reference
from contbatch.tensorrt_graph import ATTRIBUTES, write_tensorrt_onnx

SIZES = {"num_heads": 6, "kv_num_heads": 2, "head_size": 64, "hidden_size": 384, "intermediate_size": 32}
FORMS = [{}, {"qk_norm": True, "sliding_window": 5}, {"rotary_interleaved": True, "rotary_dim": 32}]


def exported(folder, dtype="float16", **config):
    return export_onnx(random_model(0, **SIZES | config), folder / "model.onnx", dtype)


class PagedAttention(OpRun):
    """The plugin, by the executable spec: packed query, and every attribute given."""

    op_domain = "contbatch"

    def _run(self, query, *rest, **attributes):
        assert set(attributes) == set(ATTRIBUTES)
        return paged_attention(query, None, None, *rest, **attributes)


class PagedAttentionSplit(OpRun):
    """The first split sees everything, the others nothing."""

    op_domain = "contbatch"

    def _run(self, query, *rest, num_splits, **attributes):
        output, *caches = paged_attention(query, None, None, *rest, **attributes)
        shape = num_splits, len(query), attributes["num_heads"], caches[0].shape[3]
        partial, lse = np.zeros(shape, np.float32), np.full(shape[:3], -np.inf, np.float32)
        partial[0], lse[0] = output.reshape(shape[1:]), 0
        return partial, lse, *caches


class PagedAttentionCombine(OpRun):
    op_domain = "contbatch"

    def _run(self, partial, lse, to):
        weighted = (np.exp2(lse)[..., None] * partial).sum(0)
        return (weighted.reshape(len(weighted), -1).astype(onnx.helper.tensor_dtype_to_np_dtype(to)),)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_same_logits(form, num_splits, tmp_path, monkeypatch):
    path = exported(tmp_path, **form)
    steps = [[(0, 5), (1, 1)], [(0, 1), (1, 6)], [(1, 1), (0, 1)]]
    prompts = prompts_for(steps, 256)
    expected = run_steps(reference.ReferenceModel(path, 8, 4), prompts, steps)
    new = write_tensorrt_onnx(path, page_size=4, num_splits=num_splits)
    assert new == tmp_path / "model.tensorrt.onnx"
    ops = [PagedAttention, PagedAttentionSplit, PagedAttentionCombine]
    evaluator = reference.ReferenceEvaluator

    def without_the_largest(proto, new_ops):
        assert [value.name for value in proto.graph.output[-3:]] == ["top_logits", "top_ids", "log_total"]
        del proto.graph.output[-3:]
        return evaluator(proto, new_ops=ops)

    monkeypatch.setattr(reference, "ReferenceEvaluator", without_the_largest)
    got = run_steps(reference.ReferenceModel(new, 8, 4), prompts, steps)
    assert [a.tobytes() for a in got] == [a.tobytes() for a in expected]


def shapes_of(graph):
    tensors = {value.name: value.type.tensor_type for value in [*graph.input, *graph.value_info]}
    return {name: tuple(d.dim_param or d.dim_value for d in tensor.shape.dim) for name, tensor in tensors.items()}


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_plugins_take_the_nodes(form, num_splits, tmp_path):
    pytest.importorskip("triton", reason="kernels are made by Triton: pip install 'contbatch[ptx]' (Linux)")
    if not importlib.util.find_spec("tensorrt_bindings") or not shutil.which("cc"):
        pytest.skip("needs TensorRT's bindings (pip install 'contbatch[ptx]') and a C compiler")
    graph = onnx.load(write_tensorrt_onnx(exported(tmp_path, **form), 8, num_splits)).graph
    shapes, half = shapes_of(graph), form.get("rotary_dim", 64) // 2
    nodes = [node for node in graph.node if node.domain == "contbatch"]
    assert [node.op_type for node in nodes[: min(2, num_splits)]] == (
        ["PagedAttention"] if num_splits == 1 else ["PagedAttentionSplit", "PagedAttentionCombine"]
    )
    assert len(nodes) == 2 * min(2, num_splits)  # of two layers
    node = nodes[0]
    assert [a.name for a in node.attribute][:7] == list(ATTRIBUTES)
    table, cache = (2048, half), shapes[node.input[1]]
    assert cache == ("num_pages", 8, 2, 64)
    inputs = [("tokens", 10 * 64), cache, cache, *(shapes[name] for name in node.input[3:6]), table, table]
    inputs = [(shape, "int32" if 3 <= i <= 5 else "float16") for i, shape in enumerate(inputs)]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    symbols = {"tokens": 9, "num_pages": 20, "num_seqs+1": 4, "num_seqs": 3, "max_pages": 6}
    built = stubbed_tensorrt.submit(stubbed_tensorrt.build, 90, node.op_type, attributes, inputs, symbols)
    assert built["shapes"][-2:] == [(20, 8, 2, 64)] * 2
    assert built["tactics"][1]["launch"]["grid_x"] == 9 // 5 + 3 + 1
    assert built["tactics"][1]["scalars"] == [9, 3, 20, 6, 2048]


def test_bad_requests_are_named(tmp_path):
    with pytest.raises(UnsupportedModelError, match="float16 or bfloat16, got float32"):
        write_tensorrt_onnx(exported(tmp_path, "float32"))
    for wrong in ({"page_size": 0}, {"num_splits": 0}):
        with pytest.raises(InvalidRequestError, match="got 0"):
            write_tensorrt_onnx(exported(tmp_path), **wrong)
    with pytest.raises(ModelFileError, match=r"nothing\.onnx"):
        write_tensorrt_onnx(tmp_path / "nothing.onnx")
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data"}
