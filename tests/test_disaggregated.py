"""Prompts here, answers there: by hand, and by the rules that every run keeps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import contbatch as cb
from contbatch.errors import CostModelError, InvalidRequestError

SERVER = cb.Simulated(cost=cb.Linear(step_s=1.0, token_s=0.1))
KV = 800 * 1024  # of OPT-13B, per token
SIZES = {"prompt": cb.lengths.Uniform(1, 90), "output": cb.lengths.Uniform(1, 30)}
POISSON = cb.Poisson(rate=3, num_requests=16, **SIZES)
CHATS = cb.Conversations(arrivals=cb.arrivals.PoissonArrivals(0.2), num_conversations=6, turns_each=3, **SIZES)
STOPS = POISSON.replace(client=cb.Client(max_tokens=64))
WORKLOADS = st.builds(
    lambda load, seed: load.replace(seed=seed), st.sampled_from([POISSON, CHATS, STOPS]), st.integers(0, 99)
)


def test_a_way_by_hand():
    """Two prompts of 10 tokens at once: one step of 3 s. The link takes 4 s for each, and 0.5 s more."""
    load = cb.OpenLoop(arrivals=cb.arrivals.AllAtOnce(), num_requests=2, prompt=10, output=3)
    link = cb.Link(bytes_per_s=10 * KV / 4, latency_s=0.5)
    result = cb.simulate_disaggregated(load, 1, 1, None, SERVER, link=link)
    assert result.transfers.to_dict("list") == {
        "request_id": [0, 1],
        "source": [0, 0],
        "target": [1, 1],
        "num_bytes": [10 * KV] * 2,
        "ready_s": [3, 3],
        "begin_s": [3, 7],
        "end_s": [7.5, 11.5],
    }
    rows = result.together.requests
    assert rows.first_token_s.tolist() == [3, 3]
    assert rows.finished_s.tolist() == [7.5 + 2 * 1.1, 11.5 + 2 * 1.1]
    assert rows.ttft_s.tolist() == [3, 3]
    assert rows.max_itl_s.tolist() == pytest.approx([4.5 + 1.1, 8.5 + 1.1])
    assert rows.tpot_s.tolist() == pytest.approx([(4.5 + 2.2) / 2, (8.5 + 2.2) / 2])
    assert rows.output_tokens.tolist() == [3, 3]
    assert rows.transfer_s.tolist() == [4.5, 8.5]
    assert (rows.replica.tolist(), rows.decode_replica.tolist()) == ([0, 0], [1, 1])
    assert result.together.token_s[0] == pytest.approx([3, 8.6, 9.7])
    assert result.balance().kind.tolist() == ["prefill", "decode"]
    assert result.balance().computed_tokens.tolist() == [20, 4]


@settings(max_examples=15, deadline=None)
@given(WORKLOADS, st.integers(1, 3), st.integers(1, 3), st.sampled_from([1e6, 1e9, 1e12]), st.integers(8, 24))
def test_every_request_goes_its_way(workload, num_prefill, num_decode, bytes_per_s, num_pages):
    link = cb.Link(bytes_per_s=bytes_per_s)
    limits = {"num_pages": num_pages, "max_num_seqs": 5, "max_num_batched_tokens": 40, "max_model_len": 128}
    result = cb.simulate_disaggregated(workload, num_prefill, num_decode, None, SERVER, link=link, **limits)
    turns, together = workload.turns(), result.together
    rows, moved = together.requests.set_index("request_id"), result.transfers.set_index("request_id")
    done = rows.finish_reason.isin(["stop", "length"])
    for name, row in rows.iterrows():
        if not done[name]:
            continue
        assert row.output_tokens == turns[name].output_tokens == len(together.token_s[name])
        times = np.array(together.token_s[name])
        assert (times[0], times[-1]) == (row.first_token_s, row.finished_s)
        assert (np.diff(times) > 0).all()
        if row.output_tokens == 1:
            assert np.isnan(row.decode_replica)
            assert name not in moved.index
        else:
            assert row.max_itl_s == pytest.approx(np.diff(times).max())
            assert row.tpot_s == pytest.approx(np.diff(times).mean())
            assert moved.ready_s[name] == row.first_token_s
            assert moved.num_bytes[name] == KV * row.prompt_tokens
            assert times[1] >= moved.end_s[name] + 1.1 * (1 - 1e-12), "no token before its keys and values are there"
    for _, of_one in result.transfers.groupby("source"):
        busy_until = of_one.begin_s + of_one.num_bytes / bytes_per_s
        assert (of_one.begin_s.to_numpy()[1:] >= busy_until.to_numpy()[:-1]).all(), "one after another"
        assert (of_one.begin_s >= of_one.ready_s).all()
    for decode in result.replicas[num_prefill:]:
        assert (decode.steps.live_pages <= num_pages).all()
        fresh = decode.steps[decode.steps.preempted.cumsum() == 0]
        assert (fresh.tokens == fresh.seqs).all(), "nothing is computed again, unless it was preempted"
    assert rows.index.is_unique
    if workload is not CHATS:  # a conversation ends with a turn that was refused
        assert done.all() or (rows.finish_reason == "rejected").any()


def test_no_prompt_tears_a_gap_where_answers_are_made():
    """At equal numbers of replicas: mixed ones stall at each prompt, decode replicas never."""
    server = cb.Simulated(cost=cb.Linear(step_s=0.01, token_s=1e-3))
    load = cb.Poisson(rate=2, num_requests=80, prompt=400, output=50)
    mixed = cb.simulate_fleet(load, 2, None, cb.ContinuousBatching(), server).together
    apart = cb.simulate_disaggregated(load, 1, 1, cb.ContinuousBatching(), server, link=cb.Link(bytes_per_s=1e12))
    assert mixed.itl_s().quantile(0.99) > 0.4
    assert apart.together.itl_s().quantile(0.99) < 0.1
    assert apart.summary().output_tokens == mixed.summary().output_tokens


def test_a_full_decode_replica_lets_them_wait():
    load = cb.OpenLoop(arrivals=cb.arrivals.AllAtOnce(), num_requests=6, prompt=16, output=16)
    wide, narrow = (cb.simulate_disaggregated(load, 1, 1, cb.Orca(), SERVER, num_pages=n) for n in (64, 4))
    seats = [result.replicas[1].steps.seats.max() for result in (wide, narrow)]
    assert seats == [6, 2], "31 tokens need two pages"
    assert narrow.replicas[1].steps.waiting.max() > 0
    assert narrow.summary().requests == 6


def test_who_is_preempted_among_the_answers_is_computed_again_there():
    load = cb.OpenLoop(arrivals=cb.arrivals.AllAtOnce(), num_requests=4, prompt=14, output=40)
    result = cb.simulate_disaggregated(load, 2, 1, cb.ChunkedPrefill(), SERVER, num_pages=8)
    rows = result.together.requests
    assert rows.preemptions.sum() == result.replicas[2].requests.preemptions.sum() > 0
    assert result.replicas[2].steps.prefill_tokens.max() > 14, "prompt and answer so far, at once"
    assert rows.output_tokens.tolist() == [40] * 4
    assert [len(times) for times in result.together.token_s.values()] == [40] * 4


def test_limits_of_one_kind():
    load = cb.OpenLoop(arrivals=cb.arrivals.AllAtOnce(), num_requests=6, prompt=16, output=16)
    result = cb.simulate_disaggregated(
        load, 1, 1, None, SERVER, prefill={"max_num_seqs": 2}, decode={"max_num_seqs": 3}
    )
    assert [r.max_num_seqs for r in result.replicas] == [2, 3]
    assert [r.steps.seats.max() for r in result.replicas] == [2, 3]


def test_the_prefix_cache_is_the_prefill_replicas():
    load = POISSON.replace(prefix=cb.SharedPrefix(64))
    result = cb.simulate_disaggregated(load, 1, 2, None, SERVER, prefix_cache=True)
    assert result.balance().hit_rate.tolist()[0] > 0.3
    assert result.balance().hit_rate.tolist()[1:] == [0, 0]


def test_bad_values_are_refused():
    with pytest.raises(InvalidRequestError, match="num_decode"):
        cb.simulate_disaggregated(POISSON, 1, 0)
    with pytest.raises(InvalidRequestError, match="as they are made"):
        cb.simulate_disaggregated(POISSON, 1, 1, cb.StaticBatching(4))
    with pytest.raises(InvalidRequestError, match="num_pages"):
        cb.simulate_disaggregated(POISSON, 1, 1, prefill={"num_pages": 9}, decode={"num_pages": 8})
    with pytest.raises(CostModelError, match="bytes_per_s"):
        cb.Link(bytes_per_s=0)
    with pytest.raises(CostModelError, match="latency_s"):
        cb.Link(latency_s=-1)
