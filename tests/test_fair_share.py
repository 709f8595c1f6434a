"""The virtual token counter: what the paper's theorem promises, measured from outside."""

from itertools import combinations

import pytest
from fake_runner import FakeRunner, request, scheduler_of, serve, table
from hypothesis import given, settings
from hypothesis import strategies as st
from random_workloads import LIMITS

from contbatch.engine import Engine
from contbatch.errors import InvalidRequestError
from contbatch.policies import ChunkedPrefill, FairShare, ShortestJobFirst
from contbatch.policies.lane import Lane, offers
from contbatch.policies.policy import arrival_key


def clients(spec, prompt=2, output=1):
    """One request per letter of `spec`, from the client of that letter, all at once."""
    return [request(f"{client}{i}-", prompt, output, client_id=client) for i, client in enumerate(spec)]


def order(policy, *requests, **limits):
    steps = serve(scheduler_of(policy, *requests, **{"max_num_seqs": 1} | limits))
    return [r.request_id[:2] for s in steps for r in s.admitted]


# ---- by hand -----------------------------------------------------------------------------------------------------


def test_clients_take_turns_whoever_came_first():
    """Each request costs 2 · 1 + 1 · 2 = 4. Counters (A, B): 0 0 → 4 0 → 4 4 → 8 4 → 8 8, ties by arrival."""
    assert order(FairShare(), *clients("AAABB")) == ["A0", "B3", "A1", "B4", "A2"]
    assert order(ChunkedPrefill(), *clients("AAABB")) == ["A0", "A1", "A2", "B3", "B4"]


def test_a_long_answer_counts_for_as_many_short_ones():
    """A's first costs 2 + 2 · 5 = 12, B's 4 each: B has three in that time."""
    requests = [*clients("A", output=5), *clients(" AABBBB")[1:]]
    for r, name in zip(requests[1:], ("A1-", "A2-", "B3-", "B4-", "B5-", "B6-"), strict=True):
        r.request_id, r.client_id = name, name[0]
    assert order(FairShare(), *requests) == ["A0", "B3", "B4", "B5", "A1", "B6", "A2"]


def test_prompts_are_charged_at_admission_so_one_step_is_fair_already():
    steps = serve(scheduler_of(FairShare(), *clients("AAABBB"), max_num_seqs=4))
    assert table(steps)[0] == "A0-2 B3-2 A1-2 B4-2"


def test_weights():
    requests = [*clients("A", prompt=9), *clients(" ABB")[1:]]
    requests[1].client_id = "A"
    served = {w: order(FairShare(*w), *requests_again(requests)) for w in ((1.0, 2.0), (0.0, 1.0))}
    assert served[1.0, 2.0] == ["A0", "B2", "B3", "A1"]
    assert served[0.0, 1.0] == ["A0", "B2", "A1", "B3"]


def requests_again(requests):
    return [request(r.request_id, r.num_prompt_tokens, r.sampling.max_tokens, client_id=r.client_id) for r in requests]


def test_who_was_idle_has_saved_nothing():
    """A is served alone; B, who comes late, is lifted to A's counter, and they take turns from then on."""
    scheduler = scheduler_of(FairShare(), *clients("AAAAAA"), max_num_seqs=1)
    serve(scheduler, 3)
    for i in range(3):
        scheduler.add(request(f"B{i}-", 2, client_id="B"))
    assert [r.request_id[:2] for s in serve(scheduler) for r in s.admitted] == ["A3", "B0", "A4", "B1", "A5", "B2"]


def test_who_comes_to_an_empty_queue_is_lifted_to_the_last_who_left_it():
    scheduler = scheduler_of(FairShare(), *clients("AA"), max_num_seqs=1)
    serve(scheduler)
    for i, client in enumerate("BBA"):
        scheduler.add(request(f"{client}{i}-", 2, client_id=client))
    assert [r.request_id[:2] for s in serve(scheduler) for r in s.admitted] == ["B0", "A2", "B1"]


# ---- the theorem -------------------------------------------------------------------------------------------------


def run(policy, requests, limits):
    """Serve requests; return per step the clients that queue while it runs and, after it, the service of each."""
    scheduler = scheduler_of(policy, *requests, **limits)
    names = sorted({r.client_id for r in requests})
    queueing, service, admitted = [], [dict.fromkeys(names, 0)], set()
    while scheduler.has_requests:
        [step] = serve(scheduler, 1)
        admitted |= set(step.admitted)
        queueing.append({r.client_id for r in scheduler.waiting if r not in step.preempted})
        service.append(dict.fromkeys(names, 0))
        for r in requests:
            service[-1][r.client_id] += r.num_prompt_tokens * (r in admitted) + 2 * r.num_output_tokens
    return queueing, service


def widest_gap(queueing, service):
    """Largest difference of service between two clients over any stretch of steps in which both queue."""
    widest = 0
    for f, g in combinations(service[0], 2):
        low = high = None
        for both, before, after in zip(({f, g} <= q for q in queueing), service, service[1:], strict=False):
            if not both:
                low = high = None
                continue
            lead = before[f] - before[g]
            low, high = (lead, lead) if low is None else (min(low, lead), max(high, lead))
            lead = after[f] - after[g]
            widest = max(widest, lead - low, high - lead)
    return widest


def bound(requests, limits):
    """Theorem 4.4: 2 U, where U = max(w_p · longest prompt, w_q · tokens in memory)."""
    return 2 * max(max(r.num_prompt_tokens for r in requests), 2 * limits["num_pages"] * limits["page_size"])


SPECS = st.lists(st.tuples(st.sampled_from("ABC"), st.integers(1, 12), st.integers(1, 9)), min_size=2, max_size=24)


@settings(max_examples=150)
@given(SPECS, LIMITS)
def test_clients_that_queue_differ_by_no_more_than_the_bound(specs, limits):
    fitting = [s for s in specs if s[1] + s[2] - 1 <= limits["num_pages"] * limits["page_size"]]
    requests = [request(i, prompt, output, client_id=c) for i, (c, prompt, output) in enumerate(fitting)]
    if requests:
        assert widest_gap(*run(FairShare(), requests, limits)) <= bound(requests, limits)


def test_first_come_first_served_breaks_the_bound_that_fair_share_keeps():
    limits = {"num_pages": 4, "page_size": 4, "max_num_seqs": 2}

    def gap(policy):
        requests = [request(i, 4, 4, client_id="B" if i in (60, 61) or i > 80 else "A") for i in range(100)]
        return widest_gap(*run(policy, requests, limits)), bound(requests, limits)

    fair, limit = gap(FairShare())
    unfair, _ = gap(ChunkedPrefill())
    assert fair <= 12 <= limit == 64 < unfair


@pytest.mark.parametrize(("policy", "bounded"), [(FairShare(), True), (ShortestJobFirst(), False)], ids=repr)
def test_nobody_starves(policy, bounded):
    def steps_until_served(num_others):
        patient = request("patient", 8, 2, client_id="B")
        others = [request(i, 2, 2, client_id="A") for i in range(num_others)]
        scheduler = scheduler_of(policy, *others, patient, max_num_seqs=2)
        while not patient.is_finished:
            serve(scheduler, 1)
        return scheduler.num_steps

    assert (steps_until_served(100) == steps_until_served(10)) is bounded


# ---- the books ---------------------------------------------------------------------------------------------------


def books(scheduler):
    scheduler.policy._ledger.settle(scheduler.policy.price)
    return dict(scheduler.policy._ledger.counters)


def test_planning_twice_charges_once():
    scheduler = scheduler_of(FairShare(), *clients("AB", output=3))
    for _ in range(3):
        scheduler.schedule()
    assert books(scheduler) == {"A": 2, "B": 2}
    serve(scheduler, 1)
    for _ in range(3):
        scheduler.schedule()
    assert books(scheduler) == {"A": 4, "B": 4}


def test_an_abort_before_anything_is_computed_costs_nothing():
    a, _, c = requests = clients("ABC", output=3)
    scheduler = scheduler_of(FairShare(), *requests, max_num_seqs=2)
    scheduler.schedule()
    scheduler.abort(a.request_id)
    scheduler.abort(c.request_id)
    assert books(scheduler) == {"A": 0, "B": 2, "C": 0}
    serve(scheduler)
    assert books(scheduler) == {"A": 0, "B": 2 + 2 * 3, "C": 0}


@settings(max_examples=60)
@given(SPECS, LIMITS, st.sets(st.integers(0, 30)), st.sets(st.integers(0, 23)))
def test_the_books_agree_with_what_was_served(specs, limits, crashes, aborted):
    """One client, so no lifts: whatever is preempted, planned again or aborted, its counter is the sum of prices."""
    scheduler = scheduler_of(FairShare(), **limits)
    pool = (limits["num_pages"], limits["page_size"], limits["prefix_cache"], limits["num_host_pages"])
    engine = Engine(scheduler, FakeRunner(*pool, crash=crashes))
    requests = [request(i, prompt, output) for i, (_, prompt, output) in enumerate(specs)]
    for r in requests:
        if r.max_kv_tokens <= limits["num_pages"] * limits["page_size"]:
            engine.add(r)
    computed = set()
    while engine.has_requests:
        try:
            engine.step()
        except RuntimeError:
            continue
        finally:
            computed |= {r for r in requests if r.num_computed_tokens or r.num_preemptions}
        if engine.scheduler.num_steps in aborted:
            engine.abort(engine.scheduler.num_steps)
    assert books(scheduler).get(None, 0) == sum(r.num_prompt_tokens + 2 * r.num_output_tokens for r in computed)
    assert not scheduler.policy._ledger._paid, "ended requests are still in the books"


def test_clients_without_requests_leave_no_lanes():
    scheduler = scheduler_of(FairShare(), *clients("ABCDEFGH"))
    serve(scheduler)
    scheduler.add(request("x", client_id="X"))
    assert set(scheduler.policy._lanes) == {"X"}


def test_a_lane_takes_a_request_twice_and_forgets_who_waits_no_more():
    lane, a = Lane(), request("a")
    lane.push(a)
    lane.push(a)
    assert lane.head is a
    assert list(offers([lane, lane], arrival_key)) == [a]
    scheduler_of(ChunkedPrefill(), a).abort("a")
    assert lane.head is None


@pytest.mark.parametrize("bad", [{"input_weight": -1.0}, {"output_weight": float("inf")}, {"output_weight": None}])
def test_bad_weights(bad):
    with pytest.raises(InvalidRequestError, match="input_weight, output_weight must be numbers ≥ 0"):
        FairShare(**bad)
