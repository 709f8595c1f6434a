"""One moment of a run, as a picture for a notebook."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

POINTS = 120
"""Pictures whose tokens per second are in the curve."""
# Okabe and Ito's colours, as in `plots.gantt`; texts take the notebook's own colour, dark or light.
STYLES = {
    "prompt": "background:#E69F00;color:black",
    "answer": "background:#0072B2;color:white",
    "held": "background:repeating-linear-gradient(45deg,#D55E00 0 2px,white 2px 6px);color:black",
    "empty": "background:#88888833",
}
BOX = "display:inline-block;min-width:18px;height:16px;margin:1px;text-align:center;font-size:10px;line-height:16px"


@dataclass(frozen=True)
class Picture:
    """The state of a run at one moment; notebooks show it as HTML, anything else as a line of text."""

    title: str
    state: str
    """"running", "done", "interrupted" or "failed"."""
    elapsed_s: float
    seats: tuple[tuple[str, str], ...]
    """What each seat does, a key of `STYLES`, and for whom."""
    waiting: int
    answered: int
    tokens: int
    """Output tokens made so far."""
    rates: tuple[float, ...]
    """Tokens per second at the last pictures."""
    pages: tuple[int, int, int]
    """Held, kept by the prefix cache, and in all."""

    def __repr__(self) -> str:
        taken = sum(kind != "empty" for kind, _ in self.seats)
        people = f"seats {taken}/{len(self.seats)}, {self.waiting} wait, {self.answered} answered"
        figures = f"{self.tokens} tokens, {self.rates[-1]:.0f} tokens/s, pages {self.pages[0]}/{self.pages[2]}"
        return f"{self.title}: {self.state}, {self.elapsed_s:.1f} s, {people}, {figures}"

    def _repr_html_(self) -> str:
        held, cached, total = self.pages
        widths = [f"{100 * count / total:.1f}%" for count in (held, cached)]
        bar = "".join(
            f'<span style="display:inline-block;height:10px;width:{width};{style}"></span>'
            for width, style in zip(widths, (STYLES["answer"], "background:#999999"), strict=True)
        )
        names = len(self.seats) <= 64
        seats = "".join(
            f'<span style="{BOX};{STYLES[kind]}">{escape(name) if names else ""}</span>' for kind, name in self.seats
        )
        return (
            f'<div style="max-width:660px;border:1px solid #88888866;padding:6px;font-size:12px">'
            f"<b>{escape(self.title)}</b> &nbsp; {self.state}, {self.elapsed_s:.1f} s<br>"
            f"{seats}<br>{self.waiting} waiting, {self.answered} answered, {self.tokens} tokens<br>"
            f"{_curve(self.rates)} {self.rates[-1]:.0f} tokens/s<br>"
            f'<span style="display:inline-block;width:300px;{STYLES["empty"]};line-height:0">{bar}</span> '
            f"{held} of {total} pages{f', {cached} cached' if cached else ''}</div>"
        )


def _curve(rates: Sequence[float], width: int = 300, height: int = 30) -> str:
    top = max(rates) or 1.0
    points = " ".join(
        f"{width * place / (POINTS - 1):.1f},{height - 1 - (height - 2) * rate / top:.1f}"
        for place, rate in enumerate(rates)
    )
    line = f'<polyline points="{points}" fill="none" stroke="#56B4E9" stroke-width="1.5"/>'
    return f'<svg width="{width}" height="{height}" style="{STYLES["empty"]};vertical-align:middle">{line}</svg>'
