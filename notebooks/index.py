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
# # contbatch: the notebooks
#
# Continuous batching and paged attention you can read, run and measure. All run on the CPU, in any order; every number
# that is not called measured comes out the same each time.

# %% [markdown]
# ### [00_quickstart](00_quickstart.ipynb)
# Why a finished answer still has to wait
#
# <img src="pictures/00_quickstart.png" alt="" width="400">

# %% [markdown]
# ### [01_pages](01_pages.ipynb)
# Where the memory goes
#
# <img src="pictures/01_pages.png" alt="" width="400">

# %% [markdown]
# ### [02_iteration_level](02_iteration_level.ipynb)
# One step at a time
#
# <img src="pictures/02_iteration_level.png" alt="" width="400">

# %% [markdown]
# ### [03_policies](03_policies.ipynb)
# Write your own policy, and run it against the others
#
# <img src="pictures/03_policies.png" alt="" width="400">

# %% [markdown]
# ### [04_sweeps](04_sweeps.ipynb)
# Many experiments
#
# <img src="pictures/04_sweeps.png" alt="" width="400">

# %% [markdown]
# ### [05_sim_vs_engine](05_sim_vs_engine.ipynb)
# Is the simulator to be believed?
#
# <img src="pictures/05_sim_vs_engine.png" alt="" width="400">

# %% [markdown]
# ### [06_tensorrt](06_tensorrt.ipynb)
# From a model to a TensorRT engine
#
# <img src="pictures/06_tensorrt.png" alt="" width="400">

# %% [markdown]
# ### [07_workloads](07_workloads.ipynb)
# Workloads: the same mean, another server
#
# <img src="pictures/07_workloads.png" alt="" width="400">

# %% [markdown]
# ### [08_widgets](08_widgets.ipynb)
# Sliders and a film
#
# <img src="pictures/08_widgets.png" alt="" width="400">

# %% [markdown]
# ### [09_batch_invariance](09_batch_invariance.ipynb)
# Does the company matter?
#
# <img src="pictures/09_batch_invariance.png" alt="" width="400">

# %% [markdown]
# ### [10_orca](10_orca.ipynb)
# Orca: scheduling at every iteration
#
# <img src="pictures/10_orca.png" alt="" width="400">

# %% [markdown]
# ### [11_vllm](11_vllm.ipynb)
# vLLM: memory in pages
#
# <img src="pictures/11_vllm.png" alt="" width="400">

# %% [markdown]
# ### [12_sarathi](12_sarathi.ipynb)
# Sarathi-Serve: no stalls
#
# <img src="pictures/12_sarathi.png" alt="" width="400">

# %% [markdown]
# ### [13_anyscale](13_anyscale.ipynb)
# Anyscale: the more answers differ, the more there is to gain
#
# <img src="pictures/13_anyscale.png" alt="" width="400">

# %% [markdown]
# ### [14_teaching](14_teaching.ipynb)
# The textbook example, and its limits
#
# <img src="pictures/14_teaching.png" alt="" width="400">

# %% [markdown]
# ### [15_host_or_rent](15_host_or_rent.ipynb)
# To host or to rent
#
# <img src="pictures/15_host_or_rent.png" alt="" width="400">

# %% [markdown]
# ### [16_many_gpus](16_many_gpus.ipynb)
# Many GPUs
#
# <img src="pictures/16_many_gpus.png" alt="" width="400">

# %% [markdown]
# ### [17_measures](17_measures.ipynb)
# What to measure
#
# <img src="pictures/17_measures.png" alt="" width="400">

# %% [markdown]
# ## Is everything there?
#
# What would run a model on this machine; `contbatch doctor` in a terminal says more.

# %%
from contbatch.doctor import diagnose

print("backend:", diagnose().backend)
