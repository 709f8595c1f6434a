"""The phases of a TensorRT build as progress bars; Ctrl-C ends the build."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from contbatch.progress import progress_bar


@contextmanager
def new_monitor(trt: Any, shown: bool, interrupted: Callable[[], bool]) -> Iterator[Any]:
    """Give a `trt.IProgressMonitor` that ends the build when `interrupted` says so; afterwards its bars are closed."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """One bar for each phase that is part of no other; steps of the others move nothing."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.bars: dict[str, Any] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self.bars[phase_name] = progress_bar(num_steps, "step", shown)
                self.bars[phase_name].set_description(phase_name)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if (bar := self.bars.get(phase_name)) is not None:
                bar.update(step + 1 - bar.n)
            return not interrupted()

        def phase_finish(self, phase_name: str) -> None:
            if (bar := self.bars.pop(phase_name, None)) is not None:
                bar.close()

    monitor = Monitor()
    try:
        yield monitor
    finally:
        for bar in monitor.bars.values():
            bar.close()
