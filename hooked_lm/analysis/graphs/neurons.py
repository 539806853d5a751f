"""Neurons as the nodes of a graph: activations are their arguments times constants, so no dictionary is needed.

The activation of a neuron is a product of an activation function act(x) and, in a gated MLP, of a linear factor. It is
written as a sum of its n factors, each times the constant (activation / factor) / n (Jafari et al. 2025, arXiv:2508.21258). So
the edges into a neuron and its bias sum to its activation.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.analysis.circuits.neurons import neuron_sites
from hooked_lm.analysis.graphs.frozen import FrozenModel, Jacobian, Link, Values
from hooked_lm.analysis.graphs.sources import Rows, Sources
from hooked_lm.analysis.graphs.targets import TargetReads
from hooked_lm.models.decoder import Decoder

AT_ZERO = 1e-3


class NeuronSources(Sources):
    """The neurons at positions whose activations are not 0, of which a graph keeps some; error nodes are the others.

    Raises ValueError for a model whose activations have no such constants, by the name of the part.
    """

    unit = "neuron"
    errors_hold_the_rest = True

    def __init__(self, model: Decoder, tokens: Int[Tensor, "1 pos"], constant: int, reads: Sequence[str] = ()) -> None:
        _check_activations(model)
        self.constant, parts = constant, {}
        for layer, (site, mlp) in neuron_sites(model).items():
            folder = site.rpartition(".")[0]
            parts[f"{folder}.{mlp.product_site}"] = layer, [f"{folder}.{factor}" for factor in mlp.factors]
        self.sites, self.layers = list(parts), [layer for layer, _ in parts.values()]
        self.factors = [factors for _, factors in parts.values()]
        every = [factor for factors in self.factors for factor in factors]
        self.frozen = FrozenModel(model, tokens, dict.fromkeys(self.sites), [*every, *reads])
        values = [self.frozen.values[site][0].detach() for site in self.sites]
        self._activations = [self._from_constant(value) for value in values]
        self._slopes = {
            factor: _ratio(value, self.frozen.values[factor][0], len(factors))
            for value, factors in zip(values, self.factors, strict=True)
            for factor in factors
        }
        self.errors = torch.tensor([(layer, pos) for layer in self.layers for pos in range(self.frozen.n_pos)])
        self.keep(torch.cat([self._active(place) for place in range(len(self.sites))]))

    def _from_constant(self, value: Float[Tensor, "pos neuron"]) -> Float[Tensor, "pos neuron"]:
        kept = value.clone()
        kept[: self.constant] = 0
        return kept

    def _active(self, place: int) -> Int[Tensor, "neuron 3"]:
        positions, index = self._activations[place].nonzero(as_tuple=True)
        return torch.stack([torch.full_like(index, self.layers[place]), positions, index], 1).cpu()

    def keep(self, neurons: Int[Tensor, "neuron 3"]) -> None:
        """Makes these neurons the features; error nodes then hold the others."""
        self.features = neurons
        places = torch.tensor([self.layers.index(layer) for layer in neurons[:, 0].tolist()], dtype=torch.long)
        self._places = places
        self.activations = torch.zeros(len(neurons))
        for place, value in enumerate(self._activations):
            own = places == place
            _, positions, index = neurons[own].T
            self.activations[own] = value[positions, index].float().cpu()
        self.totals = self.activations

    def total_effects(self, targets: TargetReads) -> Float[Tensor, " neuron"]:
        """The estimated effects of the features on the targets over all paths, by size, weighted by the targets: one backward
        pass of each target through all neurons."""
        links = {site: self._link(factors) for site, factors in zip(self.sites, self.factors, strict=True)}
        linked = FrozenModel(self.frozen.model, self.frozen.tokens, links, self.frozen.reads)
        jacobian, n = Jacobian(linked), len(targets.targets)
        found = torch.zeros(len(self.features))
        for row in range(n):
            gradients = jacobian.gradients(targets.gradients_of([row], jacobian))
            for place, site in enumerate(self.sites):
                if site in gradients:
                    own = self._places == place
                    _, positions, index = self.features[own].T
                    effects = (gradients[site][0] * self._activations[place])[positions, index]
                    found[own] += targets.targets[row].weight * effects.abs().float().cpu()
        return found

    def _link(self, factors: Sequence[str]) -> Link:
        def link(live: Mapping[str, Tensor]) -> Tensor:
            each = [live[factor] * self._slopes[factor] for factor in factors]
            return sum(each[1:], each[0])

        return link

    @property
    def n_bytes(self) -> int:
        return sum(value.numel() * value.element_size() for value in (*self._activations, *self._slopes.values()))

    def edges(self, gradients: Values) -> Float[Tensor, "read source"]:
        n = next(iter(gradients.values())).shape[0] if gradients else 0
        found = torch.zeros(n, len(self.features) + len(self.errors), device=self.frozen.tokens.device)
        for place, site in enumerate(self.sites):
            if (gradient := gradients.get(site)) is None:
                continue
            product, own = (gradient * self._activations[place]).float(), self._places == place
            _, positions, index = self.features[own].T
            kept = product[:, positions, index]
            start = len(self.features) + place * self.frozen.n_pos
            rest = product.sum(-1)
            rest.index_add_(1, positions.to(rest.device), kept, alpha=-1)
            found[:, own.nonzero()[:, 0]] = kept
            found[:, start : start + self.frozen.n_pos] = rest
        return found

    def gradients_of(self, rows: Rows, jacobian: Jacobian) -> Values:
        found: Values = {}
        for place in self._places[rows].unique().tolist():
            here = (self._places[rows] == place).nonzero()[:, 0]
            _, positions, index = self.features[rows[here]].T
            for factor in self.factors[place]:
                found[factor] = jacobian.zeros(factor, len(rows))
                found[factor][here, positions, index] = self._slopes[factor][positions, index].to(found[factor])
        return found

    def reads(self, values: Mapping[str, Tensor], rows: Rows) -> Float[Tensor, " row"]:
        found = torch.zeros(len(rows))
        for place in self._places[rows].unique().tolist():
            here = (self._places[rows] == place).nonzero()[:, 0]
            _, positions, index = self.features[rows[here]].T
            for factor in self.factors[place]:
                product = values[factor][0].detach() * self._slopes[factor]
                found[here] += product[positions, index].float().cpu()
        return found

    def biases(self) -> Values:
        found = {site: torch.zeros_like(given) for site, given in self.frozen.given.items()}
        for site, given in self.frozen.given.items():
            found[site][:, : self.constant] = given[:, : self.constant]
        return found

    def written(self, row: int) -> dict[str, tuple[int, Float[Tensor, " width"]]]:
        _, position, index = self.features[row].tolist()
        place = int(self._places[row])
        vector = torch.zeros_like(self._activations[place][position])
        vector[index] = self._activations[place][position, index]
        return {self.sites[place]: (position, vector)}


def _check_activations(model: Decoder) -> None:
    """Raises ValueError for an activation function that is not 0 at 0: near 0 no constant times its argument is near it."""
    for site, mlp in neuron_sites(model).values():
        weight = next(mlp.parameters())
        with torch.no_grad():
            at_zero = mlp.act_fn(torch.zeros(1, device=weight.device, dtype=weight.dtype))
        if float(at_zero.abs()) > AT_ZERO:
            raise ValueError(
                f"the activation function of '{site.rpartition('.')[0]}' is {float(at_zero):.2g} at 0: a neuron is no constant "
                "times its argument there, so it is no node of a graph; give transcoders"
            )


def _ratio(
    value: Float[Tensor, "pos neuron"], factor: Float[Tensor, "pos neuron"], n: int
) -> Float[Tensor, "pos neuron"]:
    """The constant by which a factor is multiplied; 0 where it is 0, as the neuron then is."""
    return (value / factor / n).detach().masked_fill(factor == 0, 0.0)
