"""Features of transcoders as sources of queries and keys: what MLPs wrote is split into features, biases and errors."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.graphs.features import as_read, checked_sites
from hooked_lm.hooks import Slice
from hooked_lm.interventions.dictionaries import LayerTranscoders
from hooked_lm.models.caches import decompose
from hooked_lm.models.caches.residual import output_norm
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.weights.terms import Term, Terms, times

Vectors = Float[Tensor, "batch pos d_model"]
OTHERS = "other features"


class FeatureSplit:
    """What the MLPs of one prompt wrote to a stream, split by the features of transcoders.

    Args:
        cache: has the sites of `sites`.
        of: the terms of the stream. Those of MLPs to which a transcoder writes are split, by `labels`.

    Raises ValueError for transcoders that write to other sites than outputs of MLPs.
    """

    def __init__(self, model: Decoder, cache: Mapping[Any, Tensor], transcoders: LayerTranscoders, of: Terms) -> None:
        self.model, self.cache, self.transcoders = model, cache, transcoders
        self.read_sites, _ = checked_sites(model, transcoders)
        terms = {term.layer: term for term in of.of("mlp")}
        layers = [_layer_written(model, site) for site in transcoders.sites_out]
        self.terms: dict[int, Term] = {place: terms[layer] for place, layer in enumerate(layers) if layer in terms}
        self.features = {
            place: transcoders.encode(place, as_read(transcoders, place, cache[site])).detach()
            for place, site in enumerate(self.read_sites)
            if place in self.terms
        }

    @property
    def labels(self) -> list[str]:
        """The labels of the terms that are split."""
        return [term.label for term in self.terms.values()]

    @staticmethod
    def sites(model: Decoder, transcoders: LayerTranscoders) -> list[str]:
        """The sites that are read: inputs and outputs of the transcoders."""
        read, written = checked_sites(model, transcoders)
        return [*read, *written]

    def added(
        self, place: int, written: Float[Tensor, "*lead d_model"], positions: Slice
    ) -> Float[Tensor, "*lead d_model"]:
        """What a vector at the output site of a place adds to the stream."""
        term = self.terms[place]
        if self.transcoders.sites_out[place].endswith("hook_mlp_out"):
            return times(written, term.factor)
        return output_norm(self.model, self.cache, term, positions)(written)

    def at(self, position: int) -> dict[str, Float[Tensor, " d_model"]]:
        """Label -> what each active feature adds to the stream at a position, of one prompt."""
        found: dict[str, Tensor] = {}
        for source, values in self.features.items():
            of = values[0, position]
            active = of.nonzero()[:, 0]
            stream = self.cache[self.read_sites[source]]
            total = stream.new_zeros(len(active), self.model.cfg.d_model)
            for target in self.terms:
                directions = self.transcoders.decoder(source, target)
                if directions is not None:
                    written = (of[active, None] * directions.detach()[active].to(of)).to(stream.dtype)
                    total = total + self.added(target, written[:, None, None], Slice([position]))[:, 0, 0]
            layer = self.transcoders.layers[source]
            found |= {
                f"L{layer}F{index}": vector for index, vector in zip(active.tolist(), total.unbind(), strict=True)
            }
        return found

    def rest(self, positions: Slice) -> dict[str, Vectors]:
        """Label -> what a split MLP adds besides its features: the bias of its dictionary, a skip connection, and the error."""
        found: dict[str, Tensor] = {}
        written = self.transcoders.written(
            [self.features.get(place, self._none(place)) for place in range(len(self.transcoders))]
        )
        for place, term in self.terms.items():
            whole = decompose.written(self.cache, [term], positions)[term.label]
            parts = {"bias": self.transcoders.bias(place).detach().to(whole).expand_as(whole)}
            if (skip := self.transcoders.skip(place)) is not None:
                x = positions.apply(self.cache[self.read_sites[place]], -2)
                parts["skip"] = x @ skip.detach().to(x)
            parts = {name: self.added(place, part, positions) for name, part in parts.items()}
            of_features = self.added(place, positions.apply(written[place].detach().to(whole.dtype), -2), positions)
            error = whole - of_features - torch.stack([*parts.values()]).sum(0)
            found |= {f"{term.layer}_mlp_{name}": part for name, part in (parts | {"error": error}).items()}
        return found

    def _none(self, place: int) -> Tensor:
        """No feature of a layer after the stream."""
        some = next(iter(self.features.values()))
        return some.new_zeros(*some.shape[:-1], self.transcoders.d_sae)


def _layer_written(model: Decoder, site: str) -> int:
    """The layer of the MLP whose output a site is."""
    [name] = model.names(site)
    if not name.startswith("blocks.") or not name.endswith((".hook_mlp_out", ".mlp.hook_out")):
        raise ValueError(
            f"transcoders write to {site!r}: QK attribution splits outputs of MLPs, hook_mlp_out or mlp.hook_out"
        )
    return int(name.split(".")[1])
