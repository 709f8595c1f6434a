"""Progress bars."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm


def progress_bar(total: float | None, unit: str, shown: bool) -> "tqdm[Any]":
    """Make a bar for the terminal or the notebook; the environment variable TQDM_DISABLE=1 hides all of them."""
    from tqdm.auto import tqdm

    options: dict[str, Any] = {"total": total, "unit": unit}
    if unit == "s":  # else tqdm prints all digits of a float
        counted = "{n:.1f} s" if total is None else "{l_bar}{bar}| {n:.1f}/{total:.1f} s"
        options["bar_format"] = f"{counted} [{{elapsed}}]"
    # tqdm heeds its environment variable only if `disable` is not given.
    return tqdm(**options) if shown else tqdm(**options, disable=True)
