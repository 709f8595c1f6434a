"""contbatch on the common workload, one run per line of standard input; see cpu.py.

Arguments: MODEL PRECISION KV_DTYPE POLICY.
"""

import json
import sys

from workload import common_workload

import contbatch as cb


def main() -> None:
    model, precision, kv_dtype, policy = sys.argv[1:]
    llm = cb.LLM(model, precision=precision, kv_dtype=kv_dtype, num_pages=1200)
    prompts, lengths = common_workload()
    sampling = [cb.SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    for _ in sys.stdin:
        result = llm.run(llm.requests(prompts, sampling), getattr(cb, policy)())
        figures = result.summary()
        row = {"seconds": figures.duration_s, "tokens": figures.output_tokens, "steps": figures.steps}
        print(json.dumps(row | {"host": result.steps.host_s.sum() / figures.duration_s}), flush=True)


if __name__ == "__main__":
    main()
