"""OpenVINO GenAI's own continuous batching (C++) on the common workload; see cpu.py. Arguments: MODEL.gguf PRECISION.

Runs in a virtual environment of its own: pip install openvino-genai==2026.4.1.0. Same file, seats (64) and token budget
(512) as ours, no prefix cache.
"""

import json
import sys
from time import perf_counter

import numpy as np
import openvino as ov
import openvino_genai as genai
from workload import common_workload


def main() -> None:
    limits = genai.SchedulerConfig()
    limits.cache_size = 2
    limits.max_num_batched_tokens, limits.max_num_seqs, limits.enable_prefix_caching = 512, 64, False
    pipeline = genai.ContinuousBatchingPipeline(sys.argv[1], limits, "CPU", {"INFERENCE_PRECISION_HINT": sys.argv[2]})
    prompts, lengths = common_workload()
    for run, _ in enumerate(sys.stdin):
        handles, steps, began = [], 0, perf_counter()
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            sampling = genai.GenerationConfig()
            sampling.max_new_tokens, sampling.ignore_eos, sampling.do_sample = length, True, False
            handles.append(pipeline.add_request(1000 * run + i, ov.Tensor(np.array([prompt], np.int64)), sampling))
        while pipeline.has_non_finished_requests():
            pipeline.step()
            steps += 1
        seconds = perf_counter() - began
        tokens = sum(len(handle.read_all()[0].generated_ids) for handle in handles)
        print(json.dumps({"seconds": seconds, "tokens": tokens, "steps": steps}), flush=True)


if __name__ == "__main__":
    main()
