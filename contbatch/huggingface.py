"""Llama-family models in Hugging Face directories: config.json and safetensors."""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from contbatch.errors import ModelFileError, UnsupportedModelError
from contbatch.model import Model, ModelConfig
from contbatch.text_file import read_json
from contbatch.weights import assemble, configure

_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_TENSORS = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
_DTYPES = ("F32", "F16", "BF16")


def load_huggingface(directory: Path) -> Model:
    """Load Llama, Mistral, Qwen2 or Qwen3 from a directory; float16 and bfloat16 weights become float32.

    Raises as `contbatch.model.load_model` does.
    """
    config = _Config(directory / "config.json").model_config()
    tensors = _Tensors(directory)
    names = {name for name in tensors.files if not name.endswith("rotary_emb.inv_freq")}
    if config.tie_word_embeddings and "lm_head.weight" in names:
        if not np.array_equal(tensors.read("lm_head.weight"), tensors.read("model.embed_tokens.weight")):
            raise ModelFileError(f"{directory}: tie_word_embeddings is true, but lm_head.weight is another matrix")
        names.remove("lm_head.weight")
    return assemble(directory, config, names, _tensor_name, tensors.read)


def _tensor_name(weight: str) -> str:
    if not weight.startswith("layers."):
        return _TENSORS[weight]
    _, layer, kind = weight.split(".")
    return f"model.layers.{layer}.{_TENSORS[kind]}"


class _Tensors:
    """The tensors of model.safetensors, or of the shards that model.safetensors.index.json lists."""

    def __init__(self, directory: Path) -> None:
        single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
        self.files: dict[str, Any] = {}
        """Tensor name → open safetensors file that holds it."""
        self.directory = directory
        if single.exists():
            file = _open(single)
            self.files = dict.fromkeys(file.keys(), file)
            return
        if not index.exists():
            raise ModelFileError(f"{directory}: has neither model.safetensors nor model.safetensors.index.json")
        weight_map = read_json(index).get("weight_map")
        shard_ok = isinstance(weight_map, dict) and all(
            isinstance(shard, str) and Path(shard).name == shard for shard in weight_map.values()
        )
        if not isinstance(weight_map, dict) or not shard_ok:
            raise ModelFileError(f"{index}: weight_map must name a file of the same directory for each tensor")
        shards = {shard: _open(directory / shard) for shard in sorted(set(weight_map.values()))}
        held = {shard: set(file.keys()) for shard, file in shards.items()}
        for name, shard in weight_map.items():
            if name not in held[shard]:
                raise ModelFileError(f"{directory / shard}: lacks the tensor {name}, which {index.name} says it has")
            self.files[name] = shards[shard]

    def read(self, name: str) -> np.ndarray:
        if name not in self.files:
            raise ModelFileError(f"{self.directory}: lacks the tensor {name}")
        dtype = self.files[name].get_slice(name).get_dtype()
        if dtype not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise UnsupportedModelError(f"{self.directory}: tensor {name} is {dtype}; read are {known}")
        return np.require(self.files[name].get_tensor(name), np.float32, ["C", "A", "W"])


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise ModelFileError(f"{path}: truncated or malformed: {error}") from error


class _Config:
    """config.json, with the defaults of the transformers classes it names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.raw = read_json(path)
        architectures = self.raw.get("architectures")
        named = architectures[0] if isinstance(architectures, list) and architectures else None
        if named not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise UnsupportedModelError(f"{path}: architectures = {architectures!r}; known are {known}")
        self.architecture: str = named

    def size(self, key: str, default: int | None = None, low: int = 1) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ModelFileError(f"{self.path}: {key} must be an integer ≥ {low}, got {value!r}")
        return value

    def unsupported(self, key: str, value: object) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.path}: {key} = {value!r} is not implemented")

    def refuse_what_changes_the_result(self) -> None:
        if self.raw.get("hidden_act", "silu") != "silu":
            raise self.unsupported("hidden_act", self.raw["hidden_act"])
        # In transformers, attention_bias also gives the output projection a bias.
        for key in ("attention_bias", "mlp_bias", "quantization_config"):
            if self.raw.get(key):
                raise self.unsupported(key, self.raw[key])

    def rope(self) -> tuple[float, float]:
        """Read the base of the rotary frequencies and the fraction of each head that is rotated, old or new layout."""
        merged: dict[str, Any] = {k: self.raw[k] for k in ("rope_theta", "partial_rotary_factor") if k in self.raw}
        for key in ("rope_scaling", "rope_parameters"):
            values = self.raw.get(key)
            values = {} if values is None else values
            if not isinstance(values, dict):
                raise ModelFileError(f"{self.path}: {key} must be an object or null, got {values!r}")
            per_layer = any(isinstance(value, dict) for value in values.values())
            if per_layer or values.get("rope_type", values.get("type", "default")) != "default":
                raise self.unsupported(key, values)
            merged |= values
        theta, fraction = merged.get("rope_theta", 10000.0), merged.get("partial_rotary_factor", 1.0)
        if not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
            raise ModelFileError(f"{self.path}: partial_rotary_factor must be in (0, 1], got {fraction!r}")
        return theta, fraction

    def sliding_window(self, num_layers: int) -> int:
        """Read how many tokens a query sees, 0 for all; a window in some layers only is not implemented."""
        used = self.architecture == "MistralForCausalLM" or self.raw.get("use_sliding_window", False)
        if self.architecture == "LlamaForCausalLM" or not used or self.raw.get("sliding_window", 0) is None:
            return 0
        first = 0 if self.architecture == "MistralForCausalLM" else self.size("max_window_layers", 28, low=0)
        split = {"full_attention": first > 0, "sliding_attention": first < num_layers}
        kinds = self.raw.get("layer_types") or [kind for kind, present in split.items() if present]
        uniform = isinstance(kinds, list) and all(kind == kinds[0] for kind in kinds)
        if not uniform or kinds[0] not in tuple(split):
            raise self.unsupported("layer_types", kinds)
        return self.size("sliding_window", 4096) if kinds[0] == "sliding_attention" else 0

    def end_tokens(self) -> list[int]:
        """Read which tokens end generation, the main one first; generation_config.json outranks config.json."""
        generation = self.path.with_name("generation_config.json")
        ends = read_json(generation).get("eos_token_id") if generation.exists() else None
        ends = self.raw.get("eos_token_id") if ends is None else ends
        return ends if isinstance(ends, list) else [] if ends is None else [ends]

    def model_config(self) -> ModelConfig:
        self.refuse_what_changes_the_result()
        hidden, heads, layers = (self.size(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
        llama, qwen3 = self.architecture == "LlamaForCausalLM", self.architecture == "Qwen3ForCausalLM"
        head_size = self.size("head_dim", 128 if qwen3 else hidden // heads)
        theta, fraction = self.rope()
        # At least 1, because 0 stands for the whole head: an odd number is refused.
        rotary_dim = 0 if fraction == 1 else max(1, int(head_size * fraction))
        ends = self.end_tokens()
        return configure(
            self.path,
            architecture=self.architecture,
            vocab_size=self.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=self.size("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            kv_num_heads=self.size("num_key_value_heads", heads if llama else None),
            head_size=head_size,
            rms_norm_eps=self.raw.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rotary_dim=rotary_dim,
            attention_bias=self.architecture == "Qwen2ForCausalLM",
            qk_norm=qwen3,
            tie_word_embeddings=self.raw.get("tie_word_embeddings", False),
            max_position=self.size("max_position_embeddings"),
            sliding_window=self.sliding_window(layers),
            bos_token_id=self.raw.get("bos_token_id"),
            eos_token_id=ends[0] if ends else None,
            extra_eos_token_ids=tuple(ends[1:]),
        )
