"""W8A8: codes, factors that move size from inputs to weights, and files made of both."""

import json

import numpy as np
import onnx
import pytest
from dense_model import dense_logits
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tiny_llm import PROMPTS, greedy, write_tiny

import contbatch as cb
from contbatch.build import build
from contbatch.calibrate import calibrate, calibration_prompts, paragraphs, whole
from contbatch.errors import InvalidRequestError, UnsupportedModelError
from contbatch.export import export_onnx, read_metadata
from contbatch.model import random_model
from contbatch.quantize import MAX_ERROR, Quantized, fit, int8_codes, linear_inputs
from contbatch.runners.cpu import CPUModel
from contbatch.runners.reference import ReferenceModel
from contbatch.tokenizer import load_tokenizer

MODELS = {
    "grouped": {},
    "biased, own head": {"attention_bias": True, "num_heads": 4, "kv_num_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "heads normed": {"qk_norm": True},
}
TOKENS = np.random.default_rng(1).integers(0, 256, (12, 40)).tolist()


@pytest.fixture(scope="module", params=list(MODELS))
def found(request, tmp_path_factory):
    """A model, its float32 export, and what was made of it."""
    model = random_model(3, **MODELS[request.param])
    path = export_onnx(model, tmp_path_factory.mktemp("floats") / "model.onnx")
    return model, path, Quantized.of(model, calibrate(path, TOKENS))


@given(
    hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=9), elements=st.floats(-8, 8, width=32))
)
def test_codes_are_half_a_step_away_at_most(weights):
    codes, steps = int8_codes(weights)
    assert codes.dtype == np.int8
    assert codes.min() >= -127
    assert (np.abs(codes * steps[:, None] - weights) <= steps[:, None] * 0.50001 + 1e-37).all()


def test_calibration_sees_what_the_layers_take(found):
    model, path, _ = found
    prompt = TOKENS[0]
    seen = calibrate(path, [prompt, prompt[:3]])
    assert list(seen) == [value.name for value in linear_inputs(model.config)]
    assert {len(rows) for rows in seen.values()} == {len(prompt) + 3}
    head = model.weights["embed" if model.config.tie_word_embeddings else "lm_head"]
    assert np.allclose(seen["final_norm"][: len(prompt)] @ head.T, dense_logits(model, prompt), atol=1e-3)
    assert np.allclose(seen["final_norm"][-3:], seen["final_norm"][:3], atol=1e-4)


def test_moving_factors_changes_nothing(found):
    model, _, quantized = found
    assert quantized.steps
    moved = [name for name in quantized.model.weights if not np.array_equal(*_both(model, quantized.model, name))]
    assert len(moved) > 2 * model.config.num_layers
    wanted = dense_logits(model, TOKENS[0])
    assert np.abs(dense_logits(quantized.model, TOKENS[0]) - wanted).max() < 1e-3 * np.abs(wanted).max()


def _both(model, other, name):
    return model.weights["embed" if name == "lm_head" and "lm_head" not in model.weights else name], other.weights[name]


def test_an_outlier_goes_into_the_weights():
    rng = np.random.default_rng(0)
    inputs, weights = (rng.normal(size=shape).astype(np.float32) for shape in ((200, 32), (48, 32)))
    inputs[:, 5] *= 100
    best = fit(inputs, weights)
    assert best.factor[5] > 5 * np.median(best.factor)
    assert best.error < 0.1 * _error(inputs, weights, np.ones(32, np.float32))
    assert best.error == pytest.approx(_error(inputs, weights, best.factor), rel=1e-3)
    assert best.step == pytest.approx(np.abs(inputs / best.factor).max() / 127)


def _error(inputs, weights, factor):
    """Say the same in float64 and in one piece: mean relative squared error of a token's output."""
    x, w, wanted = inputs.astype(float) / factor, weights.astype(float) * factor, inputs.astype(float) @ weights.T
    step, steps = np.abs(x).max() / 127, np.abs(w).max(1, keepdims=True) / 127
    got = np.round(x / step) * step @ (np.round(w / steps) * steps).T
    return (((got - wanted) ** 2).sum(1) / (wanted**2).sum(1)).mean()


def test_heads_of_a_group_share_their_factors():
    rng = np.random.default_rng(0)
    inputs, weights = (rng.normal(size=shape).astype(np.float32) for shape in ((50, 24), (10, 24)))
    factor = fit(inputs, weights, group=3, head_size=4).factor.reshape(2, 3, 4)
    assert (factor == factor[:, :1]).all()
    assert len(np.unique(factor)) > 4


def test_a_layer_that_stays_bad_keeps_its_floats():
    model = random_model(3)
    rng = np.random.default_rng(0)
    seen = {v.name: rng.normal(size=(64, _width(model, v))).astype(np.float32) for v in linear_inputs(model.config)}
    seen["layers.1.gated"][0] *= 1e4  # one huge token, as the first of a text often is
    quantized = Quantized.of(model, seen, keep=["final_norm"])
    assert set(quantized.errors) == set(seen)
    assert quantized.errors["layers.1.gated"] > MAX_ERROR
    assert set(seen) - set(quantized.steps) >= {"layers.1.gated", "final_norm"}
    assert np.array_equal(quantized.model.weights["layers.1.down"], model.weights["layers.1.down"])
    assert "layers.0.gated" in quantized.steps


def _width(model, value):
    return model.weights[value.users[0]].shape[1]


def test_what_is_wrong_is_named():
    model = random_model(3)
    seen = {v.name: np.ones((4, _width(model, v)), np.float32) for v in linear_inputs(model.config)}
    with pytest.raises(InvalidRequestError, match=r"value must be one of .*, got 'layers\.7\.gated'"):
        Quantized.of(model, seen, keep=["layers.7.gated"])
    with pytest.raises(InvalidRequestError, match=r"value must be one of .*, got 'final_norm'"):
        Quantized.of(model, {k: v for k, v in seen.items() if k != "final_norm"})
    for bad in (np.full((4, 64), np.nan, np.float32), np.ones((0, 64), np.float32)):
        with pytest.raises(InvalidRequestError, match="observed values must be finite, of a token at least"):
            Quantized.of(model, {**seen, "layers.0.attn_norm": bad})


def test_the_file_computes_in_codes(found, tmp_path):
    model, _, quantized = found
    path = export_onnx(quantized.model, tmp_path / "model.onnx", steps=quantized.steps)
    onnx.checker.check_model(path)
    assert read_metadata(path)["quantization"] == "w8a8"
    held = {tensor.name: tensor.data_type for tensor in onnx.load(path, load_external_data=False).graph.initializer}
    assert held["layers.0.qkv.weight.codes"] == onnx.TensorProto.INT8
    assert ("layers.0.qkv.weight" in held) == ("layers.0.attn_norm" not in quantized.steps)
    step = whole(TOKENS[0])
    by_standard = ReferenceModel(path, 4, 16).forward(step)
    with_cpu = CPUModel(path, 4, 16, precision="w8a8")
    logits = with_cpu.forward(step)
    with_cpu.close()
    wanted = dense_logits(model, TOKENS[0])
    size = np.sqrt(np.mean(np.square(wanted)))
    assert 1e-4 * size < np.sqrt(np.mean(np.square(by_standard - wanted))) < 0.1 * size
    assert np.sqrt(np.mean(np.square(logits - by_standard))) < 0.1 * size


def test_precision_and_file_must_agree(found, tmp_path):
    _, floats, quantized = found
    path = export_onnx(quantized.model, tmp_path / "model.onnx", steps=quantized.steps)
    for file, precision in ((floats, "w8a8"), (path, "f32"), (path, "bf16")):
        with pytest.raises(UnsupportedModelError, match=f"precision '{precision}', quantization (none|w8a8)"):
            CPUModel(file, 4, precision=precision)


def test_an_llm_in_8_bits(tmp_path, monkeypatch):
    monkeypatch.setenv("CONTBATCH_CACHE", str(tmp_path / "cache"))
    source = write_tiny(tmp_path)
    with cb.LLM(source, precision="w8a8", num_pages=40, page_size=4) as llm:
        answers = llm.generate(PROMPTS, greedy(5))
        assert [len(answer.token_ids) for answer in answers] == [5] * len(PROMPTS)
        assert llm.runner.model.config.tie_word_embeddings is False
    folder = build(source, quantization="w8a8")
    assert "-float32-w8a8-" in folder.name
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["kept"]) == {name for name, error in manifest["errors"].items() if error > MAX_ERROR}
    with pytest.raises(UnsupportedModelError, match="quantization must be None or 'w8a8', got 'int3'"):
        build(source, quantization="int3")


def test_texts_are_two_and_have_many_kinds_of_paragraphs(tmp_path):
    tokenizer = load_tokenizer(write_tiny(tmp_path))
    texts = {name: paragraphs(name, tokenizer) for name in ("calibration", "held_out")}
    assert all(len(found) >= 15 for found in texts.values())
    assert not {tuple(p) for p in texts["calibration"]} & {tuple(p) for p in texts["held_out"]}
    with_first = calibration_prompts(tokenizer, 1)
    assert [p[0] == 1 for p in with_first] == [i % 2 == 0 for i in range(len(with_first))]
