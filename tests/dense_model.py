"""A plain dense forward pass in numpy: the oracle of exported models. It shares no code with the package."""

import numpy as np


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(x, config):
    """Rotate x (tokens, heads, head_size) at positions 0, 1, ... as pairs of numbers in the complex plane."""
    dim = config.rotary_dim or config.head_size
    angle = np.arange(len(x))[:, None, None] * config.rope_theta ** (-2 * np.arange(dim // 2) / dim)
    if config.rotary_interleaved:
        pairs = x[..., 0:dim:2] + 1j * x[..., 1:dim:2]
    else:
        pairs = x[..., : dim // 2] + 1j * x[..., dim // 2 : dim]
    pairs = pairs * np.exp(1j * angle)
    out = x.copy()
    if config.rotary_interleaved:
        out[..., 0:dim:2], out[..., 1:dim:2] = pairs.real, pairs.imag
    else:
        out[..., : dim // 2], out[..., dim // 2 : dim] = pairs.real, pairs.imag
    return out


def attention(x, weight, config):
    """Causal attention of one sequence; `weight` maps a layer's own names to arrays."""

    def project(name, heads):
        y = x @ weight[name].T + (weight[f"{name}_bias"] if config.attention_bias else 0)
        y = y.reshape(len(x), heads, config.head_size)
        if config.qk_norm and name != "v":
            y = rms_norm(y, weight[f"{name}_norm"], config.rms_norm_eps)
        return y if name == "v" else rotate(y, config)

    q, k, v = project("q", config.num_heads), project("k", config.kv_num_heads), project("v", config.kv_num_heads)
    out = np.empty_like(q)
    for head in range(config.num_heads):
        kv = head * config.kv_num_heads // config.num_heads
        for t in range(len(x)):
            first = max(0, t + 1 - config.sliding_window) if config.sliding_window else 0
            score = k[first : t + 1, kv] @ q[t, head] / np.sqrt(config.head_size)
            if config.attention_softcap:
                score = config.attention_softcap * np.tanh(score / config.attention_softcap)
            p = np.exp(score - score.max())
            out[t, head] = p @ v[first : t + 1, kv] / p.sum()
    return out.reshape(len(x), -1) @ weight["o"].T


def dense_logits(model, token_ids, dtype=np.float32):
    """Logits of every position, float64 (tokens, vocab), with weights rounded to `dtype` and exact arithmetic."""
    config = model.config
    weights = {name: array.astype(dtype).astype(np.float64) for name, array in model.weights.items()}
    x = weights["embed"][np.asarray(token_ids)]
    for i in range(config.num_layers):
        prefix = f"layers.{i}."
        layer = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        x = x + attention(rms_norm(x, layer["attn_norm"], config.rms_norm_eps), layer, config)
        y = rms_norm(x, layer["mlp_norm"], config.rms_norm_eps)
        gate = y @ layer["gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ layer["up"].T)) @ layer["down"].T
    head = weights["embed"] if config.tie_word_embeddings else weights["lm_head"]
    return rms_norm(x, weights["final_norm"], config.rms_norm_eps) @ head.T
