"""Whether a difference, of which results are shares, may be 0."""

import sys
import warnings

from jaxtyping import Float
from torch import Tensor

from hooked_lm.results.callers import stacklevel_outside


def warn_if_small(difference: Float[Tensor, "*metric prompt"], between: str, advice: str) -> None:
    """Warns if a mean over prompts is within two standard errors of 0, and so are the shares of it that others are.

    Nothing is known of the error over one prompt.
    """
    n_prompts = difference.shape[-1]
    if n_prompts < 2:
        return
    whole = difference.double().reshape(-1, n_prompts)
    errors = whole.std(-1) / n_prompts**0.5
    for mean, two in zip(whole.mean(-1).tolist(), (2 * errors).tolist(), strict=True):
        if abs(mean) < two:
            warnings.warn(
                f"{between} hardly differ, by {mean:.4g} ± {two:.2g}: shares of this difference say little; {advice}",
                stacklevel=stacklevel_outside(sys._getframe()),
            )
