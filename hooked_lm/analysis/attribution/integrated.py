"""Integrated gradients: the mean gradient between the base run and the source run, instead of the gradient in the base run.

Sundararajan et al. 2017 (arXiv:1703.01365); at the activations of transformers, Hanna et al. 2024 (arXiv:2403.17806) and Marks
et al. 2024 (arXiv:2403.19647). Along a straight line at a full cut of the network the effects sum to the whole difference.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.attribution.gradient_runs import Estimates, GradientRun, PartialMetric
from hooked_lm.engine.cells_before_blocks import is_of_images
from hooked_lm.hooks import HookedRootModule, HookPoint

EMBEDDINGS = ("hook_embed_merged", "hook_embed", "embed.hook_embed")


def inputs_of(model: HookedRootModule, site: str) -> tuple[str, ...]:
    """The sites whose values are the inputs of a site: the embeddings, and what images add after layers; for a site of a vision
    tower the embeddings of words and of patches. Raises ValueError for a model without embeddings."""
    if is_of_images(model, site):
        return "hook_embed", "vision.hook_patch_embed"
    found = [site for site in EMBEDDINGS if site in model.hook_dict]
    if not found:
        raise ValueError(f"a {type(model).__name__} has no site of embeddings, along which inputs could be moved")
    return (found[0], *(site for site in model.hook_dict if site.endswith(".hook_deepstack")))


def inputs(model: HookedRootModule, sites: Sequence[str]) -> list[str]:
    """The sites of the inputs of some sites."""
    return list(dict.fromkeys(name for site in sites for name in inputs_of(model, site)))


def ig_inputs(run: GradientRun, steps: int) -> Estimates:
    """Effects from the mean gradient over runs whose inputs are between those of the base run and those of the source."""
    by_inputs: dict[tuple[str, ...], list[str]] = {}
    for site in run.sites:
        by_inputs.setdefault(inputs_of(run.model, site), []).append(site)
    old, logits = run.seen(list(dict.fromkeys([*run.sites, *inputs(run.model, run.sites)])))
    part = PartialMetric(run.metric, logits)
    total: dict[str, Tensor] = {}
    for names, sites in by_inputs.items():
        changes = {name: run.difference(name, old[name]) for name in names}
        for shares, weights in batched(steps, run.n_copies):
            hooks = [(name, moved(change, shares)) for name, change in changes.items()]
            tape = run.tape(sites, hooks, part.on(_all(run), len(shares)), len(shares))
            for site, gradient in run.gradients(tape).items():
                total[site] = total.get(site, 0.0) + mean_of(gradient, weights)
    return Estimates(part.scores, {site: run.product(site, total[site], old[site]) for site in run.sites})


def ig_activations(run: GradientRun, steps: int) -> Estimates:
    """Effects at each site from the mean gradient over runs in which its activations, at all positions, are between those of
    the base run and those of the source."""
    old, logits = run.seen(run.sites)
    part, effects = PartialMetric(run.metric, logits), {}
    for site in run.sites:
        change, total = run.difference(site, old[site]), torch.zeros(())
        for shares, weights in batched(steps, run.n_copies):
            hooks = [(site, moved(change, shares))]
            tape = run.tape([site], hooks, part.on(_all(run), len(shares)), len(shares))
            total = total.to(change.device) + mean_of(run.gradients(tape)[site], weights)
        effects[site] = run.product(site, total, old[site])
    return Estimates(part.scores, effects)


def _all(run: GradientRun) -> slice:
    return slice(0, run.tokens.shape[0])


def nodes(steps: int) -> tuple[Float[Tensor, " step"], Float[Tensor, " step"]]:
    """The nodes and weights of Gauss-Legendre quadrature from 0 to 1, which is exact for polynomials of degree 2 * steps - 1.

    >>> at, weights = nodes(2)
    >>> float((weights * at**3).sum())  # the integral of x**3
    0.25
    """
    at, weights = np.polynomial.legendre.leggauss(steps)
    return torch.tensor((at + 1) / 2), torch.tensor(weights / 2)


def batched(steps: int, n: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The nodes and weights, `n` at a time."""
    yield from zip(*(part.split(n) for part in nodes(steps)), strict=True)


def moved(change: Float[Tensor, "batch ..."], shares: Float[Tensor, " copy"]) -> Callable[..., Tensor]:
    """A hook that adds a share of the change to each copy of the prompts."""

    def hook(value: Tensor, hook: HookPoint) -> Tensor:
        scaled = shares.to(change).view(-1, *[1] * change.ndim) * change
        return (value.unflatten(0, (len(shares), -1)) + scaled).flatten(0, 1)

    return hook


def mean_of(gradient: Float[Tensor, "rows ..."], weights: Float[Tensor, " copy"]) -> Float[Tensor, "batch ..."]:
    """The weighted sum over copies."""
    copies = gradient.unflatten(0, (len(weights), -1))
    return torch.tensordot(weights.to(gradient), copies, 1)
