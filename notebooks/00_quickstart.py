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
# # Why a finished answer still has to wait
#
# Twenty-four people ask a small language model a question. The server has eight seats. Some want three tokens, one wants two
# hundred. We serve the same questions three times, on a real model on this machine's CPU:
#
# - **one at a time**: no batching at all;
# - **static batching**: eight start together and leave together;
# - **continuous batching**: after *every* token, whoever is finished leaves and whoever waits takes the seat.

# %% tags=["parameters"]
seats = 8

# %%
import matplotlib.pyplot as plt
import pandas as pd

import contbatch as cb

llm = cb.LLM("smollm2-135m")
llm.generate("Hello", cb.SamplingParams(max_tokens=2), progress=False)  # compiles; so no policy below pays for it
config = llm.config
print(config.num_layers, "layers,", config.num_heads, "query heads,", config.kv_num_heads, "key/value heads")

# %% [markdown]
# ## The questions, and how long each answer shall be
#
# The first eight start together. Number 0 needs 3 tokens, number 1 needs 200. The lengths are fixed, so that every run does
# exactly the same work: an answer may be cut, or go on past its end.

# %%
wanted = {
    "continuous batching": 3, "the moon": 200, "paged memory": 12, "a river": 60,
    "a queue": 8, "a violin": 35, "the sea": 20, "sleep": 90,
    "bread": 5, "an apple": 40, "a bicycle": 16, "wind": 110,
    "a clock": 6, "music": 25, "a map": 9, "a train": 70,
    "tea": 4, "salt": 30, "a lamp": 14, "snow": 50,
    "glass": 7, "paper": 18, "a garden": 100, "a mountain": 10,
}
questions = [[{"role": "user", "content": f"In one sentence, what is {topic}?"}] for topic in wanted]
sampling = [cb.SamplingParams(max_tokens=n, ignore_eos=True) for n in wanted.values()]
print(len(questions), "questions,", sum(wanted.values()), "answer tokens")

# %% [markdown]
# ## Three ways to serve them
#
# A policy is a small object that ranks the requests before every step. The scheduler, the pages and the model are the same
# for all three.

# %%
policies = {
    "one at a time": cb.OneAtATime(),
    "static batching": cb.StaticBatching(batch_size=seats),
    "continuous batching": cb.ContinuousBatching(),
}
requests, results = {}, {}
for name, policy in policies.items():
    requests[name] = llm.requests(questions, sampling)
    results[name] = llm.run(requests[name], policy, max_num_seqs=seats, log=cb.DecisionLog())

# %% [markdown]
# What happened, in steps and seats. A step is one pass through the model for everybody who sits, so these numbers do not
# depend on the machine. A *wasted* seat-step is a seat held by somebody who is already finished.

# %%
def seat_steps(result):
    steps = result.steps
    wasted = steps.held_seats.sum()
    return {"steps": len(steps), "seat-steps": steps.seats.sum(), "wasted": wasted, "share": f"{wasted / steps.seats.sum():.1%}"}


pd.DataFrame({name: seat_steps(result) for name, result in results.items()}).T

# %% [markdown]
# ## See it
#
# One row per seat, steps from left to right (the first picture has a scale of its own). Orange: a prompt is read. Blue: a request is getting its tokens. Hatched: it has them all and keeps its seat, because somebody in its
# batch is not finished. Grey: nobody sits there.

# %%
figure, axes = plt.subplots(3, 1, figsize=(11, 8), layout="constrained", height_ratios=[1, 3, 3])
axes[1].sharex(axes[2])
for axis, (name, result) in zip(axes, results.items()):
    cb.plots.gantt(result, by="step", title=f"{name}: {len(result.steps)} steps", legend=axis is axes[2], ax=axis)
held = results["static batching"].segments.query("request_id == 0 and kind == 'held'").iloc[0]
print("static: request 0 has its answer after", held.start_step, "steps and keeps its seat for", held.end_step - held.start_step, "more")
first_seat = results["continuous batching"].segments.query("seat == 0").request_id.unique()
print("continuous: seat 0 serves requests", *first_seat)

# %% [markdown]
# ## Watch it
#
# The last of the three, step by step, as its log tells: who sits, who waits, whose page of memory is whose, and the answers as they
# appear. Space plays and pauses, the arrow keys step, a click on a seat shows what is said there. (Run the notebook to get the player.)

# %%
cb.replay(results["continuous batching"], tokenizer=llm.tokenizer)

# %% [markdown]
# ## What it costs, and what it buys
#
# Measured on the machine that ran this notebook. The *wait* of a request is the time from asking to having the whole answer;
# short answers are those of at most 10 tokens. Static batching hands out its answers when the batch ends, as a server without
# streaming does. Other work on the same machine shows in these numbers.

# %% tags=["nbval-ignore-output", "result"]
def measured(result):
    short = result.requests.query("output_tokens <= 10").e2e_s
    figures = result.summary()
    return {
        "tokens/s": figures.output_tokens_per_s,
        "short: mean wait [s]": short.mean(),
        "P99 wait [s]": short.quantile(0.99),
        "wasted seats [%]": 100 * figures.wasted_seats,
    }


print(pd.DataFrame({name: measured(result) for name, result in results.items()}).T.round(2).to_string())

# %% [markdown]
# Continuous batching answers the short ones sooner and uses every seat that somebody waits for. Three honest limits:
#
# - It raises throughput, not the speed of a single request: with more neighbours each step takes longer.
# - With few users nobody waits, so there is nothing to refill a seat with, and nothing to gain.
# - The last long answers still run in a half-empty house: look at the right end of the picture.

# %% [markdown]
# ## The answers
#
# The same, token by token, however they were served: who shares the batch changes when a token comes, not which.

# %%
for request in requests["continuous batching"][3:10]:
    print(f"{request.request_id}: {llm.output(request).text.splitlines()[0]}")
tokens = [[r.output_token_ids for r in run] for run in requests.values()]
print("the same tokens under all policies:", tokens[0] == tokens[1] == tokens[2])

# %% [markdown]
# ## Your own policy
#
# A policy yields requests in order of preference, with the number of tokens each may compute in this step. The scheduler takes
# care of the rest: token budget, seats, pages, preemption. This one knows how long each answer will be, and serves the short ones
# first: they leave sooner, but the longest starts last, so the whole takes more steps.

# %%
class ShortestAnswerFirst(cb.Policy):
    def plan(self, waiting, running, budget):
        yield from ((r, r.num_uncomputed_tokens) for r in running)
        for r in sorted(waiting, key=lambda r: r.sampling.max_tokens):
            yield r, r.num_uncomputed_tokens


shortest = llm.run(llm.requests(questions, sampling), ShortestAnswerFirst(), max_num_seqs=seats)
order = shortest.requests.request_id
print(len(shortest.steps), "steps; the first to leave:", *order.head(8))

# %% [markdown]
# ## On a large GPU, with sliders
#
# The same scheduler, with a simulated A100 and 200 requests that arrive at random. Each move of a slider is a run of its own: from
# which rate on do requests wait, and which policy bears most?

# %%
llm.close()
exp = cb.Experiment(policy=cb.ContinuousBatching(), workload=cb.Poisson(rate=4, num_requests=200, seed=0), num_pages=512)
cb.explore(exp, policy=[cb.ContinuousBatching(), cb.StaticBatching(8)], rate=(1, 16), num_pages=[128, 256, 512])
