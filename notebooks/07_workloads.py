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
# # Workloads: the same mean, another server
#
# Who asks for what, and when? Two loads of the same mean rate and the same mean lengths can need very different servers. Here we change one
# thing at a time: when requests come, how long they are, whether people wait for answers, and what prompts have in common. Everything is
# drawn from a seed, the same on every platform.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import contbatch as cb
from contbatch.plots.colours import line_style

# %% tags=["parameters"]
gpu, model = "A100-40GB", "opt-13b"
rate, num_requests, seed = 4.0, 400, 0
seats = 32

# %%
device = f"{model} on one {gpu}, simulated"
exp = cb.Experiment(
    workload=cb.Poisson(rate=rate, num_requests=num_requests, seed=seed),
    backend=cb.Simulated(gpu=gpu, model=model), max_num_seqs=seats,
)


def table(results, *columns):
    return pd.DataFrame({name: result.summary()[list(columns)] for name, result in results.items()}).T.round(2).to_string()


# %% [markdown]
# ## When they come
#
# Four arrival processes with the same mean: independent (Poisson), clumped (Gamma gaps three times as irregular), twenty at a time, and a rate
# that goes up and down as that of a day does, here within a minute.

# %%
arrivals = {
    "Poisson": cb.arrivals.PoissonArrivals(rate),
    "clumped": cb.arrivals.GammaArrivals(rate, cv=3.0),
    "twenty at a time": cb.arrivals.BurstArrivals(20, 20 / rate),
    "day and night": cb.arrivals.DiurnalArrivals((rate / 4, rate, 7 / 4 * rate, rate), slot_s=15.0),
}
axis = plt.subplots(figsize=(10, 3.4), layout="constrained")[1]
for place, (name, process) in enumerate(arrivals.items()):
    times = process.times(num_requests, seed, "arrivals")
    axis.step(times, np.arange(1, num_requests + 1), where="post", **line_style(place), label=f"{name}: {num_requests / times[-1]:.1f}/s")
axis.set(xlabel="time [s]", ylabel="requests so far", title="the same number of requests, four ways to arrive")
axis = axis.legend(frameon=False)

# %% [markdown]
# Served by the same scheduler on the same device, with lengths drawn alike:

# %%
lengths = {"num_requests": num_requests, "prompt": cb.lengths.Uniform(32, 512), "output": cb.lengths.Uniform(1, 128), "seed": seed}
by_arrivals = {name: cb.run(exp.replace(workload=cb.OpenLoop(arrivals=process, **lengths))) for name, process in arrivals.items()}
print(table(by_arrivals, "ttft_s_p50", "ttft_s_p99", "e2e_s_p99", "mean_seqs", "output_tokens_per_s"))

# %% tags=["picture"]
axis = cb.plots.latency_cdf(by_arrivals, "ttft_s", log=True, limit=1, limit_label="1 s", title=f"time to first token by arrivals: {device}")

# %%
axis = cb.plots.queue(by_arrivals["clumped"], title=f"clumped arrivals: {device}")

# %% [markdown]
# Many at once share a step, so that the server makes the same tokens in fewer steps, and everybody waits longer: the slowest one in a hundred
# several times as long. Who measures with evenly spread requests measures another server. Which limits kept requests out, in per cent of
# the steps:

# %%
print(cb.limits_bound(by_arrivals, studied=["seats", "tokens"]).round(0).to_string())

# %% [markdown]
# ## How long they are
#
# Answers of 64 tokens on average, which differ less or more. What does it do to static batching, and to continuous?

# %%
answers = {
    "all 64": cb.lengths.Fixed(64),
    "uniform, 1 to 127": cb.lengths.Uniform(1, 127),
    "geometric": cb.lengths.Geometric(64, 1024),
    "log-normal, long tail": cb.lengths.LogNormal(39, sigma=1.0, high=1024),
}
drawn = pd.DataFrame({name: lengths.draw(num_requests, seed, "output") for name, lengths in answers.items()})
print(drawn.describe().loc[["mean", "std", "50%", "max"]].round(0).astype(int).to_string())

work = {name: cb.OpenLoop(arrivals=cb.arrivals.AllAtOnce(), num_requests=num_requests, prompt=64, output=output, seed=seed) for name, output in answers.items()}
speed = {
    policy: {name: cb.run(exp.replace(workload=load, policy=chosen, max_num_seqs=8)).summary() for name, load in work.items()}
    for policy, chosen in {"static": cb.StaticBatching(8), "continuous": cb.ContinuousBatching()}.items()
}
shown = pd.DataFrame({policy: {name: s.output_tokens_per_s for name, s in rows.items()} for policy, rows in speed.items()})
shown["gain"] = shown.continuous / shown.static
shown["wasted seats, static [%]"] = [100 * s.wasted_seats for s in speed["static"].values()]
print(shown.round(2).to_string())

# %% [markdown]
# With equal lengths nobody waits for a longer neighbour, and continuous batching gains next to nothing. The longer the tail, the more.
#
# ## Whether they wait for the answer
#
# An open loop keeps sending whatever happens; in a closed one a client asks again when it has its answer. So a closed loop slows down with
# the server: 8 clients never fill 32 seats, and of 128 never more than 96 wait, however slow the server is.

# %%
loops = {"open, 12 requests/s": cb.Poisson(rate=12, num_requests=num_requests, seed=seed)}
loops |= {f"closed, {n} clients": cb.ClosedLoop(num_clients=n, num_requests=num_requests, seed=seed) for n in (8, 32, 128)}
print(table({name: cb.run(exp.replace(workload=load)) for name, load in loops.items()}, "requests_per_s", "ttft_s_p50", "ttft_s_p99", "e2e_s_p50"))

# %% [markdown]
# ## What prompts have in common
#
# In a conversation every turn sends all that was said before; an agent's call sends everything so far, and each tool's result makes it longer.
# Without a prefix cache all of it is computed again. And many servers put the same instructions before every prompt.

# %%
start = cb.arrivals.PoissonArrivals(0.5)
shared = {
    "single questions": cb.OpenLoop(arrivals=start, num_requests=40, seed=seed),
    "one of 5 instructions of 600": cb.OpenLoop(arrivals=start, num_requests=40, prefix=cb.SharedPrefix(600, num_prefixes=5, exponent=1.0), seed=seed),
    "conversations of 4 turns": cb.Conversations(arrivals=start, num_conversations=40, turns_each=4, seed=seed),
    "agents, 5 tool calls each": cb.AgentLoops(arrivals=start, num_tasks=40, tool_calls=5, seed=seed),
}
rows = {}
for name, load in shared.items():
    without, cached = cb.run(exp.replace(workload=load)), cb.run(exp.replace(workload=load, prefix_cache=True))
    rows[name] = {
        "requests": len(cached.finished), "prompt tokens": cached.requests.prompt_tokens.sum(),
        "hits [%]": 100 * cached.summary().hit_rate,
        "p50 TTFT without [ms]": 1e3 * without.summary().ttft_s_p50, "with cache [ms]": 1e3 * cached.summary().ttft_s_p50,
    }
print(pd.DataFrame(rows).T.round(0).astype(int).to_string())

# %%
axis = cb.plots.memory(cached, title=f"agents with a prefix cache: {device}")

# %% [markdown]
# What nobody holds stays cached until its pages are wanted.
#
# ## Several at once
#
# A mixture keeps its parts' clients apart, so that each can be looked at alone.

# %%
people = cb.Conversations(arrivals=start, num_conversations=60, seed=seed, client=cb.Client(client_id="people"))
agents = cb.AgentLoops(arrivals=start, num_tasks=60, seed=seed + 1, client=cb.Client(client_id="agents"))
mixed = cb.run(exp.replace(workload=cb.Mixture((people, agents)), prefix_cache=True))
print(mixed.requests.groupby("client_id")[["prompt_tokens", "cached_tokens", "output_tokens"]].sum().to_string())

# %% [markdown]
# ## From a file
#
# A workload can be saved and given to somebody else. Public traces are read by name: Azure's, BurstGPT's, Mooncake's, ShareGPT's, Vidur's.
# None comes with this package; here are the first lines of a file in Azure's format.

# %%
folder = Path(tempfile.mkdtemp())
people.save(folder / "people.jsonl")
again = cb.load_workload(folder / "people.jsonl")
print(len(again), "turns, the same ones:", list(again.rows) == people.turns())

text = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
2023-11-16 18:15:52.2225463,91,16
"""
(folder / "azure.csv").write_text(text)
trace = cb.traces.load_azure(folder / "azure.csv")
many = trace.sample(num_requests, seed, oversample=True).with_arrivals(cb.arrivals.PoissonArrivals(rate))
print(trace, "->", table({"served": cb.run(exp.replace(workload=many))}, "requests", "ttft_s_p50", "ttft_s_p99"), sep="\n")

# %% [markdown]
# What is wrong in a file is named with its line, never skipped in silence:

# %%
(folder / "broken.csv").write_text(text + "2023-11-16 18:15:53,twelve,3\n")
try:
    cb.traces.load_azure(folder / "broken.csv")
except cb.errors.TraceFileError as error:
    print(str(error).removeprefix(f"{folder}/"))
