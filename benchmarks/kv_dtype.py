"""How often answers stay the same with smaller pages: greedy decoding of SmolLM2-135M in float32 otherwise.

python benchmarks/kv_dtype.py
"""

import contbatch as cb

SUBJECTS = "rain", "bread", "a clock", "music", "the moon", "a river", "iron", "a prime number"
PROMPTS = [f"{start} {subject}" for start in ("What is", "Tell me a story about") for subject in SUBJECTS]
SAMPLING = cb.SamplingParams(max_tokens=64, ignore_eos=True)


def answers(kv_dtype: str) -> list[list[int]]:
    with cb.LLM(kv_dtype=kv_dtype) as llm:
        prompts = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        return [list(output.token_ids) for output in llm.chat(prompts, SAMPLING)]


def agreement(found: list[int], expected: list[int]) -> int:
    """Return the number of tokens before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b), len(expected))


def main() -> None:
    expected = answers("f32")
    print(f"{len(PROMPTS)} answers of {SAMPLING.max_tokens} tokens\n")
    print("| pages | same to the end | tokens before a difference, mean |\n|---|---|---|")
    for kv_dtype in ("bf16", "int8"):
        same = [agreement(*pair) for pair in zip(answers(kv_dtype), expected, strict=True)]
        whole = sum(n == SAMPLING.max_tokens for n in same)
        print(
            f"| {kv_dtype} | {whole} of {len(same)} | {sum(same) / len(same):.1f} of {SAMPLING.max_tokens} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
