"""Swap and recomputation on the real model."""

from smollm2 import model_path

import contbatch as cb


def test_the_real_model_swapped_computed_again_and_undisturbed():
    prompts = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time, there was a"]
    sampling = cb.SamplingParams(max_tokens=14, temperature=0.8, seed=1, n=2, ignore_eos=True)
    with cb.LLM(model_path(), num_pages=24, num_host_pages=24) as llm:
        tokens, counts = [], []
        for limits in ({}, {"num_pages": 6}, {"num_pages": 6, "num_host_pages": 0}):
            requests = llm.requests(prompts, sampling)
            llm.run(requests, **limits)
            tokens.append([[c.token_ids for c in llm.output(r).choices] for r in requests])
            samples = [s for r in requests for s in r.samples]
            counts.append((sum(s.num_preemptions for s in samples) > 0, sum(s.num_swaps for s in samples) > 0))
    assert counts == [(False, False), (True, True), (True, False)]
    assert tokens[0] == tokens[1] == tokens[2]
