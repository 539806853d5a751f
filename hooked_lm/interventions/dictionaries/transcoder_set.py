"""Transcoders of several layers: one for each layer, or features that also write to the outputs of later layers."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.interventions.dictionaries.architectures import Gated
from hooked_lm.interventions.dictionaries.sae import SAE, FeatureValues, Inputs, PerFeature, filled, frozen
from hooked_lm.notebook_repr import NotebookRepr, Table
from hooked_lm.results import stored

Layers = TypeVar("Layers", bound="LayerTranscoders")


class LayerTranscoders(NotebookRepr, nn.Module):
    """Transcoders of several layers that share their sizes: what `TranscoderSet` and `CrossLayerTranscoder` have in common.

    A `place` is an index into `layers`. `transcoders` holds a dictionary for each place: its encoder and activation (ReLU, TopK,
    BatchTopK or JumpReLU), the directions of its features at one site or at several (`cfg.n_outputs`), the bias of its own output
    site, and its skip connection if it has one.

    Args:
        transcoders: the dictionaries, in the order of the layers. Their configs name the sites of input and output.

    Raises TypeError for other objects, ValueError for dictionaries that do not go together.
    """

    @dataclass(frozen=True)
    class Config:
        """The configs of the transcoders, one for each layer. `across`: whether features also write to later layers."""

        transcoders: tuple[SAE.Config, ...]
        across: bool = False

        def __post_init__(self) -> None:
            if not self.transcoders:
                raise ValueError("there are no transcoders: give at least one config")
            n = len(self.transcoders)
            numbers = [n - place if self.across else 1 for place in range(n)]
            each = tuple(replace(cfg, n_outputs=more) for cfg, more in zip(self.transcoders, numbers, strict=True))
            object.__setattr__(self, "transcoders", each)

        def build(self, seed: int = 0) -> "LayerTranscoders":
            """Transcoders with new weights: that of place i from `seed + i`."""
            of = CrossLayerTranscoder if self.across else TranscoderSet
            return of(cfg.build(seed + place) for place, cfg in enumerate(self.transcoders))

    kind: ClassVar[str]
    across: ClassVar[bool] = False

    def __init__(self, transcoders: Iterable[SAE]) -> None:
        super().__init__()
        parts = list(transcoders)
        _check_parts(parts)
        self.transcoders = nn.ModuleList(parts)
        self.sites = tuple(str(sae.cfg.hook_point) for sae in parts)
        self.sites_out = tuple(str(sae.cfg.hook_point_out) for sae in parts)
        self.layers = _layers(self.sites, self.sites_out)
        wanted = [cfg.n_outputs for cfg in self.cfg.transcoders]
        if (found := [sae.cfg.n_outputs for sae in parts]) != wanted:
            raise ValueError(
                f"the features of the layers of a {type(self).__name__} write to {wanted} sites (n_outputs), got {found}; its "
                "Config sets them"
            )

    # ---- parts -------------------------------------------------------------------------------------------------------

    @property
    def parts(self) -> list[SAE]:
        """The transcoders, in the order of the layers."""
        return list(self.transcoders)  # type: ignore[arg-type]

    @property
    def cfg(self) -> "LayerTranscoders.Config":
        """The configs of the transcoders."""
        return LayerTranscoders.Config(tuple(sae.cfg for sae in self.parts), self.across)

    @property
    def d_sae(self) -> int:
        """The number of features of each layer."""
        return self.parts[0].cfg.d_sae

    def __len__(self) -> int:
        return len(self.transcoders)

    def __bool__(self) -> bool:
        return True

    def encoder(self, place: int) -> tuple[Float[Tensor, "d_in d_sae"], PerFeature]:
        """The weights and the bias of the pre-activations."""
        sae = self.parts[place]
        return sae.W_enc, sae.b_enc

    def decoder(self, source: int, target: int) -> Float[Tensor, "d_sae d_out"] | None:
        """What each feature of place `source` writes to the output site of place `target`; None: they write nothing there."""
        sae, further = self.parts[source], target - source
        return sae.directions(further) if 0 <= further < sae.cfg.n_outputs else None

    def bias(self, target: int) -> Float[Tensor, " d_out"]:
        """The bias of an output site, `b_dec`."""
        return self.parts[target].b_dec

    def skip(self, place: int) -> Float[Tensor, "d_in d_out"] | None:
        """The skip connection from the input of a layer to its output, None if there is none."""
        return self.parts[place].W_skip

    # ---- encode and decode -------------------------------------------------------------------------------------------

    def hidden(self, place: int, x: Inputs) -> FeatureValues:
        """The pre-activations of the features of a layer."""
        return self.parts[place].hidden(x)

    def activate(self, place: int, hidden: FeatureValues) -> FeatureValues:
        """The activation function of a layer: pre-activations to features."""
        return self.parts[place].activate(hidden)

    def encode(self, place: int, x: Inputs) -> FeatureValues:
        """The features of vectors at the input site of a layer."""
        return self.parts[place].encode(x)

    def written(self, features: Sequence[Tensor]) -> list[Float[Tensor, "*batch d_out"]]:
        """What features write to the output sites, without biases and skip connections: the sum over layers."""
        return written(self.parts, features)

    def sources(self, target: int) -> list[int]:
        """The places whose features write to the output site of a place."""
        return [source for source in range(target + 1) if target - source < self.parts[source].cfg.n_outputs]

    def output(self, target: int, features: Sequence[Tensor], x: Inputs | None = None) -> Float[Tensor, "*batch d_out"]:
        """The reconstruction at one output site, from the features of its `sources` and the input of its layer."""
        pairs = zip(self.sources(target), features, strict=True)
        made = [values @ self.parts[source].directions(target - source) for source, values in pairs]
        return self.parts[target].read_out(made[0] if len(made) == 1 else torch.stack(made).sum(0), x)

    def outputs(
        self, features: Sequence[Tensor], inputs: Sequence[Tensor] | None = None
    ) -> list[Float[Tensor, "*batch d_out"]]:
        """The reconstructions at the output sites, from the features and the inputs of all layers, in their order.

        `inputs` may be left out without skip connections. Raises ValueError for another number of layers.
        """
        for name, given in (("features", features), ("inputs", inputs)):
            if given is not None and len(given) != len(self):
                raise ValueError(
                    f"{name} are a sequence with one tensor for each of {len(self)} layers, got {len(given)}"
                )
        return outputs(self.parts, features, inputs)

    def forward(self, inputs: Sequence[Tensor]) -> list[Float[Tensor, "*batch d_out"]]:
        """The reconstructions at the output sites from the vectors at the input sites."""
        return self.outputs([sae.encode(x) for sae, x in zip(self.parts, inputs, strict=True)], inputs)

    def objective(
        self, inputs: Sequence[Tensor], targets: Sequence[Tensor], sparsity: float
    ) -> tuple[Float[Tensor, ""], list[Float[Tensor, "row d_sae"]], list[Float[Tensor, "row d_sae"]]]:
        """The training loss, the sum of those of the layers, with the pre-activations and the features of each."""
        hidden = [sae.hidden(x) for sae, x in zip(self.parts, inputs, strict=True)]
        features = [sae.activate(before) for sae, before in zip(self.parts, hidden, strict=True)]
        made = self.outputs(features, inputs)
        loss = torch.stack([(y - one).pow(2).sum(-1).mean() for y, one in zip(targets, made, strict=True)]).sum()
        for sae, before, values in zip(self.parts, hidden, features, strict=True):
            sae.observe(values.detach())
            loss = loss + sparsity * sae.penalty(before, values)
        return loss, hidden, features

    # ---- description and files ---------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The kind, and the description of each transcoder, from which `filled_layers` makes the same structure."""
        return {"kind": self.kind, "transcoders": [sae.to_dict() for sae in self.parts]}

    def repr_table(self) -> Table:
        """A row for each layer: its sites, the kind of its transcoder and the shapes of its weights."""
        rows = [
            (
                layer,
                sae.cfg.hook_point,
                sae.cfg.hook_point_out,
                sae.kind,
                *(f"{[*w.shape]}" for w in (sae.W_enc, sae.W_dec)),
            )
            for layer, sae in zip(self.layers, self.parts, strict=True)
        ]
        return Table(("layer", "site", "site_out", "kind", "W_enc", "W_dec"), rows)

    def __repr__(self) -> str:
        first = self.parts[0]
        skip = ", with skip connections" if first.W_skip is not None else ""
        settings = "".join(f", {name}={getattr(first.cfg, name)}" for name in ("k",) if hasattr(first.cfg, name))
        return (
            f"{type(self).__name__}({len(self)} layers of {self.d_sae:,} features, {self._kinds()}{settings}{skip}; "
            f"{_common(self.sites)} to {_common(self.sites_out)})"
        )

    def _kinds(self) -> str:
        return ", ".join(dict.fromkeys(sae.kind for sae in self.parts))

    def save(self, path: str | Path) -> None:
        """Writes the transcoders to one safetensors file, bit for bit and atomically."""
        stored.write(path, f"hooked_lm.{type(self).__name__}", dict(self.state_dict()), {"described": self.to_dict()})

    @classmethod
    @stored.names_the_file
    def load(cls: type[Layers], path: str | Path) -> Layers:
        """The transcoders of a file that `save` wrote, in evaluation mode; their weights require no gradient.

        Raises ValueError for any other file.
        """
        tensors, header = stored.read(path, f"hooked_lm.{cls.__name__}")
        found = filled_layers(header.get("described"), tensors, str(path))
        assert isinstance(found, cls)
        return frozen(found)


class TranscoderSet(LayerTranscoders):
    """A transcoder for each layer: features read the input of an MLP and write to its output.

    The kinds may be any of ReLU, TopK, BatchTopK and JumpReLU, with or without skip connections.

    >>> import torch
    >>> from hooked_lm.interventions.dictionaries import TopK
    >>> configs = [
    ...     TopK.Config(
    ...         d_in=8,
    ...         d_sae=32,
    ...         k=4,
    ...         subtract_b_dec=False,
    ...         hook_point=f"blocks.{layer}.mlp.hook_in",
    ...         hook_point_out=f"blocks.{layer}.hook_mlp_out",
    ...     )
    ...     for layer in range(2)
    ... ]
    >>> transcoders = TranscoderSet(cfg.build() for cfg in configs)
    >>> transcoders
    TranscoderSet(2 layers of 32 features, topk, k=4; blocks.*.mlp.hook_in to blocks.*.hook_mlp_out)
    >>> inputs = [torch.randn(5, 8), torch.randn(5, 8)]
    >>> [made.shape for made in transcoders(inputs)]
    [torch.Size([5, 8]), torch.Size([5, 8])]
    """

    kind = "set"


class CrossLayerTranscoder(LayerTranscoders):
    """Features that read the input of one layer's MLP and write to the outputs of that MLP and of those after it.

    The reconstruction of an output is the sum of what the features of this layer and of all layers before it write there
    (Ameisen et al. 2025, "Circuit Tracing"). `W_dec` of place s is [d_sae, (n - s) * d_out]: the directions at its own output
    site, then those at the next ones.

    >>> from hooked_lm.interventions.dictionaries import Transcoder
    >>> sites = [
    ...     (f"blocks.{layer}.mlp.hook_in", f"blocks.{layer}.hook_mlp_out")
    ...     for layer in range(2)
    ... ]
    >>> each = [
    ...     Transcoder.Config(d_in=8, d_sae=32, hook_point=site, hook_point_out=out)
    ...     for site, out in sites
    ... ]
    >>> clt = CrossLayerTranscoder.Config(tuple(each), across=True).build()
    >>> clt.decoder(0, 1).shape, clt.decoder(1, 0)
    (torch.Size([32, 8]), None)
    """

    kind = "cross_layer"
    across = True


KINDS: dict[str, type[LayerTranscoders]] = {of.kind: of for of in (TranscoderSet, CrossLayerTranscoder)}


def written(parts: Sequence[SAE], features: Sequence[Tensor]) -> list[Float[Tensor, "*batch d_out"]]:
    """What the features of transcoders write to the output sites: of each layer the sum over it and those before it."""
    made: list[list[Tensor]] = [[] for _ in parts]
    for source, (sae, values) in enumerate(zip(parts, features, strict=True)):
        writes = (values @ sae.W_dec).unflatten(-1, (sae.cfg.n_outputs, sae.cfg.width_out))
        for further in range(sae.cfg.n_outputs):
            made[source + further].append(writes[..., further, :])
    return [each[0] if len(each) == 1 else torch.stack(each).sum(0) for each in made]


def outputs(
    parts: Sequence[SAE], features: Sequence[Tensor], inputs: Sequence[Tensor] | None
) -> list[Float[Tensor, "*batch d_out"]]:
    """The reconstructions of transcoders at the output sites."""
    of = [None] * len(parts) if inputs is None else inputs
    return [sae.read_out(made, x) for sae, made, x in zip(parts, written(parts, features), of, strict=True)]


def from_dict(described: object, tensors: Mapping[str, Tensor], where: str) -> "SAE | LayerTranscoders":
    """The dictionary, or the transcoders of layers, that `to_dict` described, with these weights."""
    of_layers = isinstance(described, dict) and "transcoders" in described
    return (filled_layers if of_layers else filled)(described, tensors, where)


def filled_layers(described: object, tensors: Mapping[str, Tensor], where: str) -> LayerTranscoders:
    """The transcoders that `to_dict` described, with these weights, in their dtypes. Raises ValueError as `sae.filled`."""
    parts = described.get("transcoders") if isinstance(described, dict) else None
    if not isinstance(described, dict) or described.get("kind") not in KINDS or not isinstance(parts, list):
        raise ValueError(f"{where} does not describe transcoders of layers: {repr(described)[:80]}")
    saes = []
    for place, one in enumerate(parts):
        start = f"transcoders.{place}."
        own = {name[len(start) :]: weight.clone() for name, weight in tensors.items() if name.startswith(start)}
        saes.append(filled(one, own, f"{where}, layer {place}"))
    known = {f"transcoders.{place}.{name}" for place, sae in enumerate(saes) for name in sae.state_dict()}
    if strange := [name for name in tensors if name not in known]:
        raise ValueError(f"{where}: {', '.join(strange[:3])} is not understood, with {len(parts)} transcoders")
    return KINDS[described["kind"]](saes)


def of_file(path: str | Path) -> LayerTranscoders:
    """The transcoders of a file that `save` wrote, of any class."""
    kind = stored.kind_of(path)
    classes = {of.__name__: of for of in KINDS.values()}
    if kind not in classes:
        raise ValueError(f"{path} holds type {kind}, not {' or '.join(classes)}")
    return classes[kind].load(path)


def _check_parts(parts: Sequence[object]) -> None:
    """Raises for dictionaries that cannot be transcoders of layers together."""
    if not parts:
        raise ValueError("there are no transcoders: give one for each layer")
    sizes, skips = set(), set()
    for sae in parts:
        if not isinstance(sae, SAE):
            raise TypeError(f"transcoders of layers are dictionaries of this package, got a {type(sae).__name__}")
        if isinstance(sae, Gated):
            raise ValueError(
                "a gated dictionary has two pre-activations for each feature, and transcoders of layers have one: use kind "
                "'transcoder', 'topk', 'batchtopk' or 'jumprelu'"
            )
        if sae.cfg.subtract_b_dec:
            raise ValueError(
                "b_dec belongs to the outputs and cannot be subtracted from inputs: give subtract_b_dec=False"
            )
        if not sae.cfg.hook_point or not sae.cfg.hook_point_out:
            raise ValueError("each transcoder names its sites: give hook_point and hook_point_out in its config")
        sizes.add((sae.cfg.d_in, sae.cfg.d_sae, sae.cfg.width_out))
        skips.add(sae.cfg.skip_connection)
    if len(sizes) > 1:
        raise ValueError(f"transcoders of layers have the same sizes (d_in, d_sae, d_out), got {sorted(sizes)}")
    if len(skips) > 1:
        raise ValueError(
            "some of the transcoders have a skip connection and some have none: give all or none of them one"
        )


def _layers(sites: Sequence[str], sites_out: Sequence[str]) -> tuple[int, ...]:
    """The numbers of the layers, from the names of sites; ValueError unless they increase."""
    found = []
    for pair in zip(sites, sites_out, strict=True):
        numbers = [re.search(r"\.(\d+)\.", site) for site in pair]
        if numbers[0] is None or numbers[1] is None or numbers[0][1] != numbers[1][1]:
            raise ValueError(f"a transcoder of a layer reads and writes sites of that layer, got {' and '.join(pair)}")
        found.append(int(numbers[0][1]))
    if any(a >= b for a, b in pairwise(found)):
        raise ValueError(f"transcoders are in the order of their layers, one for each; got layers {found}")
    return tuple(found)


def _common(sites: Sequence[str]) -> str:
    """The name of sites that differ in their layer, with * for it."""
    return next(iter(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", site, count=1) for site in sites)))


__all__ = ["CrossLayerTranscoder", "LayerTranscoders", "TranscoderSet"]
