"""Helper threads: an interrupted step lets them go, a failure doesn't end them, and callers have their CPU alone."""

import gc
import os
import threading
import time
import weakref

import numpy as np
import pytest
from ragged import step

from contbatch.export import export_onnx
from contbatch.model import random_model
from contbatch.plugins.paged_attention import helpers, team
from contbatch.plugins.paged_attention.bell import POSIX
from contbatch.runners.cpu import CPUModel

TWO = step((np.ones(300, int), 0), (np.ones(300, int), 0), table=[range(19), range(19, 38)], logits=[0])


@pytest.fixture
def model(tmp_path):
    model = CPUModel(export_onnx(random_model(0), tmp_path / "model.onnx"), 38, num_threads=2)
    model.forward(TWO)  # compiled from now on
    yield model
    if model._pages is not None:
        model._pages.close()


def goes(pages, seconds=20):
    """Whether nobody has pages any more, within some time."""
    for _ in range(int(seconds / 0.01)):
        if pages() is None:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.skipif(not POSIX, reason="elsewhere helpers wait for nothing")
def test_interrupted_when_they_were_to_go(model, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(team.Team, "attend", interrupted)
    monkeypatch.setattr(team.Team, "__exit__", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        model.forward(TWO)
    pages = weakref.ref(model._pages.arrays[0])
    bells = model._pages.team._bells
    try:
        model.close()
        gc.collect()  # the frames that the interrupt went through
        assert goes(pages)
    finally:
        team.dismiss(bells)


@pytest.mark.skipif(not POSIX, reason="elsewhere helpers wait for nothing")
def test_interrupted_when_they_were_called(model, monkeypatch):
    crew, dismiss, rung = helpers._crew(os.getpid()), team.dismiss, []
    jobs = crew.jobs

    class Interrupted:
        def put(self, job):
            jobs.put(job)
            raise KeyboardInterrupt

    monkeypatch.setattr(crew, "jobs", Interrupted())
    monkeypatch.setattr(team, "dismiss", lambda bells: (rung.append(len(bells)), dismiss(bells)))
    with pytest.raises(KeyboardInterrupt):
        model.forward(TWO)
    assert rung == [1, 1]  # those of the step before, in any case, and its own


def test_a_helper_that_failed_helps_again(caplog):
    done = [threading.Event() for _ in range(len(helpers.CPUS))]

    def fail():
        raise MemoryError("no room for a tile")

    for _ in done:
        helpers.call_helper(fail)
    for event in done:
        helpers.call_helper(event.set)
    assert all(event.wait(20) for event in done)
    assert caplog.text.count("MemoryError: no room for a tile") == len(done)


several_cpus = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(helpers.CPUS) < 2, reason="needs Linux and two CPUs"
)


def affinities():
    return [os.sched_getaffinity(thread.native_id) for thread in helpers._crew(os.getpid()).threads]


@several_cpus
def test_helpers_leave_a_bound_caller_its_cpu():
    found = {}

    def bound(*cpus):
        os.sched_setaffinity(0, cpus)
        helpers.keep_helpers_off_this_cpu()
        found[cpus] = affinities()

    for cpus in [(cpu,) for cpu in sorted(helpers.CPUS)] + [tuple(helpers.CPUS)]:
        thread = threading.Thread(target=bound, args=cpus)
        thread.start()
        thread.join()
    assert found == {cpus: [helpers.CPUS - set(cpus) or helpers.CPUS] * (len(helpers.CPUS) - 1) for cpus in found}
    assert len(found) == len(helpers.CPUS) + 1


@several_cpus
def test_without_leave_to_move_helpers_stay(model, monkeypatch):
    """As where a container lost the CPUs that the process had when it began."""
    asked, logits = [], model.forward(TWO).copy()

    def refuse(thread, cpus):
        asked.append(cpus)
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(helpers._crew(os.getpid()), "cpus", frozenset())
    with monkeypatch.context() as patched:
        patched.setattr(os, "sched_setaffinity", refuse)
        assert np.array_equal(model.forward(TWO), logits)
        model.forward(TWO)
    assert len(asked) == 1
    monkeypatch.setattr(helpers._crew(os.getpid()), "cpus", frozenset())
    model.forward(TWO)  # and now they move
    moved = helpers._crew(os.getpid()).cpus
    assert moved
    assert affinities() == [moved] * len(affinities())


@several_cpus
def test_helpers_leave_the_cpu_of_a_step(model, monkeypatch):
    seen, lead = [], team.lead
    monkeypatch.setattr(team, "lead", lambda *a: (seen.append((os.sched_getaffinity(0), affinities())), lead(*a))[1])
    model.forward(TWO)
    assert len(seen) == model.config.num_layers
    for mine, theirs in seen:  # whatever OpenVINO binds its caller to
        assert theirs == [helpers.CPUS - mine or helpers.CPUS] * len(theirs)
