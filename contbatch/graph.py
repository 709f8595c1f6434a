"""The decoder as an ONNX graph: its operators, names and shapes. Weights stay unread until the graph is saved."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import onnx_ir as ir

from contbatch.linear_layers import FLOAT, INT64, LinearLayers
from contbatch.model import Model, rotary_tables

OPSET = 21
IR_VERSION = 10
_INT32 = ir.DataType.INT32


def decoder(model: Model, dtype: ir.DataType, steps: Mapping[str, float] = MappingProxyType({})) -> ir.Model:
    """Describe one step of the model over the tokens of all sequences, as an ONNX IR model.

    Parameters
    ----------
    model : Model
        Its weights are read and converted one by one while the result is saved.
    dtype : ir.DataType
        T: the type of weights, activations and caches. Norms run in float32 and logits come out as float32.
    steps : mapping of str to float
        Where linear layers take their input in 8 bits, see `contbatch.quantize.quantized`.

    Returns
    -------
    ir.Model
        Inputs: input_ids int64 (num_tokens); cumulative_sequence_length (num_seqs+1), past_seqlens (num_seqs) and
        block_table (num_seqs, max_pages), int32; logits_indices int64 (num_logits), the rows of input_ids whose logits
        are wanted; for each layer i key_cache.i and value_cache.i, T (num_pages, page_size, kv_num_heads, head_size).
        Outputs: logits float32 (num_logits, vocab_size); for each layer i key_cache_out.i and value_cache_out.i.
    """
    config, build = model.config, _Builder(model, dtype, steps)
    ids, indices = ir.val("input_ids", INT64, ["num_tokens"]), _indices()
    logits_indices = ir.val("logits_indices", INT64, ["num_logits"])
    tables = [
        build.constant(f"{n}_cache", t, dtype) for n, t in zip(("cos", "sin"), rotary_tables(config), strict=True)
    ]
    embedding, x = build.embedding(ids)
    caches_in: list[ir.Value] = []
    caches_out: list[ir.Value] = []
    for i in range(config.num_layers):
        caches = build.caches(i)
        attention, *updated = build.attention(i, x, [*caches, *indices, *tables])
        x = build.mlp(i, build.op("Add", f"layers.{i}.attn_residual", x, attention))
        caches_in += caches
        caches_out += updated
    x = build.norm("final_norm", build.op("Gather", "logits_rows", x, logits_indices))
    logits = ir.val("logits", FLOAT, ["num_logits", config.vocab_size])
    build.head(x, embedding, logits)
    graph = ir.Graph(
        [ids, *indices, logits_indices, *caches_in],
        [logits, *caches_out],
        nodes=build.tape.nodes,
        initializers=build.tape.initializers,
        opset_imports={"": OPSET, "com.microsoft": 1},
        name=config.architecture,
    )
    return ir.Model(graph, ir_version=IR_VERSION)


def _indices() -> list[ir.Value]:
    return [
        ir.val("cumulative_sequence_length", _INT32, ["num_seqs+1"]),
        ir.val("past_seqlens", _INT32, ["num_seqs"]),
        ir.val("block_table", _INT32, ["num_seqs", "max_pages"]),
    ]


class _Builder(LinearLayers):
    """Adds what stands between the linear layers."""

    def __init__(self, model: Model, dtype: ir.DataType, steps: Mapping[str, float]) -> None:
        super().__init__(model, dtype, steps)
        self.two = self.constant("two", np.array(2), FLOAT)
        self.last_axis = self.constant("last_axis", np.array([-1]), INT64)
        self.epsilon = self.constant("rms_norm_eps", np.array(self.config.rms_norm_eps), FLOAT)

    def norm(self, name: str, x: ir.Value) -> ir.Value:
        """RMS norm over the last axis (Zhang and Sennrich 2019), in float32: squares of 300 overflow float16.

        Plain operators in the order that OpenVINO's RMSFusion and TensorRT recognise.
        """
        gamma = self.weight(f"{name}.weight", name, dtype=FLOAT)
        x = x if self.dtype == FLOAT else self.op("Cast", f"{name}.float", x, to=int(FLOAT))
        mean = self.op("ReduceMean", f"{name}.mean", self.op("Pow", f"{name}.square", x, self.two), self.last_axis)
        root = self.op("Sqrt", f"{name}.root", self.op("Add", f"{name}.mean_eps", mean, self.epsilon))
        unit = self.op("Div", f"{name}.unit", x, root)
        if self.dtype == FLOAT:
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
        biases = [f"{prefix}{n}_bias" for n in "qkv"]
        bias = self.weight(f"{prefix}qkv.bias", *biases) if config.attention_bias else None
        qkv = self.linear(f"{prefix}qkv", self.norm(f"{prefix}attn_norm", x), *(prefix + n for n in "qkv"), bias=bias)
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
        return [self.linear(f"{prefix}o", output, f"{prefix}o"), *updated]

    def normed_qkv(self, prefix: str, qkv: ir.Value) -> list[ir.Value]:
        """Split packed rows and normalise each query and key head, as Qwen3 does before rotation."""
        heads, size = {"q": self.config.num_heads, "k": self.config.kv_num_heads}, self.config.head_size
        sizes = np.array([heads["q"], heads["k"], heads["k"]]) * size
        parts = {part: ir.Value(name=prefix + part) for part in "qkv"}
        inputs = [qkv, self.constant(f"{prefix}qkv_sizes", sizes, INT64)]
        self.tape.op_multi_out("Split", inputs, {"axis": 1}, name=f"{prefix}split", outputs=list(parts.values()))
        for part, n in heads.items():
            name = f"{prefix}{part}_norm"
            by_head = self.constant(f"{name}.shape", np.array([0, n, size]), INT64)
            rows = self.constant(f"{name}.rows_shape", np.array([0, n * size]), INT64)
            normed = self.norm(name, self.op("Reshape", f"{name}.by_head", parts[part], by_head))
            parts[part] = self.op("Reshape", f"{name}.rows", normed, rows)
        return list(parts.values())

    def mlp(self, layer: int, x: ir.Value) -> ir.Value:
        """Gated MLP with SiLU (Shazeer 2020) and its residual."""
        prefix = f"layers.{layer}."
        normed = self.norm(f"{prefix}mlp_norm", x)
        gate, up = (self.linear(prefix + name, normed, prefix + name) for name in ("gate", "up"))
        silu = self.op("Mul", f"{prefix}silu", gate, self.op("Sigmoid", f"{prefix}sigmoid", gate))
        down = self.linear(f"{prefix}down", self.op("Mul", f"{prefix}gated", silu, up), f"{prefix}down")
        return self.op("Add", f"{prefix}mlp_residual", x, down)

    def head(self, x: ir.Value, embedding: ir.Value | None, logits: ir.Value) -> None:
        output = logits if self.dtype == FLOAT else None
        if self.config.tie_word_embeddings and embedding is not None:
            product = self.op("Gemm", "lm_head", x, embedding, output=output, transB=1)
        else:
            product = self.linear("lm_head", x, "lm_head", output=output)
        if output is None:
            self.op("Cast", "logits", product, to=int(FLOAT), output=logits)
