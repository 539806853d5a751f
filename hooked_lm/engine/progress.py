"""Progress bars with the common meaning of `progress=None`."""

from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm


def progress_bar(
    title: str, total: int | None, progress: bool | None, unit: str = "steps", steps: Iterable[Any] | None = None
) -> Any:
    """A progress bar: `progress` None shows it after one second, True at once, False never.

    >>> list(progress_bar("training", 2, progress=False, steps=range(2)))
    [0, 1]
    """
    delay = 1.0 if progress is None else 0.0
    never: dict[str, Any] = {"disable": True} if progress is False else {}  # else the environment decides: TQDM_DISABLE
    return tqdm(steps, total=total, desc=title, unit=unit, delay=delay, **never)
