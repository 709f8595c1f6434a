"""Pictures: what is drawn, not how it looks."""

import matplotlib as mpl
import numpy as np
import pytest
from fake_runner import engine_of, request

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.colors import to_hex

import contbatch as cb
from contbatch.errors import InvalidRequestError

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
