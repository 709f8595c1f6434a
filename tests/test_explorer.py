"""Explore: fields by name, controls for their ranges, the code line, and what happens when a control moves."""

import asyncio
import signal
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import contbatch as cb
from contbatch import cell_output, explorer
from contbatch.controls import control
from contbatch.errors import ExperimentError, InvalidRequestError, WorkloadError
from contbatch.expressions import change, expression
from contbatch.field_paths import field_paths, find_path, get_field, with_field
from contbatch.interrupts import interruptible
from contbatch.policies import Policy


def experiment(**changes):
    workload = cb.Poisson(rate=4, num_requests=20, seed=0)
    return cb.Experiment(policy=cb.ContinuousBatching(), workload=workload, num_pages=256).replace(**changes)


def evaluated(code, exp):
    return eval(code, {"cb": cb, "exp": exp})


# ---- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("num_pages", "num_pages"),
        ("rate", "workload.rate"),
        ("seed", "workload.seed"),
        ("victim", "policy.victim"),
        ("gpu", "backend.gpu"),
        ("prompt.low", "workload.prompt.low"),
        ("workload.output.high", "workload.output.high"),
        ("experiment.num_pages", "num_pages"),
    ],
)
def test_fields_are_found_however_deep(name, path):
    assert find_path(name, [experiment()]) == path


def test_ambiguous_and_unknown_names_are_errors_that_list_the_names():
    with pytest.raises(
        ExperimentError, match=r"'low' .* experiment\.workload\.prompt\.low, experiment\.workload\.output\.low"
    ):
        cb.explore(experiment(), low=(1, 8))
    with pytest.raises(
        ExperimentError, match=r"one of policy, policy\.victim, workload, .*num_host_pages, layout, got 'pages'"
    ):
        cb.explore(experiment(), pages=(1, 8))
    orca = experiment(policy=cb.Orca())
    with pytest.raises(ExperimentError, match=r"experiment\.policy\.max_model_len, experiment\.max_model_len"):
        cb.explore(orca, max_model_len=(1000, 2000))
    moved = cb.explore(orca, **{"experiment.max_model_len": (1000, 2000)})
    assert moved.experiment.max_model_len == 2000
    with pytest.raises(ExperimentError, match="given once for"):
        cb.explore(experiment(), rate=(1, 2), **{"workload.rate": (1, 2)})


PATHS = st.sampled_from(
    [
        ("num_pages", st.one_of(st.none(), st.integers(1, 999))),
        ("page_size", st.integers(1, 64)),
        ("prefix_cache", st.booleans()),
        ("workload.rate", st.floats(0.1, 99)),
        ("workload.seed", st.integers(0, 99)),
        ("workload.prompt.low", st.integers(1, 32)),
        ("workload.prompt", st.one_of(st.integers(1, 99), st.just(cb.lengths.LogNormal(100, 1.0, 2000)))),
        ("workload.prefix", st.just(cb.SharedPrefix(64, 2))),
        ("workload.client.priority", st.integers(0, 3)),
        ("workload", st.just(cb.ClosedLoop(num_clients=4, num_requests=20))),
        ("backend.gpu", st.sampled_from(["A100-40GB", "H100"])),
        ("backend.cost", st.just(cb.Linear(step_s=0.01))),
        ("policy", st.sampled_from([cb.Orca("oracle"), cb.StaticBatching(3, pad=True), cb.FairShare(2.0)])),
        ("policy.victim", st.sampled_from(["latest_arrival", "fewest_tokens"])),
    ]
)


@settings(max_examples=60)
@given(st.lists(PATHS.flatmap(lambda one: st.tuples(st.just(one[0]), one[1])), max_size=6))
def test_the_code_of_any_change_makes_it(changes):
    before = after = experiment()
    for path, value in changes:
        try:
            get_field(after, path)
            after = with_field(after, path, value)
        except (AttributeError, ExperimentError, WorkloadError):  # the parts of what was just changed are others
            continue
    assert evaluated(change(before, after, "exp"), before) == after
    assert evaluated(expression(after), None) == after
    assert set(field_paths(after)) >= {"workload", "num_pages"}


# ---- controls ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_range", "value", "kind", "widget", "begins"),
    [
        ((1, 16), 4, int, "IntSlider", 4),
        ((1, 16), 4, float, "FloatSlider", 4.0),
        ((1, 16), 4, int | float, "FloatSlider", 4.0),
        ((0.5, 2), 9.0, float, "FloatSlider", 2.0),
        ((16, 64, 16), 32, int | None, "IntSlider", 32),
        (range(16, 80, 16), 1, int, "IntSlider", 16),
        ((1, 100), 7, float, "FloatLogSlider", 7.0),
        ((1, 100_000), 512, int, "SelectionSlider", 512),
        ((1, 100_000, 1), 512, int, "IntSlider", 512),
        ((0, 100), 5, int, "IntSlider", 5),
        ([128, 256], 256, int, "Dropdown", 256),
        ([128, 256], 4, int, "Dropdown", 128),
        ((128, 256, 512, 1024), 256, int, "Dropdown", 256),
        ([None, 64], None, int | None, "Dropdown", None),
        ([0, 1], 1, int, "Dropdown", 1),
        ([False, True], False, bool, "Checkbox", False),
        (["a", "b"], "b", str, "Dropdown", "b"),
        ((1, 16), None, int | None, "IntSlider", 16),
    ],
)
def test_what_a_range_becomes(given_range, value, kind, widget, begins):
    made = control("field", given_range, value, kind)
    assert type(made).__name__ == widget
    assert made.value == begins
    assert type(made.value) is type(begins)
    assert made.description == "field"


@pytest.mark.parametrize(
    "bad", [(), [], 5, (5, 1), (1, 1), (1, 2, 0), (128, 256, 512), "abc", {1: 2}, (1, float("nan"), 3)]
)
def test_what_is_no_range_is_refused(bad):
    with pytest.raises((ExperimentError, InvalidRequestError), match="num_pages"):
        cb.explore(experiment(), num_pages=bad)


def test_every_value_on_offer_is_tried_before_anything_is_shown():
    with pytest.raises(InvalidRequestError, match="num_pages must be an integer ≥ 1, got 0"):
        cb.explore(experiment(), num_pages=(0, 64))
    with pytest.raises(WorkloadError, match="rate must be"):
        cb.explore(experiment(), rate=(0.0, 8))
    with pytest.raises(InvalidRequestError, match="batch_size must be"):
        cb.explore(experiment(), policy=[cb.Orca(), cb.StaticBatching(8)], batch_size=[4, 0])
    with pytest.raises(ExperimentError, match="must be a Simulated"):
        cb.explore(experiment(backend=SimpleNamespace(run=print)), rate=(1, 8))
    with pytest.raises(ExperimentError, match="must be an Experiment"):
        cb.explore(cb.ContinuousBatching(), rate=(1, 8))


def test_without_ranges_there_are_the_usual_ones():
    shown = cb.explore(experiment())
    assert shown.experiment == experiment()
    assert {"policy", "policy.victim", "workload.rate", "max_num_seqs", "max_num_batched_tokens"} == set(shown.controls)
    policies = [type(policy).__name__ for _, policy in shown.controls["policy"].options]
    assert len(policies) == len(set(policies)) == 11


# ---- moving them -------------------------------------------------------------------------------------------------


def test_a_moved_slider_is_run_and_its_code_makes_the_same_tables():
    shown = cb.explore(experiment(), rate=(1, 16), num_pages=[64, 128, 256])
    assert shown.code == "cb.run(exp)"
    shown.controls["workload.rate"].value = 12.0
    shown.controls["num_pages"].value = 64
    assert shown.experiment == experiment(num_pages=64, workload=experiment().workload.replace(rate=12.0))
    again = evaluated(shown.code, experiment())
    assert again.steps.equals(shown.result.steps)
    assert again.requests.equals(shown.result.requests)
    assert shown.code.replace("'", "&#x27;") in shown.view._code.value
    assert 'alt="Figure of the runs now' in shown.view._picture.value


def test_the_chosen_policy_brings_its_parameters():
    policies = [cb.ContinuousBatching(), cb.StaticBatching(4), cb.ShortestJobFirst()]
    shown = cb.explore(experiment(), policy=policies, batch_size=(1, 8))
    assert set(shown.controls) == {"policy", "policy.victim"}
    assert shown.controls["policy.victim"].value == "lowest_rank"
    shown.controls["policy"].value = policies[1]
    assert {path: type(w).__name__ for path, w in shown.controls.items() if path != "policy"} == {
        "policy.batch_size": "IntSlider",
        "policy.release": "Dropdown",
        "policy.pad": "Checkbox",
    }
    shown.controls["policy.batch_size"].value = 7
    shown.controls["policy.pad"].value = True
    assert shown.experiment.policy == cb.StaticBatching(7, pad=True)
    shown.controls["policy"].value = policies[2]
    shown.controls["policy.error"].value = 0.5
    shown.controls["policy.seed"].value = 3
    shown.controls["policy.by"].value = "prediction"
    assert shown.experiment.policy == cb.ShortestJobFirst(by="prediction", error=0.5, seed=3)
    shown.controls["policy.error"].value = -1.0
    assert shown.message == "error must be a finite number ≥ 0, got -1.0"


def test_what_can_not_run_is_a_message_and_the_widget_goes_on():
    shown = cb.explore(experiment(), num_pages=[2, 256])
    shown.controls["num_pages"].value = 2
    assert shown.message.startswith("20 of 20 requests were rejected: they need more than 2 pages of 16 tokens")
    assert shown.message in shown.view._message.value
    shown.controls["num_pages"].value = 256
    assert shown.message == ""
    assert len(shown.result.finished) == 20

    class Broken(cb.ContinuousBatching):
        def plan(self, waiting, running, budget):
            raise ZeroDivisionError("<b>oops</b>")

    class Lazy(cb.ContinuousBatching):
        def plan(self, waiting, running, budget):
            return iter(())

    for policy, message in ((Broken(), "ZeroDivisionError: <b>oops</b>"), (Lazy(), "planned nothing")):
        shown = cb.explore(experiment(policy=policy), policy=[policy, cb.Orca()])
        assert message in shown.message
        assert "<b>" not in shown.view._message.value
        assert shown.result is None
        assert shown.figure() is None
        assert shown._repr_mimebundle_().keys() == {"text/plain", "application/vnd.jupyter.widget-view+json"}
        shown.controls["policy"].value = shown.controls["policy"].options[1][1]
        assert len(shown.result.finished) == 20


def test_pinned_runs_stay_in_figure_and_table():
    shown = cb.explore(experiment(), rate=(1, 16), num_pages=[128, 256])
    shown.pin()
    shown.pin()
    assert list(shown.pinned) == ["A"]
    shown.controls["workload.rate"].value = 12.0
    shown.pin()
    shown.controls["num_pages"].value = 128
    table = shown.table
    assert list(table.index) == ["now", "A", "B"]
    assert table[["rate", "num_pages"]].to_numpy().tolist() == [[12.0, 128], [4.0, 256], [12.0, 256]]
    for name, run in shown.runs().items():
        assert table.loc[name, "steps"] == len(run.result.steps)
        assert run.result.steps.equals(cb.run(run.experiment).steps)
    for ax in shown.figure().axes:
        assert [line.get_label() for line in ax.lines] == ["now", "A", "B"]
    rows = shown.view._table.value
    assert "Download as CSV" in rows
    assert "normalized_latency_s_p99" in rows  # in the file, which has all figures
    shown.unpin()
    assert list(shown.table.index) == ["now"]


def test_figures_of_ones_own_and_no_figure_twice():
    import matplotlib.pyplot as plt

    shown = cb.explore(experiment(), draw=cb.plots.waste, num_pages=[128, 256])
    shown.pin()
    shown.controls["num_pages"].value = 128
    assert shown._repr_mimebundle_()["image/png"].startswith(b"\x89PNG")
    assert plt.get_fignums() == []
    shown.draw = lambda results: results["B"]
    shown.controls["num_pages"].value = 256
    assert "the figure failed with KeyError" in shown.view._message.value
    assert "Download" in shown.view._table.value


def test_only_the_last_of_many_changes_is_run(monkeypatch):
    runs = []
    real = explorer.run
    monkeypatch.setattr(explorer, "run", lambda point: runs.append(point.workload.rate) or real(point))

    async def drag():
        shown = cb.explore(experiment(), rate=(1, 16), num_pages=[128, 256])
        for rate in range(5, 15):
            shown.controls["workload.rate"].value = float(rate)
            await asyncio.sleep(0)
        assert runs == [4]
        shown.controls["num_pages"].value = 128
        assert shown.result.num_pages == 128  # whoever asks does not wait, and does not get what was before
        assert runs == [4, 14.0]
        shown.controls["workload.rate"].value = 2.0
        await asyncio.sleep(20 * explorer.PATIENCE_S)
        assert runs == [4, 14.0, 2.0]
        shown.controls["workload.rate"].value = 3.0
        shown.close()
        await asyncio.sleep(5 * explorer.PATIENCE_S)
        assert runs == [4, 14.0, 2.0]

    asyncio.run(drag())


def test_an_interrupt_of_a_late_run_is_a_message(monkeypatch):
    async def interrupted():
        shown = cb.explore(experiment(), rate=(1, 16))
        monkeypatch.setattr(explorer, "run", lambda point: (_ for _ in ()).throw(KeyboardInterrupt))
        shown.controls["workload.rate"].value = 9.0
        await asyncio.sleep(10 * explorer.PATIENCE_S)
        assert shown.message == "interrupted"
        monkeypatch.undo()
        shown.controls["workload.rate"].value = 8.0
        assert shown.result is not None

    asyncio.run(interrupted())


def test_without_ipywidgets_there_is_the_figure(monkeypatch):
    monkeypatch.setitem(sys.modules, "contbatch.explorer_view", None)
    shown = cb.explore(experiment(), rate=(1, 16), num_pages=[64, 128])
    assert shown.controls == {}
    assert shown.result.steps.equals(cb.run(experiment()).steps)
    bundle = shown._repr_mimebundle_()
    assert bundle.keys() == {"text/plain", "image/png"}
    assert bundle["text/plain"] == "<Explorer: cb.run(exp)>"


def test_a_cell_that_runs_again_closes_what_it_made_before(monkeypatch):
    shell = SimpleNamespace(execution_count=1, get_parent=lambda: {"metadata": {"cellId": "x"}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(cell_output, "_made", {})
    first, second = (cb.explore(experiment(), rate=(1, 16)) for _ in range(2))
    assert first.view.box.comm is not None
    shell.execution_count = 2
    third = cb.explore(experiment(), rate=(1, 16))
    assert first.view.box.comm is None
    assert second.view.box.comm is None
    assert third.view.box.comm is not None
    shell.get_parent = lambda: {"metadata": {"cellId": "y"}}
    shell.execution_count = 3
    cb.replay(third.result)
    assert third.view.box.comm is not None


def test_parameters_of_a_policy_written_in_a_notebook():
    @dataclass(frozen=True)
    class Chunks(Policy):
        size: int = 64
        names: tuple = ()
        weird: "Unknown" = 2  # noqa: F821 - a name that is known to type checkers only

        def plan(self, waiting, running, budget):
            for r in [*running, *waiting]:
                yield r, min(r.num_uncomputed_tokens, self.size)

    shown = cb.explore(experiment(), policy=[cb.Orca(), Chunks()])
    shown.controls["policy"].value = Chunks()
    assert set(shown.controls) == {"policy", "policy.size", "policy.weird"}
    shown.controls["policy.size"].value = 16
    assert shown.message == ""
    assert shown.result.steps.tokens.max() > 0
    assert "Chunks(size=16)" in shown.code


def test_interrupts_come_through_where_a_kernel_ignores_them():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), interruptible():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.signal(signal.SIGINT, lambda *_: None)
        with interruptible():
            signal.raise_signal(signal.SIGINT)  # goes to the handler that is there
    finally:
        signal.signal(signal.SIGINT, before)
