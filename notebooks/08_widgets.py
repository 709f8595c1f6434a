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
# # Sliders and a film
#
# Two widgets: `explore` simulates an experiment anew whenever a slider moves, `replay` plays a run step by step. Both need a running
# notebook; where there is none, such as on a web page that shows this file, you see one figure of each.

# %%
import os
import tempfile

import contbatch as cb

exp = cb.Experiment(
    policy=cb.ContinuousBatching(),
    workload=cb.Poisson(rate=4, num_requests=200, seed=0),
    backend=cb.Simulated(gpu="A100-40GB", model="opt-13b"),
    num_pages=512,
)

# %% [markdown]
# ## Explore
#
# Name the fields to move, and how far: a pair of numbers is a slider, a list is a choice, and a choice of policies brings the
# parameters of each. *Pin this run* keeps a run in figure and table, to compare others with it. The last line is the code of what
# you see: a click selects it, so that it can be pasted into a cell.
#
# Try: pin the run at 4 requests a second, then raise the rate. From where on do requests wait? Do more pages help, or another policy?

# %%
explorer = cb.explore(
    exp, rate=(1, 16), num_pages=[128, 256, 512, 1024],
    policy=[cb.ContinuousBatching(), cb.ChunkedPrefill(), cb.Orca(), cb.StaticBatching(8)],
)
explorer

# %% [markdown]
# What the widgets show is there in Python too: the line, the result, and a table with a row a run (also as a file, by the link
# below the table).

# %%
explorer.pin()
explorer.controls["workload.rate"].value = 12.0
explorer.controls["num_pages"].value = 256
print(explorer.code)
print(explorer.table[["rate", "num_pages", "output_tokens_per_s", "ttft_s_mean", "page_use", "preemptions"]].round(2).to_string())

# %% [markdown]
# ## Replay
#
# The same run, step by step: who sits where, who waits (dashed: preempted, and so waiting again), whose page is whose. Space plays and
# pauses, the arrow keys step, up and down choose a request, and so does a click on a seat or a page.

# %%
player = cb.replay(explorer.result)
player

# %% [markdown]
# Any decision log plays as well, and is a file that can be sent around: `contbatch replay run.jsonl` writes a page that needs nothing
# but a browser. Here is the step in which the queue was longest.

# %%
steps = explorer.result.steps
player.step = int(steps.waiting.idxmax())
folder = tempfile.mkdtemp()
page = player.save(os.path.join(folder, "run.html"))
print(f"step {player.step}: {steps.waiting.max()} requests waiting; the film is in {page.name}")
