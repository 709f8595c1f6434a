"""A decoder-only model: its configuration and its weights as numpy arrays."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a Llama-family decoder (Llama, SmolLM2, Mistral, Qwen2, Qwen3 and their like)."""

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


@dataclass(frozen=True, slots=True)
class Model:
    """Configuration and weights.

    Linear weights are (out_features, in_features) float32, as Hugging Face stores them, with q/k rows in the order
    that `config.rotary_interleaved` says. Keys: embed (vocab, hidden); per layer i `layers.{i}.` + attn_norm, q, k,
    v, o, mlp_norm, gate, up, down, and where the config asks for them q_bias, k_bias, v_bias, q_norm, k_norm
    (head_size,); final_norm; lm_head unless tied.
    """

    config: ModelConfig
    weights: Mapping[str, np.ndarray]
    source: str
