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
# # One step at a time
#
# A step is one pass of the model for everybody who has a seat. Static batching decides once a *batch* who sits; iteration-level
# scheduling (Orca) decides before every *step*. Here a handful of requests is served by one policy after the other, and we
# read what each decided. No model runs, only the scheduler; the decisions are the same with one.

# %%
import matplotlib.pyplot as plt
import pandas as pd

import contbatch as cb

# %% [markdown]
# ## Six requests
#
# Prompt tokens, answer tokens, and the step at which they arrive. There are two seats.

# %%
work = pd.DataFrame(
    {"prompt": [4, 3, 5, 2, 12, 3], "answer": [2, 9, 3, 4, 3, 5], "arrival": [0, 0, 0, 0, 6, 6]}, index=list("abcdef")
)


def requests():
    return [
        cb.Request(name, [1] * int(r.prompt), cb.SamplingParams(max_tokens=int(r.answer)), arrival_time=float(r.arrival))
        for name, r in work.iterrows()
    ]


print(work.T.to_string())

# %% [markdown]
# A *runner* turns a planned step into tokens. This one makes up token 7 for everybody who has caught up with the known tokens, and says
# that each step takes a second. The engine keeps a log of every decision.

# %%
class Sevens:
    is_virtual = True

    def validate(self, request): ...

    def execute(self, step):
        return cb.StepResult({g.request.request_id: 7 for g in step.grants if g.samples}, elapsed_s=1.0)


def run(policy, num_pages=16, page_size=4, max_num_seqs=2, **limits):
    scheduler = cb.Scheduler(policy, num_pages=num_pages, page_size=page_size, max_num_seqs=max_num_seqs, **limits)
    return cb.Engine(scheduler, Sevens(), log=cb.DecisionLog()).run(requests())


# %% [markdown]
# ## Static batching, step by step
#
# The log replays without scheduler or runner: who sits on which seat, who waits, and how many tokens each computes in the step.

# %%
def show(result, steps):
    log = result.decisions
    for state in list(log.states())[steps]:
        tokens = {log.requests[number][0]: count for number, _, count, _ in state.row.grants}
        seats = "  ".join(f"{name}:{tokens.get(name, 0):2}" for name in state.seats.values())
        print(f"step {state.step:2}  seats  {seats:14} waiting  {' '.join(state.waiting)}")


static = run(cb.StaticBatching(batch_size=2))
show(static, slice(0, 11))

# %% [markdown]
# `a` has its two tokens after step 1 and computes nothing from then on, but its seat is taken until `b` has its nine. `c` and `d`
# wait all that time.
#
# ## Continuous batching, step by step

# %%
continuous = run(cb.ContinuousBatching())
show(continuous, slice(0, 11))

# %% [markdown]
# In step 2 `c` sits where `a` was. Prompt and answer are the same kind of work: `c` computes the 5 tokens of its prompt while `b` computes 1.

# %%
results = {"one at a time": run(cb.OneAtATime()), "static batching": static, "continuous batching": continuous}
_, axes = plt.subplots(3, 1, figsize=(10, 5), sharex=True, layout="constrained")
for axis, (name, result) in zip(axes, results.items()):
    title = f"{name}: {len(result.steps)} steps"
    cb.plots.gantt(result, by="step", title=title, legend=axis is axes[-1], ax=axis)
print({name: int(result.steps.held_seats.sum()) for name, result in results.items()}, "seat-steps wasted")

# %% [markdown]
# ## A long prompt, and a budget of tokens
#
# A step may compute only so many tokens; here 6. `e` comes with a prompt of 12. With prompts first, whoever is in the middle of
# an answer waits until the prompt is done. Chunked prefill lets answers go first and gives the rest to the prompt, piece by
# piece.

# %%
budget = {"max_num_batched_tokens": 6, "max_num_seqs": 3}
prompts_first = run(cb.ContinuousBatching(), **budget)
chunked = run(cb.ChunkedPrefill(), **budget)
print("prompts first")
show(prompts_first, slice(5, 10))
print("chunked prefill")
show(chunked, slice(5, 10))

# %% [markdown]
# What it means for whoever is being answered: the longest gap between two tokens, in steps.

# %%
gaps = {"prompts first": prompts_first, "chunked prefill": chunked}
print(pd.DataFrame({name: r.requests.set_index("request_id").max_itl_s for name, r in gaps.items()}).T[list("abcdef")].to_string())
print({name: int(result.summary().tokens_bound) for name, result in gaps.items()}, "steps in which the budget was binding")

# %% [markdown]
# ## When memory runs out
#
# Three seats, but only 4 pages of 4 tokens. Who takes pages on demand lets many in and may have to preempt one: it loses its pages, waits
# at its old place, and is computed again. Who reserves all at admission (Orca) lets fewer in and preempts nobody.

# %%
memory = {"num_pages": 4, "max_num_seqs": 3}
on_demand, reserved = run(cb.ChunkedPrefill(), **memory), run(cb.Orca(), **memory)
_, axes = plt.subplots(2, 1, figsize=(10, 4), sharex=True, layout="constrained")
cb.plots.gantt(reserved, by="step", title="Orca: reserve all at admission", legend=False, ax=axes[0])
cb.plots.gantt(on_demand, by="step", title="chunked prefill: pages on demand", ax=axes[1])
print({name: (len(r.steps), int(r.steps.preempted.sum())) for name, r in {"reserved": reserved, "on demand": on_demand}.items()}, "steps, preemptions")

# %% [markdown]
# ## Where do two runs part?
#
# The log answers at which step, in which decision, and what was the same until then.

# %%
print(prompts_first.decisions.diff(chunked.decisions))
print(on_demand.decisions.diff(reserved.decisions))
print("the same workload again:", run(cb.ChunkedPrefill(), **memory).decisions.diff(on_demand.decisions))

# %% [markdown]
# ## Your own policy
#
# A policy yields requests in order of preference, with the number of tokens each should compute. The scheduler cuts what exceeds the
# budget, and takes care of seats and pages. This one lets at most two prompt tokens in per step and request.

# %%
class TwoAtATime(cb.Policy):
    def plan(self, waiting, running, budget):
        for r in [*running, *waiting]:
            yield r, min(2, r.num_uncomputed_tokens)


results |= {"prompts first": prompts_first, "chunked prefill": chunked, "two at a time": run(TwoAtATime(), **budget)}
show(results["two at a time"], slice(0, 4))

# %% [markdown]
# ## All of them
#
# Means over the six requests, in steps. A comparison is fair where the same limits were binding: the last columns count the
# steps in which they were.

# %%
columns = ["steps", "ttft_s_mean", "e2e_s_mean", "wasted_seats", "seats_bound", "tokens_bound", "pages_bound"]
print(pd.DataFrame({name: result.summary()[columns] for name, result in results.items()}).T.round(2).to_string())
