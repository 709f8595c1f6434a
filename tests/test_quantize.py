"""W8A8: codes, factors that move size from inputs to weights, and files made of both."""

import json
from itertools import product

import numpy as np
import onnx
import pytest
from dense_model import dense_logits
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from quantised import MODELS, TOKENS
from tiny_llm import PROMPTS, greedy, write_tiny

import contbatch as cb
from contbatch.build import build
from contbatch.calibrate import calibrate, whole
from contbatch.errors import InvalidRequestError, UnsupportedModelError
from contbatch.export import export_onnx, read_metadata
from contbatch.fit import REACHES, STRENGTHS, fit
from contbatch.model import random_model
from contbatch.observed import Observed
from contbatch.quantize import Quantized, int8_codes, linear_inputs
from contbatch.runners.cpu import CPUModel
from contbatch.runners.reference import ReferenceModel


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
    best = fit(Observed.of(inputs), weights)
    assert best.factor[5] > 5 * np.median(best.factor)
    ones = np.ones(32)
    assert best.error < 0.1 * _error(inputs, weights, ones, np.abs(inputs).max() / 127)
    tried = {c: _tried(inputs, weights, c) for c in product(STRENGTHS, (True, False), REACHES)}
    assert best.error < 1.1 * min(tried.values()), "the search takes no steps that are better alone"
    same = [c for c in tried if np.allclose(_codes(inputs, weights, c)[0], best.factor, rtol=1e-3)]
    choice = min(same, key=lambda c: abs(_codes(inputs, weights, c)[1] - best.step))
    assert best.step == pytest.approx(_codes(inputs, weights, choice)[1], rel=1e-3)
    assert best.error == pytest.approx(tried[choice], rel=0.1), "sums of squares stand for products"


def _codes(inputs, weights, choice):
    """Make factors, of geometric mean 1, and the step: equation 4 of SmoothQuant, or without the weights in it."""
    strength, by_weights, reach = choice
    largest = np.abs(inputs.astype(float)).max(0)
    top = largest**strength / (np.abs(weights.astype(float)).max(0) ** (1 - strength) if by_weights else 1)
    factor = top / np.prod(top ** (1 / len(top)))
    return factor, reach * (largest / factor).max() / 127


def _tried(inputs, weights, choice):
    """Make it from three quarters of the rows; try it on the fourth, for each of four."""
    found = [_codes(np.delete(inputs, np.s_[i::4], axis=0), weights, choice) for i in range(4)]
    return np.mean([_error(inputs[i::4], weights, *codes) for i, codes in enumerate(found)])


def _error(inputs, weights, factor, step):
    """Say the same in float64 and in one piece: mean relative squared error of a token's output."""
    x, w, wanted = inputs.astype(float) / factor, weights.astype(float) * factor, inputs.astype(float) @ weights.T
    steps = np.abs(w).max(1, keepdims=True) / 127
    got = np.round(x / step).clip(-128, 127) * step @ (np.round(w / steps) * steps).T
    return (((got - wanted) ** 2).sum(1) / (wanted**2).sum(1)).mean()


def test_an_error_holds_for_rows_that_were_not_seen():
    """Channels with long tails: largest values of few tokens say little of others, and a fit must not believe them."""
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(64, 128)).astype(np.float32)
    inputs, fresh = (rng.standard_t(4, (n, 128)).astype(np.float32) for n in (400, 4000))
    best, strongest = fit(Observed.of(inputs), weights), _codes(inputs, weights, (1.0, True, 1.0))
    found = _error(fresh, weights, best.factor.astype(float), best.step)
    seen, unseen = (_error(x, weights, *strongest) for x in (inputs, fresh))
    assert unseen > 20 * seen, "else believing them would do no harm"
    assert best.error < found < min(3 * best.error, unseen / 3)


def test_an_error_is_measured_by_what_the_output_is_added_to():
    rng = np.random.default_rng(0)
    inputs, weights = (rng.normal(size=shape).astype(np.float32) for shape in ((200, 32), (1100, 32)))
    alone = fit(Observed.of(inputs), weights)
    added = fit(Observed.of(inputs, 50 * np.square(inputs @ weights.T).sum(axis=1)), weights)
    assert added.error == pytest.approx(alone.error / 50, rel=0.1)  # of some rows of the weights only


def test_inputs_that_are_all_zero_have_a_step():
    weights = np.random.default_rng(0).normal(size=(10, 24)).astype(np.float32)
    found = fit(Observed.of(np.zeros((50, 24), np.float32)), weights)
    assert (found.step, found.error) == (1.0, 0.0)


def test_weights_that_are_all_zero_lose_nothing():
    inputs = np.random.default_rng(0).normal(size=(50, 24)).astype(np.float32)
    found = fit(Observed.of(inputs), np.zeros((10, 24), np.float32))
    assert found.error == 0
    assert found.step > 0


def test_heads_of_a_group_share_their_factors():
    rng = np.random.default_rng(0)
    inputs, weights = (rng.normal(size=shape).astype(np.float32) for shape in ((50, 24), (10, 24)))
    inputs *= rng.uniform(1, 30, 24).astype(np.float32)  # else one factor for all may be best
    factor = fit(Observed.of(inputs), weights, group=3, head_size=4).factor.reshape(2, 3, 4)
    assert (factor == factor[:, :1]).all()
    assert len(np.unique(factor)) > 4


def test_a_layer_that_stays_bad_keeps_its_floats():
    model = random_model(3)
    rng = np.random.default_rng(0)
    rows = {v.name: rng.normal(size=(128, _width(model, v))).astype(np.float32) for v in linear_inputs(model.config)}
    rows["layers.1.gated"][:2] *= 1e4  # huge tokens, as the first of a text often is
    seen = {name: Observed.of(found, np.full(len(found), 1e4, np.float32)) for name, found in rows.items()}
    seen["layers.1.gated"] = Observed.of(rows["layers.1.gated"])
    quantized = Quantized.of(model, seen, keep=["final_norm"])
    limits = {value.name: value.max_error for value in linear_inputs(model.config)}
    assert set(quantized.errors) == set(limits) == set(seen)
    assert quantized.errors["layers.1.gated"] > limits["layers.1.gated"]
    assert set(seen) - set(quantized.steps) >= {"layers.1.gated", "final_norm"}
    assert np.array_equal(quantized.model.weights["layers.1.down"], model.weights["layers.1.down"])
    assert "layers.0.gated" in quantized.steps
    seen["layers.0.gated"] = Observed.of(rows["layers.0.gated"] * np.float32(1e25))  # whose squares overflow
    assert "layers.0.gated" not in Quantized.of(model, seen).steps


def _width(model, value):
    return model.weights[value.users[0]].shape[1]


def test_the_last_layers_keep_the_input_of_down():
    allowed = {v.name: v.max_error for v in linear_inputs(random_model(0, num_layers=31).config)}
    assert [i for i in range(31) if allowed[f"layers.{i}.gated"] == 0] == [29, 30]
    assert all(allowed[f"layers.{i}.{name}"] > 0 for i in range(31) for name in ("attn_norm", "attention", "mlp_norm"))


def test_what_is_wrong_is_named():
    model = random_model(3)
    seen = {v.name: Observed.of(np.ones((4, _width(model, v)), np.float32)) for v in linear_inputs(model.config)}
    with pytest.raises(InvalidRequestError, match=r"value must be one of .*, got 'layers\.7\.gated'"):
        Quantized.of(model, seen, keep=["layers.7.gated"])
    with pytest.raises(InvalidRequestError, match=r"value must be one of .*, got 'final_norm'"):
        Quantized.of(model, {k: v for k, v in seen.items() if k != "final_norm"})
    for bad in (np.full((4, 64), np.nan, np.float32), np.ones((1, 64), np.float32)):
        with pytest.raises(
            InvalidRequestError, match="observed values must be finite, of tokens in two parts at least"
        ):
            Quantized.of(model, {**seen, "layers.0.attn_norm": Observed.of(bad)})


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
    limits = {value.name: value.max_error for value in linear_inputs(random_model(**manifest["config"]).config)}
    assert set(manifest["kept"]) == {name for name, error in manifest["errors"].items() if error > limits[name]}
    with pytest.raises(UnsupportedModelError, match="quantization must be None or 'w8a8', got 'int3'"):
        build(source, quantization="int3")
