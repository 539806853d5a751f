"""The residual stream of a run taken apart: who wrote what into it, and what that does to the logits.

Functions over a model and the cache of one of its runs; the methods of `ActivationCache` of the same names call
them and say what the arguments mean. A stack has its components on the first axis; the functions that label them
return (stack, labels). Components are what arrives in the stream: what a head or neuron gives, taken through the norm
after its sublayer with the divisor of the run, times the residual multiplier. Together they sum to the stream. Where
a norm stands in the stream itself they do not, and what would take the stream apart raises ValueError.
Weights are used without their gradients, on the device and in the dtype of the cache.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.blocks.block import AttentionPart, MLPPart, PreNormBlock
from hooked_lm.components.blocks.mixer import MixerMLPBlock, MixerPart
from hooked_lm.components.blocks.per_layer import PerLayerBlock
from hooked_lm.components.blocks.post_norm import PostNormBlock
from hooked_lm.components.embed import Unembed
from hooked_lm.components.moe import MoE
from hooked_lm.components.norm import norm_of, norm_unhooked
from hooked_lm.hooks import Slice, SliceInput
from hooked_lm.models.names import checked_index
from hooked_lm.models.weights.fixed_norm import FixedNorm, norm_gain

Cache = Mapping[Any, Tensor]
Part = Slice | SliceInput
Vectors = Float[Tensor, "*lead d_model"]
Stack = Float[Tensor, "component *lead d_model"]
Projected = Float[Tensor, "component *lead"]  # the last axis is d_model, or what was projected onto


def _slice(part: Part) -> Slice:
    return part if isinstance(part, Slice) else Slice(part)


def layer_bound(model: Any, layer: int | None) -> int:
    """How many blocks come before the point meant by `layer`; None and -1 mean all. IndexError out of range."""
    n_layers = model.cfg.n_layers
    if layer is None:
        return n_layers
    if not -n_layers - 1 <= layer <= n_layers:
        raise IndexError(
            f"layer {layer} is out of range: it counts the blocks before it, 0 to {n_layers}, or -1 for all"
        )
    return layer % (n_layers + 1)


def reader(model: Any, cache: Cache, layer: int, mlp_input: bool, pos: Slice) -> FixedNorm:
    """The norm that reads the stream at a layer: `ln1`, `ln2` for `mlp_input`, `ln_final` after all blocks."""
    name, norm = _reading_norm(model, layer, mlp_input)
    return FixedNorm(cache, name, norm, pos)


def _reading_norm(model: Any, layer: int, mlp_input: bool) -> tuple[str, nn.Module]:
    if layer == model.cfg.n_layers and not mlp_input:
        return "ln_final", norm_of(model, "ln_final")
    if mlp_input:
        _check_mlp(model, layer)
    if isinstance(model.blocks[layer], PostNormBlock):  # its sublayers read the stream as it is
        return "", nn.Identity()
    name = model.blocks[layer].mlp_norm if mlp_input else "ln1"
    return f"blocks.{layer}.{name}", getattr(model.blocks[layer], name)


def writer(model: Any, cache: Cache, layer: int, name: str, pos: Slice) -> FixedNorm:
    """The way of a sublayer's output into the stream; `name` is that of its post-norm."""
    block = model.blocks[layer]
    norm, path = norm_of(block, name), f"blocks.{layer}.{name}"
    return FixedNorm(cache, path, norm, pos, gain=True, factor=block.cfg.residual_scale)


def _check_mlp(model: Any, layer: int) -> None:
    if layer == model.cfg.n_layers or not isinstance(model.blocks[layer], MLPPart):
        raise ValueError(f"there is no MLP at layer {layer}")


def _attention_bound(model: Any, layer: int, mlp_input: bool) -> int:
    """How many attentions (or mixers) have written to the stream there: an MLP reads its own block's, unless parallel."""
    if mlp_input:
        _check_mlp(model, layer)
    return layer + (mlp_input and isinstance(model.blocks[layer], (PreNormBlock, PostNormBlock, MixerMLPBlock)))


def _sum_bound(model: Any, layer: int, mlp_input: bool = False) -> int:
    """The same where the stream is the sum of what was written; ValueError where a norm stands in it before that."""
    bound = _attention_bound(model, layer, mlp_input)
    kinds = (PostNormBlock, PerLayerBlock)
    if in_stream := [i for i, block in enumerate(model.blocks[:bound]) if isinstance(block, kinds)]:
        raise ValueError(
            f"blocks {in_stream} normalise the stream itself, or scale it, so it is not the sum of what sublayers wrote; "
            "accumulated_resid shows the stream, hook_attn_out and hook_mlp_out what each sublayer wrote"
        )
    return bound


def _mid(model: Any, layer: int) -> str:
    """The site of the stream between a block's sublayers."""
    normalized = "normalized_" if isinstance(model.blocks[layer], PostNormBlock) else ""
    return f"blocks.{layer}.hook_{normalized}resid_mid"


def stream(model: Any, cache: Cache, layer: int, mlp_input: bool = False) -> Vectors:
    """The residual stream that is read at a layer."""
    if _attention_bound(model, layer, mlp_input) > layer:
        return cache[_mid(model, layer)]
    names = [f"blocks.{layer}.hook_resid_pre"] if layer < model.cfg.n_layers else []
    names += [model.stack.site_after(model, layer - 1)] if layer > 0 else []
    return cache[next((name for name in names if name in cache), names[0])]


def _stacked(components: list[Tensor], like: Callable[[], Tensor]) -> Tensor:
    """One above the other; without any, an empty stack of vectors like those."""
    if components:
        return torch.stack(components)
    empty = like()
    return empty.new_empty(0, *empty.shape)


# ---- the stream --------------------------------------------------------------------------------------------


def accumulated_resid(
    model: Any,
    cache: Cache,
    layer: int | None = None,
    incl_mid: bool = False,
    apply_ln: bool = False,
    pos_slice: Part = None,
    mlp_input: bool = False,
) -> tuple[Stack, list[str]]:
    """The stream before each block, and perhaps within it, up to a layer."""
    n_layers, layer, pos = model.cfg.n_layers, layer_bound(model, layer), _slice(pos_slice)
    own_attention = _attention_bound(model, layer, mlp_input) > layer
    components, labels = [], []
    for i in range(layer + 1):
        components.append(stream(model, cache, i))
        labels.append(f"{i}_pre" if i < n_layers else "final_post")
        if (incl_mid and i < layer) or (own_attention and i == layer):
            components.append(cache[_mid(model, i)])
            labels.append(f"{i}_mid")
    stack = torch.stack([pos.apply(component, -2) for component in components])
    if apply_ln:
        final = layer == n_layers
        stack = apply_ln_to_stack(model, cache, stack, layer, mlp_input, pos, recompute_ln=final)
    return stack, labels


def decompose_resid(
    model: Any,
    cache: Cache,
    layer: int | None = None,
    mlp_input: bool = False,
    mode: str = "all",
    apply_ln: bool = False,
    pos_slice: Part = None,
    incl_embeds: bool = True,
) -> tuple[Stack, list[str]]:
    """What the embeddings and each sublayer added to the stream up to a layer."""
    if mode not in ("all", "mlp", "attn"):
        raise ValueError(f"mode must be 'all', 'mlp' or 'attn', got {mode!r}")
    layer, pos = layer_bound(model, layer), _slice(pos_slice)
    sites = _embeddings(model) if incl_embeds else {}
    for i in range(_sum_bound(model, layer, mlp_input)):
        if mode != "mlp":
            kind = "mixer" if isinstance(model.blocks[i], MixerPart) else "attn"
            sites[f"{i}_{kind}_out"] = f"blocks.{i}.hook_{kind}_out"
        if mode != "attn" and i < layer and isinstance(model.blocks[i], MLPPart):
            sites[f"{i}_mlp_out"] = f"blocks.{i}.hook_mlp_out"
    parts = [pos.apply(cache[site], -2) for site in sites.values()]
    stack = _stacked(parts, lambda: pos.apply(stream(model, cache, layer, mlp_input), -2))
    return (reader(model, cache, layer, mlp_input, pos)(stack) if apply_ln else stack), list(sites)


def _embeddings(model: Any) -> dict[str, str]:
    """Label -> site of what stands in the stream at first; a shortformer's positions never enter it."""
    if "hook_full_embed" in model.hook_dict:  # an encoder's, which is one sum
        return {"embed": "hook_full_embed"}
    tree, sites = model.cfg.tree, {"embed": "hook_embed"}
    if tree.pos_embed is not None and not tree.shortformer:
        sites["pos_embed"] = "hook_pos_embed"
    return sites


def apply_ln_to_stack(
    model: Any,
    cache: Any,
    residual_stack: Stack,
    layer: int | None = None,
    mlp_input: bool = False,
    pos_slice: Part = None,
    batch_slice: Part = None,
    has_batch_dim: bool = True,
    recompute_ln: bool = False,
) -> Float[Tensor, "component *rest d_model"]:
    """Components of the stream as the norm at a layer showed them to its readers."""
    layer, pos, rows = layer_bound(model, layer), _slice(pos_slice), _slice(batch_slice)
    if rows.mode != "identity" and not cache.has_batch_dim:
        raise ValueError("this cache has no batch dimension left to slice: leave batch_slice away")
    if has_batch_dim:
        residual_stack = rows.apply(residual_stack, 1)
    if recompute_ln:
        fresh = norm_unhooked(_reading_norm(model, layer, mlp_input)[1], residual_stack)
        return fresh if residual_stack.requires_grad else fresh.detach()
    norm = reader(model, cache, layer, mlp_input, pos)
    if norm.scale is not None and cache.has_batch_dim:
        norm.scale = rows.apply(norm.scale, 0)
    return norm(residual_stack)


def logit_attrs(
    model: Any,
    cache: Any,
    residual_stack: Stack,
    tokens: Any,
    incorrect_tokens: Any = None,
    pos_slice: Part = None,
    batch_slice: Part = None,
    has_batch_dim: bool = True,
) -> Float[Tensor, "component *rest"]:
    """What each component adds to the logits of tokens, or to their difference to those of others."""
    if "mlm_head" in model._modules:
        raise ValueError(
            "mlm_head, which is not linear, is between the stream and the logits, so no component has a share of its own in a "
            "logit; gradients tell what matters: run_with_cache, then backward() from a logit"
        )
    ids = _ids(model, tokens)
    directions = model.W_U.detach().T[ids]
    if incorrect_tokens is not None:
        others = _ids(model, incorrect_tokens)
        if others.shape != ids.shape:
            shapes = f"{tuple(ids.shape)} and {tuple(others.shape)}"
            raise ValueError(f"tokens and incorrect_tokens must have the same shape, got {shapes}")
        directions = directions - model.W_U.detach().T[others]
    stack = apply_ln_to_stack(model, cache, residual_stack, None, False, pos_slice, batch_slice, has_batch_dim)
    if (gain := norm_gain(norm_of(model, "ln_final"))) is not None:
        directions = directions * gain.to(directions)
    if isinstance(model.unembed, Unembed):
        directions = directions * model.unembed.cfg.scale
    return (stack * _aligned(directions.to(stack), stack.shape[1:-1])).sum(-1)


def _ids(model: Any, tokens: Any) -> Tensor:
    """Token ids of strings or ids; a single one has no axis."""
    ids = model.tokens.single_token_ids(tokens, model.device)
    return ids.flatten()[0] if ids.numel() == 1 else ids


def _aligned(directions: Tensor, lead: torch.Size) -> Tensor:
    """Directions [batch, d_model] beside vectors [batch, pos, d_model] get an axis for pos."""
    given = directions.shape[:-1]
    if len(given) == 1 and len(lead) == 2 and given[0] == lead[0]:
        return directions[:, None]
    if len(given) > len(lead) or any(n not in (1, m) for n, m in zip(given[::-1], lead[::-1], strict=False)):
        raise ValueError(f"tokens of shape {tuple(given)} do not fit components of shape {tuple(lead)} (batch, pos)")
    return directions


# ---- heads -------------------------------------------------------------------------------------------------


def head_results(model: Any, cache: Cache, layer: int, pos_slice: Part = None) -> Float[Tensor, "*lead head d_model"]:
    """What each head of a layer gives, before any norm after attention: `z W_O`, if it was not cached."""
    if not isinstance(model.blocks[layer], AttentionPart):
        raise ValueError(f"there is no attention at layer {layer}, so it has no heads")
    pos, name = _slice(pos_slice), f"blocks.{layer}.attn.hook_result"
    if name in cache:
        return pos.apply(cache[name], -3)
    z = pos.apply(cache[f"blocks.{layer}.attn.hook_z"], -3)
    attn = model.blocks[layer].attn
    return torch.einsum("...nh,nhm->...nm", norm_unhooked(norm_of(attn, "z_norm"), z).detach(), attn.W_O.detach().to(z))


def stack_head_results(
    model: Any,
    cache: Cache,
    layer: int | None = -1,
    incl_remainder: bool = False,
    pos_slice: Part = None,
    apply_ln: bool = False,
) -> tuple[Stack, list[str]]:
    """What each head before a layer added to the stream; layers without attention have none."""
    layer, pos = layer_bound(model, layer), _slice(pos_slice)
    bound = _sum_bound(model, layer)
    stack, labels = _heads(model, cache, bound, pos, lambda: pos.apply(stream(model, cache, layer), -2))
    if incl_remainder:
        rest = pos.apply(stream(model, cache, layer), -2) - stack.sum(0)
        stack, labels = torch.cat([stack, rest[None]]), [*labels, "remainder"]
    return (reader(model, cache, layer, False, pos)(stack) if apply_ln else stack), labels


def _heads(model: Any, cache: Cache, bound: int, pos: Slice, like: Callable[[], Tensor]) -> tuple[Stack, list[str]]:
    parts: list[Tensor] = []
    layers = [i for i in range(bound) if isinstance(model.blocks[i], AttentionPart)]
    for i in layers:
        written = writer(model, cache, i, "ln1_post", pos)(head_results(model, cache, i, pos), extra_axes=1)
        parts += written.unbind(-2)
    labels = [f"L{i}H{h}" for i in layers for h in range(model.blocks[i].attn.cfg.n_heads)]
    return _stacked(parts, like), labels


# ---- neurons -----------------------------------------------------------------------------------------------


def get_neuron_results(
    model: Any,
    cache: Cache,
    layer: int,
    neuron_slice: Part = None,
    pos_slice: Part = None,
    project_output_onto: Tensor | None = None,
    norm: FixedNorm | None = None,
) -> Float[Tensor, "*lead"]:
    """What each neuron of a layer added to the stream, [..., neuron, d_model], or its products with directions.

    `norm` is one that then reads the stream. Norms and directions meet the output weights before the activations,
    so that nothing larger than the result is made.
    """
    layer, neurons, pos = checked_index(layer, model.cfg.n_layers, "layer"), _slice(neuron_slice), _slice(pos_slice)
    _check_mlp(model, layer)
    if isinstance(model.blocks[layer].mlp, MoE):
        raise ValueError(
            f"layer {layer} has neurons in each of its experts, which see a few tokens each: 'blocks.{layer}.mlp.experts.*"
            ".hook_post' shows them; decompositions take the layer as a whole with expand_neurons=False"
        )
    way = writer(model, cache, layer, "ln2_post", pos)
    acts = way.divided(pos.apply(cache[f"blocks.{layer}.mlp.hook_post"], -2))
    rows = way.direction(neurons.apply(model.blocks[layer].mlp.W_out.detach().to(acts), 0))
    if norm is not None:
        acts, rows = norm.divided(acts), norm.direction(rows)
    acts = neurons.apply(acts, -1)
    if project_output_onto is None:
        return acts[..., None] * rows
    rows = _projected(rows, project_output_onto)
    return acts * rows if project_output_onto.ndim == 1 else acts[..., None] * rows


def stack_neuron_results(
    model: Any,
    cache: Cache,
    layer: int | None,
    pos_slice: Part = None,
    neuron_slice: Part = None,
    incl_remainder: bool = False,
    apply_ln: bool = False,
    project_output_onto: Tensor | None = None,
) -> tuple[Projected, list[str]]:
    """What each neuron before a layer added to the stream."""
    layer, pos = layer_bound(model, layer), _slice(pos_slice)
    norm = reader(model, cache, layer, False, pos) if apply_ln else None
    bound, neurons = _sum_bound(model, layer), Slice.unwrap(neuron_slice)
    parts, labels = _neurons(model, cache, bound, neurons, pos, project_output_onto, norm)
    if not parts or incl_remainder:
        whole = _finished(pos.apply(stream(model, cache, layer), -2), norm, project_output_onto)
        rest = whole - sum(part.sum(0) for part in parts)
        parts.append(rest[None] if incl_remainder else whole.new_empty(0, *whole.shape))
        labels += ["remainder"] if incl_remainder else []
    return torch.cat(parts), labels


def _neurons(
    model: Any,
    cache: Cache,
    bound: int,
    neurons: Slice,
    pos: Slice,
    project: Tensor | None,
    norm: FixedNorm | None,
) -> tuple[list[Projected], list[str]]:
    """The neurons of each layer before a bound as a stack, and the labels of all."""
    parts, labels = [], []
    neuron_axis = -1 if project is not None and project.ndim == 1 else -2
    for i in range(bound):
        if isinstance(model.blocks[i], MLPPart):
            result = get_neuron_results(model, cache, i, neurons, pos, project, norm)
            parts.append(result.movedim(neuron_axis, 0))
            numbers = neurons.apply(torch.arange(model.blocks[i].mlp.W_out.shape[0]))
            labels += [f"L{i}N{n}" for n in numbers.tolist()]
    return parts, labels


def _finished(stack: Tensor, norm: FixedNorm | None, project: Tensor | None) -> Tensor:
    """Vectors in the stream as the caller wants them: read by a norm, and projected."""
    stack = stack if norm is None else norm(stack)
    return stack if project is None else _projected(stack, project)


def _projected(vectors: Vectors, directions: Tensor) -> Float[Tensor, "..."]:
    """The products with directions [d_model, n] or [d_model]."""
    d_model = vectors.shape[-1]
    if directions.ndim not in (1, 2) or directions.shape[0] != d_model:
        raise ValueError(
            f"project_output_onto must be [d_model, n] or [d_model] with d_model {d_model}, "
            f"got shape {tuple(directions.shape)}"
        )
    return vectors @ directions.to(vectors)


# ---- everything --------------------------------------------------------------------------------------------


def get_full_resid_decomposition(
    model: Any,
    cache: Cache,
    layer: int | None = None,
    mlp_input: bool = False,
    expand_neurons: bool = True,
    apply_ln: bool = False,
    pos_slice: Part = None,
    project_output_onto: Tensor | None = None,
) -> tuple[Projected, list[str]]:
    """Heads, mixers, neurons (or MLPs), embeddings and biases: parts that sum to the stream at a layer."""
    layer, pos = layer_bound(model, layer), _slice(pos_slice)
    norm = reader(model, cache, layer, mlp_input, pos) if apply_ln else None
    embeds = {label: pos.apply(cache[site], -2) for label, site in _embeddings(model).items()}
    like = embeds["embed"]

    bound = _sum_bound(model, layer, mlp_input)
    stack, labels = _heads(model, cache, bound, pos, lambda: like)
    mixers = [i for i in range(bound) if isinstance(model.blocks[i], MixerPart)]
    labels += [f"{i}_mixer_out" for i in mixers]
    stack = torch.cat([stack, *(pos.apply(cache[f"blocks.{i}.hook_mixer_out"], -2)[None] for i in mixers)])
    neurons: list[Tensor] = []
    if expand_neurons:
        neurons, more = _neurons(model, cache, layer, Slice(), pos, project_output_onto, norm)
    else:
        mlps, more = decompose_resid(model, cache, layer, False, "mlp", False, pos, incl_embeds=False)
        stack = torch.cat([stack, mlps])
    rest = embeds | {"bias": biases(model, cache, layer, mlp_input, expand_neurons, pos, like)}
    stack = _finished(stack, norm, project_output_onto)
    last = _finished(torch.stack(list(rest.values())), norm, project_output_onto)
    return torch.cat([stack, *neurons, last]), [*labels, *more, *rest]


def biases(
    model: Any, cache: Cache, layer: int, mlp_input: bool, include_mlp_biases: bool, pos: Slice, like: Vectors
) -> Vectors:
    """The output biases of sublayers, and those of the norms after them, as they arrived in the stream."""
    total = torch.zeros_like(like)
    for i in range(_attention_bound(model, layer, mlp_input)):
        block = model.blocks[i]
        if isinstance(block, AttentionPart):  # what a mixer adds is shown whole, with its bias
            total = total + writer(model, cache, i, "ln1_post", pos).output(block.attn.b_O, like)
        if include_mlp_biases and i < layer and isinstance(block, MLPPart):
            mlp: Any = block.mlp
            total = total + writer(model, cache, i, "ln2_post", pos).output(mlp.b_out, like)
    return total
