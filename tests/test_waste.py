"""Where the memory goes, against a look at every slot; and which limits were binding."""

import numpy as np
import pytest
from fake_runner import engine_of, request
from hypothesis import given, settings
from hypothesis import strategies as st
from random_workloads import POLICIES, SAMPLED, WORKLOADS

from contbatch.errors import InvalidRequestError
from contbatch.policies import ChunkedPrefill, ContinuousBatching, GuaranteedNoEvict, Orca

MEMORY = [Orca(), Orca("oracle"), Orca("power_of_two"), Orca("max", max_model_len=24), GuaranteedNoEvict()]


def watched(engine):
    """Note, at every step, who holds which pages and how many tokens are stored in them then."""
    seen, execute = [], engine.runner.execute

    def watch(step):
        new = {g.request.request_id: g.num_tokens for g in step.grants if not g.padding}
        tables = {r.request_id: list(r.pages) for r in engine.scheduler.running}
        stored = {r.request_id: r.num_computed_tokens + new.get(r.request_id, 0) for r in engine.scheduler.running}
        restarts = {(r.request_id, r.num_preemptions) for r in step.restarted}
        stays = {r.request_id: (r.request_id, r.num_preemptions) for r in engine.scheduler.running}
        seen.append((tables, stored, stays, restarts, engine.scheduler.pool.num_free))
        return execute(step)

    engine.runner.execute = watch
    return seen


def states(seen, page_size):
    """Slots stored, to be filled, and never filled, at every step; slot by slot."""
    final = {}
    for _, stored, stays, _, _ in seen:
        for name, stay in stays.items():
            final[stay] = max(final.get(stay, 0), stored[name])
    for tables, stored, stays, _, _ in seen:
        kinds = {}
        for name, table in tables.items():
            for position in range(len(table) * page_size):
                slot = (table[position // page_size], position % page_size)
                kind = "stored" if position < stored[name] else "internal"
                if kind == "internal" and position < final[stays[name]]:
                    kind = "reserved"
                assert kinds.get(slot, kind) == kind, "a shared slot is in two states"
                kinds[slot] = kind
        yield [list(kinds.values()).count(kind) for kind in ("stored", "reserved", "internal")]


@settings(max_examples=150)
@given(SAMPLED, st.one_of(POLICIES, st.sampled_from(MEMORY)), st.booleans())
def test_every_slot_is_in_the_state_that_it_turns_out_to_be_in(workload, policy, contiguous):
    limits = dict(workload.limits)
    if contiguous:
        limits |= {"layout": "contiguous", "prefix_cache": False}
    engine = engine_of(policy, **limits)
    seen = watched(engine)
    result = engine.run(workload.requests())
    waste, slots = result.waste(), limits["num_pages"] * limits["page_size"]
    assert np.allclose(waste.sum(axis=1), 1)
    assert (waste >= 0).all(axis=None)
    found = waste[["stored", "reserved", "internal"]] * slots
    np.testing.assert_allclose(found, np.array([*states(seen, limits["page_size"])]).reshape(-1, 3), atol=1e-9)
    free = np.array([free for *_, free in seen]) * limits["page_size"]
    np.testing.assert_allclose((waste.external + waste.free) * slots, free, atol=1e-9)
    assert contiguous or not waste.external.any()
    if not contiguous and not policy.reserve(request("any")):
        most = result.steps.seats * (limits["page_size"] - 1)
        assert (result.steps.internal_slots <= most).all(), "paged memory wastes less than a page a sequence"


def test_the_split_of_one_request_in_each_layout():
    """5 prompt tokens, 6 of 20 output tokens made (a stop), so 10 of 24 K/V tokens; slots of one token, 40 of them."""
    first = {}
    for name, policy, limits in (
        ("paged", ContinuousBatching(), {"page_size": 4, "num_pages": 10}),
        ("max", Orca("max", max_model_len=32), {"page_size": 1, "num_pages": 40, "layout": "contiguous"}),
        ("max_tokens", Orca(), {"page_size": 1, "num_pages": 40, "layout": "contiguous"}),
        ("power_of_two", Orca("power_of_two"), {"page_size": 1, "num_pages": 40, "layout": "contiguous"}),
        ("oracle", Orca("oracle"), {"page_size": 1, "num_pages": 40, "layout": "contiguous"}),
    ):
        engine = engine_of(policy, **limits)
        engine.on_token = lambda r: r.num_output_tokens == 6
        waste = engine.run([request("a", 5, 20, expected_output_tokens=6)]).waste() * 40
        assert len(waste) == 6
        assert list(waste.stored) == pytest.approx(range(5, 11))
        first[name] = [round(x) for x in waste.loc[0, ["stored", "reserved", "internal", "free"]]]
    assert first == {
        "paged": [5, 3, 0, 32],
        "max": [5, 5, 22, 8],
        "max_tokens": [5, 5, 14, 16],
        "power_of_two": [5, 5, 2, 28],
        "oracle": [5, 5, 0, 30],
    }


def test_a_preempted_request_filled_what_it_filled():
    result = engine_of(ChunkedPrefill(), num_pages=2).run([request("a", 4, 5), request("b", 3, 3)])
    assert list(result.steps.preempted) == [0, 1, 0, 0, 0, 0, 0]
    assert list(result.steps.internal_slots) == [1, 0, 0, 0, 0, 0, 3]


def test_what_nobody_has_left_yet_counts_as_reserved():
    engine = engine_of(Orca(), num_pages=8)
    engine.add(request("a", 4, 9))
    engine.step()
    waste = engine.recorder.result().waste() * 32
    assert waste.iloc[0].to_dict() == {
        "stored": 4,
        "reserved": 8,
        "internal": 0,
        "external": 0,
        "cached": 0,
        "free": 20,
    }


def test_external_fragmentation_is_what_is_free_but_in_pieces():
    """12 slots in runs of 4, 4 and 4; a and c leave after step 0 and 8 are free: d, who needs 7, waits for b."""
    requests = [request("a", 4), request("b", 2, 3), request("c", 4), request("d", 3, 5)]
    result = engine_of(Orca(), num_pages=12, page_size=1, layout="contiguous").run(requests)
    assert list(result.steps.external_slots[:4]) == [0, 8, 8, 0]
    assert list(result.steps.pages_bound[:4]) == [True, True, True, False]
    assert list(result.waste().external[:4] * 12) == pytest.approx([0, 8, 8, 0])
    assert list(result.waste().free[:4] * 12) == pytest.approx([0, 0, 0, 5])


def test_cached_pages_are_a_state_of_their_own():
    result = engine_of(num_pages=4, prefix_cache=True).run([request("a", 8), request("b", 1, 2, at=50.0)])
    waste = result.waste() * 16
    assert list(waste.cached) == [0, 8, 8]
    assert list(waste.free) == [8, 4, 4]


# ---- which limits were binding -----------------------------------------------------------------------------------


RELAXED = {
    "seats": ("max_num_seqs", lambda n: n + 20),
    "tokens": ("max_num_batched_tokens", lambda n: n + 1000),
    "pages": ("num_pages", lambda n: n + 1000),
}
STEADY = POLICIES.filter(lambda p: type(p).__name__ != "RandomOrder" and not getattr(p, "preempt", False))


@pytest.mark.parametrize("limit", RELAXED)
@settings(max_examples=80)
@given(WORKLOADS, STEADY)
def test_a_limit_that_was_never_binding_could_as_well_be_higher(limit, workload, policy):
    limits = {**workload.limits, "prefix_cache": False}
    name, relax = RELAXED[limit]
    tight, loose = engine_of(policy, **limits), engine_of(policy, **{**limits, name: relax(limits[name])})
    result = tight.run(filter(workload.fits, workload.requests()))
    loose.run(filter(workload.fits, workload.requests()))
    bound = result.steps[f"{limit}_bound"]
    first = int(bound.argmax()) if bound.any() else len(bound)
    grants, others = ([grants for grants, _ in engine.runner.steps] for engine in (tight, loose))
    assert grants[:first] == others[:first], "the limit changed a step in which it was not binding"
    if not bound.any():
        assert grants == others
    elif limit == "tokens" or not result.steps[["seats_bound", "tokens_bound"]].iloc[first].any():
        assert grants[first] != others[first], "a limit that is binding would, if higher, change the step"


def test_the_summary_counts_the_steps_in_which_a_limit_was_binding():
    requests = [request("a", 6, 2), request("b", 1, 2), request("c", 1, 1)]
    result = engine_of(max_num_seqs=2, max_num_batched_tokens=4).run(requests)
    assert list(result.steps.tokens_bound) == [True, False, False, False]
    assert list(result.steps.seats_bound) == [False, True, True, False]
    summary = result.summary()
    assert (summary.tokens_bound, summary.seats_bound, summary.pages_bound) == (1, 2, 0)


def test_a_rejected_request_binds_nothing():
    with pytest.raises(InvalidRequestError):
        engine_of(num_pages=1).add(request("a", 99))
    assert engine_of(num_pages=1).run([request("a", 99)]).summary().pages_bound == 0
