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
# # The textbook example, and its limits
#
# What newcomers are shown: eight requests start together, one needs 3 tokens and one needs 200. Under static batching the short one's seat stays
# empty for 197 steps. Under continuous batching it is refilled before the next step. Here this is played through, and then the
# part that is often left out: when it gains nothing.
#
# The device is simulated: Llama-2-7B on an A100 of 80 GB. Steps are exact, seconds are arithmetic over the data sheet with assumed
# efficiencies (60 % of the arithmetic, 80 % of the bandwidth).

# %%
import matplotlib.pyplot as plt
import pandas as pd

import contbatch as cb
from contbatch.hardware import HARDWARE
from contbatch.model_shape import MODELS

# %% tags=["parameters"]
card, num_requests, seed = "A100-80GB", 160, 0

# %%
gpu = cb.Simulated(gpu=card, model="llama-2-7b")
answers = [3, 200, 60, 25, 90, 40, 120, 75]
later = [50, 110, 20, 80, 150, 30, 65, 45]
names = "abcdefghABCDEFGH"

# %% [markdown]
# Eight requests, `a` to `h`, are there at the start; eight more, `A` to `H`, wait behind them. Each has a prompt of 100 tokens. There are eight seats.

# %%
def run(policy, lengths=answers + later, prompt=100):
    requests = [cb.Request(name, [1] * prompt, cb.SamplingParams(max_tokens=n)) for name, n in zip(names, lengths)]
    scheduler = cb.Scheduler(policy, num_pages=4096, max_num_seqs=8)
    return cb.Engine(scheduler, gpu.runner()).run(requests)


# %%
static, continuous = run(cb.StaticBatching(8)), run(cb.ContinuousBatching())
_, axes = plt.subplots(2, 1, figsize=(10, 6), sharex=True, layout="constrained")
cb.plots.gantt(static, by="step", title=f"static batching: {len(static.steps)} steps", legend=False, ax=axes[0])
cb.plots.gantt(continuous, by="step", title=f"continuous batching: {len(continuous.steps)} steps", ax=axes[1])
rows = {"static": static.summary(), "continuous": continuous.summary()}
print(pd.DataFrame(rows).T[["steps", "wasted_seats", "mean_seqs"]].round(2).to_string())

# %% [markdown]
# ## 3 tokens and 200
#
# `a` needs 3 steps. How long does its answer wait to be sent, and its seat for somebody else?

# %%
def story(result):
    spans = result.segments[result.segments.request_id == "a"]
    held = spans[spans.kind == "held"]
    first = result.requests.set_index("request_id").loc["A"]
    return {
        "steps a's seat is empty": int((held.end_step - held.start_step).sum()),
        "a has its answer after [s]": result.requests.set_index("request_id").loc["a"].e2e_s,
        "A begins after [s]": first.queue_s,
    }


# %%
print(pd.DataFrame({"static": story(static), "continuous": story(continuous)}).round(2).to_string())

# %% [markdown]
# 197 steps, as in the textbook. Which limit kept the others waiting? The seats, which is what this example is about:

# %%
print(cb.limits_bound({"static": static, "continuous": continuous}, studied=["seats"]).round(0).to_string())

# %% [markdown]
# A static batch asks for nobody before its end, so no limit of the server is to blame for who waits: the policy is.
#
# ## One request is not faster
#
# Continuous batching is about throughput. A request that is alone gains nothing but its place; one in company gets its tokens a little slower,
# because a step for eight takes longer than a step for one, and longer still when newcomers' prompts are computed in it: here 1,000 tokens each.

# %%
both = {
    "alone": run(cb.ContinuousBatching(), [200], prompt=1000),
    "with others": run(cb.ContinuousBatching(), [200] + answers[2:] + later, prompt=1000),
}
first = {name: result.requests.set_index("request_id").loc["a"] for name, result in both.items()}
table = pd.DataFrame({name: 1e3 * row[["tpot_s", "max_itl_s"]].astype(float) for name, row in first.items()}).T
print(table.rename(columns={"tpot_s": "time per token [ms]", "max_itl_s": "longest gap [ms]"}).round(1).to_string())

# %% [markdown]
# ## Few users: no queue, less to gain
#
# A seat can be refilled only if somebody waits. Clients ask, wait for the answer, and ask again at once; there are 16 seats.

# %%
def throughput(policy, clients):
    load = cb.ClosedLoop(num_clients=clients, num_requests=num_requests, prompt=100, output=cb.lengths.Uniform(1, 200), seed=seed)
    return cb.simulate(load, policy, gpu, max_num_seqs=16)


# %%
users = (1, 2, 4, 8, 16, 32, 64)
policies = {"one at a time": cb.OneAtATime(), "static, batches of 16": cb.StaticBatching(16), "continuous, 16 seats": cb.ContinuousBatching()}
runs = {(name, n): throughput(policy, n) for name, policy in policies.items() for n in users}
load = pd.DataFrame([{"policy": name, "users": n, **result.summary()} for (name, n), result in runs.items()])
print(load.pivot(index="users", columns="policy", values="output_tokens_per_s").round(0).to_string())

# %%
ax = cb.plots.curves(load, "users", "output_tokens_per_s", by="policy", xlabel="users who always want an answer", ylabel="tokens per second", log="xy", title="Llama-2-7B on an A100, simulated")

# %% [markdown]
# With one user all three are the same. Up to 16 nobody ever waits for a seat, so none is refilled from a queue; what is gained over static
# is only that a short answer need not wait for the long ones that started with it. From there on the queue keeps the seats full; still
# more users wait longer and gain little.

# %%
gain = load.pivot(index="users", columns="policy", values="output_tokens_per_s")
print("continuous over static:", (gain["continuous, 16 seats"] / gain["static, batches of 16"]).round(2).to_dict())
print("median seconds in the queue:", {n: float(round(runs["continuous, 16 seats", n].summary().queue_s_p50, 1)) for n in users})
busy = {f"{n} users": runs["continuous, 16 seats", n] for n in users}
print(cb.limits_bound(busy, studied=["seats"]).round(0).to_string())

# %% [markdown]
# ## One at a time wastes a better card
#
# A step for one request reads all the weights to make a single token. A card with more arithmetic does not read faster. Tokens per second on
# three cards, and the share of each card's arithmetic that is used (2 operations a weight and token):

# %%
def on(card, policy, num_requests):
    load = cb.OpenLoop(arrivals=cb.arrivals.AllAtOnce(), num_requests=num_requests, prompt=100, output=200)
    device = cb.Simulated(gpu=card, model="llama-2-7b")
    return cb.simulate(load, policy, device, max_num_seqs=128, max_num_batched_tokens=16384).summary().output_tokens_per_s


# %%
cards = ("L40S", "A100-80GB", "H100")
policies = {"one at a time": (cb.OneAtATime(), 4), "continuous, 128 seats": (cb.ContinuousBatching(), 256)}
speed = pd.DataFrame({name: {card: on(card, *policy) for card in cards} for name, policy in policies.items()})
peaks = pd.DataFrame({c: {"TFLOP/s": HARDWARE[c].peak_flops["f16"] / 1e12, "GB/s": HARDWARE[c].memory_bytes_per_s / 1e9} for c in cards}).T
print(speed.round(0).join(peaks).to_string())

# %%
computed = speed * 300 / 200  # tokens: 100 of a prompt for every 200 of an answer
used = (2 * MODELS["llama-2-7b"].linear_params * computed / 1e12).div(peaks["TFLOP/s"], axis=0)
print("arithmetic used [%]\n" + (100 * used).round(1).to_string())
print("\nH100 over A100:", (speed.loc["H100"] / speed.loc["A100-80GB"]).round(2).to_dict())

# %% [markdown]
# One at a time, the cards differ as their memory does, and over 99 % of the arithmetic is idle: the L40S has more of it than the A100 and is
# half as fast. A server that batches puts some of the arithmetic to work; how much is up to memory, for the keys and values of
# more requests and for reading them.
