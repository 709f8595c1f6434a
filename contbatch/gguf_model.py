"""Llama-family models in GGUF files, as llama.cpp's converters write them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from contbatch.errors import ModelFileError, UnsupportedModelError
from contbatch.gguf_file import GGUFFile
from contbatch.model import Model, ModelConfig
from contbatch.weights import assemble, configure

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_TENSORS = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "lm_head": "output.weight",
}
# Keys that change the result unless they have one of these values; absent is always fine.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "expert_count": (0,),
    "attention.causal": (True,),
    "attention.scale": (),
    "attention.sliding_window_pattern": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "embedding_scale": (1.0,),
    "residual_scale": (1.0,),
    "logit_scale": (1.0,),
}


def load_gguf(path: Path) -> Model:
    """Load a GGUF file of architecture llama, qwen2 or qwen3; quantised weights become float32.

    Raises as `contbatch.model.load_model` does.
    """
    file = GGUFFile(path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise UnsupportedModelError(f"{path}: architecture {architecture!r}; known in GGUF files: {known}")
    config = _Metadata(file, architecture).config()
    rotated = config.rotary_dim or config.head_size

    def order(name: str, rows: int) -> np.ndarray | None:
        permuted = architecture == "llama" and name.split(".")[-2] in ("attn_q", "attn_k")
        return _half_split(rows, config.head_size, rotated, path) if permuted else None

    def read(name: str) -> np.ndarray:
        values = file.tensor(name)
        rows = order(name, len(values))
        return values if rows is None else values[rows]

    model = assemble(path, config, file.tensors, _tensor_name, read)
    packed = {}
    for weight in model.weights:
        name = _tensor_name(weight)
        if matrix := file.packed(name):
            rows = order(name, matrix.shape[0])
            packed[weight] = matrix if rows is None else matrix.take(rows)
    return replace(model, packed=packed)


def _tensor_name(weight: str) -> str:
    if not weight.startswith("layers."):
        return _TENSORS[weight]
    _, layer, kind = weight.split(".")
    return f"blk.{layer}.{_TENSORS[kind]}"


def _half_split(num_rows: int, head_size: int, rotated: int, path: Path) -> np.ndarray:
    """Return the rows in an order that undoes that of the llama converter, which stores rotated pairs side by side.

    Rows 2i and 2i + 1 of each head, which llama.cpp rotates together, go to i and i + rotated / 2.
    """
    if num_rows % head_size:
        raise ModelFileError(f"{path}: {num_rows} query or key rows are no whole heads of {head_size}")
    order = np.concatenate([np.arange(0, rotated, 2), np.arange(1, rotated, 2), np.arange(rotated, head_size)])
    rows: np.ndarray = np.arange(0, num_rows, head_size)[:, None] + order
    return rows.reshape(-1)


class _Metadata:
    """The values under an architecture's prefix."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def value(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def size(self, key: str, default: int | None = None) -> int:
        value = self.value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            full = f"{self.architecture}.{key}"
            raise ModelFileError(f"{self.file.path}: {full} must be an integer ≥ 1, got {value!r}")
        return value

    def refuse_what_changes_the_result(self) -> None:
        for key, neutral in _NEUTRAL.items():
            value = self.value(key)
            if value is not None and value not in neutral:
                raise UnsupportedModelError(
                    f"{self.file.path}: {self.architecture}.{key} = {value!r} is not implemented"
                )
        for tensor in ("rope_freqs.weight", "blk.0.attn_output.bias"):
            if tensor in self.file.tensors:
                raise UnsupportedModelError(f"{self.file.path}: tensor {tensor} is not implemented")

    def config(self) -> ModelConfig:
        self.refuse_what_changes_the_result()
        tensors, path = self.file.tensors, self.file.path
        if "token_embd.weight" not in tensors:
            raise ModelFileError(f"{path}: lacks the tensor token_embd.weight")
        hidden, heads = self.size("embedding_length"), self.size("attention.head_count")
        head_size = self.size("attention.key_length", hidden // heads)
        if self.size("attention.value_length", head_size) != head_size:
            raise UnsupportedModelError(f"{path}: heads of different size for keys ({head_size}) and values")
        rotated = self.size("rope.dimension_count", head_size)
        eos = self.file.metadata.get("tokenizer.ggml.eos_token_id")
        ends = (self.file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eot", "eom"))
        return configure(
            path,
            architecture=self.architecture,
            vocab_size=tensors["token_embd.weight"].shape[0],
            hidden_size=hidden,
            intermediate_size=self.size("feed_forward_length"),
            num_layers=self.size("block_count"),
            num_heads=heads,
            kv_num_heads=self.size("attention.head_count_kv", heads),
            head_size=head_size,
            rms_norm_eps=self.value("attention.layer_norm_rms_epsilon"),
            rope_theta=self.value("rope.freq_base", 10000.0),
            rotary_dim=0 if rotated == head_size else rotated,
            attention_bias="blk.0.attn_q.bias" in tensors,
            qk_norm=self.architecture == "qwen3",
            tie_word_embeddings="output.weight" not in tensors,
            max_position=self.size("context_length"),
            sliding_window=self.value("attention.sliding_window", 0),
            bos_token_id=self.file.metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_id=eos,
            extra_eos_token_ids=tuple(end for end in ends if end not in (None, eos)),
        )
