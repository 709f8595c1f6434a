"""Simulated runs against queueing theory and sums done by hand."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import CheckedScheduler
from random_workloads import POLICIES

import contbatch as cb
from contbatch.arrivals import AllAtOnce, PoissonArrivals
from contbatch.engine import Engine
from contbatch.errors import CostModelError, InvalidRequestError
from contbatch.lengths import Uniform
from contbatch.runners.simulated import SimulatedRunner, next_token
from contbatch.sessions import AgentLoops, ClosedLoop, Conversations
from contbatch.source import Source
from contbatch.turn import Turn
from contbatch.workload import Mixture, OpenLoop, Poisson

SECOND = cb.Linear(step_s=1.0)


def backend(cost, kv_tokens=100_000):
    return cb.Simulated(cost=cost, kv_tokens=kv_tokens)


def run(workload, policy=None, cost=SECOND, **limits):
    return cb.simulate(workload, policy, backend(cost), **limits)


# ---- what is simulated is what the models say --------------------------------------------------------------------


def test_one_request_takes_its_steps():
    cost = cb.Linear(step_s=1, token_s=0.01, logits_s=0.1, decode_context_s=1e-3, prefill_pair_s=1e-4)
    workload = OpenLoop(arrivals=AllAtOnce(2.0), num_requests=1, prompt=10, output=3)
    result = run(workload, cost=cost)
    prompt = 1 + 10 * 0.01 + 0.1 + 55 * 1e-4
    decodes = [1 + 0.01 + 0.1 + context * 1e-3 for context in (11, 12)]
    assert list(result.steps.elapsed_s) == pytest.approx([prompt, *decodes])
    row = result.requests.iloc[0]
    assert (row.arrival_s, row.ttft_s, row.e2e_s) == pytest.approx((2.0, prompt, prompt + sum(decodes)))
    assert (result.steps.host_s == 0).all()


def test_step_rows_have_the_shape_that_was_priced():
    cost = cb.Linear(step_s=1, token_s=2, seq_s=3, logits_s=5, decode_context_s=7, prefill_pair_s=11)
    steps = run(Poisson(rate=1, num_requests=40, prompt=Uniform(1, 90)), cost=cost, max_num_batched_tokens=64).steps
    priced = 1 + 2 * steps.tokens + 3 * steps.seqs + 5 * steps.sampled_tokens
    priced += 7 * steps.decode_context + 11 * steps.prefill_pairs
    assert (steps.prefill_pairs > 0).any()
    assert (steps.sampled_tokens < steps.seqs).any()
    assert list(priced) == list(steps.elapsed_s)


@pytest.mark.parametrize("fast_forward", [True, False])
def test_a_step_of_another_size_costs_more(fast_forward):
    """Rows of the steps: 3 + 4, 2, 2, 1, 1, 1 with a request of 3 + 3 tokens beside one of 4 + 6."""
    turns = [Turn(i, 0.0, ((i, n),), output) for i, (n, output) in enumerate([(3, 3), (4, 6)])]
    cost = cb.Linear(step_s=1, resize_s=0.25)
    steps = cb.simulate(cb.Trace(turns, "two"), backend=backend(cost), fast_forward=fast_forward).steps
    assert list(steps.tokens) == [7, 2, 2, 1, 1, 1]
    assert list(steps.elapsed_s) == [1.25, 1.25, 1, 1.25, 1, 1]


@pytest.mark.parametrize("fast_forward", [True, False])
def test_a_step_of_another_size_costs_more_unless_both_are_computed_as_one_size(fast_forward):
    """The same steps: from 2 rows to 1 nothing changes; the first step of all always has another size."""
    turns = [Turn(i, 0.0, ((i, n),), output) for i, (n, output) in enumerate([(3, 3), (4, 6)])]
    cost = cb.Linear(step_s=1, resize_s=0.25, min_rows=2)
    steps = cb.simulate(cb.Trace(turns, "two"), backend=backend(cost), fast_forward=fast_forward).steps
    assert list(steps.elapsed_s) == [1.25, 1.25, 1, 1, 1, 1]
    one = cb.Trace([Turn(0, 0.0, ((0, 1),), 3)], "one")
    assert list(cb.simulate(one, backend=backend(cost), fast_forward=fast_forward).steps.elapsed_s) == [1.25, 1, 1]


def test_pages_that_move_to_the_host_and_back_cost_their_tokens():
    cost = cb.Linear(step_s=1, swapped_token_s=0.25)
    workload = OpenLoop(arrivals=AllAtOnce(), num_requests=6, prompt=20, output=60)
    steps = run(workload, cost=cost, num_pages=12, page_size=8, num_host_pages=20).steps
    assert (steps.pages_out > 0).any()
    assert (steps.pages_in > 0).any()
    assert list(steps.elapsed_s) == list(1 + 0.25 * 8 * (steps.pages_out + steps.pages_in))


def test_one_at_a_time_is_the_queue_of_lindley_and_of_pollaczek_and_khinchine():
    rate, n = 0.7, 20_000
    workload = Poisson(rate=rate, num_requests=n, prompt=1, output=1)
    waits = run(workload, cb.OneAtATime()).requests.sort_values("request_id").queue_s.to_numpy()
    arrivals = [turn.delay_s for turn in workload.turns()]
    lindley, wait = [0.0], 0.0
    for gap in np.diff(arrivals):
        wait = max(0.0, wait + 1.0 - gap)
        lindley.append(wait)
    assert waits == pytest.approx(lindley, abs=1e-6)
    # M/D/1: mean wait = rho / (2 (1 - rho)) services; 5 % is about three standard errors at this length.
    assert waits.mean() == pytest.approx(rate / (2 * (1 - rate)), rel=0.05)


def test_a_closed_loop_client_thinks_or_waits_and_nothing_else():
    """The law of response times, N = X (R + Z), holds for each client to the last bit of its clock."""
    loop = ClosedLoop(num_clients=8, num_requests=800, think_s=20.0, prompt=Uniform(1, 50), output=Uniform(1, 9))
    rows = run(loop).requests.set_index("request_id")
    turns = loop.turns()
    for client in range(8):
        own = [i for i, turn in enumerate(turns) if turn.session == client]
        busy = sum(turns[i].delay_s for i in own) + rows.e2e_s[own].sum()
        assert rows.finished_s[own].max() == pytest.approx(busy, rel=1e-12)
    assert np.mean([turn.delay_s for turn in turns]) == pytest.approx(20, rel=4 / math.sqrt(800))


@pytest.mark.parametrize("clients", [1, 3])
def test_a_client_has_one_request_at_a_time(clients):
    loop = ClosedLoop(num_clients=clients, num_requests=30, prompt=5, output=Uniform(1, 9))
    result = run(loop, max_num_seqs=clients)
    assert result.steps.seats.max() == clients
    session = {i: turn.session for i, turn in enumerate(loop.turns())}
    for client in range(clients):
        own = result.requests[result.requests.request_id.map(session) == client].sort_values("request_id")
        assert (own.arrival_s.to_numpy()[1:] == own.finished_s.to_numpy()[:-1]).all(), "it asks when it is answered"


def test_the_tax_that_every_call_pays():
    task, call, result, calls = 100, 20, 50, 4
    agents = AgentLoops(
        arrivals=AllAtOnce(), num_tasks=3, tool_calls=calls, task=task, call=call, result=result, answer=30
    )
    without, cached = (run(agents, prefix_cache=cache, page_size=1) for cache in (False, True))
    prompts = [task + i * (call + result) for i in range(calls + 1)]
    assert without.steps.prefill_tokens.sum() == 3 * sum(prompts)
    # Cached one by one, all but the last token of a turn: it was never fed back.
    new = task + calls * (result + 1)
    assert cached.steps.tokens.sum() - 3 * (calls * (call - 1) + 29) == 3 * new
    assert cached.steps.cached_tokens.sum() == 3 * (sum(prompts) - new)


def test_an_answer_ends_where_the_trace_says_whatever_was_asked_for():
    turns = [Turn(i, 0.0, ((i, 4),), n, client=cb.Client(max_tokens=50)) for i, n in enumerate((1, 7, 50))]
    requests = list(Source(turns).requests())
    Engine(cb.Scheduler(cb.ContinuousBatching(), num_pages=100), SimulatedRunner(SECOND)).run(requests)
    assert [(r.num_output_tokens, r.finish_reason) for r in requests] == [(1, "stop"), (7, "stop"), (50, "length")]


@given(st.sets(st.integers(0, 4)), st.integers(1, 3), st.integers(0, 3))
def test_no_answer_ends_by_accident(stops, expected, made):
    request = cb.Request(
        0, [1], cb.SamplingParams(max_tokens=4, stop_token_ids=tuple(stops)), expected_output_tokens=expected
    )
    request.output_token_ids += [9] * made
    assert (next_token(request) in stops) == bool(stops and made + 1 >= expected)


def test_orca_max_holds_seven_requests_and_paging_many_more():
    """vLLM, SOSP 2023: OPT-13B on an A100 of 40 GB, at most 2,048 tokens a request."""
    crowd = OpenLoop(arrivals=AllAtOnce(), num_requests=64, prompt=161, output=338)
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
    orca = cb.simulate(crowd, cb.Orca(reservation="max", max_model_len=2048), **limits)
    paged = cb.simulate(crowd, cb.ContinuousBatching(), **limits)
    assert orca.steps.seats.max() == 7
    assert paged.steps.seats.max() > 30
    assert paged.duration_s < orca.duration_s / 2


# ---- whatever the workload ---------------------------------------------------------------------------------------

LENGTHS = {"prompt": st.just(Uniform(1, 30)), "output": st.just(Uniform(1, 8)), "seed": st.integers(0, 99)}
ARRIVALS = st.sampled_from([AllAtOnce(), PoissonArrivals(0.3)])
SINGLE = st.one_of(
    st.builds(OpenLoop, arrivals=ARRIVALS, num_requests=st.integers(1, 9), **LENGTHS),
    st.builds(ClosedLoop, num_clients=st.integers(1, 3), num_requests=st.integers(3, 9), **LENGTHS),
    st.builds(Conversations, arrivals=ARRIVALS, num_conversations=st.integers(1, 4), turns_each=st.just(3), **LENGTHS),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(SINGLE, min_size=1, max_size=2).map(Mixture), POLICIES, st.integers(4, 20), st.booleans())
def test_every_turn_has_one_row_or_its_conversation_ended(workload, policy, num_pages, prefix_cache):
    scheduler = CheckedScheduler(policy, num_pages=num_pages, page_size=4, max_num_seqs=3, prefix_cache=prefix_cache)
    source, turns = workload.source(), workload.turns()
    result = Engine(scheduler, SimulatedRunner(SECOND)).run(source.requests(), on_finish=source.on_finish)
    rows = result.requests.set_index("request_id")
    assert rows.index.is_unique
    for i, turn in enumerate(turns):
        follows = i > 0 and turns[i - 1].session == turn.session
        ended = follows and turn.keeps_context and (i - 1 not in rows.index or rows.finish_reason[i - 1] == "rejected")
        assert (i in rows.index) == (not ended)
        if not ended and rows.finish_reason[i] != "rejected":
            assert (rows.output_tokens[i], rows.finish_reason[i]) == (turn.output_tokens, "length")


def test_the_same_workload_gives_the_same_tables():
    workload = Poisson(rate=4, num_requests=50, seed=3)
    first, second = (cb.simulate(workload) for _ in range(2))
    for name in ("requests", "steps", "segments"):
        assert getattr(first, name).equals(getattr(second, name))


def test_an_interrupted_run_aborts_those_that_followed_too():
    source = ClosedLoop(num_clients=1, num_requests=5, output=2).source()
    engine = Engine(cb.Scheduler(cb.ContinuousBatching(), num_pages=100), SimulatedRunner(SECOND))

    def on_finish(request, now):
        if request.request_id == 1:
            raise KeyboardInterrupt
        return source.on_finish(request, now)

    with pytest.raises(KeyboardInterrupt):
        engine.run(source.requests(), on_finish=on_finish)
    assert not engine.has_requests
    assert engine.scheduler.pool.num_available == 100
    assert len(engine.run(ClosedLoop(num_clients=1, num_requests=1).requests()).requests) == 1


# ---- the facade --------------------------------------------------------------------------------------------------


def test_the_pool_is_what_fits_and_can_be_chosen():
    workload = Poisson(rate=4, num_requests=3)
    assert cb.simulate(workload).num_pages == cb.Roofline("A100-40GB", "opt-13b").kv_capacity() // 16
    assert cb.simulate(workload, num_pages=70).num_pages == 70
    assert cb.simulate(workload, backend=cb.Simulated(kv_tokens=4096), page_size=32).num_pages == 128


def test_requests_longer_than_the_model_are_rejected():
    workload = OpenLoop(arrivals=AllAtOnce(), num_requests=1, prompt=2000, output=100)
    assert list(cb.simulate(workload).requests.finish_reason) == ["rejected"]
    assert list(cb.simulate(workload, max_model_len=4096).requests.finish_reason) == ["length"]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: cb.Simulated(gpu="A100"), CostModelError, "gpu must be"),
        (lambda: cb.Simulated(model="opt"), CostModelError, "model must be"),
        (lambda: cb.Simulated(model="opt-30b"), CostModelError, "59.9 GB of weights"),
        (lambda: cb.Simulated(memory_utilization=1.5), CostModelError, "memory_utilization must be in"),
        (lambda: cb.Simulated(kv_tokens=0), CostModelError, "kv_tokens must be None or ≥ 1, got 0"),
        (lambda: cb.Simulated(tensor_parallel=3), CostModelError, "tensor_parallel"),
        (lambda: cb.Simulated().replace(gpus=2), CostModelError, "the field to replace must be one of .* got 'gpus'"),
        (lambda: cb.simulate(Poisson(rate=1, num_requests=1), page_size=0), InvalidRequestError, "page_size"),
    ],
)
def test_bad_values_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_contiguous_memory_refuses_what_pages_admit():
    """Of 15 slots 4 come free on either side of a run of 7: 8 are free, but no 7 side by side until that one leaves."""
    load = Mixture(
        tuple(
            OpenLoop(arrivals=AllAtOnce(at), num_requests=1, prompt=2, output=output)
            for at, output in ((0.0, 3), (0.1, 6), (0.2, 3), (4.0, 6))
        )
    )
    limits = {"num_pages": 15, "page_size": 1}
    paged, contiguous = (run(load, cb.Orca(), layout=layout, **limits) for layout in ("paged", "contiguous"))
    assert paged.steps.external_slots.sum() == 0
    assert contiguous.steps.external_slots.sum() > 0
    assert paged.requests.queue_s.iloc[-1] == 0
    assert contiguous.requests.queue_s.iloc[-1] == 3
