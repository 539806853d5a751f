"""Gradients of a metric at the inputs of the readers of a graph, one layer at a time, from one backward pass."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.analysis.attribution.graph import Graph, Node
from hooked_lm.components.context import Context
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import RMSNorm, norm_unhooked, root_mean_square, upcast
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

    The norm between them is differentiated, with `freeze_norms` as if its divisor were constant. Nothing is assumed about the
    kind of attention: it is run again up to its queries, keys or values.
    """

    def __init__(self, model: Decoder, context: Context, freeze_norms: bool) -> None:
        self.model, self.context, self.freeze_norms = model, context, freeze_norms

    def at(self, readers: Readers, gradient: Tensor, stream: Stream | None) -> Gradients:
        """The gradients of these readers, from the `gradient` at `readers.seen`; `stream` is the input of the layer."""
        if not readers.is_after_norm:
            return gradient[None]
        assert stream is not None, "the norm was given something"
        block: Any = self.model.blocks[readers.layer]
        read = self._read(block.ln1)
        if readers.nodes[0].head is None:
            return _pulled_back(read, stream, gradient)[None]
        letter, n = letter_of(readers.seen), len(readers.nodes)
        copies = stream[:, :, None].expand(-1, -1, n, -1)
        made = self._projection(block, readers.layer, letter, stream)
        return _pulled_back(lambda x: made(read(x)), copies, gradient).movedim(2, 0)

    def _read(self, norm: nn.Module) -> Read:
        return held(norm) if self.freeze_norms else lambda x: norm_unhooked(norm, x)

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


def held(norm: nn.Module) -> Read:
    """A norm with its divisor taken as a constant; raises TypeError for a module that is not one of this library's norms."""
    if isinstance(norm, nn.Identity):
        return lambda x: x
    if not isinstance(norm, (LayerNorm, RMSNorm)):
        raise TypeError(f"freeze_norms: a {type(norm).__name__} has no divisor that is known")

    def read(x: Tensor) -> Tensor:
        centred = upcast(x) - upcast(x).mean(-1, keepdim=True) if isinstance(norm, LayerNorm) else upcast(x)
        scale = root_mean_square(centred.detach(), norm.cfg.eps)
        return norm.apply_weights((centred / scale).to(x.dtype))

    return read


def frozen_norms(model: Decoder) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """Hooks that detach the divisor of each norm between the stream and the readers."""
    for name in model.all_points():
        head, _, tail = name.rpartition(".")
        if tail == "hook_scale" and (head == "ln_final" or head.split(".")[2:] in (["ln1"], ["ln2"])):
            yield name, lambda value, hook: value.detach()


def letter_of(site: str) -> str:
    """The q, k or v of `hook_q_input` and `attn.hook_q`."""
    return site.rpartition("hook_")[2][0]


def _pulled_back(function: Read, x: Tensor, gradient: Tensor) -> Tensor:
    """The gradient at `x`, given the gradient at the output of a function of `x`."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(x), x, gradient)[0]


def by_layer(readers: list[Readers]) -> Mapping[int, list[Readers]]:
    """The readers of each layer."""
    return {layer: list(group) for layer, group in groupby(readers, key=lambda some: some.layer)}
