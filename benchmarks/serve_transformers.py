"""Hugging Face's continuous batching; see cpu.py. Arguments: DIRECTORY PRECISION WORKLOAD.

Runs in a virtual environment of its own: pip install transformers torch. Seats and token budget of ours, no shared
pages. It works in a thread of its own, so that its steps can't be counted.
"""

import sys
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from workload import SEATS, WORKLOADS, Figures, serve

PAGE_SIZE = 32


def main() -> None:
    path, precision, workload = sys.argv[1:]
    prompts, lengths, budget = WORKLOADS[workload]()
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[precision]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    longest = max(len(p) + n for p, n in zip(prompts, lengths, strict=True))
    limits = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=SEATS * -(-longest // PAGE_SIZE),
        max_batch_tokens=budget,
        max_requests_per_batch=SEATS,
        allow_block_sharing=False,
    )
    manager = model.init_continuous_batching(GenerationConfig(do_sample=False, eos_token_id=-1), limits)
    manager.start()

    def run() -> Figures:
        done: list[Any] = []
        began = perf_counter()
        for prompt, length in zip(prompts, lengths, strict=True):
            manager.add_request(prompt, max_new_tokens=length, record_timestamps=True, eos_token_id=-1)
        while len(done) < len(prompts):
            if (result := manager.get_result(timeout=1)) is not None and result.is_finished():
                done.append(result)
            elif not manager.is_running():
                raise SystemExit("the thread that generates ended")
        first, last = (max(result.timestamps[i] for result in done) for i in (0, -1))
        tokens = sum(len(result.generated_tokens) for result in done)
        return {"seconds": perf_counter() - began, "tokens": tokens, "decode_s": last - first}

    serve(run)


if __name__ == "__main__":
    main()
