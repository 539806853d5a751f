"""Estimates of the untrained twin, as a control of estimates."""

from collections.abc import Callable, Mapping
from functools import cache, partial

from hooked_lm.analysis.attribution.attribution_result import Attribution
from hooked_lm.analysis.untrained import with_untrained_twin
from hooked_lm.engine.prompts import Values
from hooked_lm.hooks import HookedRootModule
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
    is_word = replace_with is None or isinstance(replace_with, str)
    is_cheap = found.exact is not None and is_word and METRIC not in found.axes
    effects = found.estimates
    return with_untrained_twin(
        model, found, effects, lambda twin: estimated(twin, check=False).estimates, control, is_cheap
    )


def with_estimates_of_twin_each(
    model: HookedRootModule,
    found: Mapping[str, Attribution],
    estimated: Callable[..., dict[str, Attribution]],
    control: str | None,
    replace_with: Values | None,
) -> dict[str, Attribution]:
    """Attributions of several sites with their controls, as `with_estimates_of_twin`, from one run of the twin."""
    of_twin = cache(partial(estimated, check=False))

    def of_site(name: str) -> Callable[..., Attribution]:
        return lambda twin, check: of_twin(twin)[name]

    return {
        name: with_estimates_of_twin(model, one, of_site(name), control, replace_with) for name, one in found.items()
    }
