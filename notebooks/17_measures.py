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
# # What to measure
#
# A server can be busy and useless. This notebook asks of the same simulated runs: how many requests were answered in time, who got how much,
# how long the queue was, what decided it, and how much of all that is chance. Llama-3-8B on an A100 of 80 GB.

# %%
import json
import tempfile
from collections import Counter
from pathlib import Path

import pandas as pd

import contbatch as cb

# %% tags=["parameters"]
rates = (2, 3, 4, 5, 6, 8)
num_requests = 200
seeds = range(5)
ttft_s, tpot_s = 0.5, 0.04

# %% [markdown]
# ## In time
#
# The promise: the first token within 0.5 s, each further one within 40 ms on average. **SLO attainment** is the share of all requests that get
# it, **goodput** is how many per second do. Each point is the mean of five runs with other seeds, the bands are 95 % confidence
# intervals (Student's t).

# %%
gpu = cb.Simulated(gpu="A100-80GB", model="llama-3-8b")
ways = {"prompts first": (cb.ContinuousBatching(), 2048), "chunks, budget 2,048": (cb.ChunkedPrefill(), 2048), "chunks, budget 256": (cb.ChunkedPrefill(), 256)}


def serve(policy, budget, rate, seed):
    load = cb.Poisson(rate=rate, num_requests=num_requests, prompt=cb.lengths.LogNormal(1000, sigma=0.8, high=6000), output=cb.lengths.LogNormal(200, sigma=0.6, high=800), seed=seed)
    return cb.simulate(load, policy, gpu, max_num_seqs=128, max_num_batched_tokens=budget)


# %%
rows = []
for name, (policy, budget) in ways.items():
    for rate in rates:
        for seed in seeds:
            result = serve(policy, budget, rate, seed)
            limits = {"ttft_s": ttft_s, "tpot_s": tpot_s}
            rows.append({"way": name, "rate": rate, "attainment": 100 * result.attainment(**limits), "goodput": result.goodput(**limits)})
table = cb.confidence(pd.DataFrame(rows), ["way", "rate"])
print(table.round(1).to_string(index=False))

# %%
axis = cb.plots.curves(table, "rate", "goodput", by="way", band=("goodput_low", "goodput_high"), xlabel="offered [requests/s]", ylabel="in time [requests/s]", title="goodput: more load, less use")

# %% [markdown]
# The bands of the three lie over each other: with these lengths and this promise, what divides them is mostly chance.
# One run of each would have named a winner. A band may leave what is possible, below 0 or above 100 %: Student's t knows no such bounds, and
# five runs that differ widely near one of them are few for it.
#
# ## Who got it
#
# One client sends 60 requests at once, another 60 of the same size within the second that follows. Jain's index of the tokens that they
# got, weighted as in VTC (an output token counts twice), is 1 if both got the same and 1/2 if one got everything. Once everybody has been
# served it says only what they asked for, so it is taken after 10 seconds, when both still have requests waiting.

# %%
def of(name, **load):
    return cb.OpenLoop(client=cb.Client(client_id=name), **load)


size = {"num_requests": 60, "prompt": 1000, "output": 200}
first = of("first", arrivals=cb.arrivals.AllAtOnce(), **size)
second = of("second", arrivals=cb.arrivals.PoissonArrivals(60), **size)
both = cb.Mixture((first, second))
orders = {"first come": cb.ChunkedPrefill(), "fair share": cb.FairShare()}
shared = {name: cb.simulate(both, policy, gpu, max_num_seqs=16) for name, policy in orders.items()}

# %%
clients = {name: cb.by_client(result, until_s=10) for name, result in shared.items()}
columns = ["requests", "service", "tokens_per_s", "ttft_s_mean", "e2e_s_mean"]
print(pd.concat(clients)[columns].round(2).to_string())
print("Jain's index of the service:", {name: round(cb.jain(client.service), 2) for name, client in clients.items()})

# %% [markdown]
# Fairness is paid for: the first client waits longer than it would alone. `tokens_per_s` is the speed that each of them saw over the whole run.
#
# ## The queue over time
#
# A queue that is gone before the next burst comes, and one that is not: 24 requests every 8 seconds, and every 2, with 16 seats.

# %%
bursts = {f"every {gap} s": cb.OpenLoop(arrivals=cb.arrivals.BurstArrivals(24, gap), num_requests=120, prompt=1000, output=100) for gap in (8, 2)}
waves = {name: cb.simulate(load, cb.ChunkedPrefill(), gpu, max_num_seqs=16) for name, load in bursts.items()}
queues = pd.concat([cb.over_time(result, 0.5).reset_index().assign(bursts=name) for name, result in waves.items()])
axis = cb.plots.curves(queues, "start_s", "waiting", by="bursts", xlabel="time [s]", ylabel="waiting requests, mean of half a second", title="bursts of 24 requests, 16 seats")
print(queues.groupby("bursts", sort=False)[["waiting", "seats", "page_use", "busy", "output_tokens_per_s"]].mean().round(2).to_string())

# %% [markdown]
# ## Utilisation, and what decided
#
# Seats were what everybody waited for. A comparison of two policies' use of *pages* would have been one of seats, and the table says so:

# %%
figures = pd.DataFrame({name: result.summary() for name, result in shared.items()}).T
print(figures[["seat_use", "wasted_seats", "page_use", "kv_use"]].round(3).to_string())
print(cb.limits_bound(shared, studied=["pages"]).round(0).to_string())

# %% [markdown]
# ## Every step, in Perfetto
#
# `to_perfetto` writes the run for [ui.perfetto.dev](https://ui.perfetto.dev) (open it there, nothing is uploaded) or chrome://tracing: steps with
# counters of pages and queue, a track for each seat, a span for each request.

# %%
with tempfile.TemporaryDirectory() as folder:
    path = shared["fair share"].to_perfetto(Path(folder) / "fair_share.json")
    events = json.loads(path.read_text())["traceEvents"]
print(dict(Counter(event["ph"] for event in events)))
print({key: events[20][key] for key in ("name", "ph", "pid")}, "and", len(events) - 1, "others")
