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
# # Many experiments
#
# One run answers one question. A *sweep* is a comprehension over experiments: it runs them, keeps what is done on disk, and gives
# one table. Here on a simulated device; the same lines take a loaded model as `backend`.

# %%
import os
import tempfile

import contbatch as cb

# %% [markdown]
# ## An experiment is a value
#
# It holds all that decides a run: who asks for what and when, the policy, the device, the limits. Two equal ones are the same
# experiment, in any session: they have the same hash, and a text that brings them back.

# %% tags=["parameters"]
gpu, model = "A100-40GB", "opt-13b"
num_requests, seed = 200, 0

# %%
exp = cb.Experiment(
    policy=cb.ContinuousBatching(),
    workload=cb.Poisson(rate=4, num_requests=num_requests, seed=seed),
    backend=cb.Simulated(gpu=gpu, model=model),
    max_num_seqs=64,
)
print(cb.Experiment.from_json(exp.to_json()) == exp, len(exp.hash))

# %%
result = cb.run(exp)
figures = result.summary()
print(f"{figures.requests:.0f} requests in {figures.steps:.0f} steps, mean batch {figures.mean_seqs:.1f}")

# %% [markdown]
# ## Policies against load
#
# Three policies at five rates. The first columns of the table are those in which the experiments differ. A temporary folder holds
# what is kept, so that this page starts from nothing; leave that line out and a second call takes no time.

# %%
os.environ["CONTBATCH_CACHE"] = tempfile.mkdtemp()
policies, rates = (cb.StaticBatching(8), cb.Orca(), cb.ContinuousBatching()), (1, 2, 4, 8, 16)
points = [exp.replace(policy=p, workload=exp.workload.replace(rate=r)) for p in policies for r in rates]
table = cb.sweep(points, progress=False)
print(table[["policy", "rate", "output_tokens_per_s", "normalized_latency_s_mean", "mean_seqs"]].round(2).to_string(index=False))

# %%
axis = cb.plots.curves(
    table, "rate", "normalized_latency_s_mean", by="policy", log="xy",
    xlabel="rate [requests/s]", ylabel="mean latency per token [s]", title=f"{model} on one {gpu}, simulated; {num_requests} requests a point",
)

# %% [markdown]
# ## What was binding?
#
# A comparison of policies is one of policies only where they met the same limits. Steps in which pages or seats kept something out (the
# batch of 8 is static batching's own limit, and not counted):

# %%
limits = table.assign(policy=table.policy.str.split("(").str[0]).set_index(["policy", "rate"])
print(limits[["steps", "seats_bound", "tokens_bound", "pages_bound"]].astype(int).unstack(0).swaplevel(axis=1).sort_index(axis=1).to_string())

# %% [markdown]
# ## Two limits at once
#
# How many seats and how many pages does this load need? Everything else stays.

# %%
busy = exp.replace(workload=exp.workload.replace(rate=8))
grid = cb.sweep(
    (busy.replace(max_num_seqs=seats, num_pages=pages) for seats in (8, 16, 32, 64) for pages in (128, 256, 512, 1024)),
    progress=False,
)
axis = cb.plots.heat_map(grid, "max_num_seqs", "num_pages", "ttft_s_mean", number=".1f", label="mean time to first token [s]")
print(grid.pivot(index="num_pages", columns="max_num_seqs", values="ttft_s_mean").round(1).to_string())

# %% [markdown]
# More of one limit helps until the other binds: along a row the numbers stop falling where the pages run out, along a column where the
# seats do.
#
# ## One point fails, the others don't
#
# A policy that asks for a request twice is refused by the scheduler. Its row says so; it is tried again the next time.

# %%
class Twice(cb.Policy):
    def plan(self, waiting, running, budget):
        for r in [*running, *waiting]:
            yield r, 1
            yield r, 1


mixed = cb.sweep([exp, exp.replace(policy=Twice())], progress=False)
print(mixed[["requests", "error"]].to_string())

# %% [markdown]
# ## More processes, more machines
#
# `cb.sweep(points, n_jobs=-1)` takes all cores. On a cluster, with the same lines:
#
# ```python
# from dask.distributed import Client
# import joblib
#
# client = Client("tcp://scheduler:8786")          # or, for Ray: from ray.util.joblib import register_ray; register_ray()
# with joblib.parallel_config("dask"):              # "ray"
#     table = cb.sweep(points)
# ```
#
# An interrupt stops the workers; what was done is kept, and the next call goes on from there. Experiments with a loaded model run one at
# a time, in this process, and are not kept: a measurement is of now.
