"""Whether a difference, of which results are shares, may be 0."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from jaxtyping import Float
from torch import Tensor

from hooked_lm.callers import warn_caller

_said: ContextVar[list[str] | None] = ContextVar("said", default=None)


@contextmanager
def one_warning() -> Iterator[None]:
    """In this context the first small difference is warned of, and no other: they are those of one task."""
    token = _said.set([]) if _said.get() is None else None
    try:
        yield
    finally:
        if token is not None:
            _said.reset(token)


def warn_if_small(difference: Float[Tensor, "*metric prompt"], between: str, advice: str) -> None:
    """Warns if a mean over prompts is within two standard errors of 0, and so are the shares of it that others are.

    Nothing is known of the error over one prompt: there it has to be 0.
    """
    n_prompts, said = difference.shape[-1], _said.get()
    if said:
        return
    whole = difference.double().reshape(-1, n_prompts)
    errors = whole.std(-1) / n_prompts**0.5 if n_prompts > 1 else whole.new_zeros(len(whole))
    for mean, two in zip(whole.mean(-1).tolist(), (2 * errors).tolist(), strict=True):
        if abs(mean) <= two:
            if said is not None:
                said.append(between)
            warn_caller(
                f"{between} hardly differ, by {mean:.4g} ± {two:.2g}: shares of this difference say little; {advice}"
            )
            if said:
                return
