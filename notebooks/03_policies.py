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
# # Write your own policy, and run it against the others
#
# A policy decides who is served, in what order, and how much of a prompt at a time. It never sees a tensor, a device or a token, so the same
# object runs on a simulated GPU, where a comparison takes seconds, and on the real model. Here you write one in a cell, compare it with the
# ready ones under a load that makes the order matter, and then serve real prompts with it.

# %%
import inspect
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

import contbatch as cb

# %% tags=["parameters"]
gpu, model = "A100-80GB", "opt-13b"
seats = 16
chats_per_s, documents_per_s = 4.0, 1.0
num_chats, seed = 240, 0

# %% [markdown]
# ## A load that makes the order matter
#
# Two clients share one server. People chat: short questions, short answers, many of them. Another client has documents summarised: few requests,
# prompts twenty times as long. Whoever comes behind a few documents waits.

# %%
chat = cb.Poisson(
    rate=chats_per_s, num_requests=num_chats, seed=seed, client=cb.Client(client_id="chat"),
    prompt=cb.lengths.LogNormal(60, sigma=0.6, high=400), output=cb.lengths.LogNormal(60, sigma=0.6, high=300),
)
documents = cb.Poisson(
    rate=documents_per_s, num_requests=int(num_chats * documents_per_s / chats_per_s), seed=seed + 1, client=cb.Client(client_id="documents"),
    prompt=cb.lengths.Uniform(900, 1500), output=cb.lengths.Uniform(100, 300),
)
exp = cb.Experiment(workload=cb.Mixture((chat, documents)), backend=cb.Simulated(gpu=gpu, model=model), max_num_seqs=seats)
print({part.client.client_id: part.num_requests for part in exp.workload.parts}, "requests")

# %% [markdown]
# ## What a policy looks like
#
# This is the whole plan of chunked prefill, the default: decodes, then prompts that have begun, then new ones in order of arrival.

# %%
print(inspect.getsource(cb.ChunkedPrefill.plan))

# %% [markdown]
# ## Yours
#
# *Shortest first* serves whoever has the least to compute. It is unfair: while short ones keep coming, a document may wait for ever. So this
# one lets waiting count: every second makes a prompt look 100 tokens shorter. `self.now` is the time at which the step starts;
# the scheduler sets it. What is yielded first is served first; the scheduler cuts what exceeds the budget and takes care of seats and pages.

# %%
class ShortestWithPatience(cb.Policy):
    """Short prompts first, but nobody waits for ever."""

    tokens_per_s = 100

    def plan(self, waiting, running, budget):
        decoding = [r for r in running if r.num_uncomputed_tokens == 1]
        prompts = [r for r in running if r.num_uncomputed_tokens > 1]
        yield from ((r, r.num_uncomputed_tokens) for r in decoding + prompts)
        for r in sorted(waiting, key=self.urgency):
            yield r, r.num_uncomputed_tokens

    def urgency(self, r):
        return r.num_prompt_tokens - self.tokens_per_s * (self.now - r.arrival_time)


mine = ShortestWithPatience()

# %% [markdown]
# ## On a simulated GPU
#
# Which limit kept requests waiting? Share of the steps in which each did, in per cent. All met the same one, the seats, so this compares
# policies and nothing else. (A static batch asks for nobody before its end, so no limit is to blame for who waits.)

# %%
policies = {
    "static batching": cb.StaticBatching(seats),
    "first come, first served": cb.ChunkedPrefill(),
    "shortest first": cb.ShortestJobFirst(),
    "fair share": cb.FairShare(),
    "mine": mine,
}
results = {name: cb.run(exp.replace(policy=policy)) for name, policy in policies.items()}


def waits(result):
    by_client = result.requests.groupby("client_id").ttft_s
    figures = {f"{client}: {what}": value for what, values in {"median": by_client.median(), "p99": by_client.quantile(0.99)}.items() for client, value in values.items()}
    return figures | {"tokens/s": result.summary().output_tokens_per_s}


print("seconds to the first token")
print(pd.DataFrame({name: waits(result) for name, result in results.items()}).T.round(2).to_string())

print(cb.limits_bound(results, studied=["seats"]).round(0).to_string())

# %% tags=["picture"]
_, axes = plt.subplots(1, 2, figsize=(12, 4), layout="constrained", sharey=True)
for axis, client in zip(axes, ("chat", "documents")):
    chosen = {name: result.requests.query("client_id == @client") for name, result in results.items()}
    cb.plots.latency_cdf(chosen, "ttft_s", log=True, title=f"{client}: {model} on one {gpu}, simulated", ax=axis)

# %% [markdown]
# The further left, the sooner. Shortest first helps chats at the cost of the slowest documents; patience bounds that cost. Nothing is free: the
# server makes the same number of tokens, and who is moved forward moves somebody back.
#
# ## Who waits
#
# The queue over time, while the same requests arrive:

# %%
_, axes = plt.subplots(2, 1, figsize=(10, 5), sharex=True, layout="constrained")
for axis, name in zip(axes, ("first come, first served", "mine")):
    cb.plots.queue(results[name], title=f"{name}: {model} on one {gpu}, {seats} seats, simulated", ax=axis)

# %% [markdown]
# ## A greedy client
#
# Order by length protects nobody from a client who sends twice as much of the same kind. That takes a policy that looks at clients: fair
# share admits whose service so far is the least. Steep lines get more; lines side by side get the same.

# %%
parts = [
    cb.Poisson(rate=rate, num_requests=int(20 * rate), seed=seed, prompt=200, output=100, client=cb.Client(client_id=client))
    for client, rate in (("greedy", 12), ("modest", 6))
]
crowded = exp.replace(workload=cb.Mixture(parts))
clients = {name: cb.run(crowded.replace(policy=policies[name])) for name in ("mine", "fair share")}
_, axes = plt.subplots(1, 2, figsize=(12, 3.6), sharey=True, layout="constrained")
for axis, (name, result) in zip(axes, clients.items()):
    cb.plots.fairness(result, title=f"{name}: {model} on one {gpu}, simulated", ax=axis)
print(pd.DataFrame({name: waits(result) for name, result in clients.items()}).T.round(1).to_string())

# %% [markdown]
# ## On the real model
#
# The same object, another backend. Twelve requests come at once, to four seats; prompts are random token ids, so only lengths matter. In a notebook with
# a person before it a live picture shows seats, tokens per second and pages while it runs.
#
# A policy sees lengths and arrivals. These are the same on both, so the decisions are the same, step by step; only the clock differs. (When
# requests arrive while others run, the speed of the machine decides who is there: then runs differ.)

# %%
llm = cb.LLM("smollm2-135m", num_pages=256)
small = cb.OpenLoop(
    arrivals=cb.arrivals.AllAtOnce(), num_requests=12, seed=seed,
    prompt=cb.lengths.Uniform(5, 120), output=cb.lengths.Uniform(4, 40),
)
pair = cb.Experiment(workload=small, policy=mine, num_pages=256, max_num_seqs=4, max_num_batched_tokens=64)
simulated, real = cb.run(pair), cb.run(pair.replace(backend=llm))
print(len(real.finished), "answers,", len(real.steps), "steps; first to leave:", *real.requests.request_id.head(6))

columns = ["step", "seats", "waiting", "seqs", "prefill_tokens", "decode_tokens", "live_pages", "left"]
print("the same steps, simulated and real:", simulated.steps[columns].equals(real.steps[columns]))

# %%
first_come = cb.run(pair.replace(policy=cb.ChunkedPrefill(), backend=llm))
_, axes = plt.subplots(2, 1, figsize=(10, 5), sharex=True, layout="constrained")
cb.plots.gantt(first_come, by="step", title=f"first come, first served: SmolLM2, {len(first_come.steps)} steps", legend=False, ax=axes[0])
axis = cb.plots.gantt(real, by="step", title=f"mine: SmolLM2, {len(real.steps)} steps", ax=axes[1])

# %% [markdown]
# The answers do not change with the order, token by token. The waits do; they are measured on the machine that ran this notebook.

# %%
print("the same tokens:", real.token_ids == first_come.token_ids)

# %% tags=["nbval-ignore-output"]
measured = {"first come, first served": first_come, "mine": real}
print(pd.DataFrame({n: r.summary()[["ttft_s_p50", "ttft_s_p99", "output_tokens_per_s"]] for n, r in measured.items()}).T.round(2).to_string())

# %% [markdown]
# ## Keep it, and let others check it
#
# A result knows where it comes from: seed, versions, hardware, and a hash of everything that decides the run, the source of your policy
# included. Saved, it can be run again and compared, here or with `contbatch verify FOLDER`.

# %%
folder = Path(tempfile.mkdtemp()) / "mine"
results["mine"].save(folder)
print(results["mine"].provenance.seed, sorted(path.name for path in folder.iterdir()))
print(cb.verify(folder, policy=ShortestWithPatience()))

llm.close()
