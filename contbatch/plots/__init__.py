"""Tables to pictures: each function takes data and returns matplotlib Axes, printing nothing."""

from contbatch.errors import MissingDependencyError

try:
    import matplotlib  # noqa: F401 - what all of them need
except ImportError as error:
    raise MissingDependencyError("plots need matplotlib: pip install 'contbatch[notebooks]'") from error

from contbatch.plots.curves import curves
from contbatch.plots.gantt import gantt
from contbatch.plots.heat_map import heat_map
from contbatch.plots.page_map import page_map
from contbatch.plots.waste import waste

__all__ = ["curves", "gantt", "heat_map", "page_map", "waste"]
