"""Gradients of a metric at the inputs of the readers of a graph, one layer at a time, from one backward pass."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.attribution.backward_rules import Attached, BackwardRules
from hooked_lm.analysis.attribution.graph import Graph, Node
from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import norm_unhooked
from hooked_lm.hooks import HookPoint
from hooked_lm.models.decoder import Decoder

Stream = Float[Tensor, "batch pos d_model"]
Gradients = Float[Tensor, "reader batch pos d_model"]
Read = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Readers:
    """The readers of one site: the queries, keys or values of a layer, or an MLP, a mixer, the unembedding.

    `seen` is the site at which the backward pass takes a gradient: for heads after the projection, where it is small.
    `InputGradients` propagates it from there to the inputs of the readers.
    """

    nodes: tuple[Node, ...]
    first: int  # the index of the first of them among all readers
    seen: str
    is_after_norm: bool = False  # whether `ln1` is between their inputs and `seen`

    @classmethod
    def of(cls, model: Decoder, graph: Graph) -> "list[Readers]":
        """All readers of a graph, site by site."""
        found: list[Readers] = []
        for site, group in groupby(graph.readers, key=lambda node: node.site):
            nodes, first = tuple(group), sum(len(before.nodes) for before in found)
            block, name = f"blocks.{nodes[0].layer}", site.rpartition(".")[2]
            if nodes[0].head is not None:
                found.append(cls(nodes, first, f"{block}.attn.hook_{letter_of(name)}", True))
            elif name == "hook_mlp_in" and model.blocks[nodes[0].layer].mlp_norm == "ln1":  # shared with attention
                found.append(cls(nodes, first, f"{block}.mlp.hook_in", True))
            else:
                found.append(cls(nodes, first, site))
        return found

    @property
    def layer(self) -> int:
        return self.nodes[0].layer


class InputGradients:
    """Propagates the gradients of a backward pass to the inputs of a layer's readers.

    The norm between them is differentiated by the same rules. Nothing is assumed about the kind of attention: it is run again up
    to its queries, keys or values.
    """

    def __init__(self, model: Decoder, context: Context, rules: BackwardRules) -> None:
        self.model, self.context, self.attached = model, context, Attached(rules)

    def at(self, readers: Readers, gradient: Tensor, stream: Stream | None) -> Gradients:
        """The gradients of these readers, from the `gradient` at `readers.seen`; `stream` is the input of the layer."""
        if not readers.is_after_norm:
            return gradient[None]
        assert stream is not None, "the norm was given something"
        block: Any = self.model.blocks[readers.layer]
        if readers.nodes[0].head is None:
            return self._pulled_back(lambda x: norm_unhooked(block.ln1, x), stream, gradient)[None]
        letter, n = letter_of(readers.seen), len(readers.nodes)
        copies = stream[:, :, None].expand(-1, -1, n, -1)
        made = self._projection(block, readers.layer, letter, stream)
        return self._pulled_back(lambda x: made(norm_unhooked(block.ln1, x)), copies, gradient).movedim(2, 0)

    def _pulled_back(self, function: Read, x: Tensor, gradient: Tensor) -> Tensor:
        """The gradient at `x`, given the gradient at the output of a function of `x`."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            with self.attached.scope():
                found = function(x)
            return torch.autograd.grad(found, x, gradient)[0]

    def _projection(self, block: Any, layer: int, letter: str, stream: Stream) -> Read:
        """A function from the normalised copies of the heads to their queries, keys or values, where attention is stopped."""
        shared = norm_unhooked(block.ln1, stream)
        shift = self.context.pos_embed
        point = getattr(block.attn, f"hook_{letter}")

        def moved(x: Tensor) -> Tensor:
            """The input of queries and keys: in a shortformer with the position embedding added."""
            if shift is None:
                return x
            return x + (shift[: len(x), :, None] if x.ndim == 4 else shift[: len(x)])

        def project(copies: Tensor) -> Tensor:
            inputs = {"q": moved(shared), "k": moved(shared), "v": shared}
            inputs[letter] = copies if letter == "v" else moved(copies)
            made = _KeepAndStop()
            try:
                with self.model.hooks(fwd_hooks=[(point.name, made)]):
                    block.attn(inputs["q"], inputs["k"], inputs["v"], self.context, layer)
            except _Stop:
                pass
            return made.seen.pop()

        return project


class _Stop(Exception):
    """Stops a run when the value that is needed is computed."""


class _KeepAndStop:
    """A hook that keeps its value and stops the run."""

    records = True

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, value: Tensor, hook: HookPoint) -> None:
        self.seen.append(value)
        raise _Stop


def letter_of(site: str) -> str:
    """The q, k or v of `hook_q_input` and `attn.hook_q`."""
    return site.rpartition("hook_")[2][0]


def by_layer(readers: list[Readers]) -> Mapping[int, list[Readers]]:
    """The readers of each layer."""
    return {layer: list(group) for layer, group in groupby(readers, key=lambda some: some.layer)}
