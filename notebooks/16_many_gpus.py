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
# # Many GPUs
#
# One server is a scheduler; many are a scheduler each and a **router** before them. It chooses a replica when a request arrives, for good,
# and knows only what it sent and what came back: not how long an answer will be. Or the machines are **disaggregated**: some compute prompts, others
# answers, and the keys and values travel between them.
#
# Simulated: Llama-3-8B on H100s, a replica each, with the real scheduler in every one of them and a clock each. Links between hosts are modelled
# only where keys and values move.

# %%
import pandas as pd

import contbatch as cb
from contbatch.lengths import LogNormal, Uniform

# %% tags=["parameters"]
seed = 0
replica_counts = (1, 2, 4)
growth = {1: 2.0, 10: 0.3, 100: 0.3, 1000: 0.3}  # seconds of load by replicas

# %% [markdown]
# ## Capacity under each router
#
# Answers of very unequal lengths, 8 seats a replica. Clients ask for up to 256 tokens and mostly get less, which no router knows. Capacity is
# the most requests per second at which nine of ten begin within a tenth of a second, by bisection to 5 %. Every run has 600 requests a replica: in one of
# a few seconds queues don't get as long as they would.

# %%
gpu = cb.Simulated(gpu="H100", model="llama-3-8b")
routers = {"round robin": cb.RoundRobin(), "power of two": cb.PowerOfTwo(seed), "least tokens": cb.LeastTokens()}


def serve(rate, n, router, seed):
    load = cb.Poisson(rate=rate, num_requests=600 * n, prompt=256, output=LogNormal(20, sigma=1.2, high=256), client=cb.Client(max_tokens=256), seed=seed)
    return cb.simulate_fleet(load, n, router, None, gpu, max_num_seqs=8, detail=False)


def capacity(n, router, seed=seed):
    keeps = lambda fleet: fleet.together.requests.queue_s.quantile(0.9) < 0.1
    return cb.find_capacity(lambda rate: serve(rate, n, router, seed), keeps, low=14 * n, high=42 * n, tolerance=0.05).rate


# %%
found = pd.DataFrame([{"router": name, "replicas": n, "capacity": capacity(n, router)} for n in replica_counts for name, router in routers.items()])
table = found.pivot(index="replicas", columns="router", values="capacity")[list(routers)]
print(table.assign(**{"looking gains [%]": 100 * (table["least tokens"] / table["round robin"] - 1)}).round(1).to_string())
print("\na replica's share of it\n" + table.div(table.index, axis=0).round(1).to_string())
print("\na single one, with other seeds:", [round(capacity(1, cb.RoundRobin(), seed + more), 1) for more in (1, 2)])

# %%
axis = cb.plots.curves(found, "replicas", "capacity", by="router", ylabel="capacity [requests/s]", title="8 seats a replica, heavy-tailed answers")
ticks = axis.set_xticks(replica_counts)
for line, size in zip(axis.lines, (5, 12, 5)):  # two lines are nearly the same: one shows around the other
    line.set_markersize(size)

# %% [markdown]
# A single replica has nothing to choose. In each line all routers get the same requests at the same rates, so the lines can be compared: the last column
# is what looking everywhere gains over taking turns, and two random looks come near it. The columns cannot: what one replica bears differs from seed to
# seed, as the last line says, by about as much as the shares differ, so this is no statement on whether many do better together than alone.
#
# ## Prefix affinity: hits against balance
#
# 24 long beginnings, some far more popular than others, and memory in which a replica keeps about a dozen. Who follows the prefix
# computes less, but all who share a popular one meet at one replica. `lead` is how many unfinished tokens more than the emptiest it may have.

# %%
shared = cb.Poisson(rate=180, num_requests=500, prompt=64, output=Uniform(8, 48), prefix=cb.SharedPrefix(1536, num_prefixes=24, exponent=1.2), seed=seed)
ways = {"round robin": cb.RoundRobin(), "least tokens": cb.LeastTokens()} | {f"affinity, lead {lead}": cb.PrefixAffinity(64, lead) for lead in (4096, 16384, 32768, float("inf"))}
rows = {}
for name, router in ways.items():
    fleet = cb.simulate_fleet(shared, 4, router, None, gpu, prefix_cache=True, num_pages=1200, max_num_seqs=12)
    figures = fleet.summary()
    rows[name] = {"hit rate [%]": 100 * figures.hit_rate, "requests, most/mean": fleet.balance().requests.max() / fleet.balance().requests.mean(), "TTFT p50 [ms]": 1e3 * figures.ttft_s_p50, "TTFT p99 [ms]": 1e3 * figures.ttft_s_p99}
affinity = pd.DataFrame(rows).T
print(affinity.round(1).to_string())

# %%
picture = affinity.rename_axis("router").reset_index()
axis = cb.plots.curves(picture, "hit rate [%]", "TTFT p99 [ms]", by="router", log="y", title="4 replicas: what is found, and what the unlucky wait")

# %% [markdown]
# More hits are not all: the most are found where nobody looks at the load, and there the unlucky wait twice as long as with a lead of a few
# requests.
#
# ## Prompts and answers apart
#
# Four GPUs, prompts of 2,000 tokens in the median. Mixed replicas compute both; the others one of them, and the keys and values of each prompt (128 KiB a token)
# go over a link of 50 GB/s. TBT is the time between tokens.

# %%
long = cb.Poisson(rate=16, num_requests=160, prompt=LogNormal(2000, sigma=0.7, high=7500), output=LogNormal(150, sigma=0.5, high=500), seed=seed)


def mixed(policy, budget):
    return cb.simulate_fleet(long, 4, None, policy, gpu, max_num_batched_tokens=budget)


def apart(num_prefill, **link):
    return cb.simulate_disaggregated(long, num_prefill, 4 - num_prefill, None, gpu, link=cb.Link(**link), max_num_batched_tokens=8192)


fleets = {"mixed, prompts first": mixed(cb.ContinuousBatching(), 8192), "mixed, chunks of 512": mixed(cb.ChunkedPrefill(), 512)}
fleets |= {f"{n} prefill, {4 - n} decode": apart(n) for n in (1, 2, 3)} | {"2 + 2, 10 Gb/s": apart(2, bytes_per_s=1.25e9)}

# %%
def in_time(fleet):
    figures, together = fleet.summary(), fleet.together
    return {"TTFT p50 [ms]": 1e3 * figures.ttft_s_p50, "TTFT p99 [ms]": 1e3 * figures.ttft_s_p99, "TBT p50 [ms]": 1e3 * figures.itl_s_p50, "TBT p99 [ms]": 1e3 * figures.itl_s_p99, "longest gap p50 [ms]": 1e3 * together.finished.max_itl_s.median(), "goodput [1/s]": together.goodput(ttft_s=0.5, tpot_s=0.02)}


print(pd.DataFrame({name: in_time(fleet) for name, fleet in fleets.items()}).T.round(1).to_string())
print(fleets["2 prefill, 2 decode"].balance()[["kind", "requests", "busy"]].round(2).to_string())

# %%
longer = [50, 20, 10, 5, 2, 1, 0.5, 0.2, 0.1]
tails = pd.concat([pd.DataFrame({"fleet": name, "share [%]": longer, "TBT [ms]": [1e3 * fleet.together.itl_s().quantile(1 - q / 100) for q in longer]}) for name, fleet in fleets.items() if "10 Gb" not in name])
axis = cb.plots.curves(tails, "share [%]", "TBT [ms]", by="fleet", log="xy", xlabel="share of the gaps that are longer [%]", title="time between tokens, 4 GPUs")

# %% [markdown]
# Where only answers are made no prompt holds anybody up: 99 of 100 gaps are like any other, at any budget. What is paid for it: the split must
# fit the load, and one gap of each answer, that of its second token, holds the transfer and the wait for a seat; with chunks the longest gaps are
# shorter than that. At 10 Gb/s the link is the bottleneck.
#
# ## A thousand replicas
#
# Each gets 100 short requests a second, so a thousand get 10⁵. If the load per replica stays the same, so should the waiting. That is one rate, below what
# they can bear: a search for the capacity of a thousand would take some minutes. The load lasts a few answers' time (a single replica gets more, to have
# enough requests); *steps each* are steps per request, more where more of the run is its beginning and end, with few requests at a time.

# %%
def grow(n, seconds, router):
    load = cb.Poisson(rate=100 * n, num_requests=int(100 * n * seconds), prompt=Uniform(16, 128), output=Uniform(1, 16), seed=seed)
    figures = cb.simulate_fleet(load, n, router, None, gpu, num_pages=1024, max_num_seqs=16, detail=False).summary()
    return {"replicas": n, "seconds": seconds, "requests": int(figures.requests), "steps each": figures.steps / figures.requests, "TTFT p50 [ms]": 1e3 * figures.ttft_s_p50, "TTFT p99 [ms]": 1e3 * figures.ttft_s_p99}


print(pd.DataFrame([grow(n, seconds, cb.PowerOfTwo(seed)) for n, seconds in growth.items()]).round(1).to_string(index=False))

# %% [markdown]
# `python benchmarks/fleet.py` runs the last line for a whole second: 100,000 requests.
