"""TensorRT's side of the plugin protocol, on the real Python bindings: stub libraries, fake registry and dimensions.

Everything that checks names, types and order is NVIDIA's own code; what stands for the library is below. It runs in a
process of its own, so that a real TensorRT elsewhere in the tests is left alone.
"""

import ctypes
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np

LIBRARIES = ("libnvinfer.so.11", "libnvinfer_plugin.so.11", "libnvonnxparser.so.11")


@cache
def _process():
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_start)


def submit(function, *arguments):
    """Call a module's function in a process where `import tensorrt` finds the bindings."""
    return _process().submit(function, *arguments).result()


def _start():
    with TemporaryDirectory() as folder:
        for name in LIBRARIES:
            path = Path(folder) / name
            source = Path(__file__).with_name("tensorrt_stub.c")
            subprocess.run(["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", path, source], check=True)
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        import tensorrt_bindings

    sys.modules["tensorrt"] = tensorrt_bindings
    from tensorrt.plugin import _tensor

    tensorrt_bindings.get_plugin_registry = Registry().itself
    tensorrt_bindings.IDimensionExpr, _tensor.SymExprImpl = Dimension, Symbol
    tensorrt_bindings.DimsExprs = lambda size: [None] * size


class Registry:
    """Keeps what plugins register, as the library does."""

    def __init__(self):
        self.creators = {}

    def itself(self):
        return self

    def register_creator(self, creator, namespace):
        self.creators[namespace, creator.name] = creator

    def get_creator(self, name, version, namespace):
        return self.creators[namespace, name] if version == "1" else None


class Dimension:
    """Stands for trt.IDimensionExpr: a constant, or a function of the values of symbols."""

    def __init__(self, constant=None, function=None):
        self.constant, self.function = constant, function

    def is_constant(self):
        return self.constant is not None

    def get_constant_value(self):
        return self.constant

    def value(self, symbols):
        return self.constant if self.is_constant() else self.function(symbols)


class Symbol:
    """Stands for trt.ISymExpr, which the bindings can only make of the library's own dimensions."""

    def __init__(self, expression):
        self.expr = expression._expr


class Expressions:
    """Stands for trt.IExprBuilder."""

    def constant(self, value):
        return Dimension(value)

    def operation(self, operation, left, right):
        compute = {"SUM": np.add, "SUB": np.subtract, "PROD": np.multiply, "FLOOR_DIV": np.floor_divide}[operation.name]
        if left.is_constant() and right.is_constant():
            return Dimension(int(compute(left.constant, right.constant)))
        return Dimension(function=lambda symbols: int(compute(left.value(symbols), right.value(symbols))))


def dimensions(shape):
    """Return the dimensions of a shape whose entries are numbers, or names of symbols."""
    return [Dimension(n) if isinstance(n, int) else Dimension(function=lambda s, n=n: s[n]) for n in shape]


def create(op, attributes):
    """Make a plugin as the ONNX parser does: the node's attributes, in the order in which the creator lists them."""
    import tensorrt as trt

    creator = trt.get_plugin_registry().get_creator(op, "1", "contbatch")
    types = {int: (trt.PluginFieldType.INT32, np.int32), float: (trt.PluginFieldType.FLOAT32, np.float32)}
    names = [field.name for field in creator.field_names if field.name in attributes]
    values = [np.array([attributes[name]], types[type(attributes[name])][1]) for name in names]
    kinds = [types[type(attributes[name])][0] for name in names]
    fields = [trt.PluginField(*field) for field in zip(names, values, kinds, strict=True)]
    collection = trt.PluginFieldCollection(fields)
    return creator.create_plugin(op, "contbatch", collection, None, trt.QuickPluginCreationRequest.STRICT_AOT)


def build(sm, op, attributes, inputs, symbols):
    """Go through all that the builder asks of a plugin, for every tactic.

    `inputs` are (shape, name of a trt.DataType), `symbols` the values of the names in shapes. Returns plain values.
    """
    import tensorrt as trt

    from contbatch.plugins.paged_attention import tensorrt_plugin

    tensorrt_plugin.register(sm)
    plugin, builder = create(op, attributes), Expressions()
    shapes, types = [dimensions(shape) for shape, _ in inputs], [getattr(trt, name) for _, name in inputs]
    output_types = plugin.get_output_data_types(types, [len(shape) for shape in shapes])
    output_shapes = plugin.get_output_shapes(shapes, [], builder)
    tensors = [
        _described(*tensor, symbols) for tensor in zip(shapes + output_shapes, types + output_types, strict=True)
    ]
    combinations = plugin.get_supported_format_combinations(tensors, len(inputs))
    plugin.configure_plugin(tensors[: len(inputs)], tensors[len(inputs) :])
    result = {
        "shapes": [tuple(d.value(symbols) for d in shape) for shape in output_shapes],
        "types": [kind.name for kind in output_types],
        "aliases": [plugin.get_aliased_input(i) for i in range(len(output_types))],
        "formats": [(d.type.name, d.format.name) for d in combinations],
        "tactics": {},
    }
    for tactic in plugin.get_valid_tactics():
        launch, arguments = SimpleNamespace(), Arguments()
        plugin.set_tactic(tactic)
        plugin.get_launch_params(shapes, tensors, len(inputs), launch, arguments, builder)
        sizes = {name: expression.value(symbols) for name, expression in _expressions(vars(launch))}
        scalars = [expression.value(symbols) for _, expression in _expressions(arguments)]
        kernel = plugin.get_kernel([t.desc for t in tensors[: len(inputs)]], [t.desc for t in tensors[len(inputs) :]])
        result["tactics"][tactic] = {"launch": sizes, "scalars": scalars, "kernel": kernel}
    return result


class Arguments(dict):
    """Stands for trt.ISymExprs."""

    nbSymExprs = 0


def _expressions(symbolic):
    return [(name, expression.expr) for name, expression in symbolic.items()]


def _described(shape, kind, symbols):
    import tensorrt as trt

    tensor = trt.DynamicPluginTensorDesc()
    plain = trt.PluginTensorDesc()
    plain.dims = tuple(d.constant if d.is_constant() else -1 for d in shape)
    plain.type, plain.format = kind, trt.TensorFormat.LINEAR
    tensor.desc = plain
    tensor.min = tensor.opt = tensor.max = tuple(d.value(symbols) for d in shape)
    return tensor
