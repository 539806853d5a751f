"""Repeats requests that the hub refuses because there are too many."""

import logging
import random
import time
from collections.abc import Callable
from functools import partial, wraps
from typing import TypeVar

LONGEST_WAIT = 120.0  # seconds between two attempts
T = TypeVar("T")
logger = logging.getLogger(__name__)


def call_hf_with_retry(
    func: Callable[..., T], *args: object, max_attempts: int = 3, base_delay: float = 10.0, **kwargs: object
) -> T:
    """The result of `func(*args, **kwargs)`, which is called again while the hub answers that there are too many requests.

    Other errors, and that of the last attempt, are raised. Between attempts it waits as long as the hub says, or about
    `base_delay` seconds, then twice that, and so on, at most 120. Raises ValueError for `max_attempts` below 1.

    >>> call_hf_with_retry(int, "7", max_attempts=2)
    7
    """
    if max_attempts < 1:
        raise ValueError(f"max_attempts must be at least 1, got {max_attempts}")
    for attempt in range(max_attempts - 1):
        try:
            return func(*args, **kwargs)
        except Exception as error:  # noqa: PERF203  (the wait is longer than what an exception costs)
            response = getattr(error, "response", None)
            if getattr(response, "status_code", None) != 429:
                raise
            wait = _asked_wait(response)
            if wait is None:
                wait = min(base_delay * 2**attempt, LONGEST_WAIT) * (0.8 + 0.4 * random.random())
            logger.warning("the hub answers: too many requests; attempt %d follows in %.1f s", attempt + 2, wait)
            time.sleep(wait)
    return func(*args, **kwargs)


def enable_hf_retry() -> None:
    """Makes `from_pretrained` of transformers' `AutoConfig`, `AutoModel`, `AutoTokenizer`, `AutoProcessor` and
    `AutoFeatureExtractor` call the hub again by `call_hf_with_retry`, for this process. A second call changes nothing."""
    import transformers

    for name in ("AutoConfig", "AutoModel", "AutoTokenizer", "AutoProcessor", "AutoFeatureExtractor"):
        auto = getattr(transformers, name)
        original = auto.from_pretrained.__func__
        if not hasattr(original, "__retries__"):
            retrying = partial(call_hf_with_retry, original)
            auto.from_pretrained = classmethod(
                wraps(original)(lambda *args, _call=retrying, **kwargs: _call(*args, **kwargs))
            )
            auto.from_pretrained.__func__.__retries__ = True


def _asked_wait(response: object) -> float | None:
    """The seconds that a response asks to wait; None if it does not say."""
    try:
        return max(float(getattr(response, "headers", {})["Retry-After"]), 0.0)
    except (KeyError, TypeError, ValueError):
        return None
