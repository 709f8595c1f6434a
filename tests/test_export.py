import collections
import json

import numpy as np
import onnx
import onnxruntime
import openvino as ov
import pytest
from dense_model import dense_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as MissingKernel
from openvino import opset13
from openvino.frontend.onnx import ConversionExtension

from contbatch.errors import ModelFileError, RunnerError, UnsupportedModelError
from contbatch.export import export_onnx, read_config, read_metadata
from contbatch.model import Model, random_model
from contbatch.runners.reference import ReferenceModel

KINDS = {
    "llama": {},
    "as many kv heads": {"kv_num_heads": 4},
    "one kv head": {"num_heads": 5, "kv_num_heads": 1},
    "wide heads": {"head_size": 24},
    "qwen2": {"attention_bias": True, "tie_word_embeddings": True, "rope_theta": 1e6},
    "qwen3": {"qk_norm": True, "tie_word_embeddings": True, "head_size": 32},
    "interleaved": {"rotary_interleaved": True},
    "partial": {"rotary_dim": 4},
    "partial interleaved": {"rotary_dim": 4, "rotary_interleaved": True},
    "window": {"sliding_window": 3},
    "softcap": {"attention_softcap": 1.0},
    "large epsilon": {"rms_norm_eps": 0.5},
}
# Three prompts in chunks, two joining late, then decoding, with other sequences between.
STEPS = [[(0, 5)], [(0, 4), (1, 7)], [(1, 1), (2, 1), (0, 1)], [(2, 6), (0, 1)], [(0, 1), (1, 1), (2, 1)]]


def run_steps(path, sequences, steps, page_size=4, num_pages=24):
    """Logits of every token of every step, by sequence, from pages handed out in an order that makes no sense."""
    model = ReferenceModel(path, num_pages, page_size)
    free = list(np.random.default_rng(0).permutation(num_pages))
    pages, done = [[] for _ in sequences], [0] * len(sequences)
    logits = [[] for _ in sequences]
    for step in steps:
        ids = [sequences[s][done[s] : done[s] + n] for s, n in step]
        for s, n in step:
            while len(pages[s]) * page_size < done[s] + n:
                pages[s].append(free.pop())
        table = np.full((len(step), max(len(pages[s]) for s, _ in step)), -1, np.int32)
        for row, (s, _) in zip(table, step, strict=True):
            row[: len(pages[s])] = pages[s]
        ends = np.cumsum([0] + [n for _, n in step])
        out = model.forward(
            {
                "input_ids": np.concatenate(ids),
                "cumulative_sequence_length": ends.astype(np.int32),
                "past_seqlens": np.array([done[s] for s, _ in step], np.int32),
                "block_table": table,
                "logits_indices": np.arange(ends[-1])[::-1],  # backwards: rows are gathered as asked for
            }
        )[::-1]
        for (s, n), rows in zip(step, np.split(out, ends[1:-1]), strict=True):
            logits[s].append(rows)
            done[s] += n
    return [np.concatenate(rows) for rows in logits]


def check_against_dense(model, folder, steps=STEPS, dtype="float32", tolerance=2e-5, **kwargs):
    lengths = collections.Counter()
    for step in steps:
        lengths.update(dict(step))
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, model.config.vocab_size, lengths[s]) for s in range(len(lengths))]
    path = export_onnx(model, folder / "model.onnx", dtype)
    rounded = {"float32": np.float32, "float16": np.float16, "bfloat16": onnx.helper.tensor_dtype_to_np_dtype(16)}
    for ids, actual in zip(sequences, run_steps(path, sequences, steps, **kwargs), strict=True):
        assert actual.dtype == np.float32
        expected = dense_logits(model, ids, rounded[dtype])
        np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * max(1, expected.std()))


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_logits_equal_dense(changes, tmp_path):
    check_against_dense(random_model(0, **changes), tmp_path)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 0.03), ("bfloat16", 0.25)])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_logits_of_small_dtypes(kind, dtype, tolerance, tmp_path):
    check_against_dense(random_model(0, **KINDS[kind]), tmp_path, dtype=dtype, tolerance=tolerance)


@pytest.mark.parametrize("change", ["rotary_interleaved", "rotary_dim", "sliding_window", "attention_softcap"])
def test_oracle_notices_each_feature(change):
    plain = random_model(0)
    kind = next(changes for changes in KINDS.values() if set(changes) == {change})
    changed = Model(random_model(0, **kind).config, plain.weights, plain.source)
    assert np.abs(dense_logits(plain, range(9)) - dense_logits(changed, range(9))).max() > 0.01


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_combination(data, tmp_path_factory):
    draw = data.draw
    kv_num_heads = draw(st.integers(1, 3))
    model = random_model(
        draw(st.integers(0, 99)),
        kv_num_heads=kv_num_heads,
        num_heads=kv_num_heads * draw(st.sampled_from([1, 3, 5])),
        num_layers=draw(st.integers(1, 3)),
        rotary_dim=draw(st.sampled_from([0, 2, 6])),
        sliding_window=draw(st.sampled_from([0, 1, 5])),
        attention_softcap=draw(st.sampled_from([0.0, 2.0])),
        **{
            flag: draw(st.booleans())
            for flag in ("rotary_interleaved", "attention_bias", "qk_norm", "tie_word_embeddings")
        },
    )
    grants = st.lists(st.tuples(st.just(0), st.integers(1, 9)), min_size=1, max_size=1)
    both = st.tuples(st.integers(1, 9), st.integers(1, 4)).map(lambda n: [(1, n[1]), (0, n[0])])
    steps = [draw(both), *draw(st.lists(grants | both, max_size=3))]
    page_size = draw(st.sampled_from([1, 3, 16]))
    check_against_dense(model, tmp_path_factory.mktemp("any"), steps, page_size=page_size, num_pages=64)


def test_large_activations_stay_finite_in_float16(tmp_path):
    # 300 squared is beyond float16: both the residual stream and the query/key heads must be normalised in float32.
    # exp(12) is, too: that of the gate's sigmoid must neither warn nor matter.
    model = random_model(0, qk_norm=True)
    scale = {"embed": 1500, "layers.0.q": 300, "layers.0.k": 300, "layers.0.gate": 20}
    weights = {name: array * np.float32(scale.get(name, 1)) for name, array in model.weights.items()}
    check_against_dense(Model(model.config, weights, model.source), tmp_path, dtype="float16", tolerance=0.01)


def signature(values):
    def dim(d):
        return d.dim_param or d.dim_value

    types = {1: "float", 5: "int16", 6: "int32", 7: "int64", 10: "float16", 16: "bfloat16"}
    return {v.name: (types[v.type.tensor_type.elem_type], *map(dim, v.type.tensor_type.shape.dim)) for v in values}


@pytest.mark.parametrize(
    ("dtype", "onnx_type"), [("float32", "float"), ("float16", "float16"), ("bfloat16", "bfloat16")]
)
def test_inputs_and_outputs(dtype, onnx_type, tmp_path):
    path = export_onnx(random_model(0, num_layers=1), tmp_path / "m.onnx", dtype)
    onnx.checker.check_model(path, full_check=True)
    graph = onnx.load(path).graph
    cache = (onnx_type, "num_pages", "page_size", 2, 16)
    assert signature(graph.input) == {
        "input_ids": ("int64", "num_tokens"),
        "cumulative_sequence_length": ("int32", "num_seqs+1"),
        "past_seqlens": ("int32", "num_seqs"),
        "block_table": ("int32", "num_seqs", "max_pages"),
        "logits_indices": ("int64", "num_logits"),
        "key_cache.0": cache,
        "value_cache.0": cache,
    }
    assert signature(graph.output) == {
        "logits": ("float", "num_logits", 256),
        "key_cache_out.0": cache,
        "value_cache_out.0": cache,
    }


def attention_nodes(proto):
    return [node for node in proto.graph.node if node.op_type == "PagedAttention"]


def test_operator_has_every_attribute_and_input(tmp_path):
    model = random_model(0, sliding_window=7, attention_softcap=2.0, rotary_dim=4)
    proto = onnx.load(export_onnx(model, tmp_path / "m.onnx", "float16"))
    assert {o.domain: o.version for o in proto.opset_import} == {"": 21, "com.microsoft": 1}
    for i, node in enumerate(attention_nodes(proto)):
        assert node.domain == "com.microsoft"
        assert {a.name: (a.type, onnx.helper.get_attribute_value(a)) for a in node.attribute} == {
            "num_heads": (onnx.AttributeProto.INT, 4),
            "kv_num_heads": (onnx.AttributeProto.INT, 2),
            "scale": (onnx.AttributeProto.FLOAT, pytest.approx(16**-0.5)),
            "softcap": (onnx.AttributeProto.FLOAT, 2.0),
            "local_window_size": (onnx.AttributeProto.INT, 7),
            "do_rotary": (onnx.AttributeProto.INT, 1),
            "rotary_interleaved": (onnx.AttributeProto.INT, 0),
        }
        steps = ["cumulative_sequence_length", "past_seqlens", "block_table", "cos_cache", "sin_cache"]
        assert node.input == [f"layers.{i}.qkv", "", "", f"key_cache.{i}", f"value_cache.{i}", *steps]
        assert node.output == [f"layers.{i}.attention", f"key_cache_out.{i}", f"value_cache_out.{i}"]
    (cos,) = (t for t in proto.graph.initializer if t.name == "cos_cache")
    assert (list(cos.dims), cos.data_type) == ([512, 2], onnx.TensorProto.FLOAT16)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_onnxruntime_lacks_nothing_but_the_kernel(kind, tmp_path):
    path = export_onnx(random_model(0, **KINDS[kind]), tmp_path / "m.onnx", "float16")
    with pytest.raises(MissingKernel, match="Could not find an implementation for PagedAttention"):
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def break_attribute_type(proto):
    (heads,) = (a for a in attention_nodes(proto)[0].attribute if a.name == "num_heads")
    heads.type, heads.f = onnx.AttributeProto.FLOAT, 4.0


def break_attribute_name(proto):
    attention_nodes(proto)[0].attribute.add(name="window", type=onnx.AttributeProto.INT, i=3)


def break_cache_type(proto):
    for value in [*proto.graph.input, *proto.graph.output]:
        if "cache" in value.name:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT


def break_index_type(proto):
    (table,) = (v for v in proto.graph.input if v.name == "block_table")
    table.type.tensor_type.elem_type = onnx.TensorProto.INT64


@pytest.mark.parametrize("breakage", [break_attribute_type, break_attribute_name, break_cache_type, break_index_type])
def test_onnxruntime_would_notice_a_wrong_operator(breakage, tmp_path):
    path = export_onnx(random_model(0), tmp_path / "m.onnx", "float16")
    proto = onnx.load(path, load_external_data=False)
    breakage(proto)
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(Exception, match="PagedAttention") as caught:
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert not isinstance(caught.value, MissingKernel)


def no_attention(node):
    """In place of attention: the query itself; keys and values go where the caches came out, so as to stay alive."""
    query = node.get_input(0)
    width = node.get_attribute("num_heads") * node.get_input(3).get_partial_shape()[3].get_length()
    if query.get_partial_shape()[1].get_length() == width:
        return [query, node.get_input(1), node.get_input(2)]
    return [opset13.slice(query, [0], [width], [1], [1]).output(0), node.get_input(3), node.get_input(4)]


@pytest.mark.parametrize(("kind", "norms"), [("llama", 5), ("qwen3", 9)])
def test_openvino_fuses_norms_linears_and_silu(kind, norms, tmp_path):
    core = ov.Core()
    core.add_extension(ConversionExtension("PagedAttention", "com.microsoft", no_attention))
    model = core.read_model(export_onnx(random_model(0, **KINDS[kind]), tmp_path / "m.onnx"))
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    types = collections.Counter(op.get_rt_info()["layerType"] for op in compiled.get_runtime_model().get_ops())
    assert types["RMS"] == norms
    assert types["FullyConnected"] == 2 * 5 + 1
    assert types["Eltwise"] == 2 * 3  # two residuals and gate · up a layer; SiLU runs inside the gate's linear
    assert not {"MatMul", "Transpose", "Reorder", "Reduce"} & set(types)


def test_weights_lie_outside_and_tied_ones_once(tmp_path):
    sizes = {}
    for tied in (False, True):
        model = random_model(0, tie_word_embeddings=tied, hidden_size=256)
        path = export_onnx(model, tmp_path / f"{tied}.onnx")
        assert path.stat().st_size < 20_000
        proto = onnx.load(path, load_external_data=False)
        assert all(len(t.raw_data) <= 256 for t in proto.graph.initializer)
        entries = {e.key: e.value for t in proto.graph.initializer for e in t.external_data if e.key == "location"}
        assert entries == {"location": f"{tied}.onnx.data"}
        assert [t.name for t in proto.graph.initializer].count("lm_head.weight") == (not tied)
        sizes[tied] = (tmp_path / f"{tied}.onnx.data").stat().st_size
    assert sizes[False] - sizes[True] == 256 * 256 * 4


def test_metadata(tmp_path):
    model = random_model(3, attention_bias=True, eos_token_id=5)
    path = export_onnx(model, tmp_path / "new folder" / "m.onnx", "bfloat16", max_position=32)
    config = read_config(path)
    assert config == random_model(3, attention_bias=True, eos_token_id=5, max_position=32).config
    metadata = read_metadata(path)
    assert (metadata["dtype"], metadata["source"]) == ("bfloat16", model.source)
    assert json.loads(metadata["versions"])["onnx"] == onnx.__version__
    again = read_metadata(export_onnx(model, tmp_path / "m.onnx"))
    other = read_metadata(export_onnx(random_model(4), tmp_path / "m.onnx"))
    assert metadata["weights_sha256"] == again["weights_sha256"] != other["weights_sha256"]
    assert onnx.load(path, load_external_data=False).producer_name == "contbatch"


def test_float64_rotary_tables(tmp_path):
    # In float32 the angle of position 100 000 is off by up to 4e-3.
    model = random_model(0, max_position=100_001, rope_theta=1e6)
    tensors = {t.name: t for t in onnx.load(export_onnx(model, tmp_path / "m.onnx")).graph.initializer}
    angle = 100_000 * 1e6 ** (-np.arange(8) / 8)
    for name, expected in (("cos_cache", np.cos(angle)), ("sin_cache", np.sin(angle))):
        table = onnx.numpy_helper.to_array(tensors[name])
        assert table.shape == (100_001, 8)
        np.testing.assert_allclose(table[-1], expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"dtype": "int8"}, "float32, bfloat16, float16, got 'int8'"),
        ({"max_position": 0}, r"\[1, 64\], got 0"),
        ({"max_position": 65}, r"\[1, 64\], got 65"),
    ],
)
def test_bad_input(kwargs, message, tmp_path):
    with pytest.raises(UnsupportedModelError, match=message):
        export_onnx(random_model(0, max_position=64), tmp_path / "m.onnx", **kwargs)
    assert not list(tmp_path.iterdir())


def test_failed_export_leaves_the_old_files(tmp_path):
    path = export_onnx(random_model(0), tmp_path / "m.onnx", "float16")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    huge = random_model(0)
    huge.weights["layers.1.down"][3, 3] = -7e4
    with pytest.raises(UnsupportedModelError, match=r"layers.1.down reaches 70000, the largest FLOAT16 is 65504"):
        export_onnx(huge, path, "float16")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before == before | {"m.onnx": path.read_bytes()}
    export_onnx(huge, path, "bfloat16")
    assert read_metadata(path)["dtype"] == "bfloat16"


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "m.onnx"
    with pytest.raises(ModelFileError, match=r"m\.onnx"):
        read_config(path)
    path.write_bytes(b"not an ONNX file")
    with pytest.raises(ModelFileError, match=r"m\.onnx"):
        read_config(path)
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [])), path)
    with pytest.raises(ModelFileError, match="no readable contbatch config"):
        read_config(path)


def step(**changes):
    return {
        "input_ids": np.array([1, 2]),
        "cumulative_sequence_length": np.array([0, 2], np.int32),
        "past_seqlens": np.array([0], np.int32),
        "block_table": np.array([[0]], np.int32),
        "logits_indices": np.array([1]),
    } | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": np.array([1, 256])}, r"input_ids must be in \[0, 256\), got 256"),
        ({"input_ids": np.array([-1, 2])}, r"input_ids must be in \[0, 256\), got -1"),
        ({"logits_indices": np.array([2])}, r"logits_indices must be in \[0, 2\), got 2"),
        ({"block_table": np.array([[3]], np.int32)}, "page 3, outside 0..2"),
        ({"past_seqlens": np.array([15], np.int32)}, "position 16"),
    ],
)
def test_reference_model_refuses(changes, message, tmp_path):
    model = ReferenceModel(export_onnx(random_model(0), tmp_path / "m.onnx"), num_pages=3, page_size=16)
    with pytest.raises(RunnerError, match=message):
        model.forward(step(**changes))
    assert not any(cache.any() for cache in model.caches.values())
    model.forward(step())
    assert all(cache.any() for cache in model.caches.values())
    model.close()
    with pytest.raises(RunnerError, match="close"):
        model.forward(step())
