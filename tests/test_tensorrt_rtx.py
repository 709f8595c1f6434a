"""A real library of NVIDIA's, TensorRT-RTX, builds what we export, by our own builder, without a GPU.

All but attention, which it has no operator for; and the whole model where pages are gathered by ONNX's own operators.

It has TensorRT's parser, networks and builder interface, but takes no plugins and makes code for consumers' GPUs. It
runs in a process of its own: where it is asked for something that it hasn't, it aborts.
"""

import importlib.util
import logging
import multiprocessing
import re
import signal
from concurrent.futures import ProcessPoolExecutor

import onnx
import pytest
from quantised import export_w8a8
from test_packed_weight import MIXES, quantised

from contbatch.errors import EngineBuildError
from contbatch.export import export_onnx, read_config
from contbatch.model import random_model
from contbatch.tensorrt_build import BuildOptions, build_plan
from contbatch.tensorrt_graph import write_tensorrt_onnx, write_without_attention
from contbatch.tensorrt_limits import EngineLimits

if not importlib.util.find_spec("tensorrt_rtx_bindings"):
    pytest.skip("TensorRT-RTX is missing: pip install 'contbatch[ptx]' (Linux)", allow_module_level=True)

SIZES = {"num_heads": 6, "kv_num_heads": 2, "head_size": 64, "hidden_size": 384, "intermediate_size": 512}
FORMS = {
    "llama": {},
    "qwen2": {"attention_bias": True, "tie_word_embeddings": True},
    "qwen3": {"qk_norm": True, "tie_word_embeddings": True},
}
LIMITS = EngineLimits(max_num_seqs=8, max_num_batched_tokens=64, num_pages=100, page_size=16)


@pytest.fixture(scope="module")
def process():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        yield executor


def plan_of(graph, profiles):
    import tensorrt_rtx_libs  # noqa: F401 - loads the library
    import tensorrt_rtx_bindings as trt  # isort: skip

    return (graph.parent / "plan").write_bytes(build_plan(trt, graph, profiles, BuildOptions(), 120, False))


class Listener(logging.Handler):
    """Hears what TensorRT tells our logger, from within its own calls."""

    def __init__(self, emit):
        super().__init__()
        self.emit = emit

    def __enter__(self):
        logger = logging.getLogger("contbatch.tensorrt")
        logger.setLevel(logging.DEBUG)
        logger.addHandler(self)

    def __exit__(self, *exception):
        logging.getLogger("contbatch.tensorrt").removeHandler(self)


def int8_products_of(graph, profiles):
    """Build; return the names of the matrix products that take int8 for both sides in the first profile."""
    told = []
    with Listener(lambda record: told.append(record.getMessage())):
        plan_of(graph, profiles)
    products = [
        line for text in told for line in text.splitlines() if re.match(r"Name: \S*myl0_\d+, LayerType: gemm", line)
    ]
    codes = [line for line in products if re.findall(r"Datatype: (\w+)", line)[:2] == ["Int8", "Int8"]]
    return {
        name
        for line in codes
        for name in re.findall(r"[\w.]+?(?=_U\d|_myl0)", line.split(",")[0].removeprefix("Name: "))
    }


def interrupted_in_its_log(graph, profiles):
    """Build, with a Ctrl-C while TensorRT is in a method of ours."""
    waiting = [signal.SIGINT]
    with Listener(lambda record: waiting and signal.raise_signal(waiting.pop())):
        plan_of(graph, profiles)


def profiles_of(graph, config):
    """The ranges of the engine's inputs that are left, and of what attention makes."""
    names = {value.name for value in onnx.load(graph, load_external_data=False).graph.input}
    width = config.num_heads * config.head_size
    found = {}
    for profile, ranges in LIMITS.profiles(config).items():
        rows = [(*shape, width) for shape in ranges["input_ids"]]
        attention = {f"layers.{i}.attention": rows for i in range(config.num_layers)}
        found[profile] = {name: shapes for name, shapes in (ranges | attention).items() if name in names}
    assert set(found["decode"]) == names
    return found


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_it_builds_what_we_export(form, dtype, process, tmp_path):
    model = export_onnx(random_model(0, **SIZES | form), tmp_path / "model.onnx", dtype)
    graph, config = write_without_attention(model), read_config(model)
    num_bytes = process.submit(plan_of, graph, profiles_of(graph, config)).result()
    weights = (tmp_path / "model.onnx.data").stat().st_size
    assert 0.5 * weights < num_bytes < 2 * weights
    assert (tmp_path / "timings-sm120.cache").exists()
    assert process.submit(plan_of, graph, profiles_of(graph, config)).result()  # with the timings of the first build


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "form",
    [
        {"qk_norm": True, "sliding_window": 40},
        {"attention_softcap": 5.0, "rotary_interleaved": True, "rotary_dim": 32},
        {"num_heads": 3, "kv_num_heads": 1},  # it has no single kernel for
    ],
    ids=["qwen3", "softcap", "3 heads"],
)
def test_it_builds_the_whole_model_where_pages_are_gathered(form, dtype, process, tmp_path):
    model = export_onnx(random_model(0, **SIZES | form), tmp_path / "model.onnx", dtype)
    graph, config = write_tensorrt_onnx(model, 16, attention="gather"), read_config(model)
    num_bytes = process.submit(plan_of, graph, LIMITS.profiles(config)).result()
    assert num_bytes > 0.9 * (tmp_path / "model.onnx.data").stat().st_size


# ---- 8 and 4 bits ----------------------------------------------------------------------------------------------------

W8A8 = {
    "llama": ({}, (), set()),
    "qwen2": ({"attention_bias": True, "tie_word_embeddings": True}, (), set()),
    "qwen3, some in floats": ({"qk_norm": True}, ("layers.0.gated", "final_norm"), {"layers.0.down", "lm_head"}),
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("form", W8A8)
def test_it_multiplies_codes_where_the_file_has_them(form, dtype, process, tmp_path):
    """Per-tensor steps of inputs, per-row steps of weights: kept, and fused into products of int8."""
    changes, keep, in_floats = W8A8[form]
    model = export_w8a8(random_model(0, **SIZES | changes), tmp_path, dtype, keep)
    graph = write_without_attention(model)
    products = process.submit(int8_products_of, graph, profiles_of(graph, read_config(model))).result()
    names = [f"layers.{i}.{part}" for i in range(2) for part in ("qkv", "o", "gate", "up", "down")]
    assert products & {*names, "lm_head"} == {*names, "lm_head"} - in_floats


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_it_builds_8_bits_whole_where_pages_are_gathered(dtype, process, tmp_path):
    model = export_w8a8(random_model(0, **SIZES), tmp_path, dtype)
    graph = write_tensorrt_onnx(model, 16, attention="gather")
    products = process.submit(int8_products_of, graph, LIMITS.profiles(read_config(model))).result()
    assert products >= {"layers.0.o", "layers.1.qkv", "layers.1.down", "lm_head"}


@pytest.mark.parametrize("mix", ["like SmolLM2", "tied in 4 bits", "untied"])
def test_it_builds_packed_files_widened(mix, process, tmp_path):
    kinds, changes, packed = MIXES[mix]
    model = export_onnx(quantised(tmp_path, kinds, **SIZES | changes), tmp_path / "model.onnx")
    kept = {onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in onnx.load(model).graph.initializer}
    assert kept >= packed
    graph, config = write_without_attention(model), read_config(model)
    num_bytes = process.submit(plan_of, graph, profiles_of(graph, config)).result()
    weights = (tmp_path / "model.wide.data").stat().st_size
    assert 2.5 * (tmp_path / "model.onnx.data").stat().st_size < weights < num_bytes < 1.5 * weights
    graph = write_tensorrt_onnx(model, 16, attention="gather")
    assert process.submit(plan_of, graph, LIMITS.profiles(config)).result() > weights


@pytest.mark.parametrize("top_k", [3840, 3841])
def test_its_limit_of_top_k_is_ours(top_k, process, tmp_path, monkeypatch):
    monkeypatch.setattr("contbatch.tensorrt_graph.MOST_TOP_K", top_k)
    model = export_onnx(random_model(0, **SIZES | {"vocab_size": 4000}), tmp_path / "model.onnx", "float16")
    built = process.submit(
        plan_of,
        write_tensorrt_onnx(model, 16, attention="gather", top_k=top_k),
        LIMITS.profiles(read_config(model)),
    )
    if top_k == 3840:
        assert built.result()
    else:
        with pytest.raises(EngineBuildError, match="3840"):
            built.result()


def test_its_words_are_told(process, tmp_path):
    model = export_onnx(random_model(0, **SIZES), tmp_path / "model.onnx", "float16")
    graph, config = write_without_attention(model), read_config(model)
    profiles = profiles_of(graph, config)
    profiles["decode"].pop("input_ids")
    with pytest.raises(EngineBuildError, match=r"(?s)model.segments.onnx: TensorRT .*input_ids"):
        process.submit(plan_of, graph, profiles).result()
    graph.write_bytes(graph.read_bytes().replace(b"Sigmoid", b"Sigmund"))
    with pytest.raises(EngineBuildError, match=r"parser refuses it: .*Sigmund"):
        process.submit(plan_of, graph, profiles).result()


def test_an_interrupt_ends_the_build(process, tmp_path):
    model = export_onnx(random_model(0, **SIZES), tmp_path / "model.onnx", "float16")
    graph = write_without_attention(model)
    with pytest.raises(KeyboardInterrupt):
        process.submit(interrupted_in_its_log, graph, profiles_of(graph, read_config(model))).result()
    assert not (tmp_path / "plan").exists()
    assert process.submit(plan_of, graph, profiles_of(graph, read_config(model))).result()
