"""OpenVINO GenAI's own continuous batching (C++); see cpu.py. Arguments: MODEL.gguf PRECISION WORKLOAD.

Runs in a virtual environment of its own: pip install openvino-genai==2026.4.1.0. Same file, seats and token budget as
ours, no prefix cache.
"""

import sys
from itertools import count
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from workload import SEATS, WORKLOADS, Figures, serve, timed


def main() -> None:
    model, precision, workload = sys.argv[1:]
    prompts, lengths, budget = WORKLOADS[workload]()
    limits = genai.SchedulerConfig()
    limits.cache_size = 2
    limits.max_num_batched_tokens, limits.max_num_seqs, limits.enable_prefix_caching = budget, SEATS, False
    pipeline = genai.ContinuousBatchingPipeline(model, limits, "CPU", {"INFERENCE_PRECISION_HINT": precision})
    names = count()

    def run() -> Figures:
        handles: list[Any] = []

        def add() -> None:
            for prompt, length in zip(prompts, lengths, strict=True):
                sampling = genai.GenerationConfig()
                sampling.max_new_tokens, sampling.ignore_eos, sampling.do_sample = length, True, False
                tokens = ov.Tensor(np.array([prompt], np.int64))
                handles.append(pipeline.add_request(next(names), tokens, sampling))

        def step() -> bool:
            going = bool(pipeline.has_non_finished_requests())
            if going:
                pipeline.step()
            return going

        figures = timed(add, step)
        return figures | {"tokens": sum(len(handle.read_all()[0].generated_ids) for handle in handles)}

    serve(run)


if __name__ == "__main__":
    main()
