"""What the engines of cpu.py are given, and how they tell what they took. Needs numpy alone, in any environment."""

import json
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np

Load = tuple[list[list[int]], list[int], int]
"""Prompts as token ids, how many tokens to generate for each, and the token budget of a step."""
Figures = dict[str, Any]
"""Of a run, by name: numbers, and `step_s` a number for each step."""
SEATS = 64


def common() -> Load:
    """64 requests at once: prompts of 16 to 128 random tokens, 4 to 256 to generate (geometric, mean about 64).

    4,676 prompt and 4,538 output tokens.
    """
    rng = np.random.default_rng(0)
    prompt_lengths = rng.integers(16, 129, SEATS)
    output_lengths = np.clip(rng.geometric(1 / 64, SEATS), 4, 256).tolist()
    return [rng.integers(1000, 40000, n).tolist() for n in prompt_lengths], output_lengths, 512


def equal() -> Load:
    """64 equal requests, all prompts of 64 tokens in one step: then 32 steps of 64 decodes each, and nothing else."""
    return np.random.default_rng(0).integers(1000, 40000, (SEATS, 64)).tolist(), [33] * SEATS, 64 * SEATS


WORKLOADS: dict[str, Callable[[], Load]] = {"common": common, "equal": equal}


def timed(add: Callable[[], None], step: Callable[[], bool]) -> Figures:
    """Add requests and step until `step` is False: seconds of all, of the steps after the first, of each, and steps."""
    ends = [perf_counter()]
    add()
    while step():
        ends.append(perf_counter())
    each = [after - before for before, after in pairwise(ends)]
    return {"seconds": sum(each), "decode_s": sum(each[1:]), "step_s": each, "steps": len(each)}


def serve(run: Callable[[], Figures], lines: Iterable[str] = sys.stdin) -> None:
    """Run once for each line, and answer with a line of JSON: at least `seconds` and `tokens`."""
    for _ in lines:
        print(json.dumps(run()), flush=True)
