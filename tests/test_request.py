import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contbatch.errors import InvalidRequestError
from contbatch.logprob import Logprob
from contbatch.request import Request, RequestStatus
from contbatch.sampling_params import SamplingParams

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("max_tokens", [1, 10**6], [0, -1, 1.0, "3", None, True, NAN]),
        ("temperature", [0, 0.0, 1e-9, 2, 100.0], [-1e-9, NAN, INF, "1", None, True]),
        ("top_k", [-1, 0, 1, 10**9], [-2, 1.0, None, False]),
        ("top_p", [1e-9, 0.5, 1], [0, 0.0, 1.0000001, -1, NAN, INF, None]),
        ("min_p", [0, 0.1, 1], [-0.1, 1.1, NAN, None]),
        ("seed", [None, 0, 2**64 - 1], [-1, 2**64, 1.5, "7", True]),
        ("stop", ["x", ("x", "y"), ["x"], ()], ["", ("x", ""), (1,), 5, None]),
        ("stop_token_ids", [(), (0,), [1, 2], 3], [(-1,), ("x",), (1.0,), "12", None, (True,)]),
        ("ignore_eos", [True, False], [0, 1, None, "yes"]),
        ("presence_penalty", [-2, 0.0, 2], [-2.001, 2.001, NAN, INF, None, "1", True]),
        ("frequency_penalty", [-2.0, 0, 2], [-2.001, 2.001, NAN, -INF, None, "1", False]),
        ("repetition_penalty", [1e-9, 0.5, 1, 100], [0, -1.0, NAN, INF, None, "1", True]),
        (
            "logit_bias",
            [{}, (), {0: 1}, {5: -100.0, 3: 100}, ((3, 0.5),)],
            [
                {-1: 1},
                {"5": 1},
                {1.0: 1},
                {True: 1},
                {5: 100.1},
                {5: -101},
                {5: NAN},
                {5: "1"},
                {5: None},
                [5],
                5,
                None,
            ],
        ),
        ("min_tokens", [0, 1, 64], [-1, 65, 1.0, None, True]),
        ("logprobs", [None, -1, 0, 20], [-2, 1.0, "1", True, NAN]),
        ("prompt_logprobs", [None, -1, 0, 20], [-2, 1.0, "1", False, NAN]),
    ],
)
def test_sampling_params_take_what_is_valid_and_name_what_is_not(name, good, bad):
    for value in good:
        SamplingParams(**{name: value})
    for value in bad:
        with pytest.raises(InvalidRequestError, match=name):
            SamplingParams(**{name: value})


def test_one_stop_string_or_token_is_a_tuple_of_one():
    params = SamplingParams(stop="ab", stop_token_ids=3)
    assert (params.stop, params.stop_token_ids) == (("ab",), (3,))


def test_sampling_params_are_values():
    params = SamplingParams(max_tokens=3, stop=["a"], logit_bias={7: 1.5, 2: -1})
    assert params == SamplingParams(max_tokens=3, stop=("a",), logit_bias={2: -1, 7: 1.5})
    assert dict(params.logit_bias) == {7: 1.5, 2: -1}
    assert hash(params) == hash(params.replace())
    with pytest.raises(AttributeError):
        params.max_tokens = 4


def test_replace_checks_names_and_values():
    params = SamplingParams(max_tokens=3, temperature=0.5)
    assert params.replace(logit_bias={3: 1}).replace(min_tokens=2).logit_bias == ((3, 1),)
    with pytest.raises(InvalidRequestError, match=r"min_tokens must be an integer in \[0, max_tokens = 1\], got 2"):
        params.replace(min_tokens=2).replace(max_tokens=1)
    assert params.replace(max_tokens=4) == SamplingParams(max_tokens=4, temperature=0.5)
    with pytest.raises(InvalidRequestError, match="max_token"):
        params.replace(max_token=4)
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        params.replace(max_tokens=0)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"prompt_token_ids": [1], "num_prompt_tokens": 1},
        {"prompt_token_ids": []},
        {"prompt_token_ids": "a prompt"},
        {"prompt_token_ids": b"a prompt"},
        {"prompt_token_ids": 5},
        {"prompt_token_ids": list},
        {"prompt_token_ids": iter([1, 2])},
        {"num_prompt_tokens": 0},
        {"num_prompt_tokens": 2.0},
        {"num_prompt_tokens": True},
        {"num_prompt_tokens": 1, "arrival_time": -0.5},
        {"num_prompt_tokens": 1, "arrival_time": NAN},
        {"num_prompt_tokens": 1, "arrival_time": INF},
        {"num_prompt_tokens": 1, "arrival_time": "now"},
        {"num_prompt_tokens": 1, "sampling": {"max_tokens": 3}},
    ],
)
def test_a_bad_request_is_refused(arguments):
    with pytest.raises(InvalidRequestError):
        Request("r", **arguments)


def test_the_error_names_request_value_and_limit():
    with pytest.raises(InvalidRequestError, match=r"'r'.*≥ 1.*got 0"):
        Request("r", [])


@given(st.lists(st.integers(0, 99), min_size=1), st.lists(st.integers(0, 99)), st.integers(0, 40), st.integers(0, 40))
def test_token_ids_are_a_slice_of_prompt_and_output(prompt, output, start, stop):
    request = Request(0, prompt)
    request.output_token_ids += output
    assert request.num_tokens == len(prompt + output)
    assert request.token_ids(start, stop) == (prompt + output)[start:stop]


def test_token_ids_of_a_length_are_an_error_that_names_the_request():
    with pytest.raises(InvalidRequestError, match="'r'"):
        Request("r", num_prompt_tokens=3).token_ids(0, 1)


def test_counts():
    request = Request(0, [1, 2, 3], SamplingParams(max_tokens=5))
    assert (request.num_tokens, request.num_uncomputed_tokens, request.num_output_tokens) == (3, 3, 0)
    assert request.max_kv_tokens == 7, "the last output token is never fed back"
    request.output_token_ids.append(9)
    request.num_computed_tokens = 3
    assert (request.num_tokens, request.num_uncomputed_tokens, request.num_output_tokens) == (4, 1, 1)
    assert not request.is_finished
    assert request.status is RequestStatus.WAITING


def test_end_tokens_end_unless_ignored():
    stops = SamplingParams(stop_token_ids=(7,))
    assert Request(0, [1], stops, eos_token_ids=(2, 3)).stop_ids == {2, 3, 7}
    assert Request(0, [1], stops.replace(ignore_eos=True), eos_token_ids=(2, 3)).stop_ids == {7}
    assert Request(0, [1]).stop_ids == frozenset()


def test_no_end_token_ends_before_min_tokens():
    request = Request(0, [1], SamplingParams(max_tokens=5, min_tokens=2, stop_token_ids=7), eos_token_ids=[3])
    for token, reason in ((7, None), (3, None), (4, None), (3, "stop")):
        request.take(token)
        assert request.finish_reason == reason
    assert request.output_token_ids == [7, 3, 4, 3]


def test_scores_are_of_the_prompt_from_its_second_token_then_of_the_output():
    scores = [{i: Logprob(-float(i), 1)} for i in range(5)]
    for asked, prompt, output in (
        ({"prompt_logprobs": 0, "logprobs": 0}, [None, *scores[:2]], scores[2:]),
        ({"prompt_logprobs": 0}, [None, *scores[:2]], None),
        ({"logprobs": 0}, None, scores),
        ({}, None, None),
    ):
        request = Request(0, [5, 6, 7], SamplingParams(**asked))
        request.scores += scores
        assert (request.prompt_logprobs, request.logprobs) == (prompt, output)


def test_rows_of_a_prompt_are_scored_once_and_only_if_wanted():
    request = Request(0, [5, 6, 7, 8], SamplingParams(prompt_logprobs=1))
    assert request.unscored_prompt_rows(0, 2) == range(2)
    request.scores += [{}, {}]
    assert list(request.unscored_prompt_rows(0, 2)) == [], "computed again after a preemption"
    assert request.unscored_prompt_rows(1, 9) == range(2, 3), "the last row tells of the first output token"
    assert list(Request(1, [5, 6, 7], SamplingParams(logprobs=1)).unscored_prompt_rows(0, 3)) == []


def test_repr_tells_how_far_it_has_come():
    request = Request("r", [1, 2], SamplingParams(max_tokens=5))
    request.output_token_ids.append(4)
    assert repr(request) == "Request('r', waiting, prompt 2, output 1/5, computed 0)"
