"""The graph without plugins against dense attention and the executable spec, run by ONNX Runtime and by ONNX itself."""

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from paged_problem import Problem, check, problems
from quantised import export_w8a8
from ragged import prompts_for, run_steps, step
from test_packed_weight import MIXES, quantised

from contbatch.errors import InvalidRequestError
from contbatch.export import export_onnx
from contbatch.model import random_model
from contbatch.runners.reference import ReferenceModel
from contbatch.tensorrt_gather import gather_pages
from contbatch.tensorrt_graph import ATTRIBUTES, write_tensorrt_onnx

SIZES = {"num_heads": 6, "kv_num_heads": 2, "head_size": 64, "hidden_size": 384, "intermediate_size": 32}
FORMS = {
    "llama": {},
    "qwen3": {"qk_norm": True, "sliding_window": 5},
    "interleaved": {"rotary_interleaved": True, "rotary_dim": 32},
    "softcap": {"attention_softcap": 5.0, "attention_bias": True},
}
RUN = {
    "onnxruntime": lambda proto: onnxruntime.InferenceSession(
        proto.SerializeToString(), options(), providers=["CPUExecutionProvider"]
    ),
    "onnx": ReferenceEvaluator,
}


def options():
    quiet = onnxruntime.SessionOptions()
    quiet.log_severity_level = 3
    return quiet


# ---- the operator ----------------------------------------------------------------------------------------------------


def node_model(problem, dtype):
    """A model of one PagedAttention, its pages gathered."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    cache = [len(problem.caches[0]), problem.page_size, problem.kv_heads, problem.head_size]
    values = [("query", kind, ["tokens", problem.qkv.shape[1]]), ("keys", kind, cache), ("values", kind, cache)]
    values += [(name, onnx.TensorProto.INT32, [None]) for name in ("cumulative", "past")]
    values.append(("table", onnx.TensorProto.INT32, [None, None]))
    inputs = [name for name, *_ in values]
    tables = {"cos": problem.cos, "sin": problem.sin} if problem.rotary_dim else {}
    given = {"scale": 0.0, "softcap": 0.0, "local_window_size": -1, "rotary_interleaved": 0} | problem.attributes
    given |= {"num_heads": problem.heads, "kv_num_heads": problem.kv_heads, "do_rotary": int(problem.rotary_dim > 0)}
    assert set(given) == set(ATTRIBUTES)
    node = helper.make_node(
        "PagedAttention", [inputs[0], "", "", *inputs[1:], *tables], ["output", "new_keys", "new_values"], **given
    )
    outputs = [("output", kind, [None, None]), ("new_keys", kind, cache), ("new_values", kind, cache)]
    graph = helper.make_graph(
        [node],
        "node",
        [helper.make_tensor_value_info(*value) for value in values],
        [helper.make_tensor_value_info(*value) for value in outputs],
        [numpy_helper.from_array(table.astype(dtype), name) for name, table in tables.items()],
    )
    proto = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    gather_pages(proto, problem.page_size)
    onnx.checker.check_model(proto)
    return proto


def run(problem, dtype=np.float32, by="onnxruntime"):
    caches = problem.caches[0].astype(dtype), problem.caches[1].astype(dtype)
    arrays = problem.qkv.astype(dtype), *caches, problem.cumulative, problem.past, problem.table
    names = "query", "keys", "values", "cumulative", "past", "table"
    return RUN[by](node_model(problem, dtype)).run(None, dict(zip(names, arrays, strict=True)))


@settings(max_examples=25)
@given(problems(pages=[np.float32], past=60, new=(0, 1, 1, 2, 17), page_sizes=(1, 3, 16, 32)))
def test_it_is_dense_attention_and_changes_no_other_page(problem):
    if problem.cumulative[-1]:
        check(problem, run(problem))


@pytest.mark.parametrize("by", RUN)
def test_padding_writes_nothing(by):
    problem = Problem([(30, 1), (7, 0), (15, 2)], padding=5, rotary_dim=64, head_size=64)
    check(problem, run(problem, by=by))


def test_halves():
    problem = Problem([(30, 1), (0, 5)], pages=np.float16, rotary_dim=64)
    output, *caches = run(problem, np.float16)
    expected, *pages = problem.reference(np.float16)
    np.testing.assert_allclose(output.astype(float), expected.astype(float), atol=4 * 2.0**-10)
    np.testing.assert_array_equal(caches[1], pages[1])


# ---- the model -------------------------------------------------------------------------------------------------------


class Gathered(ReferenceModel):
    """Runs a gathering graph, on pages that are full of NaN at first."""

    def __init__(self, path, num_pages, page_size, by):
        super().__init__(path, num_pages, page_size)
        self.caches = {name: np.full_like(cache, np.nan) for name, cache in self.caches.items()}
        self.session = RUN[by](onnx.load(path))
        self.names = [value.name for value in onnx.load(path, load_external_data=False).graph.output]

    def forward(self, inputs):
        with np.errstate(over="ignore", invalid="ignore"):
            self.results = dict(zip(self.names, self.session.run(None, {**inputs, **self.caches}), strict=True))
        self.caches = {name: self.results[name.replace("cache", "cache_out")] for name in self.caches}
        return self.results["logits"]


STEPS = [[(0, 5), (1, 1)], [(0, 1), (1, 6)], [(1, 1), (0, 1)]]


@pytest.mark.parametrize("by", RUN)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_logits_of_a_model_within_1e_4(form, by, tmp_path):
    path = export_onnx(random_model(0, **SIZES | form), tmp_path / "model.onnx")
    new = write_tensorrt_onnx(path, 4, attention="gather", top_k=5)
    assert new == tmp_path / "model.gather.onnx"
    proto = onnx.load(new, load_external_data=False)
    assert [(opset.domain, opset.version) for opset in proto.opset_import] == [("", 24)]
    assert ("Attention" in {node.op_type for node in proto.graph.node}) == ("attention_softcap" not in form)
    prompts = prompts_for(STEPS, 256)
    expected = run_steps(ReferenceModel(path, 8, 4), prompts, STEPS)
    model = Gathered(new, 8, 4, by)
    got = run_steps(model, prompts, STEPS)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


@pytest.mark.parametrize("by", RUN)
def test_the_largest_logits_come_out_with_the_sum_of_all(by, tmp_path):
    path = export_onnx(random_model(0, **SIZES), tmp_path / "model.onnx")
    model = Gathered(write_tensorrt_onnx(path, 4, attention="gather", top_k=7), 4, 4, by)
    logits = model.forward(step(([1, 2, 3], 0), table=[[2]])).astype(np.float64)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :7]
    assert model.results["top_ids"].dtype == np.int32
    np.testing.assert_array_equal(model.results["top_ids"], order)
    np.testing.assert_array_equal(model.results["top_logits"], np.take_along_axis(logits, order, 1))
    np.testing.assert_allclose(model.results["log_total"], np.log(np.exp(logits).sum(1)), rtol=1e-6)


@pytest.mark.parametrize("by", RUN)
def test_the_sum_of_large_logits_does_not_overflow(by, tmp_path):
    """TensorRT's parser makes ReduceLogSumExp of the logits as they are, so it must not be in the graph."""
    source = random_model(0, **SIZES)
    source.weights["final_norm"][:] *= 60
    new = write_tensorrt_onnx(export_onnx(source, tmp_path / "model.onnx"), 4, attention="gather")
    assert "ReduceLogSumExp" not in {node.op_type for node in onnx.load(new, load_external_data=False).graph.node}
    model = Gathered(new, 4, 4, by)
    logits = model.forward(step(([1, 2, 3], 0), table=[[2]])).astype(np.float64)
    largest = logits.max(1)
    assert largest.min() > 200
    expected = largest + np.log(np.exp(logits - largest[:, None]).sum(1))
    np.testing.assert_allclose(model.results["log_total"], expected, rtol=1e-6)


@pytest.mark.parametrize("mix", MIXES)
def test_packed_weights_are_widened(mix, tmp_path):
    kinds, changes, packed = MIXES[mix]
    path = export_onnx(quantised(tmp_path, kinds, **SIZES | changes), tmp_path / "model.onnx")
    new = write_tensorrt_onnx(path, 4, attention="gather")
    types = {onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in onnx.load(new).graph.initializer}
    assert not types & {"UINT4", "UINT8", "INT8"}
    assert (tmp_path / "model.wide.data").exists() == bool(packed)
    prompts = prompts_for(STEPS, 256)
    expected = run_steps(ReferenceModel(path, 8, 4), prompts, STEPS)
    for a, b in zip(run_steps(Gathered(new, 8, 4, "onnxruntime"), prompts, STEPS), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


@pytest.mark.parametrize("by", RUN)
def test_codes_of_w8a8_stay(by, tmp_path):
    path = export_w8a8(random_model(0, **SIZES), tmp_path, "float32")
    new = write_tensorrt_onnx(path, 4, attention="gather")
    kinds = Counter(node.op_type for node in onnx.load(new, load_external_data=False).graph.node)
    assert (kinds["QuantizeLinear"], kinds["DequantizeLinear"]) == (9, 9 + 11)
    prompts = prompts_for(STEPS, 256)
    expected = run_steps(ReferenceModel(path, 8, 4), prompts, STEPS)
    for a, b in zip(run_steps(Gathered(new, 8, 4, by), prompts, STEPS), expected, strict=True):
        # Another rounding of an input may be another code; most rows have none.
        assert np.sqrt(np.mean(np.square(a - b))) < 0.1 * np.sqrt(np.mean(np.square(b)))


def test_bad_requests_are_named(tmp_path):
    path = export_onnx(random_model(0, **SIZES), tmp_path / "model.onnx")
    for wrong, message in (
        ({"attention": "flash"}, "attention must be 'paged' or 'gather', got 'flash'"),
        ({"top_k": 0}, r"top_k must be an integer in \[1, 3840\], got 0"),
        ({"top_k": 4000}, "got 4000"),
        ({"num_splits": 2}, "num_splits must be 1 where pages are gathered, got 2"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            write_tensorrt_onnx(path, **{"attention": "gather"} | wrong)
    assert len(list(tmp_path.iterdir())) == 2
