"""Progress bars, in a terminal or a notebook, with the common meaning of `progress=None`."""

import warnings
from collections.abc import Iterable
from typing import Any

from tqdm import TqdmWarning

with warnings.catch_warnings():
    warnings.simplefilter("ignore", TqdmWarning)  # that a notebook without ipywidgets shows bars as text
    from tqdm.auto import tqdm

__all__ = ["progress_bar", "tqdm"]

DELAY = 2.0  # seconds


def progress_bar(
    title: str, total: int | None, progress: bool | None, unit: str = "steps", steps: Iterable[Any] | None = None
) -> Any:
    """A progress bar: `progress` None shows it after two seconds, True at once, False never.

    >>> list(progress_bar("training", 2, progress=False, steps=range(2)))
    [0, 1]
    """
    delay = DELAY if progress is None else 0.0
    never: dict[str, Any] = {"disable": True} if progress is False else {}  # else the environment decides: TQDM_DISABLE
    return tqdm(steps, total=total, desc=title, unit=unit, delay=delay, **never)
