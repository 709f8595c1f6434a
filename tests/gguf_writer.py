"""Writes models as GGUF files the way llama.cpp's converter does, with the gguf package: the oracle of our reader."""

import gguf
import numpy as np

NAMES = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "lm_head": "output.weight",
    "attn_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "o": "attn_output.weight",
    **{part: f"attn_{part}.weight" for part in "qkv"},
    **{f"{part}_bias": f"attn_{part}.bias" for part in "qkv"},
    **{f"{part}_norm": f"attn_{part}_norm.weight" for part in "qk"},
}


def gguf_name(name):
    *layer, kind = name.split(".")
    return f"blk.{layer[1]}.{NAMES[kind]}" if layer else NAMES[kind]


def interleave(weight, num_heads):
    """llama.cpp's order of query and key rows: (2, d / 2) per head becomes (d / 2, 2)."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def gguf_tensors(model, architecture="llama"):
    """Tensors by their names in a GGUF file."""
    heads = {"q": model.config.num_heads, "k": model.config.kv_num_heads}
    tensors = {}
    for name, array in model.weights.items():
        part = name.rsplit(".", 1)[-1].removesuffix("_bias")
        array = interleave(array, heads[part]) if architecture == "llama" and part in heads else array
        tensors[gguf_name(name)] = array
    return tensors


def gguf_metadata(config, architecture="llama"):
    """Metadata under the architecture's prefix."""
    return {
        "block_count": config.num_layers,
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.kv_num_heads,
        "attention.key_length": config.head_size,
        "attention.value_length": config.head_size,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_theta),
        "rope.dimension_count": config.rotary_dim or config.head_size,
    }


def write_gguf(path, architecture, metadata, tensors, types=None, general=None):
    """Write a file; `types` gives a quantisation by tensor name, `general` further metadata without prefix."""
    writer = gguf.GGUFWriter(path, architecture)
    values = {f"{architecture}.{key}": value for key, value in metadata.items()} | (general or {})
    for key, value in values.items():
        if value is None:
            continue
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        kinds.get(type(value), writer.add_array)(key, value)
    for name, array in tensors.items():
        kind = (types or {}).get(name, gguf.GGMLQuantizationType.F32)
        plain = kind == gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, array if plain else gguf.quantize(array, kind), raw_dtype=None if plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_model(path, model, architecture="llama", **changes):
    """Write a whole model; `changes` replace metadata, None leaves a key out."""
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    metadata = gguf_metadata(model.config, architecture) | keys
    return write_gguf(path, architecture, metadata, gguf_tensors(model, architecture))
