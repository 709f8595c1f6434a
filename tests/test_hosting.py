"""What hosting and renting cost, by hand, and that both ways of counting agree where they must."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import contbatch as cb
from contbatch.errors import PriceError

AMOUNTS = st.floats(0.01, 1000)


def test_prices_by_hand():
    prices = cb.Prices(gpu_hour=3.0, gpus=2, api_prompt=0.5, api_output=2.0)
    assert prices.server_day == 144
    assert prices.api_request(1000, 250) == pytest.approx(0.001)
    assert prices.break_even(1000, 250) == pytest.approx(144_000)
    assert prices.million_tokens(1000) == pytest.approx(6 / 3.6)
    assert prices.million_tokens(1000, 0.25) == pytest.approx(4 * 6 / 3.6)
    assert prices.host_day(86_400, 1.0) == 144
    assert prices.host_day(86_401, 1.0) == 288


@given(AMOUNTS, st.integers(1, 8), AMOUNTS, AMOUNTS, st.floats(1, 1e5), st.floats(1, 1e5), AMOUNTS)
def test_at_the_break_even_both_cost_the_same(gpu_hour, gpus, api_prompt, api_output, prompt, output, capacity):
    prices = cb.Prices(gpu_hour=gpu_hour, gpus=gpus, api_prompt=api_prompt, api_output=api_output)
    requests = prices.break_even(prompt, output)
    assert requests * prices.api_request(prompt, output) == pytest.approx(prices.server_day)
    if requests > 86_400 * capacity:
        return
    assert prices.host_day(requests, capacity) == prices.server_day
    utilisation = requests / (86_400 * capacity)
    tokens = prompt + output
    hosted = prices.million_tokens(capacity * tokens, min(1, utilisation)) * tokens / 1e6
    assert hosted == pytest.approx(prices.api_request(prompt, output))


@given(st.floats(1, 1e8), AMOUNTS)
def test_there_are_enough_servers_and_none_too_many(requests, capacity):
    prices = cb.Prices()
    servers = prices.host_day(requests, capacity) / prices.server_day
    assert (servers - 1) * 86_400 * capacity < requests * (1 + 1e-12)
    assert requests <= servers * 86_400 * capacity * (1 + 1e-12)


@pytest.mark.parametrize(
    "changes",
    [{"gpu_hour": 0}, {"gpu_hour": float("nan")}, {"gpus": 0}, {"api_prompt": -1}, {"api_prompt": 0, "api_output": 0}],
)
def test_impossible_prices_are_refused(changes):
    with pytest.raises(PriceError, match=next(iter(changes))):
        cb.Prices().replace(**changes)


def test_impossible_amounts_are_refused():
    prices = cb.Prices()
    with pytest.raises(PriceError, match="utilisation"):
        prices.million_tokens(100, 1.5)
    with pytest.raises(PriceError, match="tokens_per_s"):
        prices.million_tokens(0)
    with pytest.raises(PriceError, match="prompt_tokens"):
        prices.break_even(0, 10)
    with pytest.raises(PriceError, match="requests_per_day"):
        prices.host_day(0, 1)
    with pytest.raises(PriceError, match="euro"):
        prices.replace(euro=1)
