"""TensorRT itself: found, new enough, and its messages in Python's logging."""

import logging
from typing import Any

from contbatch.errors import EngineBuildError, MissingDependencyError

OLDEST = (10, 12)
"""Aliased plugin outputs and kernels compiled ahead of time are there; networks are strongly typed from 11 on."""
logger = logging.getLogger("contbatch.tensorrt")


def import_tensorrt() -> Any:
    """Return the module `tensorrt`; one that is missing or too old raises `MissingDependencyError`."""
    hint = "pip install 'contbatch[tensorrt]'"
    try:
        import tensorrt
    except (ImportError, OSError) as error:  # OSError: the bindings are there, the libraries are not
        raise MissingDependencyError(f"the backend 'tensorrt' needs TensorRT: {hint} ({error})") from error
    found = tuple(int(part) for part in tensorrt.__version__.split(".")[:2])
    if found < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise MissingDependencyError(f"TensorRT must be ≥ {oldest}, got {tensorrt.__version__}: {hint}")
    return tensorrt


def started(kind: Any, log: Any) -> Any:
    """Make a `Builder` or `Runtime`; `EngineBuildError` if the library can't, for instance for an old driver."""
    try:
        return kind(log)
    except TypeError as error:  # of the bindings: the library gave them nothing
        raise EngineBuildError(f"TensorRT doesn't start: {log.words()}") from error


def new_log(trt: Any) -> Any:
    """Make a logger for TensorRT that passes on to Python's and keeps what went wrong, in `errors`."""
    levels = {
        trt.ILogger.Severity.INTERNAL_ERROR: logging.ERROR,
        trt.ILogger.Severity.ERROR: logging.ERROR,
        trt.ILogger.Severity.WARNING: logging.INFO,  # about int64 inputs, for instance
        trt.ILogger.Severity.INFO: logging.DEBUG,
        trt.ILogger.Severity.VERBOSE: logging.DEBUG,
    }

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            level = levels[severity]
            logger.log(level, message)
            if level == logging.ERROR:
                self.errors.append(message)

        def words(self) -> str:
            """Return the errors since the last call."""
            told, self.errors = "; ".join(self.errors), []
            return told or "TensorRT gave no reason"

    return Log()
