"""Pictures of tables: what is drawn against what the table says; axes, units, titles; wrong tables."""

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from fake_runner import engine_of, request
from hypothesis import given
from hypothesis import strategies as st

mpl.use("Agg")

import matplotlib.pyplot as plt

import contbatch as cb
from contbatch.errors import DetailError, InvalidRequestError
from contbatch.plots.waste import WASTE

CLIENTS = ("$a", "b", None)


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def result():
    """A run on few seats and pages, with clients, held seats and requests that can never run."""
    parts = [
        cb.Poisson(rate=4, num_requests=12, prompt=40, seed=i, client=cb.Client(client_id=name))
        for i, name in enumerate(CLIENTS)
    ]
    never = cb.OpenLoop(arrivals=cb.arrivals.AllAtOnce(), num_requests=1, prompt=5000, output=1)
    return cb.simulate(cb.Mixture((*parts, never)), cb.StaticBatching(4), num_pages=60, max_num_seqs=4)


DRAW = {
    "latency_cdf": (cb.plots.latency_cdf, "requests"),
    "fairness": (cb.plots.fairness, "requests"),
    "queue": (cb.plots.queue, "steps"),
    "memory": (cb.plots.memory, "waste"),
    "gantt": (cb.plots.gantt, "segments"),
    "waste": (lambda run, **options: cb.plots.waste({"run": run}, **options), "waste"),
}


def table_of(result, part):
    return result.waste() if part == "waste" else getattr(result, part)


@pytest.mark.parametrize("name", DRAW)
def test_a_table_and_its_result_give_a_picture_with_units_and_title_and_print_nothing(name, result, capsys):
    draw, part = DRAW[name]
    for run in (result, table_of(result, part)):
        ax = draw(run, title="four seats")
        ax.figure.canvas.draw()
        assert ax.get_title() == "four seats"
        assert ax.get_xlabel()
        assert ax.get_ylabel() or ax.get_yticklabels()[0].get_text() == "run"
    assert "[" in draw(result).get_xlabel()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", DRAW)
def test_what_is_drawn_into_is_what_the_user_says(name, result):
    ax = plt.subplots()[1]
    assert (cb.plots.waste({"r": result}, ax=ax) if name == "waste" else DRAW[name][0](result, ax=ax)) is ax
    assert len(plt.get_fignums()) == 1


NEEDED = {
    "latency_cdf": ["ttft_s"],
    "fairness": ["client_id", "admitted_s", "generated_s", "prompt_tokens", "output_tokens"],
    "queue": ["start_s", "waiting", "seats", "held_seats"],
    "memory": list(WASTE),
    "gantt": ["request_id", "seat", "kind", "preempted", "start_s", "end_s"],
    "waste": list(WASTE),
}


@pytest.mark.parametrize(("name", "column"), [(name, column) for name in NEEDED for column in NEEDED[name]])
def test_a_missing_column_is_named_before_a_figure_is_made(name, column, result):
    draw, part = DRAW[name]
    with pytest.raises(InvalidRequestError, match=f"a column of the table must be one of .*, got '{column}'"):
        draw(table_of(result, part).drop(columns=column))
    with pytest.raises(InvalidRequestError, match="what is drawn must be a Result, or its table"):
        draw(table_of(result, part)[[column]].to_dict()) if name not in ("latency_cdf", "waste") else draw(3)
    assert plt.get_fignums() == []


def test_a_title_is_what_the_tables_know_of_the_run(result):
    known, other = result.requests.copy(), result.requests.copy()
    known.attrs["run"], other.attrs["run"] = "on one A100", "on two"
    assert cb.plots.latency_cdf(known).get_title() == "on one A100"
    assert cb.plots.latency_cdf({"a": known, "b": known}).get_title() == "on one A100"
    assert cb.plots.latency_cdf({"a": known, "b": other}).get_title() == ""
    assert cb.plots.fairness(known, title="mine").get_title() == "mine"


# ---- latencies ---------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.001, 10) | st.just(float("nan")), max_size=30), st.floats(0, 11))
def test_the_share_of_requests_at_a_latency(waits, at):
    ax = cb.plots.latency_cdf(pd.DataFrame({"ttft_s": waits}))
    xs, ys = ax.lines[0].get_data()
    plt.close(ax.figure)
    known = [w for w in waits if w == w]
    below = [y for x, y in zip(xs, ys, strict=True) if x <= at]
    drawn = below[-1] if below else 0.0  # steps-post: a value holds until the next x
    assert drawn == pytest.approx(100 * sum(w <= at for w in known) / max(1, len(known)))


def test_runs_by_name_a_promise_and_a_logarithmic_axis(result):
    ax = cb.plots.latency_cdf({"$x": result, "y": result.requests}, "e2e_s", limit=2.0, limit_label="$SLO", log=True)
    ax.figure.canvas.draw()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["$x", "y"]
    assert len({line.get_linestyle() for line in ax.lines[:2]}) == 2
    assert list(ax.lines[2].get_xdata()) == [2.0, 2.0]
    assert ax.get_xscale() == "log"
    assert ax.get_xlabel() == "time to the last token [s]"
    assert cb.plots.latency_cdf(result, "prompt_tokens").get_xlabel() == "prompt_tokens"


# ---- over time ---------------------------------------------------------------------------------------------------


def test_the_lines_of_the_queue_are_the_columns(result):
    ax = cb.plots.queue(result)
    lines = {line.get_label(): line for line in ax.lines}
    columns = {"waiting for a seat": "waiting", "seats taken": "seats", "of them by finished requests": "held_seats"}
    for label, column in columns.items():
        np.testing.assert_array_equal(lines[label].get_xdata(), result.steps.start_s)
        np.testing.assert_array_equal(lines[label].get_ydata(), result.steps[column])
    assert result.steps.waiting.max() > 0
    continuous = engine_of(cb.ContinuousBatching()).run([request("a", 4, 5)])
    assert "of them by finished requests" not in {line.get_label() for line in cb.plots.queue(continuous).lines}


def test_the_areas_of_memory_are_the_shares(result):
    shares = result.waste()
    ax = cb.plots.memory(shares)
    assert ax.get_xlabel() == "step"
    tops = np.cumsum(100 * shares[list(WASTE)].to_numpy(), axis=1)
    for area, top in zip(ax.collections, tops.T, strict=True):
        assert area.get_paths()[0].vertices[:, 1].max() == pytest.approx(top.max())
    assert cb.plots.memory(result).get_xlabel() == "time [s]"
    seen = [text.get_text() for text in ax.get_legend().get_texts()]
    assert seen == [label for kind, (_, label) in WASTE.items() if shares[kind].any()]
    assert len(seen) >= 4
    brief = cb.simulate(cb.Poisson(rate=4, num_requests=5), detail=False)
    with pytest.raises(DetailError, match="waste"):
        cb.plots.memory(brief)


# ---- clients -----------------------------------------------------------------------------------------------------


def test_service_at_a_time_is_the_sum_of_what_each_request_had_by_then(result):
    ax = cb.plots.fairness(result, input_weight=0.5, output_weight=3)
    lines = {line.get_label(): line for line in ax.lines}
    assert set(lines) == {"$a", "b", "no client"}
    assert "0.5 · prompt + 3 · output" in ax.get_ylabel()
    done = result.finished
    for client, label in (("$a", "$a"), ("b", "b")):
        rows = done[done.client_id == client]
        for at in np.linspace(0, result.end_s, 17):
            had = 0.0
            for r in rows.itertuples():
                share = (at - r.admitted_s) / (r.generated_s - r.admitted_s)
                had += min(1.0, max(0.0, share)) * (0.5 * r.prompt_tokens + 3 * r.output_tokens)
            drawn = np.interp(at, *lines[label].get_data(), left=0.0)
            assert drawn == pytest.approx(had, rel=1e-6, abs=1e-6)


def test_service_that_takes_no_time_and_nobody_served():
    rows = {"client_id": ["a", "b"], "admitted_s": [1.0, np.nan], "generated_s": [1.0, np.nan]}
    table = pd.DataFrame(rows | {"prompt_tokens": [3, 4], "output_tokens": [1, 0]})
    [line] = cb.plots.fairness(table).lines
    assert line.get_ydata()[-1] == pytest.approx(5)
    cb.plots.fairness(table.iloc[1:]).figure.canvas.draw()
    with pytest.raises(InvalidRequestError, match="numbers ≥ 0"):
        cb.plots.fairness(table, output_weight=-1)


def test_the_client_of_a_request_is_in_its_row():
    rows = engine_of().run([request("a", 3, 2, client_id=("team", 1)), request("b", 500, client_id="b"), request("c")])
    assert rows.requests.set_index("request_id").client_id.to_dict() == {"a": ("team", 1), "b": "b", "c": None}
    cb.plots.fairness(rows.requests).figure.canvas.draw()


# ---- the front ---------------------------------------------------------------------------------------------------

ends = st.sampled_from(["high", "low"])
figures = st.lists(st.tuples(*[st.integers(0, 5) | st.just(float("nan"))] * 2), max_size=12)


@given(figures, ends, ends)
def test_the_front_is_what_nothing_beats(rows, x_best, y_best):
    table = pd.DataFrame(rows, columns=["x", "y"], dtype=float).set_axis(range(10, 10 + len(rows)))
    front = cb.plots.pareto_front(table, "x", "y", x_best=x_best, y_best=y_best)

    def cost(row):
        return (-row.x if x_best == "high" else row.x), (-row.y if y_best == "high" else row.y)

    known = [(row.Index, *cost(row)) for row in table.itertuples() if row.x == row.x and row.y == row.y]
    expected = {
        i for i, x, y in known if not any(a <= x and b <= y and (a, b) != (x, y) for _, a, b in known)
    }  # fmt: skip
    assert set(front.index) == expected
    assert list(front.x) == sorted(front.x)


def test_the_front_is_named_and_the_rest_is_grey():
    table = pd.DataFrame({"tokens": [1, 2, 3, 3], "wait": [1.0, 1.5, 9.0, 9.0], "name": ["$a", "b", "c", "d"]})
    ax = cb.plots.pareto(table, "tokens", "wait", by="name", ylabel="wait [s]", title="t")
    ax.figure.canvas.draw()
    assert [text.get_text() for text in ax.texts] == ["$a", "b", "c and 1 more"]
    assert ax.lines[1].get_xydata().tolist() == [[1, 1.0], [2, 1.5], [3, 9.0], [3, 9.0]]
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("tokens", "wait [s]", "t")
    assert ax.get_legend().get_title().get_text() == "better: right and down"
    with pytest.raises(InvalidRequestError, match="'seats'"):
        cb.plots.pareto(table, "tokens", "seats", by="name")
    with pytest.raises(InvalidRequestError, match="y_best must be 'high' or 'low', got 'best'"):
        cb.plots.pareto(table, "tokens", "wait", by="name", y_best="best")


@pytest.mark.parametrize("plot", [cb.plots.gantt, cb.plots.queue, cb.plots.memory, cb.plots.waste])
def test_a_picture_of_what_a_run_did_not_keep_is_refused_before_a_figure_is_made(plot):
    brief = cb.simulate(cb.Poisson(rate=4, num_requests=5), detail=False)
    with pytest.raises(DetailError, match=r"a picture of its \w+ needs a run with detail=True"):
        plot(brief)
    assert plt.get_fignums() == []
    cb.plots.latency_cdf(brief, "ttft_s")
