# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Why a finished answer still has to wait
#
# Twenty-four people ask a small language model a question. The server has eight seats. Some want three tokens, one wants two
# hundred. We serve the same questions three times, on a real model on this machine's CPU:
#
# - **one at a time**: no batching at all;
# - **static batching**: eight start together and leave together;
# - **continuous batching**: after *every* token, whoever is finished leaves and whoever waits takes the seat.

# %%
import matplotlib.pyplot as plt
import pandas as pd

import contbatch as cb

llm = cb.LLM("smollm2-135m")
config = llm.config
print(f"{config.num_layers} layers, {config.num_heads} query heads, {config.kv_num_heads} key/value heads, vocabulary {config.vocab_size}")

# %% [markdown]
# ## The questions, and how long each answer shall be
#
# The first eight start together. Number 0 needs 3 tokens, number 1 needs 200. The lengths are fixed (the model may not stop
# earlier), so that every run does exactly the same work.

# %%
lengths = [3, 200, 12, 60, 8, 35, 20, 90] + [5, 40, 16, 110, 6, 25, 9, 70] + [4, 30, 14, 50, 7, 18, 100, 10]
topics = (
    "continuous batching, paged memory, a queue, a seat at a table, the sea, an apple, a bicycle, the moon, rain, bread, a clock, "
    "a bridge, music, a map, salt, a train, glass, a garden, wind, paper, a lamp, a river, honey, snow"
).split(", ")
questions = [[{"role": "user", "content": f"In one sentence, what is {topic}?"}] for topic in topics]
sampling = [cb.SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
prompts = [r.num_prompt_tokens for r in llm.requests(questions, sampling)]
print(f"{len(questions)} questions, {sum(prompts)} prompt tokens, {sum(lengths)} answer tokens, from {min(lengths)} to {max(lengths)} each")

# %% [markdown]
# ## Three ways to serve them
#
# A policy is a small object that ranks requests before every step; the scheduler, the pages and the model are the same for
# all. `requests` are single-use: each run makes its own.

# %%
policies = {
    "one at a time": cb.OneAtATime(),
    "static batching": cb.StaticBatching(batch_size=8),
    "continuous batching": cb.ContinuousBatching(),
}
runs, results = {}, {}
for name, policy in policies.items():
    runs[name] = llm.requests(questions, sampling)
    results[name] = llm.run(runs[name], policy, max_num_seqs=8)

# %% [markdown]
# What happened, in steps and seats. These numbers do not depend on the machine: every step is one pass through the model for
# everybody who sits, and a *wasted* seat-step is a seat held by somebody who is already finished.

# %%
def seat_steps(result):
    steps = result.steps
    return {"steps": len(steps), "seat-steps": steps.seats.sum(), "wasted": steps.held_seats.sum(), "mean batch": steps.seqs.mean()}

table = pd.DataFrame({name: seat_steps(result) for name, result in results.items()}).T
table["wasted seats"] = (table["wasted"] / table["seat-steps"]).map("{:.1%}".format)
table.astype({"steps": int, "seat-steps": int, "wasted": int}).round(2)

# %% [markdown]
# ## See it
#
# One row per seat. Blue is a request getting its tokens; hatched red is a request that has its answer and keeps its seat all
# the same, because somebody in its batch is not finished.

# %%
figure, axes = plt.subplots(3, 1, figsize=(11, 7), sharex=True, layout="constrained", height_ratios=[1, 5, 5])
for axis, (name, result) in zip(axes, results.items()):
    cb.plots.gantt(result, by="step", title=name, ax=axis)
figure.savefig
held = results["static batching"].segments.query("request_id == 0 and kind == 'held'").iloc[0]
print(f"static batching: request 0 has its 3 tokens after step {held.start_step}, but keeps its seat for {held.end_step - held.start_step} more steps")
seat = results["continuous batching"].segments.query("seat == 0").request_id.drop_duplicates()
print("continuous batching: seat 0 serves requests", ", ".join(map(str, seat)))
