"""The residual stream in the cache of a run: its value at a layer, and the norms that read it and write to it."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm import hooks
from hooked_lm.components.blocks.wiring import MID, NORMALIZED_MID, PRE, InStream, Wiring, wiring_of
from hooked_lm.components.norms.norm import norm_of
from hooked_lm.hooks import HookedRootModule, Slice, SliceInput
from hooked_lm.models.weights.fixed_norm import FixedNorm
from hooked_lm.models.weights.terms import Term, check_mlp, product

Cache = Mapping[Any, Tensor]
Part = Slice | SliceInput
Vectors = Float[Tensor, "*lead d_model"]


def as_slice(part: Part) -> Slice:
    return part if isinstance(part, Slice) else Slice(part)


def positions_in(cache: Cache, pos_slice: Part) -> Slice:
    """The positions as a slice; warns, once for a cache, if they are padding in some rows."""
    positions = as_slice(pos_slice)
    if isinstance(cache, hooks.Cache):
        cache.warn_of_padding(positions)
    return positions


def layer_bound(model: HookedRootModule, layer: int | None) -> int:
    """The number of blocks before `layer`; None and -1 mean all. IndexError if out of range."""
    n_layers = model.cfg.n_layers
    if layer is None:
        return n_layers
    if not -n_layers - 1 <= layer <= n_layers:
        raise IndexError(
            f"layer {layer} is out of range: it counts the blocks before it, 0 to {n_layers}, or -1 for all"
        )
    return layer % (n_layers + 1)


def input_norm(model: HookedRootModule, cache: Cache, layer: int, mlp_input: bool, pos: Slice) -> FixedNorm:
    """The norm that reads the stream at a layer: `ln1`, `ln2` if `mlp_input`, `ln_final` after all blocks."""
    name, norm = named_input_norm(model, layer, mlp_input)
    return FixedNorm(cache, name, norm, pos)


def named_input_norm(model: HookedRootModule, layer: int, mlp_input: bool) -> tuple[str, nn.Module]:
    if layer == model.cfg.n_layers and not mlp_input:
        return "ln_final", norm_of(model, "ln_final")
    if mlp_input:
        check_mlp(model, layer)
    name = input_norm_name(model.blocks[layer], mlp_input)
    return (f"blocks.{layer}.{name}", getattr(model.blocks[layer], name)) if name else ("", nn.Identity())


def output_norm(model: HookedRootModule, cache: Cache, term: Term, pos: Slice) -> FixedNorm:
    """The map from the output of a sublayer to its term of the stream: the norm after it, the residual multiplier, and the
    factors on its way."""
    step, block = term.step, model.blocks[term.layer]
    assert step is not None, "a sublayer writes it"
    path, factor = f"blocks.{term.layer}.{step.post}", product(term.factor, step.scale)
    return FixedNorm(cache, path, norm_of(block, step.post), pos, gain=True, factor=factor)


def attention_bound(model: HookedRootModule, layer: int, mlp_input: bool) -> int:
    """How many attentions (or mixers) precede the given place; an MLP follows that of its block, unless parallel."""
    if mlp_input:
        check_mlp(model, layer)
    return layer + (mlp_input and mlp_reads(model, layer) != PRE)


def mid_site(model: HookedRootModule, layer: int) -> str:
    """The site of the stream between the sublayers of a block; one that no cache has, if both read the same stream."""
    reads = mlp_reads(model, layer)
    return f"blocks.{layer}.{MID if reads == PRE else reads}"


def mlp_reads(model: HookedRootModule, layer: int) -> str:
    """The value that the MLP of a block reads."""
    wiring = wiring_of(model.blocks[layer])
    step = wiring.of("mlp")
    return step.reads if step is not None else NORMALIZED_MID if has_norms_in_stream(wiring) else MID


def input_norm_name(block: nn.Module, mlp: bool) -> str:
    """The name of the norm through which a block's MLP, or what reads the stream first, reads it; "" for none."""
    wiring = wiring_of(block)
    read_first = (step for step in wiring.sublayers if step.reads == PRE)
    step = wiring.of("mlp") if mlp else next(read_first, None)
    if step is not None:
        return step.norm
    return "" if has_norms_in_stream(wiring) else str(block.mlp_norm) if mlp else "ln1"


def has_norms_in_stream(wiring: Wiring) -> bool:
    return any(isinstance(step, InStream) for step in wiring.steps)


def stream(model: HookedRootModule, cache: Cache, layer: int, mlp_input: bool = False) -> Vectors:
    """The residual stream before a layer, or with `mlp_input` before its MLP."""
    if attention_bound(model, layer, mlp_input) > layer:
        return cache[mid_site(model, layer)]
    names = [f"blocks.{layer}.hook_resid_pre"] if layer < model.cfg.n_layers else []
    names += [model.stack.site_after(model, layer - 1)] if layer > 0 else []
    return cache[next((name for name in names if name in cache), names[0])]


def embedding_sites(model: HookedRootModule) -> dict[str, str]:
    """Label -> site of the embeddings, with the vectors of images among them, that enter the stream before the first layer.

    The position embeddings of a shortformer are not added to the stream.
    """
    if "hook_full_embed" in model.hook_dict:  # encoders: the sum of all embeddings
        return {"embed": "hook_full_embed"}
    merged = "hook_embed_merged" in model.hook_dict  # tokens and images
    tree, sites = model.cfg.tree, {"embed": "hook_embed_merged" if merged else "hook_embed"}
    if tree.pos_embed is not None and not tree.shortformer:
        sites["pos_embed"] = "hook_pos_embed"
    return sites
