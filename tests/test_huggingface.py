import json

import ml_dtypes
import numpy as np
import pytest
from huggingface_writer import hf_name, llama, write_hf
from safetensors.numpy import save_file

from contbatch.errors import ModelFileError, UnsupportedModelError
from contbatch.model import load_model, random_model

ARCHITECTURES = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 6},
    "Qwen2ForCausalLM": {"attention_bias": True, "tie_word_embeddings": True},
    "Qwen3ForCausalLM": {"qk_norm": True, "head_size": 32},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_round_trip(architecture, tmp_path):
    changes = {"architecture": architecture, "bos_token_id": 1, "eos_token_id": 2, **ARCHITECTURES[architecture]}
    wanted = random_model(7, rope_theta=5e4, **changes)
    loaded = load_model(write_hf(tmp_path, wanted))
    assert loaded.config == wanted.config
    for name, array in wanted.weights.items():
        np.testing.assert_array_equal(loaded.weights[name], array, err_msg=name)
        assert loaded.weights[name].flags.writeable


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=str)
def test_small_dtypes(dtype, tmp_path):
    model = llama()
    tensors = {hf_name(name): array.astype(dtype) for name, array in model.weights.items()}
    loaded = load_model(write_hf(tmp_path, model, tensors))
    for name, array in model.weights.items():
        np.testing.assert_array_equal(loaded.weights[name], array.astype(dtype).astype(np.float32), err_msg=name)


def test_weights_that_do_not_fit(tmp_path):
    model, name = llama(), "model.layers.1.mlp.up_proj.weight"
    for array, error, message in [
        (None, ModelFileError, f"lacks the tensor {name}$"),
        (np.ones((64, 128), np.float32), ModelFileError, r"must be \(128, 64\) .* is \(64, 128\)"),
        (np.full((128, 64), np.nan, np.float32), ModelFileError, f"{name} holds NaN or infinity"),
        (
            np.where(np.eye(128, 64) == 1, -np.inf, 1).astype(np.float16),
            ModelFileError,
            f"{name} holds NaN or infinity",
        ),
        (np.ones((128, 64)), UnsupportedModelError, f"{name} is F64; read are F32, F16, BF16"),
    ]:
        write_hf(tmp_path, model, {name: array})
        with pytest.raises(error, match=message):
            load_model(tmp_path)


def test_tensors_that_are_left_aside(tmp_path):
    model = llama(tie_word_embeddings=True)
    copies = {"lm_head.weight": model.weights["embed"].copy()}
    rotary = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    assert load_model(write_hf(tmp_path, model, copies | rotary)).config == model.config


def _shards(folder, model):
    write_hf(folder, model)
    (folder / "model.safetensors").unlink()
    names = [hf_name(name) for name in model.weights]
    arrays = dict(zip(names, model.weights.values(), strict=True))
    weight_map = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({name: arrays[name] for name in names if weight_map[name] == shard}, folder / shard)
    return weight_map


def test_shards(tmp_path):
    model = llama()
    weight_map = _shards(tmp_path, model)
    index, norm = tmp_path / "model.safetensors.index.json", "model.norm.weight"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for name, array in load_model(tmp_path).weights.items():
        np.testing.assert_array_equal(array, model.weights[name])
    other = next(shard for shard in weight_map.values() if shard != weight_map[norm])
    for changed, message in [
        (weight_map | {norm: other}, f"{other}: lacks the tensor {norm}, which {index.name} says it has"),
        (weight_map | {norm: "model-9.safetensors"}, r"model-9\.safetensors: cannot be read: No such file"),
        (weight_map | {norm: "../model-1.safetensors"}, "a file of the same directory"),
        (weight_map | {norm: 3}, "a file of the same directory"),
        ({name: shard for name, shard in weight_map.items() if name != norm}, f"lacks the tensor {norm}"),
        (None, "weight_map must name"),
    ]:
        index.write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(ModelFileError, match=message):
            load_model(tmp_path)


def test_every_truncation(tmp_path):
    small = llama(vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, head_size=2)
    path = write_hf(tmp_path, small) / "model.safetensors"
    data = path.read_bytes()
    for length in [*range(0, len(data) // 2, 7), *range(len(data) // 2, len(data), 61), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(ModelFileError, match="truncated or malformed"):
            load_model(tmp_path)
    text = (tmp_path / "config.json").read_bytes()
    path.write_bytes(data)
    for length in range(len(text)):
        (tmp_path / "config.json").write_bytes(text[:length])
        with pytest.raises(ModelFileError, match=r"config\.json: not valid JSON"):
            load_model(tmp_path)


def test_incomplete_directories(tmp_path):
    with pytest.raises(ModelFileError, match=r"config\.json: cannot be read: No such file"):
        load_model(tmp_path)
    (write_hf(tmp_path, llama()) / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load_model(tmp_path)
