import json
import re

import pytest
from huggingface_writer import hf_config, llama, write_hf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contbatch.errors import ContbatchError, ModelFileError, UnsupportedModelError
from contbatch.model import load_model, random_model

ARCHITECTURES = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"head_dim": ...}, "head_size", 16),
        ({"num_key_value_heads": 2}, "kv_num_heads", 2),
        ({"rope_theta": ...}, "rope_theta", 10000.0),
        ({"rope_theta": ..., "rope_parameters": {"rope_theta": 7e5, "rope_type": "default"}}, "rope_theta", 7e5),
        ({"rope_scaling": {"type": "default"}}, "rope_theta", 10000.0),
        ({"partial_rotary_factor": 0.5}, "rotary_dim", 8),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "rotary_dim", 4),
        ({"rms_norm_eps": ...}, "rms_norm_eps", 1e-6),
        ({"tie_word_embeddings": ...}, "tie_word_embeddings", False),
        ({"sliding_window": 9}, "sliding_window", 0),
        ({"eos_token_id": [3, 4, 5]}, "eos_token_id", 3),
        ({"eos_token_id": [3, 4, 5]}, "extra_eos_token_ids", (4, 5)),
        ({"eos_token_id": None}, "eos_token_id", None),
        ({"attention_bias": False, "mlp_bias": False, "quantization_config": None}, "attention_bias", False),
    ],
)
def test_configurations(changes, field, value, tmp_path):
    assert getattr(load_model(write_hf(tmp_path, llama(), **changes)).config, field) == value


WINDOW = {"sliding_window": 9, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("architecture", "changes", "window"),
    [
        ("MistralForCausalLM", {"sliding_window": ...}, 4096),
        ("MistralForCausalLM", {"sliding_window": None}, 0),
        ("Qwen2ForCausalLM", {"sliding_window": 9}, 0),
        ("Qwen2ForCausalLM", {"sliding_window": 9, "use_sliding_window": False, "max_window_layers": 0}, 0),
        ("Qwen2ForCausalLM", WINDOW, 0),
        ("Qwen2ForCausalLM", WINDOW | {"max_window_layers": 2}, 0),
        ("Qwen2ForCausalLM", WINDOW | {"max_window_layers": 0}, 9),
        ("Qwen2ForCausalLM", WINDOW | {"layer_types": ["sliding_attention"] * 2}, 9),
        ("Qwen2ForCausalLM", WINDOW | {"layer_types": ["full_attention"] * 2}, 0),
        ("Qwen2ForCausalLM", WINDOW | {"layer_types": ["full_attention", "sliding_attention"]}, None),
        ("Qwen2ForCausalLM", WINDOW | {"layer_types": ["chunked_attention"] * 2}, None),
        ("Qwen2ForCausalLM", WINDOW | {"max_window_layers": 1}, None),
    ],
)
def test_sliding_windows(architecture, changes, window, tmp_path):
    model = random_model(architecture=architecture, attention_bias=architecture.startswith("Qwen"))
    write_hf(tmp_path, model, **changes)
    if window is None:
        with pytest.raises(UnsupportedModelError, match="layer_types"):
            load_model(tmp_path)
    else:
        assert load_model(tmp_path).config.sliding_window == window


def test_generation_config_outranks(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 2]}')
    config = load_model(write_hf(tmp_path, llama())).config
    assert (config.eos_token_id, config.extra_eos_token_ids) == (9, (2,))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, UnsupportedModelError, r"\['GPT2LMHeadModel'\]; known are Llama"),
        ({"architectures": ...}, UnsupportedModelError, "architectures = None"),
        ({"architectures": {}}, UnsupportedModelError, "architectures"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, UnsupportedModelError, "attention_bias = True"),
        ({"mlp_bias": True}, UnsupportedModelError, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, UnsupportedModelError, "quantization_config"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 32.0}}, UnsupportedModelError, "rope_scaling.*llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, UnsupportedModelError, "rope_scaling.*linear"),
        ({"rope_parameters": {"rope_type": "yarn"}}, UnsupportedModelError, "rope_parameters.*yarn"),
        ({"rope_parameters": {"full_attention": {}}}, UnsupportedModelError, "rope_parameters"),
        ({"rope_scaling": 2.0}, ModelFileError, "rope_scaling must be an object or null, got 2.0"),
        ({"rope_theta": "big"}, ModelFileError, "rope_theta must be a finite number > 0, got 'big'"),
        ({"partial_rotary_factor": 1.5}, ModelFileError, r"partial_rotary_factor must be in \(0, 1\], got 1.5"),
        ({"partial_rotary_factor": 0.01}, ModelFileError, "rotated dimensions must be even, got 1"),
        ({"hidden_size": ...}, ModelFileError, "hidden_size must be an integer ≥ 1, got None"),
        ({"num_attention_heads": 0}, ModelFileError, "num_attention_heads must be an integer ≥ 1, got 0"),
        ({"num_attention_heads": "4"}, ModelFileError, "got '4'"),
        ({"num_hidden_layers": 10**9}, ModelFileError, "num_layers must be at most"),
        ({"num_key_value_heads": 3}, ModelFileError, "multiple of kv_num_heads = 3"),
        ({"num_hidden_layers": 3}, ModelFileError, r"lacks the tensor model\.layers\.2\.\S+ and 8 more"),
        ({"num_hidden_layers": 1}, ModelFileError, r"doesn't use: model\.layers\.1\.\S+ and 8 more"),
        ({"vocab_size": 255}, ModelFileError, r"lm_head|embed_tokens\.weight must be \(255, 64\)"),
        ({"eos_token_id": 256}, ModelFileError, "eos_token_id must be .* vocab_size = 256, got 256"),
        ({"eos_token_id": "</s>"}, ModelFileError, "got '</s>'"),
        ({"tie_word_embeddings": True}, ModelFileError, r"lm_head\.weight is another matrix"),
    ],
)
def test_bad_configurations(changes, error, message, tmp_path):
    with pytest.raises(error, match=message) as caught:
        load_model(write_hf(tmp_path, llama(), **changes))
    assert str(caught.value).count(str(tmp_path)) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)
KEYS = ["architectures", "layer_types", "max_window_layers", "use_sliding_window", "rope_scaling", "rope_parameters"]
KEYS += ["partial_rotary_factor", "generation", *hf_config(random_model().config)]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=2), name=st.sampled_from(ARCHITECTURES))
def test_any_configuration_loads_or_raises_a_typed_error(values, name, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": values.pop("generation", None)}))
    (tmp_path / "config.json").write_text(json.dumps(hf_config(llama().config) | {"architectures": [name]} | values))
    with pytest.raises(ContbatchError, match=re.escape(str(tmp_path))):
        load_model(tmp_path)  # There are no weights.


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "list, not an object"),
        (b"\xff{}", "not UTF-8"),
        (b"", "JSON"),
        (b"[" * 10**5, "JSON"),
        (b"1" * 5000, "JSON"),
    ],
)
def test_malformed_json(content, message, tmp_path):
    write_hf(tmp_path, llama())
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelFileError, match=rf"config\.json: .*{message}"):
        load_model(tmp_path)
