"""What the widgets take: a move of a slider in `explore` (200 requests), a frame of `replay` in Chromium (256 seats).

Goals: 300 ms a move; 16.7 ms a frame, so that 60 steps a second stay fluid.
"""

import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
from playwright.sync_api import sync_playwright

import contbatch as cb

FRAMES = """async () => {
  const range = document.querySelector(".cb-replay input"), spent = [];
  for (let step = 0; step < range.max; step++) {
    await new Promise(requestAnimationFrame);
    const begun = performance.now();
    range.value = step;
    range.dispatchEvent(new Event("input")); // goes to the step and draws it
    spent.push(performance.now() - begun);
  }
  return spent;
}"""


def row(what: str, times_ms: list[float], goal_ms: float) -> dict[str, object]:
    """Return the figures of one kind of work."""
    middle, tail = np.percentile(times_ms, [50, 99])
    return {"what": what, "times": len(times_ms), "median ms": middle, "P99 ms": tail, "goal ms": goal_ms}


def moves(policy: cb.Policy, rate: float) -> list[float]:
    """Move two sliders of an explorer up and down, and return what each move takes: run, figure, table."""
    workload = cb.Poisson(rate=rate, num_requests=200, seed=0)
    experiment = cb.Experiment(policy=policy, workload=workload, num_pages=512)
    explorer = cb.explore(experiment, rate=(1, 64), max_num_seqs=(8, 256))
    times = []
    for turn in range(10):
        name = ("workload.rate", "max_num_seqs")[turn % 2]
        explorer.controls[name].value = (rate * (1 + turn / 5), 8 + 24 * turn)[turn % 2]
        explorer.update()  # without an event loop the move itself has run it already; what counts is a whole run
        begun = time.perf_counter()
        explorer.controls[name].value = (rate * (1.05 + turn / 5), 9 + 24 * turn)[turn % 2]
        times.append(1e3 * (time.perf_counter() - begun))
    explorer.close()
    return times


def frames() -> list[float]:
    """Play a run of 256 seats and over 1,000 steps, and return what each step takes to show."""
    lengths = cb.lengths.Uniform(30, 200)
    workload = cb.Poisson(rate=200, num_requests=1000, seed=1, prefix=cb.SharedPrefix(64, 3), output=lengths)
    experiment = cb.Experiment(policy=cb.ContinuousBatching(), workload=workload, max_num_seqs=256, num_pages=2500)
    player = cb.replay(cb.run(experiment.replace(prefix_cache=True)))
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.goto(player.save(Path(folder) / "run.html").as_uri())
        page.locator(".cb-replay .clock").wait_for()
        times: list[float] = page.evaluate(FRAMES)
        browser.close()
    return times


def main() -> None:
    """Print the table."""
    policies = (cb.ContinuousBatching(), cb.ChunkedPrefill(), cb.StaticBatching(16), cb.OneAtATime())
    rows = [row("replay, 256 seats", frames(), 1000 / 60)]
    rows += [row(f"explore, {policy}, {rate}/s", moves(policy, rate), 300) for policy in policies for rate in (4, 16)]
    print(pd.DataFrame(rows).round(1).to_string(index=False))


if __name__ == "__main__":
    main()
