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
# # vLLM: memory in pages
#
# vLLM's paper (Kwon et al., SOSP 2023) serves OPT-13B on an A100 of 40 GB and compares memory in pages with Orca's contiguous reservations.
# *Max* reserves the model's 2,048 tokens for everybody, *power of two* rounds the answer's length up, *oracle* knows it. Its figures: 7 requests
# fit with Max; at 2 requests/s of ShareGPT the mean batch is **7.0** against **30.4** with pages; **2 to 4 times** the throughput
# at equal latency (ShareGPT: 2.7 to 8 times Max, 1.7 to 2.7 times the oracle).
#
# What was assumed: 60 % of the arithmetic and 80 % of the bandwidth of the data sheet, 1 ms a step, on all sides. ShareGPT's lengths are
# replaced by geometric ones of the same means (161.3 and 338.0), cut at 1,024. The server does not know where an answer ends.

# %%
from dataclasses import replace

import numpy as np
import pandas as pd

import contbatch as cb
from contbatch.lengths import Geometric

# %% tags=["parameters"]
card, num_requests, seed = "A100-40GB", 200, 0

# %%
gpu = cb.Simulated(gpu=card, model="opt-13b")
layouts = {
    "Orca (max)": (cb.Orca("max", max_model_len=2048), "contiguous"),
    "Orca (power of two)": (cb.Orca("power_of_two", max_model_len=2048), "contiguous"),
    "Orca (oracle)": (cb.Orca("oracle"), "contiguous"),
    "pages": (cb.ContinuousBatching(), "paged"),
}


# %%
def run(name, rate, device=gpu):
    policy, layout = layouts[name]
    prompt, output, client = Geometric(161.3, 1024), Geometric(338.0, 1024), cb.Client(max_tokens=1024)
    load = cb.Poisson(rate=rate, num_requests=num_requests, prompt=prompt, output=output, client=client, seed=seed)
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 2560, "page_size": 16 if layout == "paged" else 1}
    return cb.simulate(load, policy, device, layout=layout, **limits)


# %% [markdown]
# ## How many fit

# %%
print(f"{gpu.roofline.kv_bytes_per_token // 1024} KiB a token             paper: 800 KiB")
print(f"{gpu.kv_capacity:,} tokens fit          paper: 15,728")
print(f"{gpu.kv_capacity // 2048} requests of 2,048 tokens  paper: 7")

# %% [markdown]
# ## Runs
#
# Each layout at rates around what it can bear, and at 6 requests/s, which is too many for all. Where little is offered, less is served for two reasons: the
# draws of a seed differ from their rate (by what the last line says, at every rate), and a run ends with the last answer, some time after the last arrival.

# %%
rates = {"Orca (max)": (0.7, 0.85, 1, 2, 6), "Orca (power of two)": (6,), "Orca (oracle)": (1.5, 2, 3, 6), "pages": (2, 3, 4, 6)}
runs = {(name, rate): run(name, rate) for name in layouts for rate in rates[name]}
curve = pd.DataFrame([{"layout": name, "offered": rate, **result.summary()} for (name, rate), result in runs.items()])
curve["latency_ms"] = 1e3 * curve.normalized_latency_s_mean
columns = {"offered": 2, "requests_per_s": 2, "latency_ms": 0, "mean_seqs": 1, "preemptions": 0}
print(curve[["layout", *columns]].round(columns).to_string(index=False))
last = runs["pages", 2].requests.arrival_s.max()
print(f"\nthe draws of this seed: {num_requests / last / 2:.2f} of the rate that is asked for")

# %% [markdown]
# ## Figure 2: where the memory goes
#
# At 6 requests/s somebody always waits, so what is free could not be used. Averages over the steps in which somebody waits.

# %%
def while_waiting(name):
    result = runs[name, 6]
    return replace(result, steps=result.steps[result.steps.waiting > 0])


full = {name: while_waiting(name) for name in layouts}
cb.plots.waste(full, title="OPT-13B, A100-40GB, simulated: where 15,805 slots go while requests wait")
shares = pd.DataFrame({name: 100 * result.waste().mean() for name, result in full.items()}).T
ours = shares.assign(external=shares.external + shares.free + shares.cached)[["stored", "reserved", "internal", "external"]]
print(ours.round(1).to_string())

# %% [markdown]
# The paper's figures, in the same order (its *external* includes all that is free):

# %%
paper = {"Orca (max)": [20.4, 13.3, 57.3, 8.9], "Orca (power of two)": [26.8, 17.9, 13.6, 41.6], "Orca (oracle)": [38.2, 25.2, 0, 36.6]}
print(pd.DataFrame(paper, index=ours.columns).T.to_string() + "\npages                  96.3")

# %% [markdown]
# *Max* agrees within a point: the reservation decides nearly everything. (Which of the last two numbers is which, for *power of two* and *oracle*, is
# deduced, not read off the figure: who knows the length reserves nothing in vain, so 36.6 must be external.) In these two the paper has
# far more external waste. It gave Orca a buddy allocator, which hands out runs of powers of two; ours takes the first run
# that fits, of just the length asked for. Max's 2,048 is a power of two, so there it makes no difference.
#
# ## The mean batch at 2 requests/s
#
# While requests still arrive, after the first 20 seconds:

# %%
def mean_batch(result):
    steps = result.steps[result.steps.start_s.between(20, result.requests.arrival_s.max())]
    return steps.seqs.mean()


print({name: round(float(mean_batch(runs[name, 2])), 1) for name in ("Orca (max)", "Orca (oracle)", "pages")})

# %% [markdown]
# 7.0 in the paper for Max: memory decides, and it comes out. 30.4 for pages does not. With pages nothing is short at this rate, so the batch is how many
# happen to be there: rate × answer × seconds per token (Little's law). 30.4 means about 45 ms a token. Ours is faster, so
# fewer are there at a time. If every step took some milliseconds longer, as with the host code of 2023, more would be:

# %%
slower = gpu.replace(cost=gpu.roofline.replace(step_overhead_s=20e-3))
overheads = {"1 ms overhead a step": runs["pages", 2], "20 ms overhead a step": run("pages", 2, slower)}
print(pd.DataFrame({name: {"mean batch": mean_batch(r), "ms per token": 1e3 * r.summary().tpot_s_mean} for name, r in overheads.items()}).T.round(1).to_string())

# %% [markdown]
# That is no fit: we don't know what the host took. It shows that this number is one of the step, not of the memory.
#
# ## Throughput at equal latency

# %%
shown = curve[curve.layout != "Orca (power of two)"]
axes = {"xlabel": "throughput [requests/s]", "ylabel": "mean normalised latency [ms/token]", "log": "y"}
ax = cb.plots.curves(shown, "requests_per_s", "latency_ms", by="layout", limit=100, limit_label="100 ms", title="OPT-13B on an A100, simulated, ShareGPT's mean lengths", **axes)

# %%
crossing = {
    name: np.interp(np.log([60, 100, 150]), np.log(rows.latency_ms), rows.requests_per_s)
    for name, rows in shown.groupby("layout", sort=False)
}
table = pd.DataFrame(crossing, index=["60 ms", "100 ms", "150 ms"]).T
print(table.round(2).to_string())
print("\npages serve so many times as much\n" + (table.loc["pages"] / table).iloc[:2].round(1).to_string())

# %% [markdown]
# Over Max the gain is within the paper's range; over the oracle it is smaller than the paper's 1.7 to 2.7. Two reasons we can see: our oracle loses less to
# external waste (above), and geometric lengths are not ShareGPT's. And a price that the paper counts and we don't: its
# attention kernel was 20 to 26 % slower for reading pages.
#
# ## Which limit was it?
#
# Share of the steps at 6 requests/s, in per cent. Memory is what is studied; seats (256) and the budget (2,560 tokens) kept out nobody, so
# the comparison is one of memory.

# %%
print(cb.limits_bound({name: runs[name, 6] for name in layouts}, studied=["pages"]).round(0).to_string())
