"""Writes models as Hugging Face directories: the files transformers would save."""

import json

from safetensors.numpy import save_file

from contbatch.model import random_model

PARTS = {
    "embed": "embed_tokens.weight",
    "final_norm": "norm.weight",
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    **{part: f"self_attn.{part}_proj.weight" for part in "qkvo"},
    **{f"{part}_bias": f"self_attn.{part}_proj.bias" for part in "qkv"},
    **{f"{part}_norm": f"self_attn.{part}_norm.weight" for part in "qk"},
    **{part: f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
}


def hf_name(name):
    *layer, kind = name.split(".")
    return "lm_head.weight" if kind == "lm_head" else ".".join(["model", *layer, PARTS[kind]])


def hf_config(config):
    return {
        "architectures": [config.architecture],
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_num_heads,
        "head_dim": config.head_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "sliding_window": config.sliding_window or None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def write_hf(folder, model, tensors=None, **changes):
    """Write a directory; `changes` replace configuration values, ... leaves a key out."""
    values = {key: value for key, value in (hf_config(model.config) | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    held = {hf_name(name): array for name, array in model.weights.items()} | (tensors or {})
    save_file({name: array for name, array in held.items() if array is not None}, folder / "model.safetensors")
    return folder


def llama(**changes):
    return random_model(7, architecture="LlamaForCausalLM", bos_token_id=1, eos_token_id=2, **changes)
