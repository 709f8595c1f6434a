"""Runners of an exported model by name; each imports its runtime when it is made."""

from collections.abc import Callable
from pathlib import Path

from contbatch.errors import InvalidRequestError
from contbatch.runners.model_runner import ModelRunner


def _cpu(
    path: Path, num_pages: int, page_size: int, num_host_pages: int, *, precision: str, num_threads: int | None
) -> ModelRunner:
    from contbatch.runners.cpu import CPUModel

    model = CPUModel(
        path, num_pages, page_size, precision=precision, num_threads=num_threads, num_host_pages=num_host_pages
    )
    return ModelRunner(model)


def _reference(
    path: Path, num_pages: int, page_size: int, num_host_pages: int, *, precision: str, num_threads: int | None
) -> ModelRunner:
    from contbatch.runners.reference import ReferenceModel

    if (precision, num_threads) != ("f32", None):
        options = f"precision {precision!r} and num_threads {num_threads}"
        raise InvalidRequestError(f"backend 'reference' has precision 'f32' and no num_threads, got {options}")
    return ModelRunner(ReferenceModel(path, num_pages, page_size, num_host_pages))


BACKENDS: dict[str, Callable[..., ModelRunner]] = {"cpu": _cpu, "reference": _reference}
