import dataclasses

import numpy as np
import pytest
import smollm2
from dense_model import dense_logits

from contbatch.errors import ModelFileError
from contbatch.model import Model, ModelConfig, load_model, random_model, weight_shapes

KINDS = {
    "plain": {},
    "bias": {"attention_bias": True},
    "qk_norm": {"qk_norm": True},
    "interleaved": {"rotary_interleaved": True},
    "partial": {"rotary_dim": 8},
    "tied": {"tie_word_embeddings": True},
    "all": {"attention_bias": True, "qk_norm": True, "rotary_interleaved": True, "rotary_dim": 6, "sliding_window": 3},
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 0),
        ("hidden_size", -1),
        ("num_layers", 10_001),
        ("num_layers", 2.0),
        ("num_heads", True),
        ("num_heads", 5),
        ("kv_num_heads", 3),
        ("head_size", 15),
        ("rotary_dim", 7),
        ("rotary_dim", 18),
        ("rms_norm_eps", 0.0),
        ("rms_norm_eps", "1e-5"),
        ("rope_theta", float("inf")),
        ("rope_theta", None),
        ("attention_bias", 1),
        ("attention_softcap", -1.0),
        ("sliding_window", -1),
        ("max_position", 0),
        ("bos_token_id", 256),
        ("eos_token_id", -1),
        ("extra_eos_token_ids", (3, 256)),
        ("architecture", None),
    ],
)
def test_config_refuses(field, value):
    with pytest.raises(ModelFileError) as caught:
        random_model(**{field: value})
    assert repr(value).strip("()") in str(caught.value)


def test_config_is_frozen_and_strict():
    config = random_model().config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_heads = 8
    with pytest.raises(TypeError, match="num_head"):
        random_model(num_head=8)
    assert random_model(extra_eos_token_ids=[1, 2]).config.extra_eos_token_ids == (1, 2)


def test_random_model_repeats_and_differs():
    first, again, other = random_model(3), random_model(3), random_model(4)
    assert first.config == again.config
    for name, array in first.weights.items():
        np.testing.assert_array_equal(array, again.weights[name])
        assert not np.array_equal(array, other.weights[name])


@pytest.mark.parametrize("kind", KINDS)
def test_random_model_has_spread_logits_that_vary(kind):
    model = random_model(1, **KINDS[kind])
    ids = np.random.default_rng(0).integers(0, 256, 24)
    logits = dense_logits(model, ids)
    assert 2 < logits.std() < 8
    best = logits.argmax(axis=1)
    assert len(set(best)) > 12
    assert np.mean(best == ids) < 0.2
    top = np.sort(logits, axis=1)
    assert np.median(top[:, -1] - top[:, -2]) > 0.1


@pytest.mark.parametrize("kind", ["plain", "all"])
def test_every_weight_of_a_random_model_matters(kind):
    model = random_model(1, **KINDS[kind])
    ids = np.arange(0, 200, 10)
    logits = dense_logits(model, ids)
    for name, array in model.weights.items():
        changed = Model(model.config, {**model.weights, name: array * np.float32(1.05) + np.float32(0.01)}, "changed")
        # A constant added to every key shifts all scores of a row alike: only its rotation makes it matter a little.
        assert np.abs(dense_logits(changed, ids) - logits).max() > (1e-4 if name.endswith("k_bias") else 1e-3), name


@pytest.mark.parametrize("kind", KINDS)
def test_weight_shapes_follow_the_config(kind):
    config = random_model(**KINDS[kind]).config
    shapes = weight_shapes(config)
    assert ("lm_head" in shapes) != config.tie_word_embeddings
    assert ("layers.1.q_bias" in shapes) == config.attention_bias
    assert ("layers.1.k_norm" in shapes) == config.qk_norm
    assert shapes["layers.0.k"] == (2 * 16, 64)
    assert shapes["layers.1.down"] == (64, 128)
    assert not any(name.startswith("layers.2.") for name in shapes)


def _with(model, changes):
    weights = {name: array for name, array in {**model.weights, **changes}.items() if array is not None}
    return Model(model.config, weights, "the source")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers.0.q": None}, r"lacks 1 weight.*layers\.0\.q"),
        ({"layers.0.q_bias": np.zeros(64, np.float32)}, r"unknown 1 weight.*layers\.0\.q_bias"),
        ({"final_norm": np.zeros(63, np.float32)}, r"final_norm must be .*\(64,\), got float32 \(63,\)"),
        ({"embed": np.zeros((256, 64))}, "embed must be .*float32.*got float64"),
        ({"embed": np.zeros((64, 256), np.float32).T}, "embed must be contiguous"),
    ],
)
def test_model_refuses_weights_that_do_not_fit(changes, message):
    with pytest.raises(ModelFileError, match=message) as caught:
        _with(random_model(), changes)
    assert "the source" in str(caught.value)


@pytest.mark.parametrize("name", ["nothing-here", "nothing-here.gguf"])
def test_load_model_of_a_missing_path(tmp_path, name):
    with pytest.raises(ModelFileError, match=name):
        load_model(tmp_path / name)


def test_smollm2():
    """End to end: the real weights give the tokens that another implementation gave."""
    model = load_model(str(smollm2.model_path()))
    assert model.config == ModelConfig(
        architecture="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        kv_num_heads=3,
        head_size=64,
        rms_norm_eps=float(np.float32(1e-5)),
        rope_theta=100_000.0,
        tie_word_embeddings=True,
        max_position=8192,
        bos_token_id=1,
        eos_token_id=2,
    )
    case = smollm2.golden()[0]
    prompt, answer = case["prompt_token_ids"], case["token_ids"][:16]
    logits = dense_logits(model, prompt + answer[:-1])
    assert logits[len(prompt) - 1 :].argmax(axis=1).tolist() == answer
