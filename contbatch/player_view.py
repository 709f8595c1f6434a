"""The widget of a player."""

import anywidget
import traitlets

from contbatch.player import script


class View(anywidget.AnyWidget):
    """All of a film, sent once; then only the step."""

    _esm = script()
    about = traitlets.Dict().tag(sync=True)
    now = traitlets.Bytes().tag(sync=True)
    bound = traitlets.Bytes().tag(sync=True)
    starts = traitlets.Bytes().tag(sync=True)
    changes = traitlets.Bytes().tag(sync=True)
    step = traitlets.Int(0).tag(sync=True)
