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
# # Does the company matter?
#
# With continuous batching nobody knows with whom a request will be computed: it depends on who else is there. Its answer should not.
# Yet a sum of floats depends on its order, and many kernels choose the order by the number of rows. So the same
# request, with temperature 0, can get other logits in a full server than in an empty one, and now and then another token. Here we ask it bit by bit:
# a request alone, in batches, in chunks, preempted, in pages of other sizes.

# %%
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import gguf
import numpy as np
import pandas as pd

import contbatch as cb
from contbatch.calibrate import calibrate
from contbatch.export import export_onnx
from contbatch.inputs import pack
from contbatch.model import random_model
from contbatch.packed_weight import from_blocks
from contbatch.quantize import Quantized
from contbatch.runners.cpu import CPUModel
from contbatch.runners.model_runner import ModelRunner

# %% tags=["parameters"]
num_others, max_tokens, seed = 63, 16, 0

# %% [markdown]
# A small random model will do, since only the arithmetic counts. It comes in three files: *wide*, with weights in float32; *packed*, with weights in 4 bits
# (8 in the embedding, which is the last layer too), as in the default model's file, multiplied in float32; and *w8a8*, with weights and inputs in 8
# bits. The runner below remembers every row of logits, as bytes, by request and position.

# %%
folder = tempfile.TemporaryDirectory()
vocabulary = 2048
model = random_model(seed, vocab_size=vocabulary, hidden_size=288, intermediate_size=512, num_heads=9, kv_num_heads=3, head_size=32, tie_word_embeddings=True)


def in_bits(name, weight):
    kind = "Q8_0" if name == "embed" else "Q4_1"
    blocks = gguf.quantize(weight, gguf.GGMLQuantizationType[kind])
    return from_blocks(kind, blocks.reshape(weight.size // 32, -1), len(weight))


codes = {name: in_bits(name, weight) for name, weight in model.weights.items() if weight.ndim == 2}
packed = replace(model, weights=model.weights | {name: code.dense() for name, code in codes.items()}, packed=codes)
files = {name: export_onnx(of, Path(folder.name) / f"{name}.onnx") for name, of in (("wide", model), ("packed", packed))}
quantized = Quantized.of(model, calibrate(files["wide"], np.random.default_rng(seed).integers(0, vocabulary, (4, 60)).tolist()))
assert quantized.steps  # of the linear layers that take their input in 8 bits
files["w8a8"] = export_onnx(quantized.model, Path(folder.name) / "w8a8.onnx", steps=quantized.steps)


def opened(kind, num_pages, page_size=16):
    return CPUModel(files[kind], num_pages, page_size, precision="w8a8" if kind == "w8a8" else "f32")


class Watching(ModelRunner):
    def __init__(self, model):
        super().__init__(model)
        self.seen, self.rows = {}, set()

    def execute(self, step):
        inputs = pack(step)
        self.rows.add(len(inputs.input_ids))
        logits = self.model.forward(inputs.feed()).copy()  # once more below: a step repeated writes the same keys and values
        for request, row in zip(inputs.sampled, logits, strict=True):
            self.seen[request.request_id, request.num_tokens] = row.tobytes()
        return super().execute(step)


rng = np.random.default_rng(seed)
prompts = [rng.integers(0, vocabulary, n).tolist() for n in [60, *rng.integers(1, 100, num_others)]]


def serve(kind, count, policy, page_size=16, slots=8192, **limits):
    requests = [cb.Request(i, ids, cb.SamplingParams(max_tokens=max_tokens)) for i, ids in enumerate(prompts[:count])]
    num_pages = slots // page_size
    with Watching(opened(kind, num_pages, page_size)) as runner:
        scheduler = cb.Scheduler(policy, num_pages=num_pages, page_size=page_size, **limits)
        result = cb.Engine(scheduler, runner).run(requests)
    return requests, runner, result.requests.preemptions.sum()


# %% [markdown]
# ## The same request in other company
#
# Request 0 asks for as many tokens as `max_tokens` says. First alone, then among others, in chunks (of 7: still alone), in pages of another size (among 15 others), or with little memory. *Step sizes* says how many different
# numbers of tokens its server's steps had.

# %%
ways = {
    "with 1 other": (2, cb.ContinuousBatching(), {}),
    "with 15 others": (16, cb.ContinuousBatching(), {}),
    "with all others": (len(prompts), cb.ContinuousBatching(), {}),
    "in chunks of 7": (1, cb.ChunkedPrefill(), {"max_num_batched_tokens": 7}),
    "all, in chunks": (len(prompts), cb.ChunkedPrefill(), {"max_num_batched_tokens": 96}),
    "pages of 1": (16, cb.ContinuousBatching(), {"page_size": 1}),
    "pages of 64": (16, cb.ContinuousBatching(), {"page_size": 64}),
    "little memory": (len(prompts), cb.ChunkedPrefill(), {"page_size": 1, "slots": 200, "max_num_batched_tokens": 64}),
}
alone = {kind: serve(kind, 1, cb.OneAtATime()) for kind in files}
served = {(kind, name): serve(kind, count, policy, **limits) for kind in files for name, (count, policy, limits) in ways.items()}


def compare(found, expected, request_id=0):
    mine = [key for key in expected.seen if key[0] == request_id]
    return sum(found.seen[key] == expected.seen[key] for key in mine), len(mine)


rows = {}
for name in ways:
    runs = {kind: served[kind, name] for kind in files}
    same = {kind: compare(runs[kind][1], alone[kind][1])[0] for kind in files}
    tokens = all(runs[kind][0][0].output_token_ids == alone[kind][0][0].output_token_ids for kind in files)
    rows[name] = [*same.values(), max_tokens, tokens, len(runs["wide"][1].rows), runs["wide"][2]]
print(pd.DataFrame(rows, [f"equal, {kind}" for kind in files] + ["of", "same tokens", "step sizes", "preemptions"]).T.to_string())

# %% [markdown]
# Equal are rows of logits all of whose bits are. Those of one request could be luck, so here are all of them, each against itself alone.

# %%
lines = []
for kind in files:
    everyone, crowd, _ = served[kind, "all, in chunks"]
    equal = total = 0
    with Watching(opened(kind, 512)) as single:
        for i, ids in enumerate(prompts):
            request = cb.Request(i, ids, cb.SamplingParams(max_tokens=max_tokens))
            cb.Engine(cb.Scheduler(cb.OneAtATime(), num_pages=512), single).run([request])
            assert request.output_token_ids == everyone[i].output_token_ids
            equal, total = np.add((equal, total), compare(crowd, single, i))
    lines.append(f"{kind:6} {equal:,} of {total:,} rows of logits have equal bits")
print("\n".join(lines))

# %% [markdown]
# Could this have come out otherwise? In float32 a step with a single row, as most are of a request that is alone, is computed as one with two; below says
# why. Without that second row, request 0 alone against itself with all others (the library chooses kernels by the processor, so this may differ on yours):

# %% tags=["nbval-ignore-output"]
with patch("contbatch.runners.cpu.without_single_rows", dict):
    bare = {kind: serve(kind, 1, cb.OneAtATime())[1] for kind in files}
for kind in files:
    print(f"{kind:6} without the second row: {compare(served[kind, 'with all others'][1], bare[kind])[0]} of {max_tokens} rows of logits have equal bits")

# %% [markdown]
# ## Why an order matters, and who keeps one
#
# A kernel that is given few rows may cut each row's sum into parts for its cores or registers, and add up the parts at the end. The same
# 256 numbers in 1, 2, … 256 parts (256 parts of one number each are one part again):

# %% tags=["picture"]
numbers = np.random.default_rng(seed).standard_normal((256, 1000)).astype(np.float32)


def sums(parts):
    partial = np.zeros((parts, 1000), np.float32)
    for i, row in enumerate(numbers):
        partial[i % parts] += row
    return sum(partial[1:], partial[0])


agree = {parts: 100 * np.mean(sums(parts) == sums(1)) for parts in 2 ** np.arange(9)}
axis = pd.Series(agree).plot.bar(xlabel="parts", ylabel="%", rot=0, figsize=(6, 2.5), title="sums with the bits of the sum in one part")
print({int(parts): f"{share:.0f} %" for parts, share in agree.items()})

# %% [markdown]
# Three parts of a model add up: linear layers, norms, attention. Here:
#
# - **Attention** is our own kernel. It sums a row's keys in spans of 512 positions, whoever computes them.
# - **Linear layers and norms** are OpenVINO's. On the machine where this was found out, one case is not invariant: a *single* row times weights packed in 4
#   or 8 bits, as in the default model's file, in float32. It goes another way through the library than two rows or more. So the runner repeats
#   the only row of such a step, and drops what comes of it.
#   [performance.md](../docs/performance.md#batch-invariance) has the shapes and the cost.
# - **W8A8** sums integers, where order means nothing, and its input steps are fixed beforehand.
#
# Others: Thinking Machines ([Defeating nondeterminism in LLM inference](https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/), 2025)
# named batch size as the main reason why temperature 0 does not repeat itself, and gave kernels for GPUs that keep an order. They are the base of SGLang's
# [`--enable-deterministic-inference`](https://docs.sglang.ai/advanced_features/deterministic_inference.html), whose authors
# [report](https://lmsys.org/blog/2025-09-22-sglang-deterministic) 34 % overhead. vLLM has a mode of its own, in beta,
# [`VLLM_BATCH_INVARIANT=1`](https://docs.vllm.ai/en/v0.32.0/features/batch_invariance/). In both it is off unless asked for. Nothing of that was measured here.
