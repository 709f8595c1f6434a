"""contbatch; see cpu.py. Arguments: MODEL PRECISION WORKLOAD KV_DTYPE POLICY SEATS."""

import sys

from workload import WORKLOADS, Figures, serve

import contbatch as cb


def main() -> None:
    model, precision, workload, kv_dtype, policy, seats = sys.argv[1:]
    prompts, lengths, budget = WORKLOADS[workload]()
    llm = cb.LLM(
        model,
        precision=precision,
        kv_dtype=kv_dtype,
        num_pages=1200,
        max_num_seqs=int(seats),
        max_num_batched_tokens=budget,
        policy={
            "static": cb.StaticBatching(batch_size=int(seats)),
            "continuous": cb.ContinuousBatching(),
            "chunked": cb.ChunkedPrefill(),
        }[policy],
    )
    sampling = [cb.SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]

    def run() -> Figures:
        result = llm.run(llm.requests(prompts, sampling))
        figures, steps = result.summary(), result.steps
        each = steps.elapsed_s + steps.host_s
        return {
            "seconds": figures.duration_s,
            "tokens": int(figures.output_tokens),
            "steps": int(figures.steps),
            "host": steps.host_s.sum() / figures.duration_s,
            "decode_s": each[1:].sum(),
            "step_s": each.tolist(),
            "model_s": steps.elapsed_s[1:].sum(),
        }

    serve(run)


if __name__ == "__main__":
    main()
