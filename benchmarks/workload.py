"""The common workload: 64 requests at once, 4,676 prompt tokens, 4,538 output tokens, the end token ignored."""

import numpy as np


def common_workload() -> tuple[list[list[int]], list[int]]:
    """Return prompts (16 to 128 random token ids each) and output lengths (geometric, mean about 64, 4 to 256)."""
    rng = np.random.default_rng(0)
    prompt_lengths = rng.integers(16, 129, 64)
    output_lengths = np.clip(rng.geometric(1 / 64, 64), 4, 256).tolist()
    return [rng.integers(1000, 40000, n).tolist() for n in prompt_lengths], output_lengths
