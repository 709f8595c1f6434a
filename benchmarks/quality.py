"""What fewer bits cost: perplexity on a text that nothing was calibrated on, and greedy answers compared with float32.

    python benchmarks/quality.py [--prompts 50] [--tokens 64] [--kinds w8a8] [--text FILE ... --length 4096]

Perplexity is that of each token after the ones before it, in pieces of 512 tokens; its ratio to float32 comes with the
standard error over tokens. "alike" is the share of positions at which both would choose the same token, "answers" how
many greedy answers are the same to the end, "until" after how many tokens they first differ on average. `--text` adds
a row for the beginning of each of these files, and one for all of them together.
"""

import argparse
from collections.abc import Sequence
from math import exp
from pathlib import Path
from typing import Any

import numpy as np

import contbatch as cb
from contbatch.calibrate import paragraphs, whole

KINDS: dict[str, dict[str, Any]] = {
    "f32": {},
    "bf16": {"precision": "bf16"},
    "f32, int8 pages": {"kv_dtype": "int8"},
    "w8a8, bf16 pages": {"precision": "w8a8", "kv_dtype": "bf16"},
    "w8a8": {"precision": "w8a8"},
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


def file_with_text(path: str) -> Path:
    """Return the path of a file that there is, with something in it, as UTF-8."""
    try:
        if Path(path).read_text(encoding="utf-8").strip():
            return Path(path)
        reason = "nothing in it"
    except (OSError, UnicodeDecodeError) as error:
        reason = str(error)
    raise argparse.ArgumentTypeError(f"no text to read in {path}: {reason}")


def row(name: str, told: np.ndarray, likeliest: np.ndarray, floats: tuple[np.ndarray, np.ndarray]) -> str:
    """Say how a text was read, beside how float32 read it."""
    ratio, error = (floats[0] - told).mean(), (floats[0] - told).std() / len(told) ** 0.5
    return f"{name:34} {exp(-told.mean()):10.3f} {exp(ratio):7.4f} {error:7.4f} {(likeliest == floats[1]).mean():7.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS)[1:], default=list(KINDS)[1:], help="beside f32")
    parser.add_argument("--text", nargs="+", type=file_with_text, default=[], metavar="FILE", help="read these too")
    parser.add_argument("--length", type=int, default=4096, help="tokens to read of each FILE, %(default)s by default")
    options = parser.parse_args()
    if min(options.prompts, options.tokens, options.length) < 1:
        parser.error("--prompts, --tokens and --length must be at least 1")
    greedy = cb.SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    first = None
    print(f"{'':34} {'perplexity':>10} {'ratio':>7} {'± ':>7} {'alike':>7} {'answers':>8} {'until':>6}")
    for name in ("f32", *options.kinds):
        with cb.LLM(options.model, **KINDS[name]) as llm:
            text = paragraphs("held_out", llm.tokenizer)
            flat = [token for paragraph in text for token in [*paragraph, *llm.tokenizer.encode("\n\n")]]
            texts = [llm.tokenizer.encode(f.read_text(encoding="utf-8"))[: options.length] for f in options.text]
            seen = [read(llm, tokens) for tokens in (flat, *texts)]
            answers = [o.token_ids for o in llm.generate(prompts_of(text, options.prompts), greedy, progress=False)]
        first = first or (seen, answers)
        until = [
            next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
            for x, y in zip(answers, first[1], strict=True)
        ]
        same = sum(a == b for a, b in zip(answers, first[1], strict=True))
        print(f"{row(name, *seen[0], first[0][0])} {same:4}/{len(answers)} {np.mean(until):6.1f}", flush=True)
        for file, found, floats in zip(options.text, seen[1:], first[0][1:], strict=True):
            print(row(f"  {file.name:.31}", *found, floats), flush=True)
        if options.text:
            together = [
                (np.concatenate(a), np.concatenate(b)) for a, b in (zip(*s[1:], strict=True) for s in (seen, first[0]))
            ]
            print(row("  all of these files", *together[0], together[1]), flush=True)


if __name__ == "__main__":
    main()
