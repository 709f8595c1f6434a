"""Which limit was binding is told for every run, and a limit that is not studied raises a warning."""

import pytest
from fake_runner import engine_of, request

import contbatch as cb
from contbatch.errors import InvalidRequestError


def run(**limits):
    requests = [request(name, 4, 4) for name in "abcd"]
    return engine_of(cb.ContinuousBatching(), **limits).run(requests)


@pytest.fixture
def results():
    return {
        "free": run(num_pages=64, max_num_seqs=8, max_num_batched_tokens=64),
        "two seats": run(num_pages=64, max_num_seqs=2, max_num_batched_tokens=64),
        "small budget": run(num_pages=64, max_num_seqs=8, max_num_batched_tokens=6),
    }


def test_the_shares_are_those_of_the_steps(results):
    table = cb.limits_bound(results)
    for name, result in results.items():
        for limit in ("seats", "tokens", "pages"):
            steps = result.steps[f"{limit}_bound"].tolist()
            assert table.loc[name, limit] == pytest.approx(100 * steps.count(True) / len(steps))
    assert table.loc["free", ["seats", "tokens", "pages"]].tolist() == [0, 0, 0]
    assert table.loc["two seats", "seats"] > 0
    assert table.loc["small budget", "tokens"] > 0


def test_only_what_is_not_studied_is_warned_of(results):
    assert cb.limits_bound(results).warning.tolist() == ["", "seats bound too", "tokens bound too"]
    assert cb.limits_bound(results, ["seats"]).warning.tolist() == ["", "", "tokens bound too"]
    assert cb.limits_bound(results, ["seats", "tokens"]).warning.tolist() == ["", "", ""]


def test_a_share_below_the_threshold_is_not_warned_of(results):
    share = results["small budget"].steps.tokens_bound.mean()
    assert cb.limits_bound(results, ["seats"], at_least=share).warning["small budget"] == "tokens bound too"
    assert cb.limits_bound(results, ["seats"], at_least=share + 0.001).warning["small budget"] == ""


def test_an_unknown_limit_is_refused(results):
    with pytest.raises(InvalidRequestError, match="'memory'"):
        cb.limits_bound(results, ["memory"])
