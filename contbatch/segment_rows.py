"""Rows of segments: stretches of a seat in which a request did one kind of work."""

from typing import TYPE_CHECKING, Any

import numpy as np

from contbatch.life import Life
from contbatch.request import Request, RequestStatus

if TYPE_CHECKING:
    import pandas as pd

AWAY = RequestStatus.PREEMPTED, RequestStatus.SWAPPED
SEGMENT_COLUMNS = ["request_id", "seat", "kind", "start_step", "end_step", "start_s", "end_s", "preempted"]


class SegmentRows:
    """Collects segments, and makes their table."""

    def __init__(self) -> None:
        self._values: list[object] = []
        """Row after row: a container for each would be looked through for garbage."""

    def add(self, request: Request, live: Life, end_step: int, end_s: float) -> None:
        """Add the segment that a request is in, if any, up to a step that begins at `end_s`.

        Not one of an interrupted step.
        """
        if live.kind and live.start_step < end_step:
            self._values += (
                request.request_id,
                live.seat,
                live.kind,
                live.start_step,
                end_step,
                live.start_s,
                end_s,
                request.status in AWAY,
            )

    def frame(self) -> "pd.DataFrame":
        """Make the table of what was added so far."""
        import pandas as pd

        if not self._values:
            return pd.DataFrame([], columns=SEGMENT_COLUMNS)
        rows: dict[str, Any] = {name: self._values[i :: len(SEGMENT_COLUMNS)] for i, name in enumerate(SEGMENT_COLUMNS)}
        kinds = {"seat": np.int64, "start_step": np.int64, "end_step": np.int64, "preempted": np.bool_}
        kinds |= {"start_s": np.float64, "end_s": np.float64}
        return pd.DataFrame(rows | {name: np.array(rows[name], kind) for name, kind in kinds.items()})
