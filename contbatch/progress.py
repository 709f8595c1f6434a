"""Progress bars."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm


def progress_bar(total: float | None, unit: str, shown: bool) -> "tqdm[Any]":
    """Make a bar for the terminal or the notebook; the environment variable TQDM_DISABLE=1 hides all of them."""
    from tqdm.auto import tqdm

    # tqdm heeds its environment variable only if `disable` is not given.
    return tqdm(total=total, unit=unit) if shown else tqdm(total=total, unit=unit, disable=True)
