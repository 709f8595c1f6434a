"""The widgets of an explorer: controls on the left, message, figure, table and code on the right."""

from base64 import b64encode
from html import escape
from typing import TYPE_CHECKING
from urllib.parse import quote

import anywidget
import ipywidgets

from contbatch.cell_output import svg
from contbatch.controls import control, parameter, parameters
from contbatch.field_paths import field_type, get_field

if TYPE_CHECKING:
    from contbatch.explorer import Explorer

FIGURES = {
    "requests": "answered",
    "output_tokens_per_s": "tokens/s",
    "ttft_s_mean": "mean TTFT [s]",
    "ttft_s_p99": "P99 TTFT [s]",
    "tpot_s_mean": "mean TPOT [s]",
    "e2e_s_mean": "mean latency [s]",
    "mean_seqs": "mean batch",
    "wasted_seats": "wasted seats",
    "page_use": "pages held",
    "preemptions": "preemptions",
}
"""Figures of `Result.summary` that are shown, and how they are called here."""


STYLE = (
    ".contbatch-explore :is(th, td) { line-height: 1.3; text-align: right; padding: 3px 8px; vertical-align: bottom }"
)


class Names(anywidget.AnyWidget):
    """Shows nothing, but gives sliders the names that screen readers read: ipywidgets leaves them out."""

    _esm = """
    export default { render({ el }) {
      const name = (box) => box.querySelectorAll("[role=slider]:not([aria-label])").forEach((handle) =>
        handle.setAttribute("aria-label", handle.closest(".widget-inline-hbox").querySelector("label").textContent));
      const watcher = new MutationObserver((changes, watcher) => name(changes[0].target.closest(".contbatch-explore")));
      const wait = () => {
        const box = el.closest(".contbatch-explore");
        if (!box) return requestAnimationFrame(wait);
        watcher.observe(box, { childList: true, subtree: true });
        name(box);
      };
      wait();
      return () => watcher.disconnect();
    } };
    """


class View:
    """Widgets that show an explorer and tell it of every change."""

    def __init__(self, explorer: "Explorer") -> None:
        self.explorer = explorer
        self.controls: dict[str, ipywidgets.Widget] = {}
        self._chosen = ipywidgets.VBox()
        """The controls of the chosen policy's parameters."""
        self._message, self._picture, self._table, self._code = (ipywidgets.HTML() for _ in range(4))
        start = explorer.start
        for path, given in explorer.ranges.items():
            if not (path.startswith("policy.") and "policy" in explorer.ranges):
                widget = control(path.rpartition(".")[2], given, get_field(start, path), field_type(start, path))
                self._listen(path, widget)
        shown: list[ipywidgets.Widget] = []
        for path, widget in list(self.controls.items()):
            shown += [widget, self._chosen] if path == "policy" else [widget]
        if "policy" in self.controls:
            self._choose()
        pin, unpin = ipywidgets.Button(description="Pin this run"), ipywidgets.Button(description="Unpin all")
        pin.tooltip, unpin.tooltip = "Keep this run to compare others with it", "Forget the runs that are kept"
        pin.on_click(lambda _: explorer.pin())
        unpin.on_click(lambda _: explorer.unpin())
        left = ipywidgets.VBox([*shown, ipywidgets.HBox([pin, unpin])], layout={"width": "24em", "flex": "0 0 auto"})
        right = ipywidgets.VBox([self._message, self._picture], layout={"flex": "1 1 30em", "min_width": "20em"})
        top = ipywidgets.HBox([left, right], layout={"flex_flow": "row wrap"})
        self.box = ipywidgets.VBox([top, self._table, self._code, Names()])
        self.box.add_class("contbatch-explore")

    def show(self) -> None:
        """Show what the explorer has."""
        explorer, figure = self.explorer, None
        message = explorer.message
        try:
            figure = explorer.figure()
        except Exception as error:  # of a `draw` written by whoever explores
            message = f"the figure failed with {type(error).__name__}: {error}"
        self._message.value = f'<div role="status" style="color: #D55E00">{escape(message)}</div>'
        names = ", ".join(explorer.runs())
        self._picture.value = (
            _image(svg(figure), f"Figure of the runs {names}; the table below has their numbers") if figure else ""
        )
        self._table.value = self._rows() if explorer.runs() else ""
        click = "user-select: all; white-space: pre-wrap"  # one click selects the whole line
        code = f'<code style="{click}" title="The run above as code">{escape(explorer.code)}</code>'
        self._code.value = code if "now" in explorer.runs() else ""

    def close(self) -> None:
        """Close all widgets."""
        widgets = [self.box]
        for widget in widgets:
            widgets += getattr(widget, "children", ())
            widget.close()

    def _rows(self) -> str:
        table, [run, *_] = self.explorer.table, self.explorer.runs().values()
        csv = quote(table.to_csv(index_label="run"))
        num_fields = len(table.columns) - len(run.summary)
        shown = table[[*table.columns[:num_fields], *FIGURES]]
        html = shown.rename(columns=FIGURES).to_html(float_format="{:.4g}".format, border=0)
        look = 'download="explore.csv" style="text-decoration: underline"'
        link = f'<a {look} href="data:text/csv;charset=utf-8,{csv}">Download as CSV</a>'
        return f'<style>{STYLE}</style><div style="overflow-x: auto">{html}</div>{link}'

    def _listen(self, path: str, widget: ipywidgets.Widget) -> None:
        if path == "policy":  # before the explorer, which reads the controls
            widget.observe(self._choose, "value", type="change")
        widget.observe(self.explorer.change_soon, "value", type="change")
        self.controls[path] = widget

    def _choose(self, *_: object) -> None:
        """Put the controls of the chosen policy's parameters in place of those of the one before."""
        policy, ranges = self.controls["policy"].value, self.explorer.ranges
        self.controls = {path: w for path, w in self.controls.items() if not path.startswith("policy.")}
        before = self._chosen.children
        made = []
        for name in parameters(policy):
            path = f"policy.{name}"
            if path in ranges:
                widget = control(name, ranges[path], getattr(policy, name), field_type(policy, name))
            else:
                widget = parameter(policy, name)
            if widget is not None:
                self._listen(path, widget)
                made.append(widget)
        self._chosen.children = made
        for widget in before:
            widget.close()


def _image(picture: bytes, text: str) -> str:
    data = b64encode(picture).decode()
    return (
        f'<img alt="{escape(text)}" style="max-width: 100%; background: white" src="data:image/svg+xml;base64,{data}">'
    )
