"""What fewer bits cost: perplexity on a text that nothing was calibrated on, and greedy answers compared with float32.

    python benchmarks/quality.py [--prompts 50] [--tokens 64]

Perplexity is that of each token after the ones before it, in pieces of 512 tokens; its ratio to float32 comes with the
standard error over tokens. "alike" is the share of positions at which both would choose the same token, "answers" how
many greedy answers are the same to the end, "until" after how many tokens they first differ on average.
"""

import argparse
from collections.abc import Sequence
from math import exp
from typing import Any

import numpy as np

import contbatch as cb
from contbatch.calibrate import paragraphs, whole

KINDS: dict[str, dict[str, Any]] = {
    "f32": {},
    "bf16": {"precision": "bf16"},
    "f32, int8 pages": {"kv_dtype": "int8"},
    "w8a8": {"precision": "w8a8"},
    "w8a8, int8 pages": {"precision": "w8a8", "kv_dtype": "int8"},
}
PIECE = 512


def read(llm: cb.LLM, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probability of each token, and the likeliest in its place."""
    told, likeliest = [], []
    for start in range(0, len(tokens), PIECE):
        piece = [llm.config.bos_token_id or 0, *tokens[start : start + PIECE]]
        logits = llm.runner.model.forward(whole(piece))[:-1].astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        total = np.log(np.exp(logits).sum(axis=1))
        told.append(logits[np.arange(len(logits)), piece[1:]] - total)
        likeliest.append(logits.argmax(axis=1))
    return np.concatenate(told), np.concatenate(likeliest)


def prompts_of(text: list[list[int]], count: int) -> list[list[int]]:
    """Cut beginnings of 8 to 31 tokens out of a text."""
    flat = [token for paragraph in text for token in paragraph]
    starts = np.linspace(0, len(flat) - 32, count, dtype=int)
    return [flat[start : start + 8 + i % 24] for i, start in enumerate(starts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    greedy = cb.SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    first = None
    print(f"{'':18} {'perplexity':>10} {'ratio':>7} {'± ':>7} {'alike':>7} {'answers':>8} {'until':>6}")
    for name, kind in KINDS.items():
        with cb.LLM(options.model, **kind) as llm:
            text = paragraphs("held_out", llm.tokenizer)
            flat = [token for paragraph in text for token in [*paragraph, *llm.tokenizer.encode("\n\n")]]
            told, likeliest = read(llm, flat)
            answers = [o.token_ids for o in llm.generate(prompts_of(text, options.prompts), greedy, progress=False)]
        first = first or (told, likeliest, answers)
        ratio, error = (first[0] - told).mean(), (first[0] - told).std() / len(told) ** 0.5
        alike = (likeliest == first[1]).mean()
        until = [
            next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
            for x, y in zip(answers, first[2], strict=True)
        ]
        same = sum(a == b for a, b in zip(answers, first[2], strict=True))
        row = f"{name:18} {exp(-told.mean()):10.3f} {exp(ratio):7.4f} {error:7.4f} {alike:7.1%}"
        print(f"{row} {same:4}/{len(answers)} {np.mean(until):6.1f}", flush=True)


if __name__ == "__main__":
    main()
