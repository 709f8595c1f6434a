"""Policies that differ in the memory they reserve and in whom they preempt: Orca's variants, TensorRT-LLM's two."""

import pytest
from fake_runner import request, scheduler_of, serve, table
from hypothesis import given, settings
from hypothesis import strategies as st
from random_workloads import FIRST_COME_FIRST_SERVED, LIMITS, WORKLOADS

from contbatch.errors import InvalidRequestError
from contbatch.policies import ChunkedPrefill, GuaranteedNoEvict, MaxUtilization, Orca, Preemptive, Priority
from contbatch.policies.preemptive import VICTIMS


def reserved(policy, *args, **kwargs):
    """Pages of 4 tokens that a request holds right after its admission."""
    scheduler = scheduler_of(policy, request("a", *args, **kwargs))
    scheduler.schedule()
    return len(scheduler.running[0].pages)


@pytest.mark.parametrize(
    ("policy", "pages"),
    [
        (Orca(), 10),  # 3 + 36 - 1 tokens: what it may make
        (Orca("max", max_model_len=64), 16),  # 64: the model's longest
        (Orca("power_of_two"), 9),  # 3 + 32 - 1: 25 expected, as in vLLM's example
        (Orca("power_of_two", max_model_len=30), 8),  # 30
        (Orca("oracle"), 7),  # 3 + 25 - 1
        (GuaranteedNoEvict(), 10),
        (MaxUtilization(), 1),
        (ChunkedPrefill(), 1),
    ],
    ids=repr,
)
def test_pages_at_admission(policy, pages):
    assert reserved(policy, 3, 36, expected_output_tokens=25) == pages


@given(st.integers(1, 40), st.integers(1, 200))
def test_a_power_of_two_is_between_the_oracle_and_twice_its_output(prompt, expected):
    r = request("a", prompt, 200, expected_output_tokens=expected)
    oracle, rounded = Orca("oracle").reserve(r), Orca("power_of_two").reserve(r)
    assert oracle <= rounded < oracle + expected
    assert bin(rounded - prompt + 1).count("1") == 1


def test_what_is_reserved_must_fit_the_pool():
    scheduler = scheduler_of(Orca("max", max_model_len=64), num_pages=15)
    with pytest.raises(InvalidRequestError, match="need 16 pages of 4 tokens, the pool has 15"):
        scheduler.add(request("a"))


@pytest.mark.parametrize("bad", [{"reservation": "all"}, {"reservation": None}, {"max_model_len": 0}])
def test_bad_orca(bad):
    [(name, value)] = bad.items()
    with pytest.raises(InvalidRequestError, match=f"{name} must be .* got {value!r}"):
        Orca(**bad)


@pytest.mark.parametrize(
    "policy", [Orca(), Orca("max", max_model_len=16), Orca("power_of_two"), GuaranteedNoEvict()], ids=repr
)
@settings(max_examples=60)
@given(workload=WORKLOADS, data=st.data())
def test_who_reserves_all_is_never_preempted(policy, workload, data):
    scheduler = scheduler_of(policy, **workload.limits)
    for r in workload.requests():
        r.expected_output_tokens = r.sampling.max_tokens  # an oracle that errs may cost a preemption
        try:
            scheduler.add(r)
        except InvalidRequestError:
            continue
    assert not any(step.preempted for step in serve(scheduler))


def test_an_oracle_that_errs_costs_a_preemption_and_no_token():
    requests = [request(name, 4, 9, expected_output_tokens=1) for name in "ab"]
    scheduler = scheduler_of(Orca("oracle"), *requests, num_pages=3)
    steps = serve(scheduler)
    assert sum(len(s.preempted) for s in steps) == 1
    assert [r.num_output_tokens for r in requests] == [9, 9]


FOUR = [(name, 4, 5) for name in "abcd"]  # 4 tokens fill a page, 8 are computed in the end


def test_guaranteed_no_evict_admits_whom_it_can_serve_to_the_end():
    steps = serve(scheduler_of(GuaranteedNoEvict(), *(request(*lengths) for lengths in FOUR), num_pages=4))
    assert table(steps) == ["a4 b4", *["a1 b1"] * 4, "c4 d4", *["c1 d1"] * 4]


def test_max_utilization_admits_all_that_fit_and_pauses_the_latest():
    steps = serve(scheduler_of(MaxUtilization(), *(request(*lengths) for lengths in FOUR), num_pages=4))
    assert table(steps) == [
        "a4 b4 c4 d4",
        "a1 b1 -d -c",
        *["a1 b1"] * 3,
        "c5 d5",
        *["c1 d1"] * 3,
    ]


@settings(max_examples=60)
@given(LIMITS, st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=7))
def test_max_utilization_admits_at_least_as_many_at_once(limits, lengths):
    admitted = []
    for policy in (GuaranteedNoEvict(), MaxUtilization()):
        scheduler = scheduler_of(policy, **limits)
        for i, (prompt, output) in enumerate(lengths):
            if prompt + output - 1 <= limits["num_pages"] * limits["page_size"]:
                scheduler.add(request(i, prompt, output))
        admitted.append(len(scheduler.schedule().admitted) if scheduler.has_requests else 0)
    assert admitted[0] <= admitted[1]


def test_max_utilization_goes_by_arrival_whoever_was_admitted_first():
    late, early = request("late", at=2.0), request("early", at=1.0)
    assert [r for r, _ in MaxUtilization().plan((), (late, early), 9)] == [early, late]


# ---- whom to preempt ---------------------------------------------------------------------------------------------


def candidates():
    """Four requests, each the victim of one choice."""
    made = {
        "latest_arrival": request("latest", at=9.0),
        "lowest_priority": request("unimportant", priority=7),
        "fewest_tokens": request("young"),
        "lowest_rank": request("last"),
    }
    for order, (name, r) in enumerate(made.items()):
        r.order, r.num_computed_tokens = order, 1 if name == "fewest_tokens" else 5
    return made


@pytest.mark.parametrize("victim", ["lowest_rank", *VICTIMS])
def test_choices_of_a_victim(victim):
    made = candidates()
    assert MaxUtilization(victim=victim).choose_victim(tuple(made.values())) is made[victim]


@pytest.mark.parametrize(
    ("victim", "out"), [("lowest_rank", "d"), ("latest_arrival", "d"), ("lowest_priority", "b"), ("fewest_tokens", "c")]
)
def test_the_victim_is_chosen_among_those_ranked_below(victim, out):
    """Pages of 4 tokens: a needs a second one; its own priority and few tokens do not make it a victim."""
    requests = [
        request("a", 4, 5, priority=9),
        request("b", 7, 9, priority=5),
        request("c", 5, 9),
        request("d", 6, 9),
    ]
    scheduler = scheduler_of(ChunkedPrefill(victim=victim), *requests, num_pages=7)
    serve(scheduler, 1)
    [step] = serve(scheduler, 1)
    assert [r.request_id for r in step.preempted] == [out]
    assert "a1" in table([step])[0]


@pytest.mark.parametrize("policy", [p for p in FIRST_COME_FIRST_SERVED if isinstance(p, Preemptive)], ids=repr)
def test_two_that_each_need_the_pool_end_whoever_is_the_victim(policy):
    requests = [request(i, 3, 9, priority=-i) for i in range(5)]
    steps = serve(scheduler_of(policy, *requests, num_pages=3, max_num_seqs=3), max_steps=120)
    assert sum(len(s.preempted) for s in steps) <= 12


def test_bad_victim():
    with pytest.raises(
        InvalidRequestError, match=r"victim must be one of lowest_rank, latest_arrival, .* got 'oldest'"
    ):
        Priority(victim="oldest")
