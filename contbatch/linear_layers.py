"""Linear layers of a decoder as ONNX operators: dense, packed as in the model's file, or with both sides in 8 bits."""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from contbatch.errors import UnsupportedModelError
from contbatch.model import Model
from contbatch.packed_weight import PackedWeight, stacked
from contbatch.quantize import int8_codes

FLOAT = ir.DataType.FLOAT
INT8 = ir.DataType.INT8
INT64 = ir.DataType.INT64


class LinearLayers:
    """Records nodes and initializers; every value bears the name of the module that makes it.

    Linear layers are Gemm with transB: weights keep the layout they are stored in, and nothing transposes them.

    Parameters
    ----------
    model : Model
    dtype : ir.DataType
        T of the graph.
    steps : mapping of str to float
        By name of the value: the distance between two codes, where a layer takes its input in 8 bits. Others stay in T.
    """

    def __init__(self, model: Model, dtype: ir.DataType, steps: Mapping[str, float]) -> None:
        self.model, self.config, self.dtype, self.steps = model, model.config, dtype, steps
        self.tape = ir.tape.Tape()
        self.row_shape = self.constant("row_shape", np.array([0, -1]), INT64)
        self._rounded: dict[str, ir.Value] = {}

    def op(self, op_type: str, name: str, *inputs: ir.Value, output: ir.Value | None = None, **attrs: int) -> ir.Value:
        """Record an operator with one output, which bears its name unless it is given."""
        return self.tape.op(op_type, inputs, attrs, name=name, output=output or ir.Value(name=name))

    def constant(self, name: str, array: np.ndarray, dtype: ir.DataType) -> ir.Value:
        """Make an initializer."""
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
        whole = stacked(packed) if self.dtype == FLOAT and len(packed) == len(keys) else None
        return self.weight(name, *keys) if whole is None else self.widened(name, *self.codes(name, whole))

    def codes(self, name: str, packed: PackedWeight, narrow: bool = True) -> list[ir.Value]:
        """Make initializers of codes, scales and, where there are any, zeros; 4-bit codes in bytes unless `narrow`."""
        kind = INT8 if packed.bits == 8 else ir.DataType.UINT4 if narrow else ir.DataType.UINT8
        parts = [
            self.constant(f"{name}.codes", packed.codes, kind),
            self.constant(f"{name}.scales", packed.scales, FLOAT),
        ]
        return parts if packed.zeros is None else [*parts, self.constant(f"{name}.zeros", packed.zeros, FLOAT)]

    def widened(self, name: str, codes: ir.Value, scales: ir.Value, zeros: ir.Value | None = None) -> ir.Value:
        """(codes - zeros) · scales, a row each: OpenVINO recognises this and computes from the codes."""
        x = self.op("Cast", f"{name}.wide", codes, to=int(FLOAT))
        x = x if zeros is None else self.op("Sub", f"{name}.centred", x, zeros)
        return self.op("Reshape", name, self.op("Mul", f"{name}.groups", x, scales), self.row_shape)

    def embedding(self, ids: ir.Value) -> tuple[ir.Value | None, ir.Value]:
        """Return the table, if the head needs it too, and the rows of `ids`."""
        packed = self.model.packed.get("embed")
        if packed is None or self.dtype != FLOAT:
            whole = self.weight("embed.weight", "embed")
            return whole, self.op("Gather", "embed", whole, ids)
        # OpenVINO gathers rubbish, or crashes, from 4-bit codes that a matrix product takes as well.
        parts = self.codes("embed.weight", packed, narrow=not self.config.tie_word_embeddings)
        rows = [self.op("Gather", f"embed.{i}", part, ids) for i, part in enumerate(parts)]
        table = self.widened("embed.weight", *parts) if self.config.tie_word_embeddings else None
        return table, self.widened("embed", *rows)

    def linear(
        self, name: str, x: ir.Value, *keys: str, bias: ir.Value | None = None, output: ir.Value | None = None
    ) -> ir.Value:
        """Make x · weightsᵀ + bias, the weights of these keys one below the other."""
        weight = f"{name}.weight"
        if x.name in self.steps:
            x, matrix = self.rounded(x), self.coded(weight, *keys)
        else:
            matrix = self.matrix(weight, *keys)
        inputs = [x, matrix] if bias is None else [x, matrix, bias]
        return self.op("Gemm", name, *inputs, output=output, transB=1)

    def rounded(self, x: ir.Value) -> ir.Value:
        """Round to 8 bits and widen again, once for all layers that take x: a runtime multiplies the codes."""
        if x.name not in self._rounded:
            step = self.constant(f"{x.name}.step", np.array(self.steps[str(x.name)]), self.dtype)
            zero = self.constant(f"{x.name}.zero", np.array(0), INT8)
            codes = self.op("QuantizeLinear", f"{x.name}.codes", x, step, zero)
            self._rounded[str(x.name)] = self.op("DequantizeLinear", f"{x.name}.rounded", codes, step, zero)
        return self._rounded[str(x.name)]

    def coded(self, name: str, *keys: str) -> ir.Value:
        """Weights as int8 codes and a step for each row, widened by the graph."""
        codes, steps = int8_codes(np.concatenate([self.model.weights[key] for key in keys]))
        parts = [
            self.constant(f"{name}.codes", codes, INT8),
            self.constant(f"{name}.steps", steps, self.dtype),
            self.constant(f"{name}.zeros", np.zeros(len(steps)), INT8),
        ]
        return self.op("DequantizeLinear", name, *parts, axis=0)


def _convert(key: str, array: np.ndarray, dtype: ir.DataType) -> np.ndarray:
    try:
        with np.errstate(over="raise"):
            return np.ascontiguousarray(array, dtype.numpy())
    except FloatingPointError:
        limit = f"{np.finfo(dtype.numpy()).max:.5g}"
        raise UnsupportedModelError(
            f"weight {key} reaches {np.abs(array).max():.5g}, the largest {dtype.name} is {limit}: use another dtype"
        ) from None
