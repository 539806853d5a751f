"""The outputs of the writers of a graph: stored compactly, and split into single writers one layer at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.attribution.graph import Graph, Node
from hooked_lm.components.attention.multihead import AbstractAttention
from hooked_lm.components.norms.norm import norm_of, norm_unhooked
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.weights.terms import times

Stream = Float[Tensor, "batch pos d_model"]
Parts = Float[Tensor, "writer batch pos d_model"]
Kept = Float[Tensor, "batch pos *features"]  # heads: [batch, pos, head, d_head]; others: [batch, pos, d_model]


@dataclass(frozen=True)
class Writers:
    """The writers of one site: the heads of a layer, or an MLP, a mixer, the input.

    Their outputs are a linear map of the kept value: for heads the input of `W_O`, for others the output itself. So differences
    and means may be computed from kept values.
    """

    nodes: tuple[Node, ...]
    first: int  # the index of the first of them among all writers
    site: str  # of the kept value
    added: str  # the site of their sum, with the bias
    attn: AbstractAttention | None = None

    @classmethod
    def of(cls, model: Decoder, graph: Graph) -> "list[Writers]":
        """All writers of a graph, site by site."""
        found: list[Writers] = []
        for _, group in groupby(graph.writers, key=lambda node: node.site):
            nodes, first = tuple(group), sum(len(before.nodes) for before in found)
            site, block = nodes[0].site, f"blocks.{nodes[0].layer}"
            if nodes[0].head is None:
                found.append(cls(nodes, first, site, site))
            else:
                attn = model.blocks[nodes[0].layer].attn
                found.append(cls(nodes, first, f"{block}.attn.hook_z", f"{block}.hook_attn_out", attn))
        return found

    @property
    def rank(self) -> float:
        return self.nodes[0].rank

    @property
    def places(self) -> slice:
        """Their indices among all writers."""
        return slice(self.first, self.first + len(self.nodes))

    def kept(self, value: Kept) -> Kept:
        """The kept value, from the value at the site."""
        return value if self.attn is None else norm_unhooked(norm_of(self.attn, "z_norm"), value)

    def parts(self, kept: Kept) -> Parts:
        """The term of each of them in the last stream."""
        if self.attn is None:
            return times(kept[None], self.nodes[0].weight)
        written = torch.bmm(kept.flatten(0, 1).transpose(0, 1), self.attn.W_O.detach())
        if self.nodes[0].weight != 1.0:
            written *= self.nodes[0].weight
        return written.unflatten(1, kept.shape[:2])

    def total(self, kept: Kept) -> Stream:
        """The sum of their terms of the last stream, without the bias."""
        if self.attn is None:
            return self.parts(kept)[0]
        written = kept.flatten(2) @ self.attn.W_O.detach().flatten(0, 1)
        return times(written, self.nodes[0].weight)

    def change(self, kept: Kept) -> Stream:
        """What a change of the kept value adds to the value at `added`."""
        return times(self.total(kept), 1 / self.nodes[0].factor)

    def constant(self) -> Float[Tensor, " d_model"] | None:
        """The bias that is added to their sum; None if there is none."""
        if self.attn is None or self.attn.b_O is None:
            return None
        return self.attn.b_O.detach() * self.nodes[0].weight


def check_sum(writers: Sequence[Writers], kept: Mapping[str, Tensor], stream: Stream) -> None:
    """Raises ValueError unless the last stream is the sum of the writers' outputs and biases."""
    total = torch.zeros_like(stream)
    for some in writers:
        total += some.total(kept[some.site])
        if (constant := some.constant()) is not None:
            total += constant
    size = stream.abs().max()
    if not (total - stream).abs().max() <= max(1e-4, 32 * torch.finfo(stream.dtype).eps) * size:
        raise ValueError(
            f"the last stream is not the sum of what the writers of the graph add to it: they differ by "
            f"{(total - stream).abs().max():.2g}, its largest number is {size:.2g}; the edges of this model cannot be separated"
        )
