"""Estimates of the untrained twin, as a control of estimates."""

import warnings
from collections.abc import Callable

from hooked_lm.analysis.attribution.attribution_result import Attribution
from hooked_lm.analysis.untrained import with_untrained_twin
from hooked_lm.engine.prompts import Values
from hooked_lm.engine.study import SwapWarning
from hooked_lm.hooks import HookedRootModule
from hooked_lm.models.base import BaseModel
from hooked_lm.results.scores import METRIC


def with_estimates_of_twin(
    model: HookedRootModule,
    found: Attribution,
    estimated: Callable[..., Attribution],
    control: str | None,
    replace_with: Values | None,
) -> Attribution:
    """An attribution with its control, the estimates of the same method on the untrained twin.

    `estimated` takes the model and `check`. It is cheap where exact patching has checked the estimates. Values that were given
    are those of the trained model, so they have no control by default; several metrics have none (`refuse_several_metrics`).
    Raises as `with_untrained_twin`.
    """

    def of_twin(twin: BaseModel) -> Attribution:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SwapWarning)
            warnings.filterwarnings("ignore", ".* hardly differ")  # which is the point
            return estimated(twin, check=False)

    is_word = replace_with is None or isinstance(replace_with, str)
    is_cheap = found.exact is not None and is_word and METRIC not in found.axes
    return with_untrained_twin(model, found, found.estimates, lambda twin: of_twin(twin).estimates, control, is_cheap)
