"""Features of transcoders as the nodes of a graph: what they write takes the place of the outputs of MLPs, errors added."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.analysis.graphs.frozen import FrozenModel, Jacobian, Link, Values
from hooked_lm.analysis.graphs.sources import Rows, Sources, by_position
from hooked_lm.components.blocks.wiring import has_part
from hooked_lm.interventions.dictionaries import BatchTopK, LayerTranscoders
from hooked_lm.models.decoder import Decoder


class FeatureSources(Sources):
    """The active features of transcoders on one prompt.

    What an MLP writes is the sum of what features write there, its bias, what a skip connection adds, and the error. MLPs without
    a transcoder are errors as a whole. At the first `constant` positions MLPs write constants, and have no features.
    """

    unit = "feature"

    def __init__(
        self,
        model: Decoder,
        tokens: Int[Tensor, "1 pos"],
        transcoders: LayerTranscoders,
        constant: int,
        reads: Sequence[str] = (),
    ) -> None:
        self.transcoders, self.constant = transcoders, constant
        self.read_sites, self.write_sites = checked_sites(model, transcoders)
        links: dict[str, Link | None] = {site: self._link(place) for place, site in enumerate(self.write_sites)}
        layers = dict(zip(self.write_sites, transcoders.layers, strict=True))
        for layer, block in enumerate(model.blocks):
            if layer not in transcoders.layers and has_part(block, "mlp"):
                links[f"blocks.{layer}.hook_mlp_out"], layers[f"blocks.{layer}.hook_mlp_out"] = None, layer
        self.sites = sorted(links, key=lambda site: layers[site])
        self.frozen = FrozenModel(model, tokens, links, [*self.read_sites, *reads])
        self._find_features()
        errors = {site: self.frozen.given[site][0] - self._explained(site) for site in self.sites}
        self._errors = {site: self._from_constant(value) for site, value in errors.items()}
        self.errors = torch.tensor(
            [(layers[site], position) for site in self.sites for position in range(self.frozen.n_pos)], dtype=torch.long
        ).view(-1, 2)

    def _link(self, place: int) -> Link | None:
        """The skip connection of a layer."""
        skip, site = self.transcoders.skip(place), self.read_sites[place]
        return None if skip is None else lambda live: live[site] @ skip.detach().to(live[site].dtype)

    @torch.no_grad()
    def _find_features(self) -> None:
        """The active features by layer, with their activations and what they write where."""
        found, activations, totals = [], [], []
        for place, (layer, site) in enumerate(zip(self.transcoders.layers, self.read_sites, strict=True)):
            hidden = self.transcoders.hidden(place, as_read(self.transcoders, place, self.frozen.values[site][0]))
            values = self._from_constant(self.transcoders.activate(place, hidden))
            positions, index = values.nonzero(as_tuple=True)
            found.append(torch.stack([torch.full_like(index, layer), positions, index], 1).cpu())
            activations.append(values[positions, index].float())
            totals.append(hidden[positions, index].float())
        self.features, self._active = torch.cat(found), found
        self.activations, self.totals = torch.cat(activations).cpu(), torch.cat(totals).cpu()
        ends = torch.tensor([0, *map(len, found)]).cumsum(0).tolist()
        self._rows = [slice(start, stop) for start, stop in pairwise(ends)]
        self._groups = [by_position(of) for of in found]
        self._vectors: dict[tuple[int, int], Float[Tensor, "feature width"]] = {}
        for source in range(len(found)):
            index = found[source][:, 2]
            for target in range(len(found)):
                decoder = self.transcoders.decoder(source, target)
                if decoder is not None and len(index):
                    own = decoder.detach()[index.to(decoder.device)]
                    self._vectors[source, target] = own * activations[source][:, None].to(own)

    def _from_constant(self, value: Float[Tensor, "pos width"]) -> Float[Tensor, "pos width"]:
        """The value with 0 at the constant positions."""
        kept = value.detach().clone()
        kept[: self.constant] = 0
        return kept

    def _bias(self, site: str) -> Tensor | float:
        if site not in self.write_sites:
            return 0.0
        return self.transcoders.bias(self.write_sites.index(site)).detach().to(self.frozen.given[site].dtype)

    def _explained(self, site: str) -> Float[Tensor, "pos width"]:
        """What features and the bias write at a site."""
        written = torch.zeros_like(self.frozen.given[site][0]) + self._bias(site)
        for (source, target), vectors in self._vectors.items():
            if self.write_sites[target] == site:
                written.index_add_(0, self._active[source][:, 1].to(written.device), vectors.to(written.dtype))
        return written

    @property
    def own_eps(self) -> float:
        return rounding(self.transcoders)

    @property
    def n_bytes(self) -> int:
        return sum(vectors.numel() * vectors.element_size() for vectors in self._vectors.values())

    def edges(self, gradients: Values) -> Float[Tensor, "read source"]:
        n = next(iter(gradients.values())).shape[0] if gradients else 0
        found = torch.zeros(n, len(self.features) + len(self.errors), device=self.frozen.tokens.device)
        for (source, target), vectors in self._vectors.items():
            if (gradient := gradients.get(self.write_sites[target])) is not None:
                start = self._rows[source].start
                for position, rows in self._groups[source]:
                    found[:, start + rows.start : start + rows.stop] += (
                        gradient[:, position].float() @ vectors[rows].float().T
                    )
        for place, site in enumerate(self.sites):
            if (gradient := gradients.get(site)) is not None:
                start = len(self.features) + place * self.frozen.n_pos
                found[:, start : start + self.frozen.n_pos] = (gradient * self._errors[site]).sum(
                    -1, dtype=torch.float32
                )
        return found

    def _of_place(self, rows: Rows) -> list[tuple[int, Tensor, Tensor]]:
        """The rows of each layer: its place, which of the given rows they are, and their numbers within the layer."""
        found = []
        for place, own in enumerate(self._rows):
            here = ((rows >= own.start) & (rows < own.stop)).nonzero()[:, 0]
            if len(here):
                found.append((place, here, rows[here] - own.start))
        return found

    def gradients_of(self, rows: Rows, jacobian: Jacobian) -> Values:
        found: Values = {}
        for place, here, inner in self._of_place(rows):
            site, (weight, _) = self.read_sites[place], self.transcoders.encoder(place)
            _, positions, index = self._active[place][inner].T
            if site not in found:
                found[site] = jacobian.zeros(site, len(rows))
            vectors = weight.detach()[:, index.to(weight.device)].T
            found[site][here, positions] += vectors.to(found[site])
        return found

    def reads(self, values: Mapping[str, Tensor], rows: Rows) -> Float[Tensor, " row"]:
        found = torch.zeros(len(rows))
        for place, here, inner in self._of_place(rows):
            _, positions, index = self._active[place][inner].T
            x = as_read(self.transcoders, place, values[self.read_sites[place]][0])
            hidden = self.transcoders.hidden(place, x).detach()
            found[here] = hidden[positions, index].float().cpu()
        return found

    def biases(self) -> Values:
        found = {}
        for site, given in self.frozen.given.items():
            found[site] = torch.zeros_like(given) + self._bias(site)
            found[site][:, : self.constant] = given[:, : self.constant]
        return found

    def written(self, row: int) -> dict[str, tuple[int, Float[Tensor, " width"]]]:
        [(place, _, inner)] = self._of_place(torch.tensor([row]))
        position = int(self.features[row, 1])
        return {
            self.write_sites[target]: (position, vectors[int(inner)])
            for (source, target), vectors in self._vectors.items()
            if source == place
        }


# ---- transcoders of a model ------------------------------------------------------------------------------------------


def as_read(transcoders: LayerTranscoders, place: int, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_in"]:
    """Values of the model in the dtype of the transcoder that reads them."""
    return x.to(transcoders.encoder(place)[0].dtype)


def rounding(transcoders: LayerTranscoders) -> float:
    """The rounding of the weights with the fewest digits."""
    return max(float(torch.finfo(weight.dtype).eps) for weight in transcoders.parameters())


def checked_sites(model: Decoder, transcoders: LayerTranscoders) -> tuple[list[str], list[str]]:
    """The full names of the sites that are read and written.

    Raises TypeError for anything but transcoders of several layers; ValueError for those of another model, by sites or widths,
    and for BatchTopK in training mode, where what a position keeps depends on the other positions.
    """
    if not isinstance(transcoders, LayerTranscoders):
        raise TypeError(
            "transcoders must be a TranscoderSet or a CrossLayerTranscoder, such as TranscoderSet([transcoder]) or "
            f"load_transcoders('demo'); got a {type(transcoders).__name__}"
        )
    for layer, part in zip(transcoders.layers, transcoders.parts, strict=True):
        if isinstance(part, BatchTopK) and part.training:
            raise ValueError(
                f"the transcoder of layer {layer} is in training mode, in which BatchTopK chooses features across positions: "
                "call transcoders.eval()"
            )
    found: tuple[list[str], list[str]] = ([], [])
    widths = [(sae.cfg.d_in, sae.cfg.width_out) for sae in transcoders.parts]
    for end, sites in enumerate((transcoders.sites, transcoders.sites_out)):
        for site, of in zip(sites, widths, strict=True):
            try:
                [name] = model.names(site)
            except KeyError as error:
                raise ValueError(f"the transcoders are of another model: {error.args[0]}") from None
            width = getattr(model.cfg, model.hook_dict[name].dims[-1], None)
            if width is not None and width != of[end]:
                raise ValueError(
                    f"the transcoders are of another model: '{name}' has width {width}, and theirs is {of[end]}"
                )
            found[end].append(name)
    return found
