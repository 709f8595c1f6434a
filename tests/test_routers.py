"""Routers choose by what they have sent and heard, and by nothing else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import contbatch as cb
from contbatch.errors import InvalidRequestError
from contbatch.routers import Loads


def request(prompt=8, output=8, salt=None, name=0):
    tokens = list(range(prompt)) if isinstance(prompt, int) else prompt
    return cb.Request(name, tokens, cb.SamplingParams(max_tokens=output), cache_salt=salt)


def loads(*tokens):
    made = Loads(len(tokens))
    made.tokens[:] = tokens
    return made


def test_round_robin_takes_turns():
    router = cb.RoundRobin()
    assert [router.choose(request(), loads(9, 9, 0)) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_least_tokens_takes_the_first_of_the_emptiest():
    assert cb.LeastTokens().choose(request(), loads(5, 3, 3, 9)) == 1


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20), st.integers(1, 9), st.floats(0, 9)), max_size=30))
def test_loads_are_what_was_sent_and_not_heard_of(sent):
    made = Loads(3)
    for replica, prompt, output, ends in sent:
        made.sent(replica, request(prompt, output))
        made.ends(replica, request(prompt, output), ends)
    for now in (0, 4.5, 9):
        made.hear(now)
        left = [(r, p + o) for r, p, o, ends in sent if ends > now]
        assert made.tokens.tolist() == [sum(t for r, t in left if r == i) for i in range(3)]
        assert made.requests.tolist() == [sum(r == i for r, _ in left) for i in range(3)]


def test_power_of_two_takes_the_better_of_two_different_ones():
    """The emptiest of four is chosen whenever it is drawn: in one of two draws; the fullest never."""
    router, chosen = cb.PowerOfTwo(seed=3), []
    for _ in range(2000):
        chosen.append(router.choose(request(), loads(4, 1, 3, 2)))
    shares = np.bincount(chosen, minlength=4) / 2000
    assert shares[0] == 0
    assert shares[1:] == pytest.approx([1 / 2, 1 / 6, 1 / 3], abs=0.04)


def test_power_of_two_is_seeded_and_manages_one_replica():
    def draws(seed):
        router = cb.PowerOfTwo(seed)
        return [router.choose(request(), loads(0, 0, 0, 0)) for _ in range(20)]

    assert draws(1) == draws(1) != draws(2)
    assert cb.PowerOfTwo().choose(request(), loads(7)) == 0


def test_affinity_follows_the_longest_known_beginning():
    router = cb.PrefixAffinity(block_size=4, lead=1000)
    assert router.choose(request([1] * 8), loads(9, 0)) == 1
    assert router.choose(request([1] * 4 + [2] * 8), loads(0, 9)) == 1, "the first block is known there"
    assert router.choose(request([3] * 8), loads(0, 9)) == 0, "nobody knows it: the emptiest"
    assert router.choose(request([3] * 4 + [1] * 8), loads(9, 0)) == 0
    assert router.choose(request([1] * 3), loads(0, 9)) == 0, "no whole block"
    assert router.choose(request([1] * 8, salt="x"), loads(0, 9)) == 0, "another salt shares nothing"


def test_affinity_ends_where_the_lead_is_too_large():
    router = cb.PrefixAffinity(block_size=4, lead=10)
    assert router.choose(request([1] * 8), loads(0, 0)) == 0
    assert router.choose(request([1] * 8), loads(10, 0)) == 0
    assert router.choose(request([1] * 8), loads(11, 0)) == 1
    assert router.choose(request([1] * 8), loads(0, 0)) == 1, "now it is known there"


def test_bad_parameters_are_refused():
    with pytest.raises(InvalidRequestError, match="seed"):
        cb.PowerOfTwo(seed=-1)
    with pytest.raises(InvalidRequestError, match="block_size"):
        cb.PrefixAffinity(block_size=0)
    with pytest.raises(InvalidRequestError, match="lead"):
        cb.PrefixAffinity(lead=float("nan"))
    with pytest.raises(NotImplementedError, match="Router must define choose"):
        cb.Router().choose(request(), loads(0))
