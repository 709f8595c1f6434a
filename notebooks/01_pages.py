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
# # Where the memory goes
#
# Every token that a model has read leaves keys and values behind, and whoever wants the next token needs all of them. This
# memory, not arithmetic, decides how many requests can run at once. Here we look at who holds which piece of it: in **pages**
# (vLLM), and in **contiguous** runs reserved in advance (Orca, FasterTransformer). No model runs: a page is a number, and the
# scheduler that hands them out knows nothing else.

# %%
import random

import matplotlib.pyplot as plt
import pandas as pd

import contbatch as cb

# %% [markdown]
# ## A page table fills
#
# A pool of 12 pages with room for 4 tokens each. Request `a` has a prompt of 6 tokens, `b` one of 3. After every step each gets a
# token, which we make up: 7. A page is taken only when a token needs it.

# %%
def step(scheduler):
    planned = scheduler.schedule()
    return scheduler.update(planned, {grant.request.request_id: 7 for grant in planned.grants if grant.samples})


scheduler = cb.Scheduler(cb.ChunkedPrefill(), num_pages=12, page_size=4)
a, b = (cb.Request(name, [1] * n, cb.SamplingParams(max_tokens=6)) for name, n in (("a", 6), ("b", 3)))
scheduler.add(a)
scheduler.add(b)
for number in range(5):
    step(scheduler)
    print(f"after step {number}:  a {a.num_computed_tokens:2} tokens in pages {a.pages}   b {b.num_computed_tokens} in {b.pages}")

# %% [markdown]
# Token *t* lies in page `table[t // 4]`, slot `t % 4`. The pages of one request need not be neighbours: `a` has 0, 1 and then 4. What is
# held but empty is at most the rest of each last page, pale in the picture.

# %%
def page_map(scheduler, **options):
    pool, running = scheduler.pool, scheduler.running
    options |= {"cached": pool.cached_pages, "page_size": pool.page_size}
    stored = {r.request_id: r.num_computed_tokens for r in running}
    cb.plots.page_map({r.request_id: r.pages for r in running}, pool.num_pages, stored=stored, **options)


page_map(scheduler, title="after step 4: two requests, 12 pages of 4 tokens")
print("slots held:", 4 * scheduler.pool.num_live, " tokens in them:", a.num_computed_tokens + b.num_computed_tokens)

# %% [markdown]
# ## Sharing
#
# Three requests begin with the same 8 tokens, as chats with one system prompt do. With the prefix cache on, `c` computes them. `d` and
# `e` come later and find the two full pages: they hold the same ones, and compute only their own 2 tokens.

# %%
system = [5] * 8
shared = cb.Scheduler(cb.ChunkedPrefill(), num_pages=12, page_size=4, prefix_cache=True)
chats = [cb.Request(name, system + own, cb.SamplingParams(max_tokens=4)) for name, own in (("c", [1, 2]), ("d", [3, 4]), ("e", [6, 6]))]
for chat in chats:
    shared.add(chat)
    step(shared)
for chat in chats:
    print(chat.request_id, "pages", chat.pages, " found in the cache:", chat.num_cached_tokens, "tokens")

# %% [markdown]
# When they have gone, nobody holds the pages they filled, but their content is kept until the memory is needed: *cached*.

# %%
_, axes = plt.subplots(2, 1, figsize=(10, 2.6), layout="constrained")
page_map(shared, title="c, d and e share the pages of their common beginning", legend=False, ax=axes[0])
while shared.has_requests:
    step(shared)
page_map(shared, title="after they have left", ax=axes[1])
pool = shared.pool
print(pool.num_live, "live,", pool.num_cached, "cached,", pool.num_free, "free; evicted first:", pool.cached_pages[0])

# %% [markdown]
# ## Copy-on-write
#
# `n=2` asks for two answers to one prompt. It is computed once, and both answers draw their first token from it. Then they share its
# full page; of the page that is only half full each needs one of its own, since both go on writing in it: it is copied at
# that moment, and not before.

# %%
twice = cb.Scheduler(cb.ChunkedPrefill(), num_pages=12, page_size=4)
first = cb.Request("f", [1] * 6, cb.SamplingParams(max_tokens=6, n=2, seed=0))
twice.add(first)
for _ in range(3):
    planned = twice.schedule()
    sampling = [grant.request for grant in planned.grants if grant.samples] + planned.forked
    twice.update(planned, {sample.request_id: 7 for sample in sampling})
    tables = "  ".join(f"{sample.request_id} {sample.pages}" for sample in first.samples)
    print(f"step {planned.step}: {tables}   moves: {[tuple(move) for move in planned.moves]}")

# %%
page_map(twice, title="one prompt of 6 tokens, two answers: page 0 has two holders, page 1 was copied")
print("live pages:", twice.pool.num_live, " in page tables:", sum(len(sample.pages) for sample in first.samples))

# %% [markdown]
# ## Contiguous memory falls to pieces
#
# Without page tables a request needs all its memory side by side, for all the tokens it may ever have. 24 slots of one token;
# requests that may hold 6 each. Two leave, 12 slots are free, and yet nobody who needs 7 can come in.

# %%
runs = cb.Scheduler(cb.Orca(), num_pages=24, page_size=1, layout="contiguous")
for name in "abcd":
    runs.add(cb.Request(name, [1] * 3, cb.SamplingParams(max_tokens=4)))
step(runs)
runs.abort("a")
runs.abort("c")
runs.add(cb.Request("long", [1] * 4, cb.SamplingParams(max_tokens=4)))
refused = runs.schedule()
page_map(runs, title="12 slots are free, in two pieces; pale: reserved for tokens to come")
print("free:", runs.pool.num_free, " free runs (start, length):", list(runs.pool.free_runs), " waiting:", len(runs.waiting))
print("limits that kept it out:", sorted(refused.bound))

# %% [markdown]
# ## Four layouts, one workload
#
# Three hundred requests wait. Each may make up to 100 tokens; most stop much earlier, and nobody knows when, but the oracle. The memory
# is the same, 1,024 tokens: 64 pages of 16, or 1,024 slots in runs. An engine needs a *runner*, which turns a planned step into
# tokens; this one says 0, and 2 ("stop") when an answer is as long as we have drawn it.

# %%
draw = random.Random(0)
lengths = [(draw.randint(5, 60), min(100, 1 + int(draw.expovariate(1 / 25)))) for _ in range(300)]
STOP = 2


class Drawn:
    is_virtual = True

    def validate(self, request): ...

    def execute(self, step):
        done = {g.request.request_id: g.request.num_output_tokens + 1 for g in step.grants if g.samples}
        return cb.StepResult({name: STOP * (made == lengths[name][1]) for name, made in done.items()}, elapsed_s=1.0)


# %%
def run(policy, **limits):
    sampling = cb.SamplingParams(max_tokens=100, stop_token_ids=(STOP,))
    requests = [cb.Request(i, [1] * prompt, sampling, expected_output_tokens=n) for i, (prompt, n) in enumerate(lengths)]
    return cb.Engine(cb.Scheduler(policy, **limits), Drawn()).run(requests)


slots = {"num_pages": 1024, "page_size": 1, "layout": "contiguous"}
layouts = {
    "max": run(cb.Orca("max", max_model_len=160), **slots),
    "power of two": run(cb.Orca("power_of_two", max_model_len=160), **slots),
    "oracle": run(cb.Orca("oracle"), **slots),
    "paged": run(cb.ContinuousBatching(), num_pages=64, page_size=16),
}

# %% tags=["picture"]
shares = pd.DataFrame({name: 100 * result.waste().mean() for name, result in layouts.items()}).T
cb.plots.waste(layouts, title="where 1,024 slots go, on average over the steps")
print(shares.round(1).to_string())

# %% [markdown]
# *Reserved* will hold a token later; *internal* never will: it was reserved for an answer that stopped. *External* is free, but in
# pieces too short for the next in line. *Free* is too little for the next, even in one piece, or nobody waits any more. vLLM's paper
# measured (figure 2) 20 % tokens with the longest reserved, 27 % with powers of two, 38 % with an oracle, 96 % with pages.
# Their requests are others, with a longest of 2,048 tokens; the order is the same.
#
# What it buys: more requests at once, so fewer steps for all of them.

# %%
columns = ["steps", "mean_seqs", "preemptions", "seats_bound", "tokens_bound", "pages_bound"]
print(pd.DataFrame({name: result.summary()[columns] for name, result in layouts.items()}).T.round(1).to_string())

# %% [markdown]
# The last three columns say in how many steps a limit kept something out. Only memory did, so the comparison is one of memory. Pages
# have a price too: with everybody growing, they run out at times, and somebody is preempted and computed again.
#
# ## How large should a page be?
#
# Large pages waste more at the end of each table; small ones make long tables. The waste is less than a page a sequence.

# %%
sizes = {size: run(cb.ContinuousBatching(), num_pages=1024 // size, page_size=size) for size in (1, 4, 16, 64)}
internal = {size: 100 * result.waste().internal.mean() for size, result in sizes.items()}
worst = {size: (result.steps.internal_slots / result.steps.seats).max() for size, result in sizes.items()}
print(pd.DataFrame({"internal [%]": internal, "slots a sequence, in the worst step": worst}).rename_axis("page size").round(2).to_string())
