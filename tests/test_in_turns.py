"""Measured runs that take turns on one model: the same as one after the other, but for the time."""

from itertools import groupby

import numpy as np
import pytest
from tiny_llm import write_tiny

import contbatch as cb
from contbatch import in_turns, verification
from contbatch.arrivals import AllAtOnce
from contbatch.errors import ExperimentError, RunnerError
from contbatch.lengths import Uniform


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTBATCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        with cb.LLM(write_tiny(tmp_path_factory.mktemp("tiny")), num_pages=90, page_size=4) as made:
            yield made


def at_once(seed, n=7, **fields):
    return cb.OpenLoop(
        arrivals=AllAtOnce(), num_requests=n, prompt=Uniform(1, 20), output=Uniform(1, 12), seed=seed, **fields
    )


def experiments(llm, **changes):
    loads = at_once(1), at_once(2, prefix=cb.SharedPrefix(9)), cb.ClosedLoop(num_clients=2, num_requests=5, output=4)
    policies = cb.StaticBatching(2), cb.ContinuousBatching(), cb.ChunkedPrefill()
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "backend": llm, **changes}
    return [
        cb.Experiment(policy=policy, workload=load, prefix_cache=i == 1, **limits)
        for i, (policy, load) in enumerate(zip(policies, loads, strict=True))
    ]


def decisions(result):
    return [(row.plan, row.admitted, row.tables, row.grants, row.sampled, row.left) for row in result.decisions.rows]


def test_each_decides_and_says_what_it_does_alone(llm, monkeypatch):
    """Static batching and all at once: no decision hangs on the clock. Any mix-up of pages would change a token."""
    monkeypatch.setattr(in_turns, "TURN_S", 0.0)
    given = [e for e in experiments(llm, num_pages=30) if isinstance(e.workload, cb.OpenLoop)]
    for experiment, result in zip(given, cb.run_in_turns(given, log=True), strict=True):
        alone = cb.run(experiment, log=cb.DecisionLog())
        assert decisions(result) == decisions(alone)
        assert result.token_ids == alone.token_ids
        assert result.max_num_seqs == 3
        assert result.provenance.hash == alone.provenance.hash


def test_requests_that_wait_for_answers_come(llm):
    closed = experiments(llm)[2]
    [result] = cb.run_in_turns([closed.replace(max_model_len=None, workload=closed.workload.replace(prompt=9))])
    assert len(result.finished) == 5
    assert result.decisions is None


def test_a_clock_counts_its_own_steps_and_the_last_one_catches_up(llm, monkeypatch):
    monkeypatch.setattr(in_turns, "TURN_S", 0.0)
    order = []
    forward = in_turns.PagesFrom.forward

    def noting(self, inputs):
        order.append(self)
        return forward(self, inputs)

    monkeypatch.setattr(in_turns.PagesFrom, "forward", noting)
    given = experiments(llm)[:2]
    results = cb.run_in_turns(given)
    for result in results:
        steps = result.steps
        ends = steps.start_s + steps.elapsed_s + steps.host_s
        np.testing.assert_allclose(steps.start_s[1:], ends[:-1], atol=1e-9)
    assert len(order) == sum(len(result.steps) for result in results)
    assert len(list(groupby(order))) > 6, "they take turns"


def test_long_and_short_runs_end_together(llm, monkeypatch):
    monkeypatch.setattr(in_turns, "TURN_S", 0.0)
    order = []
    forward = in_turns.PagesFrom.forward
    monkeypatch.setattr(in_turns.PagesFrom, "forward", lambda s, inputs: (order.append(s), forward(s, inputs))[1])
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "backend": llm, "policy": cb.ContinuousBatching()}
    cb.run_in_turns([cb.Experiment(workload=at_once(n, n), **limits) for n in (8, 40)])
    short = [place for place, experiment in enumerate(order) if experiment is order[0]]
    other = [place for place, experiment in enumerate(order) if experiment is not order[0]]
    assert max(len(short), len(other)) > 3 * min(len(short), len(other))
    assert min(short[-1], other[-1]) > 0.8 * len(order), "by the clock it would end in the middle"


def test_no_step_pays_for_another_experiments(llm, monkeypatch):
    """Before each but the first the model runs the last one of the same experiment, and no page has changed then."""
    monkeypatch.setattr(in_turns, "TURN_S", 0.0)
    seen, counted, repeated = [], [], []
    forward, forward_of = llm.runner.model.forward, in_turns.PagesFrom.forward
    resume, pages = in_turns.PagesFrom.resume, llm.runner.model._pages

    def noting(self, inputs):
        counted.append((self, len(seen)))
        return forward_of(self, inputs)

    def checking(self):
        before = [array.copy() for array in pages.arrays]
        resume(self)
        repeated.append(all(map(np.array_equal, before, pages.arrays)))

    monkeypatch.setattr(llm.runner.model, "forward", lambda inputs: (seen.append(inputs), forward(inputs))[1])
    monkeypatch.setattr(in_turns.PagesFrom, "forward", noting)
    monkeypatch.setattr(in_turns.PagesFrom, "resume", checking)
    cb.run_in_turns(experiments(llm)[:2])
    last = {}
    for experiment, place in counted:
        if experiment in last:
            assert seen[place - 1] is last[experiment]
        last[experiment] = seen[place]
    assert len(seen) == 2 * len(counted), "and once before each finds that it has ended, in place of the first"
    assert all(repeated)


def test_the_llm_is_ready_afterwards_and_needs_to_be_free(llm):
    cb.run_in_turns(experiments(llm)[:2])
    stream = llm.stream([5, 6, 7], cb.SamplingParams(max_tokens=3, ignore_eos=True))
    next(stream)
    with pytest.raises(RunnerError, match=r"run_in_turns\(\) needs all pages"):
        cb.run_in_turns(experiments(llm))
    stream.close()
    assert llm.num_free_pages == 90


def test_what_can_not_take_turns_is_refused(llm):
    with pytest.raises(ExperimentError, match="the sum of num_pages must be at most the 90 pages of the LLM, got 93"):
        cb.run_in_turns(experiments(llm, num_pages=31))
    with pytest.raises(ExperimentError, match="backend must be an LLM on the CPU"):
        cb.run_in_turns(experiments(cb.Simulated()))
    with pytest.raises(ExperimentError, match="must be the same LLM, got 2"):
        cb.run_in_turns([*experiments(llm), *experiments(cb.Simulated())])
    with pytest.raises(ExperimentError, match="what runs in turns must be an Experiment, got 1"):
        cb.run_in_turns([*experiments(llm), 1])
    with pytest.raises(ExperimentError, match="must be the same LLM, got 0"):
        cb.run_in_turns([])


def test_provenance_tells_the_pages_that_each_had(llm):
    load = cb.OpenLoop(arrivals=AllAtOnce(), num_requests=3, prompt=20, output=4)
    given = cb.Experiment(policy=cb.OneAtATime(), workload=load, backend=llm)
    results = cb.run_in_turns([given, given.replace(num_pages=30)])
    assert [result.provenance.description["num_pages"] for result in results] == [45, 30]
    with pytest.raises(ExperimentError, match="experiments that run in turns must be at most one for each of 90 pages"):
        cb.run_in_turns([given] * 91)


def test_verify_swaps_no_more_than_the_run_did(tmp_path, tmp_path_factory, monkeypatch):
    """The LLM has host pages, which runs that take turns do without."""
    monkeypatch.setenv("CONTBATCH_CACHE", str(tmp_path / "cache"))
    folder = write_tiny(tmp_path_factory.mktemp("model"))
    with cb.LLM(folder, num_pages=12, page_size=4, num_host_pages=12) as llm:
        experiment = cb.Experiment(workload=at_once(3), policy=cb.ContinuousBatching(), backend=llm)
        [result] = cb.run_in_turns([experiment])
        assert cb.run(experiment).requests.preemptions.sum() > 0, "or nothing would be swapped"
    result.save(tmp_path / "r")
    again = []
    run = verification.run
    monkeypatch.setattr(verification, "run", lambda *args, **fields: again.append(run(*args, **fields)) or again[0])
    assert cb.verify(tmp_path / "r", model=str(folder)).is_same
    assert dict(again[0].provenance.description["backend"]["items"])["num_host_pages"] == 0
    assert again[0].provenance.hash == result.provenance.hash
