"""A graph of the components that write to the residual stream and read it (Elhage et al. 2021, "A Mathematical Framework for
Transformer Circuits"; Goldowsky-Dill et al. 2023, arXiv:2304.05969).

The stream at a reader is the sum of the outputs of all earlier writers, times the factors of blocks that multiply the stream in
between. So every pair of a writer and a later reader is an edge: the output of the writer is a term of the input of the reader,
and can be replaced in that input alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from hooked_lm.components.blocks.wiring import scale_of, sublayer_of, wiring_of
from hooked_lm.components.norms.norm import norm_of
from hooked_lm.engine.decoders import decoder
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.weights.terms import Factor, terms_at, terms_of, times
from hooked_lm.notebook_repr import NotebookRepr, Table, short_repr

INPUT, LOGITS = "input", "logits"


@dataclass(frozen=True)
class Node:
    """A component that writes to the residual stream or reads it: a site, or one head of a site with heads.

    `rank` orders the nodes: a reader sees the output of writers with a lower rank. The output of a writer is the value at its
    site times `scale`. `factor` is what multiplies the stream from the node to the last stream: outputs are compared there, so
    the factor of a writer multiplies them, and that of a reader divides what it sees of them. A writer depends on its own
    inputs, and on those of `fed_by`: readers whose norm, choice of keys or experts it shares, and "input" if it reads the
    embeddings beside the stream.
    """

    name: str  # writers: "input", "L2H1", "m3"; readers: "L2H1<q>", "m3", "logits"
    site: str
    layer: int
    rank: float
    head: int | None = None
    scale: float = 1.0
    fed_by: tuple[str, ...] = ()
    factor: float = 1.0

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> "Node":
        """The node of these fields, as files have them, where tuples are lists."""
        return cls(**{**fields, "fed_by": tuple(fields.get("fed_by", ()))})

    @property
    def is_input(self) -> bool:
        """Whether this is a writer that reads nothing: the embeddings, or what images add after a layer."""
        return self.name == INPUT or self.site.endswith(".hook_deepstack")

    @property
    def weight(self) -> float:
        """What multiplies the value at the site of a writer in the last stream."""
        return self.scale * self.factor

    def of(self, value: Tensor) -> Tensor:
        """This writer's term [batch, pos, d_model] of the last stream, from the value at its site."""
        return times(value if self.head is None else value[:, :, self.head], self.weight)


@dataclass(frozen=True)
class Graph(NotebookRepr):
    """The writers and readers of a model, each in the order of computation, and the edges, `is_edge[writer, reader]`.

    Writers are the embeddings, with images among them ("input"), attention heads ("L2H1"), MLPs ("m3"), mixers with a state
    ("s2"), gates of per-layer embeddings ("p3") and features of images that are added after a layer ("d1"). Readers are the
    queries, keys and values of heads ("L2H1<q>"; keys and values of a grouped-query model by key/value head), MLPs, mixers,
    gates, and the unembedding ("logits"). Where a norm follows attention, the stream is not a sum over heads, and the whole
    attention ("a2") is one writer.

    >>> from hooked_lm import HookedTransformer
    >>> graph = Graph.of(HookedTransformer.from_pretrained("demo"))
    >>> graph
    Graph(37 writers, 101 readers, 1519 edges)
    >>> graph.edge("L0H1", "L2H7<v>"), "m0" in graph.parents("L1H0<k>")
    ((2, 73), True)
    """

    writers: tuple[Node, ...]
    readers: tuple[Node, ...]

    @classmethod
    def of(cls, model: Decoder) -> "Graph":
        """The graph of a decoder; raises TypeError for another model, and ValueError if its stream is not the sum of the
        outputs of its writers, each times a number, or it is on several devices."""
        decoder(model, "a graph needs")
        if model.device_map is not None:
            raise ValueError(
                "a graph adds what all layers write, on one device, and this model is on several (device_map)"
            )
        last, factors = len(model.blocks) - 1, _Factors(model)
        writers = [Node(INPUT, "blocks.0.hook_resid_pre", 0, -1, factor=factors.of_input)]
        readers: list[Node] = []
        for layer, block in enumerate(model.blocks):
            part = _Layer(model, block, layer, factors)
            writers += part.writers()
            readers += part.readers()
        end = Node(LOGITS, f"blocks.{last}.hook_resid_post", last, 2 * last + 2)
        return cls(tuple(writers), (*readers, end))

    @cached_property
    def is_edge(self) -> Bool[Tensor, "writer reader"]:
        """Whether the reader comes after the writer."""
        written = torch.tensor([node.rank for node in self.writers])
        read = torch.tensor([node.rank for node in self.readers])
        return written[:, None] < read

    @property
    def n_edges(self) -> int:
        return int(self.is_edge.sum())

    @cached_property
    def _places(self) -> tuple[dict[str, int], dict[str, int]]:
        return tuple({node.name: i for i, node in enumerate(nodes)} for nodes in (self.writers, self.readers))  # type: ignore[return-value]

    def writer(self, name: str) -> int:
        """The index of a writer; raises KeyError for an unknown name."""
        return _found(self._places[0], name, "writer")

    def reader(self, name: str) -> int:
        """The index of a reader; raises KeyError for an unknown name."""
        return _found(self._places[1], name, "reader")

    def edge(self, writer: str, reader: str) -> tuple[int, int]:
        """The indices of both; raises KeyError for unknown names, ValueError if the reader does not come later."""
        place = self.writer(writer), self.reader(reader)
        if not self.is_edge[place]:
            raise ValueError(
                f"there is no edge from {writer!r} to {reader!r}: the reader does not come after the writer"
            )
        return place

    def parents(self, reader: str) -> list[str]:
        """The names of the writers that a reader sees."""
        seen = self.is_edge[:, self.reader(reader)]
        return [node.name for node, is_seen in zip(self.writers, seen.tolist(), strict=True) if is_seen]

    def named(self, edges: Bool[Tensor, "writer reader"]) -> Iterator[tuple[str, str]]:
        """The names of both ends of some edges."""
        for writer, reader in edges.nonzero().tolist():
            yield self.writers[writer].name, self.readers[reader].name

    def repr_table(self) -> Table:
        """The writers and readers of each layer."""
        layers = dict.fromkeys(node.layer for node in (*self.writers, *self.readers))
        names = [
            [[node.name for node in ends if node.layer == n] for ends in (self.writers, self.readers)] for n in layers
        ]
        rows = [
            (layer, short_repr(", ".join(w)), short_repr(", ".join(r)))
            for layer, (w, r) in zip(layers, names, strict=True)
        ]
        return Table(("layer", "writers", "readers"), rows)

    def __repr__(self) -> str:
        return f"Graph({len(self.writers)} writers, {len(self.readers)} readers, {self.n_edges} edges)"


class _Layer:
    """The writers and readers of a block."""

    def __init__(self, model: Decoder, block: nn.Module, layer: int, factors: "_Factors") -> None:
        self.block: Any = block
        self.model, self.layer, self.factors = model, layer, factors
        self.sites = {name.removeprefix(f"blocks.{layer}.") for name in model.all_points()}

    def _writer(self, name: str, written: str, rank: float, head: int | None = None) -> Node:
        """A writer of what is written at a site, or of the part of a head."""
        site, scale = (written, 1.0) if head is None else ("attn.hook_result", scale_of(self.block, "attn"))
        factor = self.factors.after_site(f"blocks.{self.layer}.{written}")
        return self._fed(Node(name, f"blocks.{self.layer}.{site}", self.layer, rank, head, scale, factor=factor))

    def _reader(self, name: str, site: str, rank: float, part: str, head: int | None = None) -> Node:
        factor = self.factors.after(self.layer, sublayer_of(self.block, part).reads)
        return Node(name, f"blocks.{self.layer}.{site}", self.layer, rank, head, factor=factor)

    def _fed(self, node: Node) -> Node:
        """A writer with what it depends on beside its own inputs."""
        beside = [step.writes for step in wiring_of(self.block).sublayers if "hook_per_layer_in" in step.beside]
        reads_embeddings = "hook_per_layer_in" in self.sites and (not beside or node.site.endswith(tuple(beside)))
        found = [INPUT] if reads_embeddings else []
        if node.head is not None and _mixes_heads(self.block.attn):
            source = getattr(self.block.attn.cfg, "index_source_layer", self.layer)  # which chooses keys for this layer
            of_source = _Layer(self.model, self.model.blocks[source], source, self.factors)
            layers = [self] if source == self.layer else [self, of_source]
            found += [reader.name for layer in layers for reader in layer.readers() if reader.head is not None]
        if node.name.startswith("m") and "hook_shortcut_out" in self.sites:
            found.append(f"m{self.layer - 1}")
        return replace(node, fed_by=tuple(found))

    def writers(self) -> list[Node]:
        rank, found = 2 * self.layer, []
        if "hook_attn_out" in self.sites:
            found += self._attention_writers(rank)
        if "hook_mixer_out" in self.sites:
            found.append(self._writer(f"s{self.layer}", "hook_mixer_out", rank))
        if "hook_mlp_out" in self.sites:
            found.append(self._writer(f"m{self.layer}", "hook_mlp_out", rank + 1))
        if "hook_per_layer_out" in self.sites:
            found.append(self._writer(f"p{self.layer}", "hook_per_layer_out", rank + 1.5))
        if "hook_deepstack" in self.sites:
            found.append(self._writer(f"d{self.layer}", "hook_deepstack", rank + 1))
        return found

    def _attention_writers(self, rank: int) -> list[Node]:
        if "attn.hook_result" not in self.sites or not isinstance(norm_of(self.block, "ln1_post"), nn.Identity):
            return [self._writer(f"a{self.layer}", "hook_attn_out", rank)]
        heads = range(self.block.attn.cfg.n_heads)
        return [self._writer(f"L{self.layer}H{head}", "hook_attn_out", rank, head) for head in heads]

    def readers(self) -> list[Node]:
        rank, found = 2 * self.layer, []
        if "hook_attn_out" in self.sites:
            attn = self.block.attn
            for letter in "qkv":
                site = f"hook_{letter}_input"
                n = attn.cfg.n_heads if letter == "q" else attn.n_kv
                heads = range(n if site in self.sites else 0)
                found += [self._reader(f"L{self.layer}H{head}<{letter}>", site, rank, "attn", head) for head in heads]
        if "hook_mixer_in" in self.sites:
            found.append(self._reader(f"s{self.layer}", "hook_mixer_in", rank, "mixer"))
        if "hook_mlp_in" in self.sites:
            is_parallel = "hook_resid_mid" not in self.sites and bool(found)
            found.append(self._reader(f"m{self.layer}", "hook_mlp_in", rank if is_parallel else rank + 1, "mlp"))
        if "hook_per_layer_resid" in self.sites:
            found.append(self._reader(f"p{self.layer}", "hook_per_layer_resid", rank + 1.5, "per_layer"))
        return found


class _Factors:
    """What multiplies the stream from each place of a model to its end, as numbers."""

    def __init__(self, model: Decoder) -> None:
        self.model, whole = model, terms_at(model, len(model.blocks))
        self.of_input = self._number(whole.embeddings)
        self.of_sites = {term.site: self._number(term.factor) for term in whole.terms}
        self.is_plain = {self.of_input, *self.of_sites.values()} == {1.0}

    def after_site(self, site: str) -> float:
        """From what is written at a site."""
        return self.of_sites[site]

    def after(self, layer: int, value: str) -> float:
        """From a value of the stream in a layer."""
        return 1.0 if self.is_plain else self.of_input / self._number(terms_of(self.model, layer, value).embeddings)

    def _number(self, factor: Factor) -> float:
        if isinstance(factor, Tensor) and factor.numel() > 1:
            raise ValueError(
                "a block multiplies the numbers of the stream by different weights, which no edge has: "
                "cache.decompose_resid and direct_logit_attribution take them into account"
            )
        if float(factor) == 0:
            raise ValueError("a block multiplies the stream by 0, so that nothing before it reaches the logits")
        return float(factor)


def _mixes_heads(attn: nn.Module) -> bool:
    """Whether a head depends on more than the inputs of its queries, and of the keys and values of its group."""
    norms = (norm_of(attn, name) for name in ("q_norm", "k_norm", "v_norm", "z_norm"))
    return getattr(attn, "mixes_heads", False) or any(
        getattr(getattr(norm, "cfg", None), "joint", False) for norm in norms
    )


def _found(places: dict[str, int], name: str, what: str) -> int:
    if name not in places:
        from difflib import get_close_matches

        near = get_close_matches(name, places, 3, 0.5) or list(places)[:3]
        raise KeyError(f"there is no {what} {name!r}; did you mean {', '.join(map(repr, near))}?")
    return places[name]
