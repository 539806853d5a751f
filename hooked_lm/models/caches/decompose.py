"""Decomposes the residual stream of a run into what each component wrote, and into contributions to the logits.

Functions of a model and the cache of one run; the methods of `ActivationCache` with the same names document the
arguments. A stack has its components on the first axis; functions that label components return (stack, labels).
A component is what is added to the stream: the output of a head or neuron, through the norm after its sublayer (with the
scale of the run), times the residual multiplier. Components sum to the stream. A model with norms in the stream itself
has no such sum: ValueError. Weights are detached, and moved to the device and dtype of the cache.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.components.blocks.block import AttentionPart, MLPPart
from hooked_lm.components.blocks.mixer import MixerPart
from hooked_lm.components.embeddings.embed import Unembed
from hooked_lm.components.embeddings.transformed_unembed import check_linear
from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.norms.norm import norm_of, norm_unhooked
from hooked_lm.hooks import HookedRootModule, Slice
from hooked_lm.models.caches.residual import (
    Cache,
    Part,
    Vectors,
    as_slice,
    attention_bound,
    check_mlp,
    embedding_sites,
    input_norm,
    layer_bound,
    mid_site,
    named_input_norm,
    output_norm,
    stream,
    sum_bound,
)
from hooked_lm.models.checks import check_one_stream
from hooked_lm.models.names import checked_index
from hooked_lm.models.placement import together
from hooked_lm.models.weights.fixed_norm import FixedNorm, norm_gain

Stack = Float[Tensor, "component *lead d_model"]
Projected = Float[Tensor, "component *lead"]  # the last axis is d_model, or the directions projected onto


def _stacked(model: HookedRootModule, components: list[Tensor], like: Callable[[], Tensor]) -> Tensor:
    """The components as one tensor; for none, an empty stack of vectors shaped as `like()`."""
    if components:
        return torch.stack(together(components, model.device))
    example = like()
    return example.new_empty(0, *example.shape)


# ---- the stream --------------------------------------------------------------------------------------------


def accumulated_resid(
    model: HookedRootModule,
    cache: Cache,
    layer: int | None = None,
    incl_mid: bool = False,
    apply_ln: bool = False,
    pos_slice: Part = None,
    mlp_input: bool = False,
) -> tuple[Stack, list[str]]:
    """The stream before each block up to a layer, and with `incl_mid` between its sublayers."""
    check_one_stream(model, "there is no accumulated stream")
    n_layers, layer, pos = model.cfg.n_layers, layer_bound(model, layer), as_slice(pos_slice)
    includes_attention = attention_bound(model, layer, mlp_input) > layer
    components, labels = [], []
    for i in range(layer + 1):
        components.append(stream(model, cache, i))
        labels.append(f"{i}_pre" if i < n_layers else "final_post")
        if (incl_mid and i < layer) or (includes_attention and i == layer):
            components.append(cache[mid_site(model, i)])
            labels.append(f"{i}_mid")
    stack = torch.stack(together([pos.apply(component, -2) for component in components], model.device))
    if apply_ln:
        final = layer == n_layers
        stack = apply_ln_to_stack(model, cache, stack, layer, mlp_input, pos, recompute_ln=final)
    return stack, labels


def decompose_resid(
    model: HookedRootModule,
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
    layer, pos = layer_bound(model, layer), as_slice(pos_slice)
    sites = embedding_sites(model, layer) if incl_embeds else {}
    for i in range(sum_bound(model, layer, mlp_input)):
        for kind, part in {"attn": AttentionPart, "mixer": MixerPart}.items():
            if mode != "mlp" and isinstance(model.blocks[i], part):
                sites[f"{i}_{kind}_out"] = f"blocks.{i}.hook_{kind}_out"
        if mode != "attn" and i < layer and isinstance(model.blocks[i], MLPPart):
            sites[f"{i}_mlp_out"] = f"blocks.{i}.hook_mlp_out"
    parts = [pos.apply(cache[site], -2) for site in sites.values()]
    stack = _stacked(model, parts, lambda: pos.apply(stream(model, cache, layer, mlp_input), -2))
    return (input_norm(model, cache, layer, mlp_input, pos)(stack) if apply_ln else stack), list(sites)


def apply_ln_to_stack(
    model: HookedRootModule,
    cache: Any,
    residual_stack: Stack,
    layer: int | None = None,
    mlp_input: bool = False,
    pos_slice: Part = None,
    batch_slice: Part = None,
    has_batch_dim: bool = True,
    recompute_ln: bool = False,
) -> Float[Tensor, "component *rest d_model"]:
    """Components of the stream normalized by the norm at a layer, with its scale in the run."""
    check_one_stream(model, "there is no stack of components")
    layer, pos, rows = layer_bound(model, layer), as_slice(pos_slice), as_slice(batch_slice)
    if rows.mode != "identity" and not cache.has_batch_dim:
        raise ValueError("this cache has no batch dimension to slice: omit batch_slice")
    if has_batch_dim:
        residual_stack = rows.apply(residual_stack, 1)
    if recompute_ln:
        normalized = norm_unhooked(named_input_norm(model, layer, mlp_input)[1], residual_stack)
        return normalized if residual_stack.requires_grad else normalized.detach()
    norm = input_norm(model, cache, layer, mlp_input, pos)
    if norm.scale is not None and cache.has_batch_dim:
        norm.scale = rows.apply(norm.scale, 0)
    if norm.scale is not None:
        _check_fits(residual_stack, norm.scale)
    return norm(residual_stack)


def _check_fits(stack: Tensor, scale: Tensor) -> None:
    """Raises ValueError for a stack of other positions or rows than the scale [*rest, 1], to which it would broadcast."""
    found, expected = list(stack.shape[:-1]), list(scale.shape[:-1])
    rest = found[len(found) - len(expected) :]
    fits = all(mine == theirs or theirs == 1 for mine, theirs in zip(rest, expected, strict=False))
    if not fits or len(found) - len(expected) not in (0, 1):
        raise ValueError(
            f"components of shape {[*stack.shape]} do not have the batch and positions {expected} of the norm's scale: "
            "slice the components and give the same pos_slice and batch_slice here, or neither"
        )


def logit_attrs(
    model: HookedRootModule,
    cache: Any,
    residual_stack: Stack,
    tokens: Any,
    incorrect_tokens: Any = None,
    pos_slice: Part = None,
    batch_slice: Part = None,
    has_batch_dim: bool = True,
) -> Float[Tensor, "component *rest"]:
    """The contribution of each component, before the final norm, to the logits of tokens, or to a logit difference."""
    if "mlm_head" in model._modules:
        raise ValueError(
            "mlm_head, which is not linear, is between the stream and the logits, so a logit is not a sum over components; "
            "use gradients instead: run_with_cache, then backward() from a logit"
        )
    check_linear(model.unembed)
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
    return (stack * _with_pos_axis(directions.to(stack), stack.shape[1:-1])).sum(-1)


def _ids(model: HookedRootModule, tokens: Any) -> Tensor:
    """Token ids of strings or ids; a scalar if there is one."""
    ids = model.tokens.single_token_ids(tokens, model.device)
    return ids.flatten()[0] if ids.numel() == 1 else ids


def _with_pos_axis(directions: Tensor, lead: torch.Size) -> Tensor:
    """Directions that broadcast with vectors [*lead, d_model]; those of [batch, d_model] get an axis for pos."""
    shape = directions.shape[:-1]
    if len(shape) == 1 and len(lead) == 2 and shape[0] == lead[0]:
        return directions[:, None]
    if len(shape) > len(lead) or any(n not in (1, m) for n, m in zip(shape[::-1], lead[::-1], strict=False)):
        raise ValueError(f"tokens of shape {tuple(shape)} do not fit components of shape {tuple(lead)} (batch, pos)")
    return directions


# ---- heads -------------------------------------------------------------------------------------------------


def head_results(
    model: HookedRootModule, cache: Cache, layer: int, pos_slice: Part = None
) -> Float[Tensor, "*lead head d_model"]:
    """The output of each head of a layer before any norm after attention: `hook_result`, or `z W_O` if not cached."""
    if not isinstance(model.blocks[layer], AttentionPart):
        raise ValueError(f"there is no attention at layer {layer}, so it has no heads")
    pos, name = as_slice(pos_slice), f"blocks.{layer}.attn.hook_result"
    if name in cache:
        return pos.apply(cache[name], -3)
    z = pos.apply(cache[f"blocks.{layer}.attn.hook_z"], -3)
    attn = model.blocks[layer].attn
    return torch.einsum("...nh,nhm->...nm", norm_unhooked(norm_of(attn, "z_norm"), z).detach(), attn.W_O.detach().to(z))


def stack_head_results(
    model: HookedRootModule,
    cache: Cache,
    layer: int | None = -1,
    incl_remainder: bool = False,
    pos_slice: Part = None,
    apply_ln: bool = False,
) -> tuple[Stack, list[str]]:
    """What each head before a layer added to the stream; layers without attention are skipped."""
    layer, pos = layer_bound(model, layer), as_slice(pos_slice)
    bound = sum_bound(model, layer)
    stack, labels = _heads(model, cache, bound, pos, lambda: pos.apply(stream(model, cache, layer), -2))
    if incl_remainder:
        rest = pos.apply(stream(model, cache, layer), -2).to(stack.device) - stack.sum(0)
        stack, labels = torch.cat([stack, rest[None]]), [*labels, "remainder"]
    return (input_norm(model, cache, layer, False, pos)(stack) if apply_ln else stack), labels


def _heads(
    model: HookedRootModule, cache: Cache, bound: int, pos: Slice, like: Callable[[], Tensor]
) -> tuple[Stack, list[str]]:
    parts: list[Tensor] = []
    layers = [i for i in range(bound) if isinstance(model.blocks[i], AttentionPart)]
    for i in layers:
        added = output_norm(model, cache, i, "ln1_post", pos)(head_results(model, cache, i, pos), extra_axes=1)
        parts += added.unbind(-2)
    labels = [f"L{i}H{h}" for i in layers for h in range(model.blocks[i].attn.cfg.n_heads)]
    return _stacked(model, parts, like), labels


# ---- neurons -----------------------------------------------------------------------------------------------


def get_neuron_results(
    model: HookedRootModule,
    cache: Cache,
    layer: int,
    neuron_slice: Part = None,
    pos_slice: Part = None,
    project_output_onto: Tensor | None = None,
    norm: FixedNorm | None = None,
) -> Float[Tensor, "*lead"]:
    """What each neuron of a layer added to the stream, [..., neuron, d_model], or its products with directions.

    `norm` is a norm to apply to the result. Norms and directions are applied to the output weights, before these are
    multiplied by the activations, so that no tensor is larger than the result.
    """
    layer, neurons, pos = checked_index(layer, model.cfg.n_layers, "layer"), as_slice(neuron_slice), as_slice(pos_slice)
    check_mlp(model, layer)
    if isinstance(model.blocks[layer].mlp, MoE):
        raise ValueError(
            f"the neurons of layer {layer} belong to experts, each of which processes only some tokens: see 'blocks.{layer}"
            ".mlp.experts.*.hook_post', or decompose by whole layers with expand_neurons=False"
        )
    post_norm = output_norm(model, cache, layer, "ln2_post", pos)
    acts = post_norm.divide(pos.apply(cache[f"blocks.{layer}.mlp.hook_post"], -2))
    rows = post_norm.project(neurons.apply(model.blocks[layer].mlp.W_out.detach().to(acts), 0))
    if norm is not None:
        acts, rows = norm.divide(acts), norm.project(rows)
    acts = neurons.apply(acts, -1)
    if project_output_onto is None:
        return acts[..., None] * rows
    rows = _projected(rows, project_output_onto)
    return acts * rows if project_output_onto.ndim == 1 else acts[..., None] * rows


def stack_neuron_results(
    model: HookedRootModule,
    cache: Cache,
    layer: int | None,
    pos_slice: Part = None,
    neuron_slice: Part = None,
    incl_remainder: bool = False,
    apply_ln: bool = False,
    project_output_onto: Tensor | None = None,
) -> tuple[Projected, list[str]]:
    """What each neuron before a layer added to the stream."""
    layer, pos = layer_bound(model, layer), as_slice(pos_slice)
    norm = input_norm(model, cache, layer, False, pos) if apply_ln else None
    bound, neurons = sum_bound(model, layer), Slice.unwrap(neuron_slice)
    parts, labels = _neurons(model, cache, bound, neurons, pos, project_output_onto, norm)
    if not parts or incl_remainder:
        whole = _normed_and_projected(pos.apply(stream(model, cache, layer), -2), norm, project_output_onto)
        whole, *parts = together([whole, *parts], model.device)
        rest = whole - sum(part.sum(0) for part in parts)
        parts.append(rest[None] if incl_remainder else whole.new_empty(0, *whole.shape))
        labels += ["remainder"] if incl_remainder else []
    return torch.cat(together(parts, model.device)), labels


def _neurons(
    model: HookedRootModule,
    cache: Cache,
    bound: int,
    neurons: Slice,
    pos: Slice,
    project: Tensor | None,
    norm: FixedNorm | None,
) -> tuple[list[Projected], list[str]]:
    """One stack of neurons for each layer before a bound, and the labels of all."""
    parts, labels = [], []
    neuron_axis = -1 if project is not None and project.ndim == 1 else -2
    for i in range(bound):
        if isinstance(model.blocks[i], MLPPart):
            result = get_neuron_results(model, cache, i, neurons, pos, project, norm)
            parts.append(result.movedim(neuron_axis, 0))
            numbers = neurons.apply(torch.arange(model.blocks[i].mlp.W_out.shape[0]))
            labels += [f"L{i}N{n}" for n in numbers.tolist()]
    return parts, labels


def _normed_and_projected(stack: Tensor, norm: FixedNorm | None, project: Tensor | None) -> Tensor:
    """The stack after a norm and a projection, each of which may be None."""
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
    model: HookedRootModule,
    cache: Cache,
    layer: int | None = None,
    mlp_input: bool = False,
    expand_neurons: bool = True,
    apply_ln: bool = False,
    pos_slice: Part = None,
    project_output_onto: Tensor | None = None,
) -> tuple[Projected, list[str]]:
    """Heads, mixers, neurons (or MLPs), embeddings and biases, which sum to the stream at a layer."""
    layer, pos = layer_bound(model, layer), as_slice(pos_slice)
    norm = input_norm(model, cache, layer, mlp_input, pos) if apply_ln else None
    embeds = {label: pos.apply(cache[site], -2) for label, site in embedding_sites(model, layer).items()}
    like = embeds["embed"]

    bound = sum_bound(model, layer, mlp_input)
    stack, labels = _heads(model, cache, bound, pos, lambda: like)
    mixers = [i for i in range(bound) if isinstance(model.blocks[i], MixerPart)]
    labels += [f"{i}_mixer_out" for i in mixers]
    of_mixers = [pos.apply(cache[f"blocks.{i}.hook_mixer_out"], -2)[None] for i in mixers]
    stack = torch.cat(together([stack, *of_mixers], model.device))
    neurons: list[Tensor] = []
    if expand_neurons:
        neurons, more = _neurons(model, cache, layer, Slice(), pos, project_output_onto, norm)
    else:
        mlps, more = decompose_resid(model, cache, layer, False, "mlp", False, pos, incl_embeds=False)
        stack = torch.cat(together([stack, mlps], model.device))
    rest = embeds | {"bias": biases(model, cache, layer, mlp_input, expand_neurons, pos, like)}
    stack = _normed_and_projected(stack, norm, project_output_onto)
    last = _normed_and_projected(torch.stack(list(rest.values())), norm, project_output_onto)
    return torch.cat(together([stack, *neurons, last], model.device)), [*labels, *more, *rest]


def biases(
    model: HookedRootModule,
    cache: Cache,
    layer: int,
    mlp_input: bool,
    include_mlp_biases: bool,
    pos: Slice,
    like: Vectors,
) -> Vectors:
    """The sum of the output biases of sublayers and of the norms after them, as added to the stream."""
    total = torch.zeros_like(like)
    for i in range(attention_bound(model, layer, mlp_input)):
        block = model.blocks[i]
        if isinstance(block, AttentionPart):  # the output of a mixer is one component, which includes its bias
            total = total + output_norm(model, cache, i, "ln1_post", pos).bias_in_stream(block.attn.b_O, like)
        if include_mlp_biases and i < layer and isinstance(block, MLPPart):
            mlp: Any = block.mlp
            total = total + output_norm(model, cache, i, "ln2_post", pos).bias_in_stream(mlp.b_out, like)
    return total
