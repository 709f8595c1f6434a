"""Tables to pictures: each function takes data and returns matplotlib Axes, printing nothing."""

from contbatch.errors import MissingDependencyError

try:
    import matplotlib  # noqa: F401 - what all of them need
except ImportError as error:
    raise MissingDependencyError("plots need matplotlib: pip install 'contbatch[notebooks]'") from error

from contbatch.plots.curves import curves
from contbatch.plots.fairness import fairness
from contbatch.plots.gantt import gantt
from contbatch.plots.heat_map import heat_map
from contbatch.plots.latency_cdf import latency_cdf
from contbatch.plots.memory import memory
from contbatch.plots.page_map import page_map
from contbatch.plots.pareto import pareto, pareto_front
from contbatch.plots.queue import queue
from contbatch.plots.waste import waste

__all__ = [
    "curves",
    "fairness",
    "gantt",
    "heat_map",
    "latency_cdf",
    "memory",
    "page_map",
    "pareto",
    "pareto_front",
    "queue",
    "waste",
]
