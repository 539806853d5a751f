"""AtP*: attribution patching with two corrections for its known failures (Kramar et al. 2024, arXiv:2403.00745).

Where a softmax is saturated, its gradient with respect to queries and keys almost vanishes, even if exchanging them moves
attention. So for queries and keys the new pattern is computed, and only what follows it is linearised. Effects along two paths
may cancel in the gradient, but not in an exact run. So the gradient is also taken with the outputs of one layer held constant,
for each layer ("GradDrop"), and the size of an estimate is the mean of the sizes over these gradients. The paper divides the sum
over the L layers by L - 1, since its nodes lie inside layers and have no gradient when their own layer is dropped. A site of the
residual stream has a gradient in all L cases, so there the mean is over L.

Where nothing cancels, that mean is too small: each dropped layer takes away what flows through it, so an effect that flows
through k of the other layers keeps 1 - k / (L - 1) of its size. In deep models this is little; in one of four layers a third or
more is lost. So here the mean counts only where it exceeds the estimate without dropping, which is where paths cancel.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.attribution.gradient_runs import Effects, Estimates, GradientRun
from hooked_lm.components.attention.multihead import AbstractAttention
from hooked_lm.engine.prompts import site_of_layer
from hooked_lm.engine.site_info import kv_source_layer, mixing
from hooked_lm.hooks import HookedRootModule
from hooked_lm.models.decoder import Decoder

# the outputs of a layer to the stream
OUTPUTS = ("attn_out", "mlp_out", "mixer_out", "laurel_out", "per_layer_out", "conv_out")
STREAM = re.compile(r"(?!.*blocks\.).*|.*\.hook_(normalized_)?resid_[a-z]+")  # embeddings too: all outside of layers
SCORES, PATTERN, MIXED = "attn_scores", "pattern", "z"

PerQuery = Float[Tensor, "batch head query_pos key_pos"]


def atp_star(run: GradientRun, steps: int) -> Estimates:
    """Estimates by AtP*: the estimate without dropping, or with its sign the mean size over the gradients that each drop one
    layer if that is larger; for queries and keys by their exchanged patterns. `steps` is not used."""
    fix = PatternFix(run)
    drop = Drop(run.model)
    tape = run.tape(list(dict.fromkeys([*run.sites, *fix.patterns])), drop.hooks())
    estimates = _Estimator(run, fix, tape.values)
    plain = estimates.of(run.gradients(tape, again=True))
    sizes = {site: torch.zeros_like(effect) for site, effect in plain.items()}
    n_layers = len(drop.sites)
    for layer in range(n_layers):
        drop.layer = layer
        for site, effect in estimates.of(run.gradients(tape, again=layer < n_layers - 1)).items():
            if site not in drop.sites[layer]:  # the gradient is stopped here: no effect
                sizes[site] += effect.abs()
    if n_layers == 1:  # nothing can cancel
        return Estimates(tape.scores.detach(), plain)
    found = {}
    for site, effect in plain.items():
        size = torch.maximum(effect.abs(), sizes[site] / (n_layers - (STREAM.fullmatch(site) is None)))
        found[site] = torch.where(effect < 0, -size, size)
    return Estimates(tape.scores.detach(), found)


class _Estimator:
    """Effects from gradients; those of queries and keys by their exchanged patterns."""

    def __init__(self, run: GradientRun, fix: "PatternFix", values: Mapping[str, Tensor]) -> None:
        self.run, self.fix, self.values = run, fix, values

    def of(self, gradients: Mapping[str, Tensor]) -> dict[str, Effects]:
        """The effect at each site."""
        return {
            site: self.fix.effects(site, gradients)
            if site in self.fix.readers
            else self.run.product(site, gradients[site], self.values[site])
            for site in self.run.sites
        }


class Drop:
    """Stops the gradient at the outputs of one layer to the stream; `layer` None: of no layer."""

    def __init__(self, model: HookedRootModule) -> None:
        self.layer: int | None = None
        n_layers = getattr(model, "cfg").n_layers  # noqa: B009
        found = {layer: [site_of_layer(model, name, layer) for name in OUTPUTS] for layer in range(n_layers)}
        self.sites = {layer: [site for site in sites if site is not None] for layer, sites in found.items()}

    def hooks(self) -> list[tuple[str, Any]]:
        """The hooks for a forward pass."""
        return [(site, self._hook(layer)) for layer, sites in self.sites.items() for site in sites]

    def _hook(self, layer: int) -> Any:
        def hook(value: Tensor, hook: Any) -> Tensor:
            if value.requires_grad:
                value.register_hook(lambda gradient: torch.zeros_like(gradient) if layer == self.layer else gradient)
            return value.view_as(value)  # gradients are taken at this view, after the stop

        return hook


class PatternFix:
    """The queries and keys among a run's sites, and the patterns that result from exchanging them.

    `readers` maps each of these sites to the layers whose patterns use it: its own, and for keys those that share them.
    """

    def __init__(self, run: GradientRun) -> None:
        self.run = run
        self.readers = _readers(run.model, run.sites)
        self.layers = sorted({layer for layers in self.readers.values() for layer in layers})
        self._base: dict[str, Tensor] = {}
        if self.layers:
            inside = [site for name in (SCORES, PATTERN, MIXED) for _, site in self._sites_of_layers(name)]
            self._base, _ = run.seen([*self.readers, *inside])
        self._changed = {kind: self._patched(kind) for kind in ("q", "k")}

    @property
    def patterns(self) -> list[str]:
        """The sites of patterns, whose gradients are needed."""
        return [site for _, site in self._sites_of_layers(PATTERN)]

    def _sites_of_layers(self, name: str) -> list[tuple[int, str]]:
        found = [(layer, site_of_layer(self.run.model, name, layer)) for layer in self.layers]
        return [(layer, site) for layer, site in found if site is not None]

    def _patched(self, kind: str) -> dict[str, Tensor]:
        """The scores (for keys) or patterns (for queries) with all of these exchanged. Mixed values are held at the base run,
        so that the input of every layer is that of the base run."""
        sites = [site for site in self.readers if _kind(site) == kind]
        if not sites:
            return {}

        def exchange(value: Tensor, hook: Any) -> Tensor:
            return self.run.new(hook.name, value).clone()

        def hold(value: Tensor, hook: Any) -> Tensor:
            return self._base[hook.name]

        wanted = [site for _, site in self._sites_of_layers(PATTERN if kind == "q" else SCORES)]
        held = [(site, hold) for _, site in self._sites_of_layers(MIXED)]
        with self.run.model.hooks(fwd_hooks=[*((site, exchange) for site in sites), *held]):
            return self.run.seen(wanted)[0]

    def effects(self, site: str, gradients: Mapping[str, Tensor]) -> Effects:
        """The effect of exchanging the queries or keys of a site, through the change of patterns."""
        effect = self._of_queries if _kind(site) == "q" else self._of_keys
        own, *borrowed = [effect(site, layer, gradients) for layer in self.readers[site]]
        return sum(borrowed, own)

    def _of_queries(self, site: str, layer: int, gradients: Mapping[str, Tensor]) -> Effects:
        pattern = dict(self._sites_of_layers(PATTERN))[layer]
        change = (self._changed["q"][pattern] - self._base[pattern]).mul_(gradients[pattern])
        return self.run.sums[site].total(change.sum(-1).transpose(1, 2)[..., None])

    def _of_keys(self, site: str, layer: int, gradients: Mapping[str, Tensor]) -> Effects:
        scores, pattern = (dict(self._sites_of_layers(name))[layer] for name in (SCORES, PATTERN))
        effects = one_key_exchanged(
            self._base[scores], self._changed["k"][scores], self._base[pattern], gradients[pattern]
        )
        n_kv = self._base[site].shape[2]
        by_key = effects.sum(2).unflatten(1, (n_kv, -1)).sum(2)  # [batch, kv_head, key_pos]
        return self.run.sums[site].total(by_key.transpose(1, 2)[..., None])


def one_key_exchanged(scores: PerQuery, exchanged: PerQuery, pattern: PerQuery, gradient: PerQuery) -> PerQuery:
    """The change of `sum(gradient * pattern)` of a row if one score alone is exchanged, for each score.

    Let P be the weight of the key in the softmax, R that of all others and d the change of its score. The weight becomes
    P exp(d) / (R + P exp(d)), and the others shrink in proportion. So the sum changes by P (exp(d) - 1) / (R + P exp(d)) times
    the sum, over the others, of their weight times (the key's gradient - theirs). R is summed directly, since 1 - P would be 0
    where the softmax is saturated.

    >>> rows = torch.tensor([[[[0.0, 0.0]]]])
    >>> one_key_exchanged(
    ...     rows, rows + 2.0, rows.softmax(-1), torch.tensor([[[[1.0, 0.0]]]])
    ... )[0, 0, 0, 0]
    tensor(0.3808)
    """
    change = torch.where(scores == exchanged, 0.0, exchanged.double() - scores.double())
    slopes, sink = gradient.double(), _share_of_sink(pattern)
    share = scores.double().softmax(-1) * (1 - sink)
    others = _sum_of_others(share) + sink
    up, down = change.clamp(min=0), change.clamp(max=0)  # no exponential exceeds 1
    moved = share * (down.exp() - (-up).exp()) / (others * (-up).exp() + share * down.exp()).clamp(min=1e-300)
    above = slopes * others - _sum_of_others(share * slopes)
    return torch.where(share > 0, moved * above, 0.0).to(gradient.dtype)


def _sum_of_others(values: PerQuery) -> PerQuery:
    """For each key the sum over all other keys, without rounding errors from a large value of that key."""
    before = F.pad(values.cumsum(-1), (1, 0))[..., :-1]
    after = F.pad(values.flip(-1).cumsum(-1), (1, 0))[..., :-1].flip(-1)
    return before + after


def _share_of_sink(pattern: PerQuery) -> Float[Tensor, "batch head query_pos 1"]:
    """The share of the softmax that no key has: that of the sink, or 0 (up to rounding) without one."""
    share = 1 - pattern.double().sum(-1, keepdim=True)
    return torch.where(share < 1e-4, 0.0, share)


def _kind(site: str) -> str:
    return site[-1]


def _readers(model: HookedRootModule, sites: Sequence[str]) -> dict[str, list[int]]:
    """The queries and keys among these sites, each with the layers whose patterns use it.

    Those of layers whose keys are also values, or are pooled, are left out: they change more than one pattern.
    """
    if not isinstance(model, Decoder):
        return {}
    found: dict[str, list[int]] = {}
    for layer, block in enumerate(model.blocks):
        attns = [module for module in mixing(block) if isinstance(module, AbstractAttention)]
        if all(getattr(attn, "keys_are_values", False) for attn in attns):
            continue
        query, key = (site_of_layer(model, kind, layer) for kind in ("q", "k"))
        if query in sites:
            found[str(query)] = [layer]
        if key in sites:
            found[str(key)] = [layer, *(i for i, other in enumerate(model.blocks) if kv_source_layer(other) == layer)]
    return found
