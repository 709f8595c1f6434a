# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From a model to a TensorRT engine
#
# TensorRT compiles an ONNX file for one GPU. It knows matrix products and norms, but not paged attention: that operator is our own
# plugin, a Triton kernel compiled to PTX beforehand. Here a model with SmolLM2's heads and random weights goes all the way, as
# far as a machine without a GPU can follow (Linux, `pip install 'contbatch[cpu,ptx]'`). **Nothing of this has run on a GPU yet**: docs/tensorrt.md lists what is unchecked.

# %%
from collections import Counter
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import onnx
import pandas as pd

import contbatch as cb
from contbatch.export import export_onnx, read_config
from contbatch.model import random_model
from contbatch.tensorrt_graph import write_tensorrt_onnx, write_without_attention

sizes = {"num_heads": 9, "kv_num_heads": 3, "head_size": 64, "hidden_size": 576, "intermediate_size": 1536}
model = export_onnx(random_model(0, **sizes), Path(mkdtemp()) / "model.onnx", "float16")
config = read_config(model)
print(f"{model.with_name('model.onnx.data').stat().st_size / 1e6:.1f} MB of weights, {config.num_layers} layers")

# %% [markdown]
# ## The graph
#
# `write_tensorrt_onnx` renames the attention nodes to those of the plugin, and fixes the page size.

# %%
graph = onnx.load(write_tensorrt_onnx(model, page_size=16), load_external_data=False).graph
print(dict(Counter(f"{node.domain or 'onnx'}::{node.op_type}" for node in graph.node)))
node = next(node for node in graph.node if node.domain)
print({a.name: onnx.helper.get_attribute_value(a) for a in node.attribute})
axis = pd.Series(Counter(node.op_type for node in graph.node)).sort_values().plot.barh(
    color="#0072B2", figsize=(7, 4), xlabel="nodes", title="a model of two layers, as TensorRT gets it"
)

# %% [markdown]
# At its end stand the 64 largest logits of each row and the sum of all: greedy and top-k sampling need no more, so the GPU keeps
# the rest.

# %%
print({v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.output if "cache" not in v.name})

# %% [markdown]
# What goes in: the tokens of all sequences side by side, what belongs to whom, and the pages. Keys and values come back as outputs
# that *alias* the inputs: the kernel writes into the pages, nothing is copied.

# %%
shapes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.input}
print(pd.Series({name: shape for name, shape in shapes.items() if not name.endswith(".1")}).to_string())

# %% [markdown]
# ## The profiles
#
# The builder tunes for the shapes that it is told: the scheduler's limits. One profile is for steps where everybody decodes, one for
# steps with prompts. Each row: smallest, likeliest, largest.

# %%
from contbatch.tensorrt_limits import EngineLimits

limits = EngineLimits(max_num_seqs=64, max_num_batched_tokens=512, num_pages=4096, page_size=16)
profiles = pd.DataFrame(limits.profiles(config)).loc[list(shapes)[:6]]
print(profiles.map(lambda r: " ".join(str(s).replace(",)", ")").replace(", ", "×") for s in r)).to_string())

# %% [markdown]
# ## The kernel
#
# Compiled here, for a GPU that isn't here. Two ways to cut the work into tiles; the builder will time both.

# %%
import json

from contbatch.gpu_kernels import export_ptx

folder = export_ptx(model, [80, 90], page_size=16)
kernels = pd.DataFrame(json.loads((folder / "kernels.json").read_text())["kernels"])
columns = ["sm", "tactic", "block_tokens", "num_threads", "registers", "spilled_bytes", "shared_memory"]
print(kernels[columns].to_string(index=False))

# %% [markdown]
# How many programs a step launches follows from its shape alone: TensorRT computes it, no Python runs. A step of 64 decoding
# sequences, and one prompt of 512 tokens:

# %%
for num_tokens, num_seqs in ((64, 64), (512, 1)):
    for k in kernels[kernels.sm == 90].itertuples():
        print(f"{num_tokens} tokens of {num_seqs}: tactic {k.tactic}, grid "
              f"({num_tokens // k.block_tokens + num_seqs + 1}, {k.grid_y}, {k.grid_z})")

# %% [markdown]
# ## Its numbers
#
# Triton's interpreter runs the same kernel on numpy arrays, slowly. Two sequences: one decodes at position 20, one has a prompt
# of 5. The executable spec, in float64, says what should come out.

# %%
from contbatch.gpu_kernels import variants
from contbatch.plugins.paged_attention import interpreter
from contbatch.plugins.paged_attention.reference import paged_attention

rng = np.random.default_rng(0)
query = rng.standard_normal((6, (9 + 2 * 3) * 64)).astype(np.float16)
keys, values = rng.standard_normal((2, 4, 16, 3, 64)).astype(np.float16)
angles = np.arange(64)[:, None] * 1e4 ** (-np.arange(0, 64, 2) / 64)
table = np.array([[2, 0], [3, -1]], np.int32)
step = [np.array([0, 1, 6], np.int32), np.array([20, 0], np.int32), table, *np.float16([np.cos(angles), np.sin(angles)])]
inputs = [query, None, None, keys, values, *step]

output, new_keys, new_values = interpreter.launch(variants(config, "float16", 16)[1], inputs)
expected, expected_keys, expected_values = paged_attention(*inputs, num_heads=9, kv_num_heads=3, do_rotary=1)
error = np.abs(output - expected.astype(float)).max() / np.abs(expected.astype(float)).max()
print("attention within 2^-9 of the spec, relative to the largest:", error < 2**-9)
print("values in their pages, bit by bit:", new_values.tobytes() == expected_values.tobytes())
print("pages changed:", np.flatnonzero((new_keys != keys).any(axis=(1, 2, 3))))

# %% [markdown]
# ## The rest of the engine
#
# TensorRT-RTX, NVIDIA's library for consumers' GPUs, has the same parser and builder, and builds without a GPU. It takes no plugins, so
# we cut them out. This is our own builder code on a real compiler, first in float16, then in 8 bits (W8A8): there the file has
# QuantizeLinear and DequantizeLinear around each product, and the compiler multiplies the codes. `cb.LLM(precision="w8a8",
# backend="tensorrt")` and `contbatch build --w8a8` make such an engine.

# %%
import tensorrt_rtx_libs  # loads the library
import tensorrt_rtx_bindings as rtx

from contbatch.tensorrt_build import BuildOptions, build_plan

def built(file):
    (file.parent / "timings-sm120.cache").unlink(missing_ok=True)  # of another graph: without a GPU nothing is measured
    ranges = {name: all_ranges[name] for name in names}
    return memoryview(build_plan(rtx, write_without_attention(file), {"prompts": ranges}, BuildOptions(), 120, False)).nbytes

names = [v.name for v in onnx.load(write_without_attention(model), load_external_data=False).graph.input]
all_ranges = limits.profiles(config)["prompts"]
all_ranges |= dict.fromkeys(names[2:], [(*shape, 9 * 64) for shape in all_ranges["input_ids"]])
print(names, "built" if (in_floats := built(model)) > 1e6 else "too small")

# %%
from contbatch.calibrate import calibrate
from contbatch.quantize import Quantized

weights, prompts = random_model(0, **sizes), rng.integers(0, 256, (6, 40)).tolist()
seen = calibrate(export_onnx(weights, model.with_name("floats.onnx")), prompts)
found = Quantized.of(weights, seen)
in_codes = built(export_onnx(found.model, model.parent / "w8a8" / "model.onnx", "float16", steps=found.steps))
print(len(found.steps), "inputs of", len(seen), "in 8 bits; the engine has", f"{in_codes / in_floats:.0%} of the bytes")

# %% [markdown]
# ## Without the plugin
#
# The same model with ONNX's own operators in its place: each token's pages are gathered, then ONNX's Attention reads them. TensorRT-RTX
# builds that as a whole.

# %%
gathering = write_tensorrt_onnx(model, page_size=16, attention="gather")
names = Counter(node.op_type for node in onnx.load(gathering, load_external_data=False).graph.node)
print({name: names[name] for name in ("Gather", "ScatterND", "Attention", "TopK")})
(model.parent / "timings-sm120.cache").unlink()
small = EngineLimits(max_num_seqs=8, max_num_batched_tokens=64, num_pages=128, page_size=16)
plan = build_plan(rtx, gathering, small.profiles(config), BuildOptions(), sm=120, progress=False)
print("built" if memoryview(plan).nbytes > 1e6 else "too small")

# %% [markdown]
# It computes the same, and pays for it. A step decodes 64 sequences, 63 of 300 tokens and one of 2000, which makes the table wide. Keys and
# values that it reads, in MB:

# %%
page = 16 * 2 * config.kv_num_heads * config.head_size * 2 * config.num_layers
reads = pd.Series({"plugin: pages that sequences have": 63 * -(-300 // 16) + 125, "gather: pages of the table": 64 * 125})
print((reads * page / 1e6).round(1).to_string())

# %% [markdown]
# ## All of it
#
# On a machine with a GPU and TensorRT this builds the engine and answers; elsewhere it says what is missing.

# %% tags=["nbval-ignore-output"]
try:
    with cb.LLM("smollm2-135m", backend="tensorrt") as llm:
        print(llm.generate("The capital of France is", cb.SamplingParams(max_tokens=8))[0].text)
except (cb.errors.MissingDependencyError, cb.errors.DeviceError) as error:
    print(type(error).__name__, error, sep=": ")
