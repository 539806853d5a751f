"""The runs of a circuit of neurons: what flows between neurons by backward passes, and exact runs that keep some neurons."""

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_lm.analysis.attribution.backward_rules import BackwardRules
from hooked_lm.analysis.attribution.gradient_runs import seen
from hooked_lm.analysis.attribution.gradients import Tape
from hooked_lm.analysis.circuits.held_out import MeasuredPairs
from hooked_lm.components.activations import Activated
from hooked_lm.engine.metric_rows import numbers_of
from hooked_lm.engine.metric_trace import reads_of
from hooked_lm.hooks import HookPoint
from hooked_lm.models.decoder import Decoder
from hooked_lm.progress import progress_bar
from hooked_lm.results.scores import Scores

KEPT = "neurons"  # the axis of the runs in which some neurons are kept
ALL, NONE, CIRCUIT = "all neurons", "no neurons", "circuit"


class Flows:
    """One run with a graph, whose gradients can be stopped where they enter the MLPs of layers."""

    def __init__(
        self, model: Decoder, pairs: MeasuredPairs, sites: Mapping[int, tuple[str, Activated]], rules: BackwardRules
    ) -> None:
        self.sites, self.open = {layer: site for layer, (site, _) in sites.items()}, {*sites}
        device = next(model.parameters()).device
        stops = [
            (f"{site.rpartition('.')[0]}.{factor}", self._stop(layer))
            for layer, (site, mlp) in sites.items()
            for factor in mlp.factors
        ]
        self.input = "blocks.0.hook_resid_pre"
        every = [self.input, *self.sites.values()]
        assert pairs.metric is not None, "checked before"
        self.tape = Tape(model, pairs.clean.to(device), every, pairs.metric, stops, rules)
        new, _ = seen(model, pairs.corrupted.to(device), every)
        old = self.tape.values
        self.changes = {site: new[site] - old[site] for site in every}
        self.total = self.tape.gradients(check=False, again=True)
        self.open = set()
        self.direct = self.tape.gradients(check=False, again=True)

    def _stop(self, layer: int) -> Callable[..., Tensor]:
        def hook(value: Tensor, hook: HookPoint) -> Tensor:
            same = value.view_as(value)
            same.register_hook(lambda gradient: gradient if layer in self.open else torch.zeros_like(gradient))
            return same

        return hook

    def effects_of(self, chosen: Int[Tensor, "node 3"]) -> Float[Tensor, "node prompt"]:
        """The whole effect of each neuron."""
        return self._at(chosen, self.total)

    def edges(self, chosen: Int[Tensor, "node 3"], progress: bool | None) -> Float[Tensor, "source target prompt"]:
        """What flows from each source into each target."""
        n, n_prompts = len(chosen), len(self.tape.scores)
        found = torch.zeros(n + 1, n + 2, n_prompts)
        bar = progress_bar("neurons", n, progress, steps=chosen.tolist())
        for column, (layer, position, neuron) in enumerate(bar):
            earlier = [self.input, *(site for other, site in self.sites.items() if other < layer)]
            slopes = self._into(layer, position, neuron, earlier)
            found[:, column] = self._of_sources(chosen, slopes)
        found[:, -1] = self._of_sources(chosen, self.direct)
        found[:, -2] = self._of_sources(chosen, self.total) - found.sum(1)
        return found

    def _into(self, layer: int, position: int, neuron: int, earlier: Sequence[str]) -> dict[str, Tensor]:
        """The gradients, at earlier sites, of a neuron times its own gradient."""
        self.open = {layer}
        value, slope = (where[self.sites[layer]][:, position, neuron] for where in (self.tape.live, self.total))
        live = [self.tape.live[site] for site in earlier]
        found = torch.autograd.grad((value * slope).sum(), live, retain_graph=True, allow_unused=True)
        return {site: each for site, each in zip(earlier, found, strict=True) if each is not None}

    def _of_sources(
        self, chosen: Int[Tensor, "node 3"], gradients: Mapping[str, Tensor]
    ) -> Float[Tensor, "source prompt"]:
        """Gradient times change of each neuron, and of the embeddings."""
        of_input = torch.zeros(1, len(self.tape.scores))
        if self.input in gradients:
            of_input = (gradients[self.input] * self.changes[self.input]).sum((1, 2))[None].float().cpu()
        return torch.cat([self._at(chosen, gradients), of_input])

    def _at(self, chosen: Int[Tensor, "node 3"], gradients: Mapping[str, Tensor]) -> Float[Tensor, "node prompt"]:
        found = torch.zeros(len(chosen), len(self.tape.scores))
        for layer in chosen[:, 0].unique().tolist():
            if (site := self.sites[layer]) in gradients:
                rows = chosen[:, 0] == layer
                _, positions, neurons = chosen[rows].T.to(gradients[site].device)
                product = gradients[site][:, positions, neurons] * self.changes[site][:, positions, neurons]
                found[rows] = product.T.float().cpu()
        return found


class PartialRuns:
    """Exact clean runs in which some neurons are kept, and the others are those of the corrupted run."""

    def __init__(self, model: Decoder, pairs: MeasuredPairs, sites: Mapping[int, tuple[str, Activated]]) -> None:
        self.model, self.pairs = model, pairs
        self.sites = {layer: site for layer, (site, _) in sites.items()}
        device = next(model.parameters()).device
        self.clean = pairs.clean.to(device)
        every = list(self.sites.values())
        (old, _), (self.new, _) = (seen(model, rows, every) for rows in (self.clean, pairs.corrupted.to(device)))
        self.differs = {layer: (old[site] != self.new[site]).any(0).cpu() for layer, site in self.sites.items()}

    def measured(self, chosen: Int[Tensor, "node 3"], n_random: int, seed: int) -> Scores:
        """The metric with all neurons, with none, with the chosen ones and with as many random ones."""
        places = {layer: torch.zeros(self.new[site].shape[1:], dtype=torch.bool) for layer, site in self.sites.items()}
        own = {layer: mask.clone() for layer, mask in places.items()}
        for layer, position, neuron in chosen.tolist():
            own[layer][position, neuron] = True
        runs = {ALL: {layer: ~mask for layer, mask in places.items()}, NONE: places, CIRCUIT: own}
        generator = torch.Generator().manual_seed(seed)
        for draw in range(n_random):
            runs[f"random {draw}"] = self._random(places, len(chosen), generator)
        values = torch.stack([self._metric(keep) for keep in runs.values()])
        return Scores(values, {KEPT: list(runs)})

    def _random(
        self, places: Mapping[int, Bool[Tensor, "pos neuron"]], n: int, generator: torch.Generator
    ) -> dict[int, Bool[Tensor, "pos neuron"]]:
        """As many random neurons, of those that differ between the runs."""
        flat = torch.cat([self.differs[layer].flatten() for layer in places]).nonzero()[:, 0]
        drawn = torch.zeros(sum(mask.numel() for mask in places.values()), dtype=torch.bool)
        drawn[flat[torch.randperm(len(flat), generator=generator)[:n]]] = True
        parts = drawn.split([mask.numel() for mask in places.values()])
        return {layer: part.view_as(places[layer]) for layer, part in zip(places, parts, strict=True)}

    @torch.no_grad()
    def _metric(self, keep: Mapping[int, Bool[Tensor, "pos neuron"]]) -> Float[Tensor, " prompt"]:
        def exchange(layer: int) -> Callable[..., Tensor]:
            def hook(value: Tensor, hook: HookPoint) -> Tensor:
                return torch.where(keep[layer].to(value.device), value, self.new[self.sites[layer]])

            return hook

        hooks = [(site, exchange(layer)) for layer, site in self.sites.items()]
        with self.model.hooks(fwd_hooks=hooks):
            logits = self.model(self.clean)
        assert self.pairs.metric is not None, "checked before"
        _, [scores] = reads_of([self.pairs.metric], logits)
        return numbers_of(torch.as_tensor(scores), len(self.clean)).float().cpu()
