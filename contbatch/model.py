"""A decoder-only model: its configuration and its weights as numpy arrays."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from contbatch.checks import is_int, is_real, require
from contbatch.errors import ModelFileError
from contbatch.packed_weight import PackedWeight

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "kv_num_heads",
    "head_size",
    "max_position",
)
# A corrupt count must not become a list of that many layers.
_MAX_LAYERS = 10_000
_FLAGS = ("rotary_interleaved", "attention_bias", "qk_norm", "tie_word_embeddings")


_require = partial(require, error=ModelFileError)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a Llama-family decoder (Llama, SmolLM2, Mistral, Qwen2, Qwen3 and their like).

    Values that describe no such model raise `ModelFileError`, with the field, its value and the limit.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    kv_num_heads: int
    head_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rotary_dim: int = 0
    """Leading dimensions of each head that are rotated; 0 means all of head_size."""
    rotary_interleaved: bool = False
    attention_bias: bool = False
    """q, k and v projections have a bias (Qwen2)."""
    qk_norm: bool = False
    """RMS norm over each query and key head before rotation (Qwen3)."""
    tie_word_embeddings: bool = False
    max_position: int = 2048
    sliding_window: int = 0
    """Tokens a query sees including itself; 0 means all."""
    attention_softcap: float = 0.0
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    extra_eos_token_ids: tuple[int, ...] = ()
    """Further tokens that end generation, such as a chat model's end of turn."""

    def __post_init__(self) -> None:
        _require(isinstance(self.architecture, str), "architecture", self.architecture, "a string")
        for name in _SIZES:
            _require(is_int(getattr(self, name), 1), name, getattr(self, name), "an integer ≥ 1")
        layers_ok = self.num_layers <= _MAX_LAYERS
        _require(layers_ok, "num_layers", self.num_layers, f"at most {_MAX_LAYERS}")
        for name in _FLAGS:
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        groups_ok = self.num_heads % self.kv_num_heads == 0
        _require(groups_ok, "num_heads", self.num_heads, f"a multiple of kv_num_heads = {self.kv_num_heads}")
        rotary_ok = is_int(self.rotary_dim, 0, self.head_size)
        _require(rotary_ok, "rotary_dim", self.rotary_dim, f"an integer in 0..{self.head_size}, the head size")
        rotated = self.rotary_dim or self.head_size
        _require(rotated % 2 == 0, "the number of rotated dimensions", rotated, "even")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            _require(is_real(value) and value > 0, name, value, "a finite number > 0")
        softcap_ok = is_real(self.attention_softcap) and self.attention_softcap >= 0
        _require(softcap_ok, "attention_softcap", self.attention_softcap, "a finite number ≥ 0")
        _require(is_int(self.sliding_window, 0), "sliding_window", self.sliding_window, "an integer ≥ 0")
        for name in ("bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            token_ok = value is None or is_int(value, 0, self.vocab_size - 1)
            _require(token_ok, name, value, f"None or an integer below vocab_size = {self.vocab_size}")
        object.__setattr__(self, "extra_eos_token_ids", tuple(self.extra_eos_token_ids))
        extra_ok = all(is_int(token, 0, self.vocab_size - 1) for token in self.extra_eos_token_ids)
        limit = f"integers below vocab_size = {self.vocab_size}"
        _require(extra_ok, "extra_eos_token_ids", self.extra_eos_token_ids, limit)


def rotary_tables(config: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return cos and sin, float64 (max_position, rotary_dim/2), of position · rope_theta^(-2i/rotary_dim).

    Source: Su et al. 2021, "RoFormer", section 3.2.2.
    """
    rotary_dim = config.rotary_dim or config.head_size
    frequencies = config.rope_theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    angles = np.arange(config.max_position)[:, None] * frequencies
    return np.cos(angles), np.sin(angles)


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that a model of this configuration has, in the order they are used."""
    hidden, head = config.hidden_size, config.head_size
    queries, keys = config.num_heads * head, config.kv_num_heads * head
    layer: dict[str, tuple[int, ...]] = {"attn_norm": (hidden,)}
    layer |= {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden)}
    if config.attention_bias:
        layer |= {"q_bias": (queries,), "k_bias": (keys,), "v_bias": (keys,)}
    if config.qk_norm:
        layer |= {"q_norm": (head,), "k_norm": (head,)}
    layer |= {"o": (hidden, queries), "mlp_norm": (hidden,)}
    layer |= {"gate": (config.intermediate_size, hidden), "up": (config.intermediate_size, hidden)}
    layer |= {"down": (hidden, config.intermediate_size)}
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, hidden)}
    for i in range(config.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["final_norm"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head"] = (config.vocab_size, hidden)
    return shapes


@dataclass(frozen=True, slots=True)
class Model:
    """Configuration and weights.

    Linear weights are (out_features, in_features) float32, as Hugging Face stores them, with q/k rows in the order
    that `config.rotary_interleaved` says. Keys: embed (vocab, hidden); per layer i `layers.{i}.` + attn_norm, q, k,
    v, o, mlp_norm, gate, up, down, and where the config asks for them q_bias, k_bias, v_bias, q_norm, k_norm
    (head_size,); final_norm; lm_head unless tied. `weight_shapes` lists them. A missing or extra name, another shape
    or another type raises `ModelFileError`.
    """

    config: ModelConfig
    weights: Mapping[str, np.ndarray]
    source: str
    packed: Mapping[str, PackedWeight] = field(default_factory=dict)
    """Those of the linear weights and embeddings that the file holds in few bits, as codes."""

    def __post_init__(self) -> None:
        shapes = weight_shapes(self.config)
        for problem, names in (("lacks", shapes.keys() - self.weights), ("has unknown", self.weights.keys() - shapes)):
            if names:
                raise ModelFileError(
                    f"{self.source}: the model {problem} {len(names)} weight(s): {sorted(names)[0]}, …"
                )
        for name, shape in shapes.items():
            array = self.weights[name]
            if array.shape != shape or array.dtype != np.float32 or not array.flags.c_contiguous:
                found = f"{array.dtype} {array.shape}"
                raise ModelFileError(f"{self.source}: {name} must be contiguous float32 {shape}, got {found}")


def load_model(path: str | os.PathLike[str]) -> Model:
    """Load a GGUF file or a Hugging Face directory (config.json and safetensors).

    Raises
    ------
    ModelFileError
        Nothing there, or it is truncated, malformed, incomplete, or its weights aren't finite numbers.
    UnsupportedModelError
        Another architecture, or a feature that would change the result if it were left out.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        from contbatch.huggingface import load_huggingface

        return load_huggingface(path)
    from contbatch.gguf_model import load_gguf

    return load_gguf(path)


_TINY: dict[str, Any] = {
    "architecture": "random",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_layers": 2,
    "num_heads": 4,
    "kv_num_heads": 2,
    "head_size": 16,
    "max_position": 512,
}


def random_model(seed: int = 0, **config_changes: Any) -> Model:
    """Make a tiny model with seeded random weights, for tests and demonstrations without a download.

    Parameters
    ----------
    seed : int
        The same seed and configuration give the same weights.
    **config_changes
        Fields of `ModelConfig` in place of the defaults (256 tokens, 2 layers of 64, 4 query and 2 KV heads of 16).

    Returns
    -------
    Model
        Its logits have a standard deviation of about 4, so that greedy choices are clear, and depend on every weight.
    """
    config = ModelConfig(**{**_TINY, **config_changes})
    rng = np.random.default_rng(seed)
    weights = {name: _random_weight(rng, name, shape) for name, shape in weight_shapes(config).items()}
    return Model(config, weights, f"random_model(seed={seed})")


def _random_weight(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    kind = name.rsplit(".", 1)[-1]
    if kind.endswith("norm"):
        # With embeddings of 0.2 as the head, 20 / sqrt(hidden) brings normalised states to logits of about 4.
        scale = 20.0 / math.sqrt(shape[0]) if kind == "final_norm" else 1.0
        values = scale * rng.uniform(0.5, 1.5, shape)
    elif kind.endswith("bias"):
        values = rng.normal(0.0, 0.5, shape)
    elif kind in ("embed", "lm_head"):
        # Small beside what the layers add, else a tied model would just repeat its input.
        values = rng.normal(0.0, 0.2, shape)
    else:
        # Sharper than unit-variance scores, so that attending to the wrong position shows.
        gain = 1.5 if kind in ("q", "k") else 1.0
        values = rng.normal(0.0, gain / math.sqrt(shape[1]), shape)
    return values.astype(np.float32)
