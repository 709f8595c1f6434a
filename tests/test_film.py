"""A film of a log shows what the log's replayed states say, and does what the recorder saw."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_workloads import POLICIES, SAMPLED
from test_decision_log import LAYOUTS, limits_of, logged, run_to_the_end

import contbatch as cb
from contbatch import film as f
from contbatch.decision import REASONS
from contbatch.errors import DecisionLogError
from contbatch.seat_picture import seat_picture, seats_over_time


def played(film):
    """What a player shows in each step: seats, work, pages, queue, how those in it came, tokens, and who is gone."""
    seats, work, pages, queue, tokens, gone = {}, {}, {}, [], {}, {}
    for begin, end in zip(film.starts, film.starts[1:], strict=False):
        for what, where, which in film.changes[begin:end].tolist():
            if what == f.SEAT:
                seats[where] = which
            elif what == f.WORK:
                work[where] = which
            elif what == f.PAGE:
                pages[where] = which
            elif what == f.ENTER:
                queue.insert(where, divmod(which, 4))
            elif what == f.LEAVE:
                assert queue.pop(where)[0] == which
            elif what == f.TOKEN:
                tokens.setdefault(where, []).append(which)
            else:
                assert what == f.GONE
                gone[where] = REASONS[which]
        sits = {seat: request for seat, request in seats.items() if request != f.NOBODY}
        yield sits, dict(work), dict(pages), list(queue), {r: list(made) for r, made in tokens.items()}, dict(gone)


def owner_of(page, state, ids):
    holders = [name for name, table in state.tables.items() if page in table]
    if len(holders) > 1:
        return f.SHARED
    return ids.index(str(holders[0])) if holders else f.CACHED if page in state.cached else f.FREE


def check(log):
    film = f.Film.of(log)
    ids, tokens, gone, num_pages = film.requests, {}, {}, log.settings["num_pages"]
    assert len(film) == len(log)
    for shown, state, now in zip(played(film), log.states(), film.now, strict=True):
        seats, work, pages, queue, made, left = shown
        assert now == state.now
        assert {seat: ids[request] for seat, request in seats.items()} == {s: str(r) for s, r in state.seats.items()}
        assert [ids[request] for request, _ in queue] == [str(name) for name in state.waiting]
        assert {ids[r] for r, kind in queue if kind == 2} == {str(name) for name in state.host_tables}
        assert {page: owner_of(page, state, ids) for page in range(num_pages)} == dict.fromkeys(
            range(num_pages), -1
        ) | pages
        assert all(work.get(seat, 0) == 0 for seat in range(log.settings["max_num_seqs"]) if seat not in seats)
        for number, token in state.row.sampled:
            tokens.setdefault(number, []).append(token)
        assert made == tokens
        assert left == gone
        gone |= {number: REASONS[reason] for number, reason in state.row.left}
    return film


@settings(max_examples=150)
@given(SAMPLED, POLICIES, LAYOUTS)
def test_a_film_shows_the_states_of_its_log(workload, policy, layout):
    engine, _ = logged(policy, filter(workload.fits, workload.requests()), **limits_of(workload, layout))
    run_to_the_end(engine)
    if not engine.log.rows:
        return
    film = check(engine.log)
    seen = {}  # what the recorder saw each seat do
    for row in engine.recorder.result().segments.itertuples():
        seen |= {(step, row.seat): row.kind for step in range(row.start_step, row.end_step)}
    kinds = {1: "prefill", 2: "decode", 3: "held"}
    for (seats, work, *_), row in zip(played(film), engine.log.rows, strict=True):
        doing = {seat: kinds[work[seat]] for seat in seats if work.get(seat)}
        assert doing == {seat: seen[row.step, seat] for seat in doing}
        granted = {number for number, *_ in row.grants}
        idle = {seat for seat, number in seats.items() if number not in granted and seen[row.step, seat] != "held"}
        assert idle == seats.keys() - doing.keys()


@settings(max_examples=60)
@given(SAMPLED, POLICIES, LAYOUTS, st.data())
def test_a_film_survives_aborts_and_crashes(workload, policy, layout, data):
    requests = list(filter(workload.fits, workload.requests()))
    engine, _ = logged(policy, requests, **limits_of(workload, layout))
    for _ in range(data.draw(st.integers(0, 12))):
        action = data.draw(st.sampled_from(["step", "abort", "crash"]))
        if action == "abort" and requests:
            engine.abort(data.draw(st.sampled_from(requests)).request_id)
        elif action == "crash":
            engine.runner.crash = {engine.runner.calls}
        with suppress(RuntimeError):
            engine.step()
    run_to_the_end(engine)
    if engine.log.rows:
        check(engine.log)


def experiment(**changes):
    workload = cb.Poisson(rate=8, num_requests=60, seed=1)
    return cb.Experiment(policy=cb.ContinuousBatching(), workload=workload, num_pages=200, max_num_seqs=8).replace(
        **changes
    )


def log_of(**changes):
    log = cb.DecisionLog()
    cb.run(experiment(**changes), log=log)
    return log


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"prefix_cache": True, "workload": cb.Poisson(rate=8, num_requests=40, prefix=cb.SharedPrefix(64, 2))},
        {"num_host_pages": 50, "num_pages": 60},
        {"policy": cb.StaticBatching(4, pad=True)},
    ],
)
def test_films_of_simulated_runs(changes):
    check(log_of(**changes))


def test_swapped_shared_and_cached_are_told_apart():
    cached = f.Film.of(
        log_of(prefix_cache=True, workload=cb.Poisson(rate=8, num_requests=40, prefix=cb.SharedPrefix(64, 2)))
    )
    assert {f.SHARED, f.CACHED} <= set(cached.changes[cached.changes[:, 0] == f.PAGE, 2])
    swapped = f.Film.of(log_of(num_host_pages=50, num_pages=60))
    assert {0, 2} <= set(swapped.changes[swapped.changes[:, 0] == f.ENTER, 2] % 4)
    again = f.Film.of(log_of(num_pages=60))
    assert set(again.changes[again.changes[:, 0] == f.ENTER, 2] % 4) == {0, 1}


def test_memory_grows_with_what_happens_not_with_pages():
    few, many = (f.Film.of(log_of(num_pages=pages)) for pages in (5_000, 50_000))
    assert few.changes.nbytes == many.changes.nbytes


def test_logs_without_steps_and_malformed_ones_are_refused_with_the_step():
    with pytest.raises(DecisionLogError, match="has no step"):
        f.Film.of(cb.DecisionLog())
    for field, value in (
        ("admitted", [[9999, 0, 0]]),
        ("tables", [[5, 0, 1]]),
        ("sampled", [[0]]),
        ("ranks", [1.0, 2.0]),
    ):
        log = log_of()
        setattr(log.rows[0], field, value)
        with pytest.raises(DecisionLogError, match="step 0"):
            f.Film.of(log)


def test_the_picture_of_seats_samples_the_steps_of_a_long_run():
    log = log_of(policy=cb.StaticBatching(8))
    film, states = f.Film.of(log), list(played(f.Film.of(log)))
    whole = seats_over_time(film, len(film))
    assert whole.shape == (8, len(film))
    expected = [[1 + work.get(seat, 0) if seat in seats else 0 for seats, work, *_ in states] for seat in range(8)]
    assert np.array_equal(whole, expected)
    some = seats_over_time(film, 10)
    assert some.shape == (8, 10)
    assert np.array_equal(some[:, [0, -1]], whole[:, [0, -1]])
    [ax] = seat_picture(film).axes
    assert [text.get_text() for text in ax.get_legend().get_texts()][-1] == "held: wasted"
