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
# # To host or to rent
#
# A GPU costs by the hour, an API by the token. Which is cheaper depends on how many requests there are, and on how many of them a GPU can
# answer **in time**: that is the scheduler's doing, and here it is simulated. Everything in the next cell is yours to change: the prices are
# round numbers and no offer of anybody's.

# %% tags=["parameters"]
gpu_name, model, gpus = "A100-80GB", "llama-3-8b", 1
gpu_hour = 2.0  # change me: of one GPU, with host, power and people
api_prompt, api_output = 0.2, 0.6  # change me: per million tokens
prompt_median, output_median = 600, 150  # tokens of a request
ttft_s, tpot_s, share = 1.0, 0.05, 0.95  # promised: first token, each further token, to which share of the requests
num_requests = 1000  # simulated in each run

# %%
import numpy as np
import pandas as pd
from ipywidgets import HTML, FloatLogSlider, FloatSlider, VBox

import contbatch as cb
from contbatch.lengths import LogNormal

# %% [markdown]
# ## How many requests does a card serve in time?
#
# The load: Poisson arrivals, log-normal lengths (σ = 0.7). To serve a trace, let `load` be a `cb.Trace` (`cb.traces.load_azure` and others), and `at` do
# what its comment says. The highest rate at which the share of requests that get what was promised is kept, by bisection to 5 %.

# %%
prices = cb.Prices(gpu_hour=gpu_hour, gpus=gpus, api_prompt=api_prompt, api_output=api_output)
server = cb.Simulated(gpu=gpu_name, model=model, tensor_parallel=gpus)
load = cb.Poisson(rate=1, num_requests=num_requests, prompt=LogNormal(prompt_median, 0.7, high=6000), output=LogNormal(output_median, 0.7, high=1500), seed=0)
policies = {"one at a time": cb.OneAtATime(), "Orca, 16 seats": cb.Orca(), "prompts first": cb.ContinuousBatching(), "chunked prefill": cb.ChunkedPrefill()}
seats, budgets = {"one at a time": 1, "Orca, 16 seats": 16}, {"chunked prefill": 512}


def at(rate):
    return load.replace(rate=rate)  # of a trace: load.at_rate(rate)


def run(name, rate):
    return cb.simulate(at(rate), policies[name], server, max_num_seqs=seats.get(name, 64), max_num_batched_tokens=budgets.get(name, 8192))


def keeps(result):
    return result.attainment(ttft_s=ttft_s, tpot_s=tpot_s) >= share


def capacity(name, keeps):
    return cb.find_capacity(lambda rate: run(name, rate), keeps, low=0.01, high=40, tolerance=0.05)


found = {name: capacity(name, keeps) for name in policies}
served = {name: c.result.summary().requests_per_s for name, c in found.items()}

# %%
turns = load.turns()
prompt, output = np.mean([turn.num_new_tokens for turn in turns]), np.mean([turn.output_tokens for turn in turns])
print(f"a request: {prompt:.0f} tokens in, {output:.0f} out; the API takes {1000 * prices.api_request(prompt, output):.3f} for a thousand of them")
limits = cb.limits_bound({name: capacity.beyond for name, capacity in found.items()})
table = pd.DataFrame({name: {"offered/s": c.rate, "arrived/s": len(turns) / c.result.requests.arrival_s.max(), "served/s": served[name], "served/day": 86400 * served[name]} for name, c in found.items()}).T
print(table.assign(**{"bound beyond it": limits.warning.str.removesuffix(" bound too")}).round(2).to_string())

# %% [markdown]
# *Offered* is the rate asked of the Poisson process, *arrived* what its draws came to, *served* the requests over the seconds to the last answer, with a
# server that empties at the end. All below goes by what was served. A run of more requests brings the three closer together, and a short one is generous:
# a server that is offered a little too much keeps its promise for a while. So raise `num_requests` before you sign anything.
#
# ## What a million tokens cost
#
# Of prompts and answers, on a card that is always as busy as the promise allows, and what the API takes for the same mixture. The break-even is the
# number of requests a day at which both cost the same. Only a card that can serve as many as that can ever pay.

# %%
def economics(prices, rate):
    even = prices.break_even(prompt, output)
    return {
        "hosted, per million": prices.million_tokens(rate * (prompt + output)),
        "API, per million": 1e6 * prices.api_request(prompt, output) / (prompt + output),
        "break-even [requests/day]": even,
        "that is, of the card [%]": 100 * even / (86400 * rate),
    }


print(pd.DataFrame({name: economics(prices, rate) for name, rate in served.items()}).T.round(2).to_string())

# %% [markdown]
# The break-even itself does not depend on the policy: it is the price of a day over that of a request. How much of the card is left beyond it
# does.

# %%
use = np.array([0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0])
costs = pd.concat([pd.DataFrame({"policy": name, "use [%]": 100 * use, "cost": [prices.million_tokens(rate * (prompt + output), u) for u in use]}) for name, rate in served.items()])
axis = cb.plots.curves(costs, "use [%]", "cost", by="policy", log="xy", xlabel="requests that come, of those the card could serve in time [%]", ylabel="cost of a million tokens", limit=1e6 * prices.api_request(prompt, output) / (prompt + output), limit_label="API", title=f"{model} on {gpus} × {gpu_name}, simulated")
for line, size in zip(axis.lines, (5, 5, 11, 5)):  # two lines are nearly the same: one shows around the other
    line.set_markersize(size)

# %% [markdown]
# ## A day's bill
#
# Requests that come evenly over the day; whole servers. In truth they come in waves, and the servers are bought for the crest: then divide the
# capacity by the crest over the mean.

# %%
per_day = np.geomspace(1e4, 2e6, 60)
bills = [pd.DataFrame({"who": "API", "requests": per_day, "bill": per_day * prices.api_request(prompt, output)})]
bills += [pd.DataFrame({"who": name, "requests": per_day, "bill": [prices.host_day(n, rate) for n in per_day]}) for name, rate in served.items() if name != "one at a time"]
axis = cb.plots.curves(pd.concat(bills), "requests", "bill", by="who", log="xy", xlabel="requests a day", ylabel="cost of a day", title="what a day costs")
for line, width in zip(axis.lines, (1.5, 8, 5, 1.5)):  # whoever needs one server pays the same
    line.set(linewidth=width, markersize=0)
legend = axis.legend(fontsize=8, frameon=False)
axis.xaxis.set_major_formatter("{x:,.0f}")

# %% [markdown]
# ## What moves it
#
# The cost of a million hosted tokens at 30 % use, under each policy, if one number changes at a time. A stricter promise costs capacity:

# %%
changes = {"as above": {}, "GPU at half the price": {"gpu_hour": gpu_hour / 2}, "GPU at twice the price": {"gpu_hour": 2 * gpu_hour}}
rows = {what: {name: prices.replace(**change).million_tokens(rate * (prompt + output), 0.3) for name, rate in served.items()} for what, change in changes.items()}
strict = lambda result: result.attainment(ttft_s=ttft_s / 2, tpot_s=tpot_s / 2) >= share
stricter = {name: capacity(name, strict).result.summary().requests_per_s for name in policies}
rows["half the seconds promised"] = {name: prices.million_tokens(rate * (prompt + output), 0.3) for name, rate in stricter.items()}
print(pd.DataFrame(rows).T.round(2).to_string())

# %% [markdown]
# ## Change the numbers
#
# With a running kernel: capacities are those served above, prices and use are yours.

# %%
def compare(gpu_hour, api_prompt, api_output, requests_per_day):
    own = prices.replace(gpu_hour=gpu_hour, api_prompt=api_prompt, api_output=api_output)
    api = requests_per_day * own.api_request(prompt, output)
    bill = {name: own.host_day(requests_per_day, rate) for name, rate in served.items()}
    table = pd.DataFrame({"hosted, a day": bill, "of the API's [%]": {name: 100 * cost / api for name, cost in bill.items()}})
    return f"API {api:,.2f} a day; break-even {own.break_even(prompt, output):,.0f} requests a day\n{table.round(1).to_string()}"


def update(_=None):
    answer.value = f"<pre>{compare(**{name: slider.value for name, slider in sliders.items()})}</pre>"


answer, sliders = HTML(), {
    "gpu_hour": FloatSlider(value=gpu_hour, min=0.1, max=10, step=0.1, description="GPU hour"),
    "api_prompt": FloatSlider(value=api_prompt, min=0.0, max=5, step=0.05, description="API, prompt"),
    "api_output": FloatSlider(value=api_output, min=0.05, max=20, step=0.05, description="API, output"),
    "requests_per_day": FloatLogSlider(value=1e5, base=10, min=2, max=7, step=0.1, readout_format=",.0f", description="requests"),
}
for slider in sliders.values():
    slider.observe(update, "value")
update()
VBox([*sliders.values(), answer])

# %% [markdown]
# What is left out: people, idle hours of waves, failures, tokens that an API counts otherwise, and that the models behind both are seldom the
# same. The device is simulated, with the assumptions that [docs/simulation.md](../docs/simulation.md) lists.
