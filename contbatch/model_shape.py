"""The sizes of a model that decide what it costs to run, without its weights; those of the field's papers by name."""

from dataclasses import dataclass, replace
from functools import partial

from contbatch.checks import is_int, require, require_type, take_python_numbers
from contbatch.errors import CostModelError
from contbatch.model import ModelConfig

_require = partial(require, error=CostModelError)
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "kv_num_heads", "head_size")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only model: how many weights it has, where, and what a token leaves in the KV cache.

    Parameters
    ----------
    vocab_size, hidden_size, intermediate_size, num_layers, num_heads, kv_num_heads, head_size, max_position : int
    gated : bool
        Three matrices in the MLP (Llama) instead of two (OPT, GPT-3).
    biased : bool
        Every linear layer and norm has a bias (OPT, GPT-3).
    qkv_bias : bool
        The q, k and v projections alone have a bias (Qwen2).
    qk_norm : bool
        A norm over each query and key head (Qwen3).
    position_rows : int
        Rows of a learned table of positions; 0 for rotary embeddings.
    tied : bool
        The last layer shares the weights of the embedding.
    source : str
        Where the sizes come from.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    kv_num_heads: int
    head_size: int
    max_position: int
    gated: bool = True
    biased: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    position_rows: int = 0
    tied: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        take_python_numbers(self)
        for name in (*_SIZES, "max_position"):
            _require(is_int(getattr(self, name), 1), name, getattr(self, name), "an integer ≥ 1")
        for name in ("gated", "biased", "qkv_bias", "qk_norm", "tied"):
            require_type(name, getattr(self, name), bool, CostModelError)
        require_type("source", self.source, str, CostModelError)
        groups_ok = self.num_heads % self.kv_num_heads == 0
        _require(groups_ok, "num_heads", self.num_heads, f"a multiple of kv_num_heads = {self.kv_num_heads}")
        _require(is_int(self.position_rows, 0), "position_rows", self.position_rows, "an integer ≥ 0")

    @classmethod
    def of(cls, config: ModelConfig) -> "ModelShape":
        """Take the sizes of a loaded model."""
        sizes = {name: getattr(config, name) for name in (*_SIZES, "max_position", "qk_norm")}
        tied, bias = config.tie_word_embeddings, config.attention_bias
        return cls(**sizes, qkv_bias=bias, tied=tied, source=f"configuration of a {config.architecture} model")

    @property
    def linear_params_per_layer(self) -> int:
        """Weights of a layer that every token is multiplied with, biases left out."""
        queries, keys = self.num_heads * self.head_size, self.kv_num_heads * self.head_size
        attention = self.hidden_size * (2 * queries + 2 * keys)
        return attention + (3 if self.gated else 2) * self.hidden_size * self.intermediate_size

    @property
    def linear_params(self) -> int:
        """Those of all layers, the last one (`head_params`) not among them."""
        return self.num_layers * self.linear_params_per_layer

    @property
    def head_params(self) -> int:
        """Weights that make logits of a hidden state."""
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """All weights, biases and norms."""
        hidden, queries, keys = self.hidden_size, self.num_heads * self.head_size, self.kv_num_heads * self.head_size
        layer = self.linear_params_per_layer + 2 * hidden + 2 * self.head_size * self.qk_norm
        layer += (queries + 2 * keys) * (self.qkv_bias or self.biased)
        if self.biased:  # of the output projection, the MLP's two matrices and the two norms
            layer += hidden + self.intermediate_size * (2 if self.gated else 1) + hidden + 2 * hidden
        embeddings = self.head_params * (1 if self.tied else 2) + self.position_rows * hidden
        return self.num_layers * layer + embeddings + hidden * (2 if self.biased else 1)

    def kv_bytes_per_token(self, number_bytes: int = 2) -> int:
        """Bytes of keys and values that a token leaves in all layers."""
        return 2 * self.num_layers * self.kv_num_heads * self.head_size * number_bytes


def _gpt(hidden: int, layers: int, vocab: int, position_rows: int, source: str) -> ModelShape:
    sizes = (vocab, hidden, 4 * hidden, layers, hidden // 128, hidden // 128, 128, 2048)
    return ModelShape(*sizes, gated=False, biased=True, position_rows=position_rows, tied=True, source=source)


def _opt(hidden: int, layers: int, source: str) -> ModelShape:
    return _gpt(hidden, layers, 50272, 2050, source)


def _qwen3(hidden: int, mlp: int, layers: int, heads: int, tied: bool, size: str) -> ModelShape:
    sizes = (151936, hidden, mlp, layers, heads, 8, 128, 40960)
    return ModelShape(*sizes, qk_norm=True, tied=tied, source=f"config.json of Qwen/Qwen3-{size}")


def _smollm2(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, size: str) -> ModelShape:
    sizes = (49152, hidden, mlp, layers, heads, kv_heads, 64, 8192)
    return ModelShape(*sizes, tied=True, source=f"config.json of HuggingFaceTB/SmolLM2-{size}")


_LLAMA2, _LLAMA3 = "config.json of meta-llama/Llama-2", "config.json of meta-llama/Meta-Llama-3"
_LLAMA3_8B = ModelShape(128256, 4096, 14336, 32, 32, 8, 128, 8192, source=f"{_LLAMA3}-8B")
_LLAMA3_70B = ModelShape(128256, 8192, 28672, 80, 64, 8, 128, 8192, source=f"{_LLAMA3}-70B")
MODELS = {
    "opt-13b": _opt(5120, 40, "config.json of facebook/opt-13b"),
    "opt-30b": _opt(7168, 48, "config.json of facebook/opt-30b"),
    "opt-175b": _opt(12288, 96, "OPT (Zhang et al. 2022), table 1"),
    "gpt-3-175b": _gpt(12288, 96, 50257, 2048, "GPT-3 (Brown et al. 2020), table 2.1; every attention dense"),
    "llama-2-7b": ModelShape(32000, 4096, 11008, 32, 32, 32, 128, 4096, source=f"{_LLAMA2}-7b-hf"),
    "llama-2-13b": ModelShape(32000, 5120, 13824, 40, 40, 40, 128, 4096, source=f"{_LLAMA2}-13b-hf"),
    "llama-2-70b": ModelShape(32000, 8192, 28672, 80, 64, 8, 128, 4096, source=f"{_LLAMA2}-70b-hf"),
    "llama-3-8b": _LLAMA3_8B,
    "llama-3-70b": _LLAMA3_70B,
    "llama-3.1-8b": replace(_LLAMA3_8B, max_position=131072, source="config.json of meta-llama/Llama-3.1-8B"),
    "llama-3.1-70b": replace(_LLAMA3_70B, max_position=131072, source="config.json of meta-llama/Llama-3.1-70B"),
    "mistral-7b": ModelShape(
        32768, 4096, 14336, 32, 32, 8, 128, 32768, source="config.json of mistralai/Mistral-7B-v0.3"
    ),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, True, "0.6B"),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, True, "1.7B"),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, True, "4B"),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, False, "8B"),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, False, "14B"),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, False, "32B"),
    "smollm2-135m": _smollm2(576, 1536, 30, 9, 3, "135M"),
    "smollm2-360m": _smollm2(960, 2560, 32, 15, 5, "360M"),
    "smollm2-1.7b": _smollm2(2048, 8192, 24, 32, 32, "1.7B"),
    "yi-34b": ModelShape(64000, 7168, 20480, 60, 56, 8, 128, 4096, source="config.json of 01-ai/Yi-34B"),
}
"""By name."""


def model_shape(model: str | ModelShape | ModelConfig) -> ModelShape:
    """Find the sizes of a model by name, or of a loaded model; `CostModelError` lists the names."""
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, ModelConfig):
        return ModelShape.of(model)
    known = isinstance(model, str) and model in MODELS
    _require(known, "model", model, f"a ModelShape, a ModelConfig or one of {', '.join(MODELS)}")
    return MODELS[model]
