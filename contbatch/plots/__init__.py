"""Tables to pictures: each function takes data and returns matplotlib Axes, printing nothing."""

from contbatch.plots.curves import curves
from contbatch.plots.gantt import gantt
from contbatch.plots.page_map import page_map
from contbatch.plots.waste import waste

__all__ = ["curves", "gantt", "page_map", "waste"]
