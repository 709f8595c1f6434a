"""Penalties, bias, minimum lengths and log-probabilities: what they are, and that only the request changes them."""

import math

import numpy as np
import pytest
from fake_model import VOCABULARY, FakeModel, adjusted, engine_of, same_scores, score, solo
from hypothesis import given, settings
from hypothesis import strategies as st
from random_workloads import ARRIVALS, LIMITS, POLICIES

from contbatch.errors import InvalidRequestError, LogitsError
from contbatch.logits import adjust, logprobs
from contbatch.policies import ChunkedPrefill, ContinuousBatching, OneAtATime, StaticBatching
from contbatch.request import Request
from contbatch.sampler import sample
from contbatch.sampling_params import SamplingParams

INF, NAN = float("inf"), float("nan")
TOKENS = st.integers(0, VOCABULARY - 1)
PROMPTS = st.lists(TOKENS, min_size=1, max_size=12).map(tuple)
COUNTS = st.sampled_from([None, None, -1, 0, 1, 3, VOCABULARY])
# Powers of two, with logits in halves: float32 is exact, so a tie here is a tie in the oracle.
PENALTIES = st.sampled_from([0.0, 0.0, 0.5, 2.0, -1.0])


@st.composite
def samplings(draw):
    max_tokens = draw(st.integers(1, 9))
    return SamplingParams(
        max_tokens=max_tokens,
        n=draw(st.sampled_from([1, 1, 2, 3])),
        temperature=draw(st.sampled_from([0.0, 0.0, 1.0])),
        top_k=draw(st.sampled_from([0, 3])),
        seed=draw(st.integers(0, 9)),
        presence_penalty=draw(PENALTIES),
        frequency_penalty=draw(PENALTIES),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.5, 2.0, 4.0])),
        logit_bias=draw(st.dictionaries(TOKENS, st.sampled_from([-100, -1.5, 2, 100.0]), max_size=2)),
        stop_token_ids=draw(st.lists(TOKENS, max_size=3)),
        ignore_eos=draw(st.booleans()),
        min_tokens=draw(st.integers(0, max_tokens)),
        logprobs=draw(COUNTS),
        prompt_logprobs=draw(COUNTS),
    )


SPECS = st.lists(st.tuples(PROMPTS, samplings(), ARRIVALS), min_size=1, max_size=6)


def requests_of(specs):
    return [
        Request(i, prompt, sampling, arrival_time=at, eos_token_ids=(2, 9))
        for i, (prompt, sampling, at) in enumerate(specs)
    ]


def check(request):
    output, reason, scores, of_prompt = solo(request)
    assert (request.output_token_ids, request.finish_reason) == (output, reason)
    same_scores(request.logprobs, scores, 2e-6)
    same_scores(request.prompt_logprobs, of_prompt, 2e-6)


# ---- the same, whoever shares the batch ----------------------------------------------------------------------------


@settings(max_examples=150)
@given(LIMITS, SPECS, POLICIES, st.sets(st.integers(0, 20), max_size=3))
def test_policy_chunks_preemption_and_crashes_change_nothing(limits, specs, policy, crash):
    limits = dict(limits)
    model = FakeModel(limits.pop("num_pages"), limits.pop("page_size"), limits["num_host_pages"], crash)
    engine = engine_of(policy, model, **limits)
    requests = [r for r in requests_of(specs) if r.max_kv_tokens <= model.num_pages * model.page_size]
    for r in requests:
        engine.add(r)
    while engine.has_requests:
        try:
            engine.step()
        except RuntimeError:
            assert model.calls - 1 in crash
    for r in [s for parent in requests for s in parent.samples]:
        check(r)
    assert [len(r.samples) for r in requests] == [r.sampling.n for r in requests]


@pytest.mark.parametrize(
    ("policy", "limits"),
    [
        (ChunkedPrefill(), {"max_num_batched_tokens": 3}),
        (ContinuousBatching(), {}),
        (StaticBatching(3, pad=True), {}),
        (OneAtATime(), {"max_num_batched_tokens": 2}),
    ],
)
def test_each_wanted_row_of_logits_is_computed_once(policy, limits):
    asks = SamplingParams(max_tokens=8, ignore_eos=True, prompt_logprobs=2, logprobs=1)
    specs = [((1, 2, 3, 4, 5), asks, 0.0), ((6, 7, 8), asks, 0.0), ((5, 5), asks.replace(prompt_logprobs=None), 0.0)]
    tight = not isinstance(policy, (StaticBatching, OneAtATime))
    model = FakeModel(6 if tight else 20, 2)
    requests = requests_of(specs)
    result = engine_of(policy, model, **limits).run(requests)
    for r in requests:
        check(r)
    assert (result.requests.preemptions.sum() > 0) == tight
    assert model.num_logits == (5 - 1) + (3 - 1) + sum(r.num_output_tokens for r in requests)


def test_what_a_callback_sees_is_complete():
    seen = []
    engine = engine_of(ChunkedPrefill(), FakeModel(20, 2), max_num_batched_tokens=2)
    engine.on_token = lambda r: seen.append((r.num_output_tokens, len(r.logprobs), len(r.prompt_logprobs)))
    engine.run(requests_of([((1, 2, 3, 4, 5), SamplingParams(max_tokens=2, prompt_logprobs=0, logprobs=0), 0.0)]))
    assert seen == [(1, 1, 5), (2, 2, 5)]


# ---- bad requests and bad logits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {3: 1, VOCABULARY: 1}}, r"logit_bias of request 'bad' .*\[0, 11\), got 11"),
        ({"stop_token_ids": (3, 99)}, r"stop_token_ids of request 'bad' .*\[0, 11\), got 99"),
        ({"logprobs": 12}, r"logprobs of request 'bad' must be at most the vocabulary's 11, got 12"),
        ({"prompt_logprobs": 12}, r"prompt_logprobs of request 'bad' must be at most the vocabulary's 11, got 12"),
    ],
)
def test_what_the_vocabulary_does_not_have_is_refused_and_the_others_go_on(options, message):
    engine = engine_of(ChunkedPrefill(), FakeModel(20, 2))
    bad, good = (
        Request("bad", [1], SamplingParams(max_tokens=4, **options)),
        Request("good", [1], SamplingParams(max_tokens=2)),
    )
    with pytest.raises(InvalidRequestError, match=message):
        engine.add(bad)
    engine.run([bad, good])
    assert (bad.finish_reason, good.finish_reason) == ("rejected", "length")


@pytest.mark.parametrize("place", [1, 2, 3, 4])
def test_nan_in_a_wanted_row_fails_that_request_only(place):
    prompt = (1, 2, 3)
    p = SamplingParams(max_tokens=4, logprobs=1, prompt_logprobs=1)
    [whole] = requests_of([(prompt, p, 0.0)])
    tokens = prompt + tuple(solo(whole)[0])
    specs = [(prompt, p, 0.0), (prompt[:1], p, 0.0), (prompt, p.replace(prompt_logprobs=None), 0.0)]
    requests = requests_of(specs)
    engine_of(ChunkedPrefill(), FakeModel(20, 2, poison=[tokens[:place]])).run(requests)
    for r, fails in zip(requests, (True, place == 1, place >= 3), strict=True):
        assert (r.finish_reason == "error") == fails
        if fails:
            assert isinstance(r.error, LogitsError)
        else:
            check(r)


def test_a_ban_on_everything_fails_that_request_only():
    banned = SamplingParams(max_tokens=3, min_tokens=1, stop_token_ids=tuple(range(VOCABULARY)), logprobs=1)
    requests = requests_of([((1,), banned, 0.0), ((1,), SamplingParams(max_tokens=3, ignore_eos=True), 0.0)])
    engine_of(ChunkedPrefill(), FakeModel(20, 2)).run(requests)
    assert [r.finish_reason for r in requests] == ["error", "length"]
    assert isinstance(requests[0].error, LogitsError)
    assert (requests[0].output_token_ids, requests[0].logprobs) == ([], [])


# ---- definitions ---------------------------------------------------------------------------------------------------


def row_of(*values):
    return np.array(values, np.float32)


def adjusted_by(row, output=(), prompt=(0,), eos=(), **options):
    request = Request("r", prompt, SamplingParams(**options), eos_token_ids=eos)
    request.output_token_ids += output
    copies = adjust(row[None], [request])
    return copies[0].tolist() if copies else None


@pytest.mark.parametrize(
    ("options", "expected"),  # by hand: logits 3, -2, 1, 0, 4; prompt 0 3, output 1 4 1
    [
        ({"presence_penalty": 0.5}, [3, -2.5, 1, 0, 3.5]),
        ({"frequency_penalty": 0.5}, [3, -3, 1, 0, 3.5]),
        ({"frequency_penalty": -1, "presence_penalty": 0.25}, [3, -0.25, 1, 0, 4.75]),
        ({"repetition_penalty": 2}, [1.5, -4, 1, 0, 2]),
        ({"repetition_penalty": 0.5}, [6, -1, 1, 0, 8]),
        ({"logit_bias": {2: 100, 3: -1.5}}, [3, -2, 101, -1.5, 4]),
        # vLLM's order: the bias, then repetition, then the other two.
        ({"logit_bias": {1: 4}, "repetition_penalty": 2}, [1.5, 1, 1, 0, 2]),
        ({"repetition_penalty": 2, "presence_penalty": 1}, [1.5, -5, 1, 0, 1]),
        ({"min_tokens": 4, "stop_token_ids": (0, 1)}, [-INF, -INF, 1, 0, -INF]),
        ({"min_tokens": 4, "ignore_eos": True}, [3, -2, 1, 0, -INF]),
        ({"min_tokens": 4, "logit_bias": {4: 100}, "repetition_penalty": 0.5}, [6, -1, 1, 0, -INF]),
        ({"min_tokens": 3, "stop_token_ids": (0, 1)}, None),
        ({"top_p": 0.5, "temperature": 1.0, "logprobs": 3, "stop_token_ids": (0, 1)}, None),
    ],
)
def test_adjusted_logits(options, expected):
    row = row_of(3, -2, 1, 0, 4)
    row.setflags(write=False)
    assert adjusted_by(row, [1, 4, 1], [0, 3], [4, 77], **options) == expected


def test_prompts_may_be_arrays_and_outputs_empty():
    row = row_of(3, -2, 1)
    assert adjusted_by(row, (), np.array([0, 1], np.int32), repetition_penalty=2.0) == [1.5, -4, 1]
    assert adjusted_by(row, (), [0], frequency_penalty=1.0, presence_penalty=1.0) == [3, -2, 1]


@settings(max_examples=100)
@given(st.data())
def test_adjusted_logits_are_the_oracles(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    rows = (rng.standard_normal((3, 20)) * 10).astype(np.float32)
    rows[rng.random(rows.shape) < 0.1] = -INF
    number = st.floats(-2, 2)
    requests = []
    for i in range(3):
        sampling = SamplingParams(
            presence_penalty=data.draw(number),
            frequency_penalty=data.draw(number),
            repetition_penalty=data.draw(st.floats(0.01, 100)),
            logit_bias=data.draw(st.dictionaries(st.integers(0, 19), st.floats(-100, 100), max_size=4)),
            min_tokens=data.draw(st.integers(0, 5)),
            stop_token_ids=data.draw(st.lists(st.integers(0, 19), max_size=2)),
        )
        requests.append(Request(i, rng.integers(0, 20, 6).tolist(), sampling if data.draw(st.booleans()) else None))
        requests[i].output_token_ids += rng.integers(0, 20, data.draw(st.integers(0, 7))).tolist()
    copies = adjust(rows, requests)
    for i, request in enumerate(requests):
        expected = adjusted(rows[i], request, request.output_token_ids)
        np.testing.assert_allclose(copies.get(i, rows[i]), expected, rtol=1e-5, atol=1e-5)
        assert i in copies or request.sampling == SamplingParams() or expected == rows[i].tolist()


@pytest.mark.parametrize("penalty", [1e-40, 5e-324, 1e300])
def test_extreme_repetition_penalties_fail_the_request_at_worst(penalty):
    with np.errstate(all="raise"):
        row = np.array(adjusted_by(row_of(0, -1, 2, 1), [0, 1, 3], repetition_penalty=penalty), np.float32)
    _, errors = sample(row[None], [SamplingParams()], [0], [0])
    assert (0 in errors) == bool(np.isinf(row).any() and row.max() == INF)
    assert not np.isnan(row).any()
    assert row[2] == 2


def test_only_adjusted_rows_change_and_greedy_and_sampled_rows_use_them():
    logits = np.zeros((3, 4), np.float32)
    logits[:, 1] = 1
    params = [SamplingParams(), SamplingParams(), SamplingParams(temperature=0.01)]
    copies = {1: row_of(0, 0, 9, 0), 2: row_of(0, 0, 0, 9)}
    assert sample(logits, params, [1] * 3, [0] * 3, copies)[0].tolist() == [1, 2, 3]
    token_ids, errors = sample(logits, params, [1] * 3, [0] * 3, {1: row_of(0, NAN, 0, 0)})
    assert (token_ids.tolist(), list(errors)) == ([1, -1, 1], [1])


@settings(max_examples=200)
@given(st.integers(1, 400), st.integers(0, 10**6), st.sampled_from([0.0, 1.0, 30.0, 1e30]), st.data())
def test_log_probabilities_are_the_oracles(size, seed, scale, data):
    rng = np.random.default_rng(seed)
    row = (rng.standard_normal(size) * scale).astype(np.float32)
    row = np.round(row) if data.draw(st.booleans()) else row
    row[rng.random(size) < 0.2] = -INF
    row[rng.integers(size)] = 0
    token, count = data.draw(st.integers(0, size - 1)), data.draw(st.integers(-1, size))
    with np.errstate(all="raise"):
        found = logprobs(row, token, count)
    shifted = row.astype(np.float64) - row.max()
    expected = score(shifted, token, count)
    assert list(found) == list(expected)
    for (logprob, rank), (value, place, text) in zip(expected.values(), found.values(), strict=True):
        assert (place, text) == (rank, None)
        assert type(value) is float
        assert value == logprob or math.isclose(value, logprob, rel_tol=1e-6, abs_tol=1e-6)


def test_log_probabilities_of_a_real_vocabulary_sum_to_one():
    row = np.random.default_rng(0).standard_normal(49152).astype(np.float32) * 5
    everything = logprobs(row, 7, -1)
    assert math.isclose(math.fsum(math.exp(s.logprob) for s in everything.values()), 1, rel_tol=1e-6)
    assert sorted(s.rank for s in everything.values()) == list(range(1, 49153))
    assert [t for t, s in sorted(everything.items(), key=lambda item: item[1].rank)][:50] == np.argsort(-row)[
        :50
    ].tolist()
    few = logprobs(row, 7, 20)
    assert few == {t: everything[t] for t in few}
    assert len(few) == 21


@pytest.mark.parametrize("row", [row_of(0, NAN), row_of(INF, 0), row_of(-INF, -INF)])
def test_logits_without_probabilities(row):
    with pytest.raises(LogitsError, match=r"largest logit must be finite, got .* token 1"):
        logprobs(row, 1, 1)
