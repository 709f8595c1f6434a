"""Penalties, bias, min_tokens and log-probabilities on models, against dense forward passes in float64."""

from functools import lru_cache

import numpy as np
import pytest
from dense_model import dense_logits
from fake_model import engine_of, same_scores, solo
from smollm2 import model_path

import contbatch as cb
from contbatch.errors import InvalidRequestError
from contbatch.export import export_onnx
from contbatch.model import load_model, random_model
from contbatch.runners.cpu import CPUModel
from contbatch.runners.reference import ReferenceModel

TINY = random_model(0)
EOS = (2, 9)
ASKS = cb.SamplingParams(max_tokens=10, logprobs=4, prompt_logprobs=2)
SPECS = [
    ([1, 2, 3, 4, 5, 6, 7, 8, 9], ASKS.replace(repetition_penalty=1.3, logit_bias={17: 3.5, 40: -100})),
    ([200, 100, 200], ASKS.replace(presence_penalty=1.5, frequency_penalty=0.7, prompt_logprobs=None)),
    ([7], ASKS.replace(min_tokens=6, stop_token_ids=tuple(range(0, 256, 2)), logprobs=0, prompt_logprobs=0)),
    ([11, 12, 13, 14, 15], ASKS.replace(temperature=0.8, top_p=0.9, seed=3, frequency_penalty=2.0, logprobs=-1)),
    ([51, 52, 53, 54, 55], ASKS.replace(temperature=1.2, seed=5, n=3, prompt_logprobs=None)),
    ([31, 32, 33, 34], ASKS.replace(temperature=1.0, seed=4, repetition_penalty=0.8, logprobs=None)),
]
WAYS = {
    "chunks": (cb.ChunkedPrefill(), 60, {"max_num_batched_tokens": 4}, False),
    "preempted": (cb.ChunkedPrefill(), 10, {}, True),
    "swapped": (cb.ChunkedPrefill(), 10, {"num_host_pages": 30}, True),
    "swapped, shared": (cb.ChunkedPrefill(), 14, {"num_host_pages": 30, "prefix_cache": True}, True),
    "prompts first": (cb.ContinuousBatching(), 10, {"max_num_batched_tokens": 9}, True),
    "static": (cb.StaticBatching(5, pad=True), 60, {}, False),
    "one": (cb.OneAtATime(), 10, {}, False),
}


@lru_cache(None)
def tiny_logits(tokens):
    return dense_logits(TINY, np.array(tokens))[-1]


def tiny_requests():
    return [cb.Request(i, prompt, sampling, eos_token_ids=EOS) for i, (prompt, sampling) in enumerate(SPECS)]


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory):
    return export_onnx(TINY, tmp_path_factory.mktemp("tiny") / "model.onnx", "float32")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", [CPUModel, ReferenceModel])
def test_nothing_depends_on_policy_chunks_or_preemption(tiny_path, backend, way):
    policy, num_pages, limits, preempts = WAYS[way]
    requests = tiny_requests()
    model = backend(tiny_path, num_pages, 2, num_host_pages=limits.get("num_host_pages", 0))
    result = engine_of(policy, model, **limits).run(requests)
    assert (result.requests.preemptions.sum() > 0) == preempts
    samples = [sample for r in requests for sample in r.samples]
    assert (sum(r.num_swaps for r in samples) > 0) == ("num_host_pages" in limits)
    for r in samples:
        output, reason, of_output, of_prompt = solo(r, tiny_logits)
        assert (r.output_token_ids, r.finish_reason) == (output, reason)
        same_scores(r.logprobs, of_output, 5e-5)
        same_scores(r.prompt_logprobs, of_prompt, 5e-5)


def test_the_requests_above_do_ask_for_something():
    plain = [cb.Request(r.request_id, r.prompt_token_ids, ASKS.replace(seed=r.sampling.seed)) for r in tiny_requests()]
    for r, without in zip(tiny_requests(), plain, strict=True):
        assert solo(r, tiny_logits)[0] != solo(without, tiny_logits)[0]


# ---- the real model ------------------------------------------------------------------------------------------------

PROMPTS = ["1, 2, 3, 4,", "The capital of France is"]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def llm():
    with cb.LLM(model_path(), num_pages=64) as llm:
        yield llm
        assert llm.num_free_pages == 64


@pytest.fixture(scope="module")
def model():
    return load_model(model_path())


def greedy(max_tokens, **changes):
    return cb.SamplingParams(max_tokens=max_tokens, ignore_eos=True, **changes)


def test_the_real_model_against_a_dense_forward_pass(llm, model):
    samplings = [
        greedy(9, repetition_penalty=1.2, logit_bias={260: -100, 253: 4.0}, logprobs=3, prompt_logprobs=1),
        greedy(9, presence_penalty=0.8, frequency_penalty=1.2, logprobs=0, prompt_logprobs=3),
    ]
    oracle = {}
    for policy, limits in ((None, {}), (None, {"num_pages": 2}), (None, {"max_num_batched_tokens": 4})):
        requests = llm.requests(PROMPTS, samplings)
        result = llm.run(requests, policy, **limits)
        assert (result.requests.preemptions.sum() > 0) == ("num_pages" in limits)
        for r in requests:
            if not limits:
                logits = dense_logits(model, np.array([*r.prompt_token_ids, *r.output_token_ids[:-1]]), np.float32)
                oracle[r.request_id] = solo(r, lambda tokens, logits=logits: logits[len(tokens) - 1])
            output, _, of_output, of_prompt = oracle[r.request_id]
            assert r.output_token_ids == output
            same_scores(r.logprobs, of_output, 2e-4)
            same_scores(r.prompt_logprobs, of_prompt, 2e-4)
    plain = llm.generate(PROMPTS, greedy(9), progress=False)
    assert all(list(o.token_ids) != told for o, (told, *_) in zip(plain, oracle.values(), strict=True)), (
        "no penalty told"
    )


def test_outputs_show_tokens_with_their_text(llm):
    [output] = llm.chat(QUESTION, cb.SamplingParams(max_tokens=30, logprobs=2, prompt_logprobs=0), progress=False)
    assert output.finish_reason == "stop"
    assert len(output.logprobs) == len(output.token_ids)
    own = [scores[token] for scores, token in zip(output.logprobs, output.token_ids, strict=True)]
    assert all(score.rank == 1 for score in own)
    assert own[-1].decoded_token == "<|im_end|>"
    assert "".join(score.decoded_token for score in own[:-1]) == output.text
    assert [len(scores) for scores in output.logprobs] == [2] * len(own)
    assert output.prompt_logprobs[0] is None
    shown = [s[t].decoded_token for s, t in zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)]
    assert "".join(shown).endswith("What is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    [plain] = llm.generate(PROMPTS[0], greedy(2), progress=False)
    assert (plain.logprobs, plain.prompt_logprobs) == (None, None)


def test_min_tokens_puts_off_the_end(llm):
    sampling = cb.SamplingParams(max_tokens=20, logit_bias={llm.tokenizer.eos_token_id: 8})
    [short] = llm.chat(QUESTION, sampling, progress=False)
    n = len(short.token_ids)
    assert (short.finish_reason, n < 12) == ("stop", True)
    [longer] = llm.chat(QUESTION, sampling.replace(min_tokens=n + 2), progress=False)
    assert longer.token_ids[: n - 1] == short.token_ids[:-1]
    assert llm.tokenizer.eos_token_id not in longer.token_ids[: n + 2]


def test_stop_strings_count_beyond_min_tokens(llm):
    for min_tokens, kept in ((0, False), (8, True)):
        sampling = greedy(14, stop=", ", min_tokens=min_tokens)
        [output] = llm.generate(PROMPTS[0], sampling, progress=False)
        assert (", " in output.text) == kept
        assert output.finish_reason == "stop"
        assert len(output.token_ids) > min_tokens
        streamed = llm.stream(PROMPTS[0], sampling)
        assert "".join(streamed) == output.text
        assert streamed.request.output_token_ids == list(output.token_ids)


def test_a_bias_beyond_the_vocabulary_is_refused_and_leaves_nothing_behind(llm):
    with pytest.raises(InvalidRequestError, match=r"logit_bias of request .* in \[0, 49152\), got 49152"):
        llm.generate(PROMPTS, [greedy(2), greedy(2, logit_bias={49152: 1.0})], progress=False)
    assert llm.num_free_pages == 64
