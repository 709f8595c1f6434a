"""Who worked when: the one picture of a film that needs no player."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from contbatch.film import NOBODY, SEAT, WORK, Film

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 1000
COLOURS = {
    "empty": "#EEEEEE",
    "sits a step out": "#999999",
    "prompt": "#E69F00",
    "answer": "#0072B2",
    "held: wasted": "#D55E00",
}


def seats_over_time(film: Film, columns: int = COLUMNS) -> NDArray[np.uint8]:
    """Return what each seat does, 0 if nobody is there, else 1 + a place in `WORK_KINDS`: (seats, columns)."""
    num_seats = int(film.settings["max_num_seqs"])
    steps = np.unique(np.linspace(0, len(film) - 1, columns).astype(int))
    shown = np.zeros((num_seats, len(steps)), np.uint8)
    taken, work, begin = np.zeros(num_seats, np.uint8), np.zeros(num_seats, np.uint8), 0
    for column, end in enumerate(film.starts[steps + 1]):
        for what, where, which in film.changes[begin:end]:
            if what == SEAT:
                taken[where] = which != NOBODY
            elif what == WORK:
                work[where] = which
        shown[:, column], begin = taken * (1 + work), end
    return shown


def seat_picture(film: Film) -> "Figure":
    """Draw a row a seat, a column a step, or some of them if there are many."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from contbatch.plots.legend import legend_below

    shown = seats_over_time(film)
    figure = Figure(figsize=(10, 1.2 + min(6, 0.3 * len(shown))), layout="constrained")
    ax = figure.subplots()
    colours = ListedColormap(list(COLOURS.values()))
    extent = (0, len(film), len(shown) - 0.5, -0.5)
    ax.imshow(shown, cmap=colours, vmin=0, vmax=4, aspect="auto", interpolation="nearest", extent=extent)
    ax.set(ylabel="seat", title=film.settings["policy"])
    ax.title.set_parse_math(False)
    ax.set_xlabel("step", loc="left")
    legend_below(ax, [Patch(facecolor=colour, label=kind) for kind, colour in COLOURS.items()])
    return figure
