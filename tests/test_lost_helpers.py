"""Helper threads that an interrupt has kept in a step go when the model goes, and so do its pages."""

import gc
import os
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
    jobs, dismiss, rung = helpers._jobs(os.getpid()), team.dismiss, []

    class Interrupted:
        def put(self, job):
            jobs.put(job)
            raise KeyboardInterrupt

    monkeypatch.setattr(helpers, "_jobs", lambda _: Interrupted())
    monkeypatch.setattr(team, "dismiss", lambda bells: (rung.append(len(bells)), dismiss(bells)))
    with pytest.raises(KeyboardInterrupt):
        model.forward(TWO)
    assert rung == [1, 1]  # those of the step before, in any case, and its own
