"""Writes a model as the Hugging Face directory that peers read: config.json and model.safetensors, float32."""

import json
from pathlib import Path

from safetensors.numpy import save_file

from contbatch.huggingface import _tensor_name
from contbatch.model import load_model


def write(source: Path, folder: Path) -> Path:
    """Write a GGUF file's model into a folder; return the folder."""
    model = load_model(source)
    config = model.config
    told = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(told), encoding="utf-8")
    tensors = {_tensor_name(name): array for name, array in model.weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
