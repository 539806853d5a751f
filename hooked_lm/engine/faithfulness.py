"""A metric on the scale of two runs: 0 as in the corrupted run, 1 as in the clean run."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.engine.metrics import Fits, Metric

SMALL = 1e-6  # of the larger of two values, or of 1: a difference that is rounding


def faithfulness(
    metric: Metric, clean: Float[Tensor, "..."] | float, corrupted: Float[Tensor, "..."] | float
) -> Metric:
    """How much of the clean answer a run has, by a metric m: (m - m(corrupted)) / (m(clean) - m(corrupted)).

    It is 0 in the corrupted run and 1 in the clean run, whether m rises or falls with a better answer.

    Args:
        metric: a metric of this module.
        clean, corrupted: its values in the two runs. One number each is the scale of the means, by which circuits are usually
            evaluated (Mueller et al. 2025, arXiv:2504.13151): all effects are divided by one number, so their order and the
            circuits stay. [batch] is a scale for each prompt: then prompts count alike, however large their differences are. So
            a prompt whose runs hardly differ has large numbers.

    Raises TypeError for another kind of metric; ValueError for values that are not one number or one for each prompt, that are
    not finite, or that differ by no more than rounding.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.analysis.metrics import logit_difference
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> prompts = ["When Mary and John left, John", "When Mary and John left, Mary"]
    >>> clean, corrupted = (model(prompt) for prompt in prompts)
    >>> difference = logit_difference(" Mary", " John", model=model)
    >>> restored = faithfulness(difference, difference(clean), difference(corrupted))
    >>> restored(clean).item(), restored(corrupted).item()
    (1.0, 0.0)
    """
    if not isinstance(metric, Metric):
        raise TypeError(f"faithfulness is that of a metric of hooked_lm.analysis.metrics, got {type(metric).__name__}")
    high, low = (torch.as_tensor(value).detach().double().cpu() for value in (clean, corrupted))
    if high.shape != low.shape or high.ndim > 1:
        raise ValueError(
            f"the values of the clean and the corrupted run are one number each or one for each prompt, got {list(high.shape)} "
            f"and {list(low.shape)}"
        )
    span = high - low
    small = ~(span.abs() > SMALL * torch.maximum(high.abs(), low.abs()).clamp(min=1)) | ~span.isfinite()
    if bool(small.any()):
        of = f" of prompts {small.nonzero()[:, 0].tolist()}" if span.ndim else ""
        raise ValueError(f"no scale: the values{of} in the clean and the corrupted run must be finite and differ")
    prompts = len(span) if span.ndim else None
    if None not in (prompts, metric.fits.prompts) and prompts != metric.fits.prompts:
        raise ValueError(f"{metric} was made for {metric.fits.prompts} prompts, and the values are of {prompts}")

    def compute(read: Float[Tensor, "batch pos column"]) -> Float[Tensor, " batch"]:
        value = metric.compute(read)
        return (value - low.to(value)) / span.to(value)

    arguments = ", ".join(
        [repr(metric), *(f"{name}={_shown(value)}" for name, value in (("clean", high), ("corrupted", low)))]
    )
    return replace(metric, name="faithfulness", arguments=arguments, fits=_fits(metric.fits, prompts), compute=compute)


def _fits(fits: Fits, prompts: int | None) -> Fits:
    return fits if prompts is None else replace(fits, prompts=prompts)


def _shown(value: Tensor) -> str:
    return f"<{len(value)}>" if value.ndim else f"{value.item():.6g}"
