"""The decoder as an ONNX graph: its operators, names and shapes. Weights stay unread until the graph is saved."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from contbatch.errors import UnsupportedModelError
from contbatch.model import Model, ModelConfig
from contbatch.packed_weight import PackedWeight, stacked

OPSET = 21
IR_VERSION = 10
_FLOAT = ir.DataType.FLOAT
_INT32 = ir.DataType.INT32
_INT64 = ir.DataType.INT64


def rotary_tables(config: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return cos and sin, float64 (max_position, rotary_dim/2), of position · rope_theta^(-2i/rotary_dim).

    Source: Su et al. 2021, "RoFormer", section 3.2.2.
    """
    rotary_dim = config.rotary_dim or config.head_size
    frequencies = config.rope_theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    angles = np.arange(config.max_position)[:, None] * frequencies
    return np.cos(angles), np.sin(angles)


def decoder(model: Model, dtype: ir.DataType) -> ir.Model:
    """Describe one step of the model over the tokens of all sequences, as an ONNX IR model.

    Parameters
    ----------
    model : Model
        Its weights are read and converted one by one while the result is saved.
    dtype : ir.DataType
        T: the type of weights, activations and caches. Norms run in float32 and logits come out as float32.

    Returns
    -------
    ir.Model
        Inputs: input_ids int64 (num_tokens); cumulative_sequence_length (num_seqs+1), past_seqlens (num_seqs) and
        block_table (num_seqs, max_pages), int32; logits_indices int64 (num_logits), the rows of input_ids whose logits
        are wanted; for each layer i key_cache.i and value_cache.i, T (num_pages, page_size, kv_num_heads, head_size).
        Outputs: logits float32 (num_logits, vocab_size); for each layer i key_cache_out.i and value_cache_out.i.
    """
    config, build = model.config, _Builder(model, dtype)
    ids = ir.val("input_ids", _INT64, ["num_tokens"])
    steps = [
        ir.val("cumulative_sequence_length", _INT32, ["num_seqs+1"]),
        ir.val("past_seqlens", _INT32, ["num_seqs"]),
        ir.val("block_table", _INT32, ["num_seqs", "max_pages"]),
    ]
    logits_indices = ir.val("logits_indices", _INT64, ["num_logits"])
    tables = [
        build.constant(f"{n}_cache", t, dtype) for n, t in zip(("cos", "sin"), rotary_tables(config), strict=True)
    ]
    embedding, x = build.embedding(ids)
    caches_in: list[ir.Value] = []
    caches_out: list[ir.Value] = []
    for i in range(config.num_layers):
        caches = build.caches(i)
        attention, *updated = build.attention(i, x, [*caches, *steps, *tables])
        x = build.mlp(i, build.op("Add", f"layers.{i}.attn_residual", x, attention))
        caches_in += caches
        caches_out += updated
    x = build.norm("final_norm", build.op("Gather", "logits_rows", x, logits_indices))
    head = embedding if config.tie_word_embeddings else build.matrix("lm_head.weight", "lm_head")
    logits = ir.val("logits", _FLOAT, ["num_logits", config.vocab_size])
    build.head(x, head, logits)
    graph = ir.Graph(
        [ids, *steps, logits_indices, *caches_in],
        [logits, *caches_out],
        nodes=build.tape.nodes,
        initializers=build.tape.initializers,
        opset_imports={"": OPSET, "com.microsoft": 1},
        name=config.architecture,
    )
    return ir.Model(graph, ir_version=IR_VERSION)


class _Builder:
    """Records nodes and initializers; every value bears the name of the module that makes it.

    Linear layers are Gemm with transB: weights keep the layout they are stored in, and nothing transposes them.
    """

    def __init__(self, model: Model, dtype: ir.DataType) -> None:
        self.model, self.config, self.dtype = model, model.config, dtype
        self.tape = ir.tape.Tape()
        self.two = self.constant("two", np.array(2), _FLOAT)
        self.row_shape = self.constant("row_shape", np.array([0, -1]), _INT64)
        self.last_axis = self.constant("last_axis", np.array([-1]), _INT64)
        self.epsilon = self.constant("rms_norm_eps", np.array(self.config.rms_norm_eps), _FLOAT)

    def op(self, op_type: str, name: str, *inputs: ir.Value, output: ir.Value | None = None, **attrs: int) -> ir.Value:
        return self.tape.op(op_type, inputs, attrs, name=name, output=output or ir.Value(name=name))

    def constant(self, name: str, array: np.ndarray, dtype: ir.DataType) -> ir.Value:
        return self.tape.initializer(ir.Tensor(array.astype(dtype.numpy()), dtype=dtype, name=name))

    def weight(self, name: str, *keys: str, dtype: ir.DataType | None = None) -> ir.Value:
        """Make an initializer of the model's weights with these keys, one below the other."""
        target, weights = dtype or self.dtype, self.model.weights

        def load() -> ir.TensorProtocol:
            parts = [_convert(key, weights[key], target) for key in keys]
            return ir.Tensor(parts[0] if len(parts) == 1 else np.concatenate(parts), dtype=target, name=name)

        shape = ir.Shape((sum(weights[key].shape[0] for key in keys), *weights[keys[0]].shape[1:]))
        return self.tape.initializer(ir.LazyTensor(load, target, shape, name=name))

    def matrix(self, name: str, *keys: str) -> ir.Value:
        """Do as `weight`; in a float32 graph, matrices that the model's file packs stay so, widened by the graph."""
        packed = [self.model.packed[key] for key in keys if key in self.model.packed]
        whole = stacked(packed) if self.dtype == _FLOAT and len(packed) == len(keys) else None
        return self.weight(name, *keys) if whole is None else self.widened(name, *self.codes(name, whole))

    def codes(self, name: str, packed: PackedWeight) -> list[ir.Value]:
        """Make initializers of codes, scales and, where there are any, zeros."""
        kind = ir.DataType.INT8 if packed.bits == 8 else ir.DataType.UINT4
        parts = [
            self.constant(f"{name}.codes", packed.codes, kind),
            self.constant(f"{name}.scales", packed.scales, _FLOAT),
        ]
        return parts if packed.zeros is None else [*parts, self.constant(f"{name}.zeros", packed.zeros, _FLOAT)]

    def widened(self, name: str, codes: ir.Value, scales: ir.Value, zeros: ir.Value | None = None) -> ir.Value:
        """(codes - zeros) · scales, a row each: OpenVINO recognises this and computes from the codes."""
        x = self.op("Cast", f"{name}.wide", codes, to=int(_FLOAT))
        x = x if zeros is None else self.op("Sub", f"{name}.centred", x, zeros)
        return self.op("Reshape", name, self.op("Mul", f"{name}.groups", x, scales), self.row_shape)

    def embedding(self, ids: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the table, for a tied head, and the rows of `ids`."""
        packed = self.model.packed.get("embed")
        if packed is None or self.dtype != _FLOAT:
            table = self.weight("embed.weight", "embed")
            return table, self.op("Gather", "embed", table, ids)
        parts = self.codes("embed.weight", packed)
        rows = [self.op("Gather", f"embed.{i}", part, ids) for i, part in enumerate(parts)]
        return self.widened("embed.weight", *parts), self.widened("embed", *rows)

    def linear(self, name: str, x: ir.Value) -> ir.Value:
        return self.op("Gemm", name, x, self.matrix(f"{name}.weight", name), transB=1)

    def norm(self, name: str, x: ir.Value) -> ir.Value:
        """RMS norm over the last axis (Zhang and Sennrich 2019), in float32: squares of 300 overflow float16.

        Plain operators in the order that OpenVINO's RMSFusion and TensorRT recognise.
        """
        gamma = self.weight(f"{name}.weight", name, dtype=_FLOAT)
        x = x if self.dtype == _FLOAT else self.op("Cast", f"{name}.float", x, to=int(_FLOAT))
        mean = self.op("ReduceMean", f"{name}.mean", self.op("Pow", f"{name}.square", x, self.two), self.last_axis)
        root = self.op("Sqrt", f"{name}.root", self.op("Add", f"{name}.mean_eps", mean, self.epsilon))
        unit = self.op("Div", f"{name}.unit", x, root)
        if self.dtype == _FLOAT:
            return self.op("Mul", name, unit, gamma)
        return self.op("Cast", name, self.op("Mul", f"{name}.scaled", unit, gamma), to=int(self.dtype))

    def caches(self, layer: int, *, out: bool = False) -> list[ir.Value]:
        kv_heads, head_size = self.config.kv_num_heads, self.config.head_size
        shape: list[str | int | None] = ["num_pages", "page_size", kv_heads, head_size]
        return [ir.val(f"{name}_cache{'_out' * out}.{layer}", self.dtype, shape) for name in ("key", "value")]

    def attention(self, layer: int, x: ir.Value, rest: Sequence[ir.Value]) -> list[ir.Value]:
        """Norm, projections and PagedAttention; `rest` are the operator's inputs from the caches on."""
        config, prefix = self.config, f"layers.{layer}."
        q_size = config.num_heads * config.head_size
        inputs = [self.norm(f"{prefix}attn_norm", x), self.matrix(f"{prefix}qkv.weight", *(prefix + n for n in "qkv"))]
        if config.attention_bias:
            inputs.append(self.weight(f"{prefix}qkv.bias", *(f"{prefix}{n}_bias" for n in "qkv")))
        qkv = self.op("Gemm", f"{prefix}qkv", *inputs, transB=1)
        output, updated = ir.val(f"{prefix}attention", self.dtype, ["num_tokens", q_size]), self.caches(layer, out=True)
        attributes = {
            "num_heads": config.num_heads,
            "kv_num_heads": config.kv_num_heads,
            "scale": config.head_size**-0.5,
            "softcap": float(config.attention_softcap),
            "local_window_size": config.sliding_window or -1,
            "do_rotary": 1,
            "rotary_interleaved": int(config.rotary_interleaved),
        }
        self.tape.op_multi_out(
            "PagedAttention",
            [*(self.normed_qkv(prefix, qkv) if config.qk_norm else (qkv, None, None)), *rest],
            attributes,
            domain="com.microsoft",
            name=f"{prefix}attention",
            outputs=[output, *updated],
        )
        return [self.linear(f"{prefix}o", output), *updated]

    def normed_qkv(self, prefix: str, qkv: ir.Value) -> list[ir.Value]:
        """Split packed rows and normalise each query and key head, as Qwen3 does before rotation."""
        heads, size = {"q": self.config.num_heads, "k": self.config.kv_num_heads}, self.config.head_size
        sizes = np.array([heads["q"], heads["k"], heads["k"]]) * size
        parts = {part: ir.Value(name=prefix + part) for part in "qkv"}
        inputs = [qkv, self.constant(f"{prefix}qkv_sizes", sizes, _INT64)]
        self.tape.op_multi_out("Split", inputs, {"axis": 1}, name=f"{prefix}split", outputs=list(parts.values()))
        for part, n in heads.items():
            name = f"{prefix}{part}_norm"
            by_head = self.constant(f"{name}.shape", np.array([0, n, size]), _INT64)
            rows = self.constant(f"{name}.rows_shape", np.array([0, n * size]), _INT64)
            normed = self.norm(name, self.op("Reshape", f"{name}.by_head", parts[part], by_head))
            parts[part] = self.op("Reshape", f"{name}.rows", normed, rows)
        return list(parts.values())

    def mlp(self, layer: int, x: ir.Value) -> ir.Value:
        """Gated MLP with SiLU (Shazeer 2020) and its residual."""
        prefix = f"layers.{layer}."
        normed = self.norm(f"{prefix}mlp_norm", x)
        gate, up = self.linear(f"{prefix}gate", normed), self.linear(f"{prefix}up", normed)
        silu = self.op("Mul", f"{prefix}silu", gate, self.op("Sigmoid", f"{prefix}sigmoid", gate))
        down = self.linear(f"{prefix}down", self.op("Mul", f"{prefix}gated", silu, up))
        return self.op("Add", f"{prefix}mlp_residual", x, down)

    def head(self, x: ir.Value, weight: ir.Value, logits: ir.Value) -> None:
        if self.dtype == _FLOAT:
            self.op("Gemm", "lm_head", x, weight, transB=1, output=logits)
        else:
            self.op("Cast", "logits", self.op("Gemm", "lm_head", x, weight, transB=1), to=int(_FLOAT), output=logits)


def _convert(key: str, array: np.ndarray, dtype: ir.DataType) -> np.ndarray:
    try:
        with np.errstate(over="raise"):
            return np.ascontiguousarray(array, dtype.numpy())
    except FloatingPointError:
        limit = f"{np.finfo(dtype.numpy()).max:.5g}"
        raise UnsupportedModelError(
            f"weight {key} reaches {np.abs(array).max():.5g}, the largest {dtype.name} is {limit}: use another dtype"
        ) from None
