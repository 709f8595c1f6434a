"""A device that returns only the largest logits, and breaks ties as it likes, gives the tokens of the whole rows."""

from dataclasses import replace

import numpy as np
import pytest
from fake_model import VOCABULARY, FakeModel, engine_of, same_scores, solo
from hypothesis import example, given, settings
from hypothesis import strategies as st
from invariants import CheckedScheduler
from test_logits import samplings

from contbatch import logits
from contbatch.engine import Engine
from contbatch.policies import ChunkedPrefill
from contbatch.request import Request
from contbatch.runners.top_runner import TopRunner
from contbatch.sampler import sample
from contbatch.sampling_params import SamplingParams
from contbatch.top_logits import TopLogits, likeliest_needed

INF, NAN = float("inf"), float("nan")


def top_of(rows, k, rng):
    """The k largest of each row in a random order, of equals any; NaN and infinities as a device may have them."""
    ids = np.array([np.lexsort((rng.random(row.size), -row))[:k] for row in rows], np.int32).reshape(len(rows), k)
    ids = rng.permuted(ids, axis=1)
    with np.errstate(all="ignore"):
        largest = rows.max(axis=1, keepdims=True, initial=-INF)
        total = np.log(np.exp(rows - largest).sum(axis=1)) + largest[:, 0]
    return TopLogits.sorted_by_id(ids, np.take_along_axis(rows, ids, 1), total.astype(np.float32), rows.shape[1])


@st.composite
def problems(draw):
    size = draw(st.sampled_from([1, 5, 40]))
    values = [st.sampled_from([-1.0, 0.0, 0.5, 2.0]), st.sampled_from([-INF, 1.0, 3.0]), st.floats(-4, 4, width=32)]
    if draw(st.booleans()):
        values.append(st.sampled_from([NAN, INF]))
    row = draw(st.lists(st.one_of(values), min_size=size, max_size=size))
    greedy = {"temperature": 0.0, "top_k": draw(st.integers(0, 7))}
    drawn = {"temperature": draw(st.sampled_from([0.3, 1.0])), "top_k": draw(st.integers(0, 7))}
    drawn |= {"top_p": draw(st.sampled_from([0.3, 0.9, 1.0])), "min_p": draw(st.sampled_from([0.0, 0.2]))}
    sampling = SamplingParams(**draw(st.sampled_from([greedy, drawn])), seed=draw(st.integers(0, 99)))
    count = draw(st.sampled_from([None, 0, 3]))
    return np.array([row], np.float32), draw(st.integers(1, size)), sampling.replace(logprobs=count)


@settings(max_examples=300)
@given(problems(), st.integers(0, 99))
@example((np.zeros((1, 40), np.float32), 8, SamplingParams()), 0)
@example((np.array([[0, INF]], np.float32), 1, SamplingParams(min_p=0.2)), 0)
def test_what_it_tells_is_what_the_whole_row_tells(problem, shuffle):
    rows, k, sampling = problem
    top = top_of(rows, k, np.random.default_rng(shuffle))
    request = Request(0, [1], sampling)
    if not top.tells_next(0, request):
        return
    with np.errstate(all="ignore"):
        expected, errors = sample(rows, [sampling], [sampling.seed or 0], [0])
        places, none = sample(top.values, [sampling], [sampling.seed or 0], [0])
    assert (errors, none) == ({}, {})
    token = int(top.ids[0, places[0]])
    assert token == expected[0]
    if sampling.logprobs is not None:
        theirs, ours = logits.logprobs(rows[0], token, sampling.logprobs), top.logprobs(0, token, sampling.logprobs)
        assert [(t, lp.rank) for t, lp in ours.items()] == [(t, lp.rank) for t, lp in theirs.items()]
        np.testing.assert_allclose([a.logprob for a in ours.values()], [b.logprob for b in theirs.values()], atol=2e-6)


def test_it_tells_unless_ties_or_the_unusable_are_in_the_way():
    rows = np.array([[5, 4, 3, 3, 3], [3, 3, 3, 3, 1], [5, 4, NAN, 2, 1], [5, INF, 3, 2, 1], [-INF] * 5], np.float32)
    top = top_of(rows, 3, np.random.default_rng(0))
    told = [[top.tells(row, count) for count in (1, 2, 3, None)] for row in range(5)]
    assert told == [[True, True, False, False], *[[False] * 4] * 4]
    whole = top_of(rows, 5, np.random.default_rng(0))
    assert [whole.tells(row, None) for row in range(5)] == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("sampling", "needed"),
    [
        (SamplingParams(), 1),
        (SamplingParams(top_k=9, min_p=0.5, top_p=0.5), 1),  # greedy all the same
        (SamplingParams(temperature=1, top_k=9, top_p=0.5), 9),
        (SamplingParams(temperature=1, top_k=9, logprobs=20), 20),
        (SamplingParams(logprobs=0), 1),
        *[
            (SamplingParams(**asked), None)
            for asked in (
                {"temperature": 1},
                {"temperature": 1, "top_p": 0.5},
                {"logprobs": -1},
                {"logit_bias": {3: 1}},
                {"repetition_penalty": 1.1},
                {"presence_penalty": 1},
                {"frequency_penalty": 1},
                {"min_tokens": 1},
            )
        ],
    ],
)
def test_what_requests_need(sampling, needed):
    assert likeliest_needed(Request(0, [1], sampling)) == needed


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"min_p": 0.2}, True),
        ({"min_p": 0.2, "top_p": 0.5, "logprobs": 2}, True),
        ({"min_p": 0.2, "logprobs": 3}, False),  # of the three here, the least may have ties elsewhere
        ({"min_p": 0.2, "logprobs": -1}, False),
        ({"min_p": 0.2, "presence_penalty": 1}, False),
        ({"min_p": 0.1}, False),  # exp(-2) is more: the least here stays, and others like it may
        ({"min_p": 0.1, "temperature": 0.5}, True),
        ({}, False),
    ],
)
def test_min_p_may_leave_none_but_those_here(asked, told):
    top = top_of(np.array([[3, 1, 1, 1, 2.9, 0]], np.float32), 3, np.random.default_rng(0))
    assert top.tells_next(0, Request(0, [1], SamplingParams(**{"temperature": 1.0} | asked))) == told


# ---- in an engine ----------------------------------------------------------------------------------------------------


class TopFake(FakeModel):
    """Keeps its logits and returns the largest five."""

    fetched = 0

    def forward_top(self, inputs):
        self.rows = self.forward(inputs)
        self.top = top_of(self.rows, 5, np.random.default_rng(self.calls))
        return self.top

    def whole_rows(self, top, rows):
        assert top is self.top
        self.fetched += len(rows)
        return self.rows[list(rows)]


class VirtualTopRunner(TopRunner):
    is_virtual = True

    def execute(self, step):
        return replace(super().execute(step), elapsed_s=1.0)


def run(requests, model):
    scheduler = CheckedScheduler(ChunkedPrefill(), num_pages=model.num_pages, page_size=2, max_num_batched_tokens=20)
    Engine(scheduler, VirtualTopRunner(model)).run(requests)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9), samplings()), max_size=5))
def test_answers_are_those_of_whole_rows(specs):
    requests = [Request(i, prompt, sampling, eos_token_ids=(2,)) for i, (prompt, sampling) in enumerate(specs)]
    run(requests, TopFake(200, 2))
    for request in requests:
        for one in request.samples:
            tokens, reason, output, prompt = solo(one)
            assert (one.output_token_ids, one.finish_reason) == (tokens, reason)
            same_scores(one.logprobs, output, 2e-6)
            same_scores(one.prompt_logprobs, prompt, 2e-6)


def test_whole_rows_come_only_where_they_are_needed():
    rows = np.array([6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4], np.float32)
    asked = [SamplingParams(max_tokens=4), SamplingParams(max_tokens=4, temperature=1, top_k=4, seed=1, logprobs=2)]
    asked += [SamplingParams(max_tokens=4, temperature=1, top_p=0.9, seed=1)]
    for sampling, fetched in zip(asked, (0, 0, 4), strict=True):
        model = TopFake(20, 2)
        model.logits_of = lambda tokens: rows
        run([Request(0, [1, 2, 3], sampling)], model)
        assert model.fetched == fetched


def test_unusable_rows_fail_their_request_alone_and_in_the_same_words():
    answers = []
    for model in (FakeModel(20, 2, poison=[(1, 2)]), TopFake(20, 2, poison=[(1, 2)])):
        requests = [Request(0, [1, 2], SamplingParams(max_tokens=3)), Request(1, [3], SamplingParams(max_tokens=3))]
        if isinstance(model, TopFake):
            run(requests, model)
        else:
            engine_of(ChunkedPrefill(), model).run(requests)
        answers.append([(r.output_token_ids, r.finish_reason, str(r.error)) for r in requests])
    assert answers[0] == answers[1]
    assert [reason for _, reason, _ in answers[0]] == ["error", "length"]
