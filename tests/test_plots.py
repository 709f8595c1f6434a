"""Pictures: what is drawn, not how it looks."""

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from fake_runner import engine_of, request

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.colors import to_hex

import contbatch as cb
from contbatch.errors import InvalidRequestError
from contbatch.plots.page_map import HOLDERS

COLOURS = {"prefill": "#e69f00", "decode": "#0072b2", "held": "#ffffff"}


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def run(*requests, **limits):
    return engine_of(cb.StaticBatching(3), **limits).run(requests)


@pytest.fixture
def result():
    """A static batch of three: "a" ends first and its seat is held; "d" waits for all of them."""
    return run(request("a", 2, 3), request("b", 5, 9), request("c", 2, 6), request("d", 3, 4), max_num_batched_tokens=4)


def bars(ax):
    """(seat, from, to, kind) of each bar."""
    kinds = {colour: kind for kind, colour in COLOURS.items()}
    return sorted(
        (round(b.get_y() + 0.4), b.get_x(), b.get_x() + b.get_width(), kinds[to_hex(b.get_facecolor())])
        for b in ax.patches
    )


@pytest.mark.parametrize(
    ("by", "unit", "label"), [("step", "step", "step"), ("second", "s", "time [s]")], ids=["step", "second"]
)
def test_a_bar_for_each_segment(result, by, unit, label):
    ax = cb.plots.gantt(result, by=by, title="static")
    rows = result.segments[["seat", f"start_{unit}", f"end_{unit}", "kind"]].itertuples(index=False)
    expected = sorted(tuple(row) for row in rows)
    assert {kind for *_, kind in expected} == {"prefill", "decode", "held"}
    found = bars(ax)
    assert [(seat, kind) for seat, _, _, kind in found] == [(seat, kind) for seat, _, _, kind in expected]
    np.testing.assert_allclose([row[1:3] for row in found], [row[1:3] for row in expected])
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == (label, "seat", "static")
    assert ax.get_xlim() == (0, result.segments[f"end_{unit}"].max())
    assert ax.get_ylim() == (2.5, -0.5)  # seat 0 is the topmost
    assert ax.get_yticks().tolist() == [0, 1, 2]


def test_held_seats_are_hatched_and_everything_is_explained(result):
    ax = cb.plots.gantt(result)
    assert {to_hex(b.get_facecolor()) for b in ax.patches if b.get_hatch()} == {COLOURS["held"]}
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "prompt",
        "answer, token by token",
        "finished, seat kept: wasted",
        "empty",
    ]
    assert cb.plots.gantt(result, legend=False).get_legend() is None


def test_wide_bars_name_their_request_whatever_the_name():
    names = ["$x_{$", "\\frac", "two\nlines", 7]
    long, short = [request(name, 2, 30) for name in names], request("brief", 2, 1)
    ax = cb.plots.gantt(run(*long, short))
    ax.figure.canvas.draw()
    assert sorted(text.get_text() for text in ax.texts) == sorted(map(str, names))


def test_drawn_where_the_user_says(result):
    figure, axes = plt.subplots(2, 1)
    assert cb.plots.gantt(result, ax=axes[1]) is axes[1]
    assert plt.get_fignums() == [figure.number]
    assert not axes[0].patches
    assert len(axes[1].patches) == len(result.segments)


@pytest.mark.parametrize("prompts", [[], [500]], ids=["nothing", "rejected"])
@pytest.mark.parametrize("by", ["step", "second"])
def test_a_run_without_any_work(prompts, by):
    ax = cb.plots.gantt(run(*(request("too long", n) for n in prompts)), by=by)
    ax.figure.canvas.draw()
    assert not ax.patches
    assert ax.get_ylim() == (0.5, -0.5)


@pytest.mark.parametrize("by", ["steps", "", None, 1])
def test_an_unknown_axis_is_named_before_a_figure_is_made(result, by):
    with pytest.raises(InvalidRequestError, match=f"by must be 'step' or 'second', got {by!r}"):
        cb.plots.gantt(result, by=by)
    assert plt.get_fignums() == []


def test_a_preemption_is_marked_where_it_happened_and_explained():
    result = engine_of(cb.ChunkedPrefill(), num_pages=2).run([request("a", 4, 5), request("b", 4, 3)])
    stops = result.segments[result.segments.preempted]
    assert list(zip(stops.request_id, stops.end_step, strict=True)) == [("b", 1)]
    ax = cb.plots.gantt(result, by="step")
    assert [line.get_xydata().tolist() for line in ax.lines] == [[[1.0, 1.0]]]
    assert ax.get_legend().get_texts()[-1].get_text() == "preempted"


@pytest.mark.parametrize("seats", [1, 2, 8])
def test_the_legend_covers_no_bar(seats):
    result = engine_of(cb.StaticBatching(seats)).run([request(i, 2, 3 + i) for i in range(9)])
    ax = cb.plots.gantt(result)
    ax.figure.canvas.draw()
    legend = ax.get_legend().get_window_extent()
    assert legend.y1 < ax.get_window_extent().y0
    assert legend.x0 > ax.xaxis.label.get_window_extent().x1


# ---- pages -------------------------------------------------------------------------------------------------------


def cells(ax):
    """(left, top, width, colour, hatch) of each rectangle, the pale ones apart."""
    full = [b for b in ax.patches if b.get_alpha() is None]
    return [(b.get_x(), b.get_y(), b.get_width(), to_hex(b.get_facecolor()), b.get_hatch()) for b in full]


def test_every_page_is_drawn_as_what_it_is():
    tables = {"a": [0, 2], "b": [0, 5]}
    ax = cb.plots.page_map(tables, 7, cached=[3], stored={"a": 6, "b": 5}, page_size=4, columns=4, title="pool")
    held = {name: colour.lower() for name, colour in zip("ab", HOLDERS, strict=False)}
    assert cells(ax) == [
        (0, 0, 1, "#666666", "xx"),
        (1, 0, 1, "#eeeeee", None),
        (2, 0, 0.5, held["a"], None),
        (3, 0, 1, "#ffffff", ".."),
        (0, 1, 1, "#eeeeee", None),
        (1, 1, 0.25, held["b"], None),
        (2, 1, 1, "#eeeeee", None),
    ]
    assert [text.get_text() for text in ax.texts] == ["a+b", "", "a", "", "", "b", ""]
    assert (ax.get_title(), ax.get_xlabel(), ax.get_xlim()) == ("pool", "page, 4 in a line", (0, 4))
    assert [text.get_text() for text in ax.get_legend().get_texts()][-3:] == ["shared", "cached", "free"]


def test_a_page_map_from_a_replayed_state_and_with_more_holders_than_colours():
    engine = engine_of(num_pages=40, max_num_seqs=9)
    engine.log = cb.DecisionLog()
    engine.run([request(f"${i}", 3, 2) for i in range(9)])
    state = next(engine.log.states())
    ax = cb.plots.page_map(state.tables, 40, cached=state.cached, legend=False)
    ax.figure.canvas.draw()
    assert sum(text.get_text() != "" for text in ax.texts) == 9
    assert ax.get_legend() is None
    assert ax.get_ylim() == (2, -0.1)


def test_the_bars_of_waste_are_the_means_of_the_shares():
    tight = engine_of(cb.Orca(), num_pages=12, page_size=1, layout="contiguous")
    results = {
        "runs": tight.run([request("a", 4), request("b", 2, 3), request("c", 4), request("d", 3, 5)]),
        "$pages": engine_of(cb.ContinuousBatching(), num_pages=8).run([request("a", 4, 5)]),
    }
    ax = cb.plots.waste(results, title="waste")
    ax.figure.canvas.draw()
    widths = np.array([b.get_width() for b in ax.patches]).reshape(2, 6)
    np.testing.assert_allclose(widths, [100 * r.waste().mean() for r in results.values()])
    np.testing.assert_allclose(widths.sum(axis=1), 100)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["runs", "$pages"]
    assert {text.get_text() for text in ax.texts} == {f"{w:.1f}" for w in widths.flat if w > 3}
    assert "[%]" in ax.get_xlabel()


@pytest.mark.parametrize("page", [7, -1])
def test_a_page_outside_the_pool_is_named_before_a_figure_is_made(page):
    with pytest.raises(InvalidRequestError, match=rf"a page of request 'a' must be in \[0, 7\), got {page}"):
        cb.plots.page_map({"a": [page]}, 7)
    assert plt.get_fignums() == []


def test_the_waste_of_a_run_without_steps():
    cb.plots.waste({"nothing": run()}).figure.canvas.draw()


def test_a_line_for_each_server_and_the_promise_across():
    table = pd.DataFrame({"rate": [1, 2, 1, 2], "p50": [3.0, 5.0, 2.0, 4.0], "who": ["$a", "$a", "b", "b"]})
    ax = cb.plots.curves(
        table, "rate", "p50", by="who", limit=4.5, limit_label="promised", log="y", ylabel="latency [s]"
    )
    first, second, promised = ax.lines
    assert (first.get_label(), second.get_label()) == ("$a", "b")
    assert first.get_xydata().tolist() == [[1, 3], [2, 5]]
    assert second.get_xydata().tolist() == [[1, 2], [2, 4]]
    assert list(promised.get_ydata()) == [4.5, 4.5]
    assert [text.get_text() for text in ax.texts] == ["promised"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("rate", "latency [s]")
    assert (ax.get_xscale(), ax.get_yscale()) == ("linear", "log")
    assert first.get_marker() != second.get_marker()
    ax.figure.canvas.draw()  # a name with a dollar is no formula


def test_a_band_lies_around_its_curve():
    table = pd.DataFrame({"rate": [1, 2], "p50": [3, 5], "low": [2, 4], "high": [4, 8], "who": ["a", "a"]})
    ax = cb.plots.curves(table, "rate", "p50", by="who", band=("low", "high"))
    [band] = ax.collections
    assert {(1, 2), (1, 4), (2, 4), (2, 8)} <= set(map(tuple, band.get_paths()[0].vertices.tolist()))
    with pytest.raises(InvalidRequestError, match="'lower'"):
        cb.plots.curves(table, "rate", "p50", by="who", band=("lower", "high"))


def test_curves_name_the_column_that_is_missing():
    table = pd.DataFrame({"rate": [1], "who": ["a"]})
    with pytest.raises(InvalidRequestError, match="'p50'"):
        cb.plots.curves(table, "rate", "p50", by="who")
    with pytest.raises(InvalidRequestError, match="log"):
        cb.plots.curves(table, "rate", "rate", by="who", log="z")


def test_a_heat_map_has_each_number_at_its_place():
    table = pd.DataFrame({"seats": [1, 2, 2], "pages": [8, 8, 4], "tokens": [1.5, 2.5, float("nan")]})
    ax = cb.plots.heat_map(table, "seats", "pages", "tokens", label="tokens [1/s]", title="t")
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "2"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["8", "4"]
    assert {text.get_position(): text.get_text() for text in ax.texts} == {(0, 0): "1.5", (1, 0): "2.5"}
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("seats", "pages", "t")
    assert ax.figure.axes[1].get_ylabel() == "tokens [1/s]"


def test_a_heat_map_refuses_two_numbers_for_one_place():
    table = pd.DataFrame({"seats": [1, 1], "pages": [8, 8], "tokens": [1.5, 2.5]})
    with pytest.raises(InvalidRequestError, match="rows for one pair of seats and pages must be one at most"):
        cb.plots.heat_map(table, "seats", "pages", "tokens")
    with pytest.raises(InvalidRequestError, match="'load'"):
        cb.plots.heat_map(table, "seats", "load", "tokens")
