"""Decomposes the residual stream of a run into what each component wrote, and into contributions to the logits.

Functions of a model and the cache of one run; the methods of `ActivationCache` with the same names document the
arguments. A stack has its components on the first axis; functions that label components return (stack, labels).
A component is what is added to the stream: the output of a head or neuron, through the norm after its sublayer (with the
scale of the run), times the residual multiplier and what multiplies the stream after it. Components sum to the stream. A model
with norms in the stream itself has no such sum: ValueError. Weights are detached, and moved to the device and dtype of the cache.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm import hooks
from hooked_lm.callers import warn_caller
from hooked_lm.components.blocks.wiring import has_part
from hooked_lm.components.embeddings.embed import Unembed
from hooked_lm.components.embeddings.transformed_unembed import check_linear
from hooked_lm.components.experts.moe import AbstractMoE
from hooked_lm.components.norms.norm import norm_of, norm_unhooked
from hooked_lm.hooks import HookedRootModule, Slice
from hooked_lm.models.caches.residual import (
    Cache,
    Part,
    Vectors,
    as_slice,
    attention_bound,
    embedding_sites,
    input_norm,
    layer_bound,
    mid_site,
    named_input_norm,
    output_norm,
    positions_in,
    stream,
)
from hooked_lm.models.checks import check_one_stream
from hooked_lm.models.names import checked_index
from hooked_lm.models.placement import together
from hooked_lm.models.weights.fixed_norm import FixedNorm, norm_gain
from hooked_lm.models.weights.terms import Term, Terms, check_mlp, terms_at, times

OF_MODE = {"attn": "attn", "mixer": "attn", "mlp": "mlp"}
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
    cache: hooks.Cache,
    layer: int | None = None,
    incl_mid: bool = False,
    apply_ln: bool = False,
    pos_slice: Part = None,
    mlp_input: bool = False,
) -> tuple[Stack, list[str]]:
    """The stream before each block up to a layer, and with `incl_mid` between its sublayers."""
    check_one_stream(model, "there is no accumulated stream")
    n_layers, layer, pos = model.cfg.n_layers, layer_bound(model, layer), positions_in(cache, pos_slice)
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
    layer, pos = layer_bound(model, layer), positions_in(cache, pos_slice)
    of = terms_at(model, layer, mlp_input)
    parts = entering(model, cache, of, pos) if incl_embeds else {}
    parts |= written(cache, [term for term in of.terms if term.step and mode in ("all", OF_MODE.get(term.part))], pos)
    stack = _stacked(model, [*parts.values()], lambda: pos.apply(stream(model, cache, layer, mlp_input), -2))
    return (input_norm(model, cache, layer, mlp_input, pos)(stack) if apply_ln else stack), list(parts)


def entering(model: HookedRootModule, cache: Cache, of: Terms, pos: Slice) -> dict[str, Vectors]:
    """Label -> what enters the stream besides the outputs of sublayers: the embeddings, the features of images that are added
    later, and constants."""
    parts = {label: times(pos.apply(cache[site], -2), of.embeddings) for label, site in embedding_sites(model).items()}
    parts |= written(cache, [term for term in of.terms if term.step is None], pos)
    like = parts["embed"]
    return parts | {label: constant.to(like).expand_as(like) for label, constant in of.constants}


def written(cache: Cache, terms: Sequence[Term], pos: Slice) -> dict[str, Vectors]:
    """Label -> term of the stream, whole."""
    return {term.label: times(pos.apply(cache[term.site], -2), term.factor) for term in terms}


def apply_ln_to_stack(
    model: HookedRootModule,
    cache: hooks.Cache,
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
    layer, pos, rows = layer_bound(model, layer), positions_in(cache, pos_slice), as_slice(batch_slice)
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
    cache: hooks.Cache,
    residual_stack: Stack,
    tokens: object,
    incorrect_tokens: object = None,
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
    return torch.einsum("...m,...m->...", stack, _with_pos_axis(directions.to(stack), stack.shape[1:-1]))


def _ids(model: HookedRootModule, tokens: object) -> Tensor:
    """Token ids of strings or ids; a scalar if there is one. Warns of words without the space that they have after a word."""
    given = tokens if isinstance(tokens, (list, tuple)) else [tokens]
    if bare := [word for word in given if isinstance(word, str) and model.tokens.without_space(word)]:
        warn_caller(
            f"{bare[0]!r} has no leading space, so it is not the token that follows a word: give {f' {bare[0]}'!r}, or an id for "
            "the token without a space"
        )
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
    if not has_part(model.blocks[layer], "attn"):
        raise ValueError(f"there is no attention at layer {layer}, so it has no heads")
    pos, name = positions_in(cache, pos_slice), f"blocks.{layer}.attn.hook_result"
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
    layer, pos = layer_bound(model, layer), positions_in(cache, pos_slice)
    heads = terms_at(model, layer).of("attn")
    stack, labels = _heads(model, cache, heads, pos, lambda: pos.apply(stream(model, cache, layer), -2))
    if incl_remainder:
        rest = pos.apply(stream(model, cache, layer), -2).to(stack.device) - stack.sum(0)
        stack, labels = torch.cat([stack, rest[None]]), [*labels, "remainder"]
    return (input_norm(model, cache, layer, False, pos)(stack) if apply_ln else stack), labels


def _heads(
    model: HookedRootModule, cache: Cache, terms: Sequence[Term], pos: Slice, like: Callable[[], Tensor]
) -> tuple[Stack, list[str]]:
    parts: list[Tensor] = []
    for term in terms:
        added = output_norm(model, cache, term, pos)(head_results(model, cache, term.layer, pos), extra_axes=1)
        parts += added.unbind(-2)
    labels = [f"L{term.layer}H{h}" for term in terms for h in range(model.blocks[term.layer].attn.cfg.n_heads)]
    return _stacked(model, parts, like), labels


# ---- neurons -----------------------------------------------------------------------------------------------


def get_neuron_results(
    model: HookedRootModule,
    cache: Cache,
    layer: int,
    neuron_slice: Part = None,
    pos_slice: Part = None,
    project_output_onto: Tensor | None = None,
) -> Float[Tensor, "*lead"]:
    """What each neuron of a layer added to the stream, [..., neuron, d_model], or its products with directions."""
    layer = checked_index(layer, model.cfg.n_layers, "layer")
    check_mlp(model, layer)
    term = Term.of(model.blocks[layer], layer, "mlp")
    return neuron_results(
        model, cache, term, as_slice(neuron_slice), positions_in(cache, pos_slice), project_output_onto
    )


def neuron_results(
    model: HookedRootModule,
    cache: Cache,
    term: Term,
    neurons: Slice,
    pos: Slice,
    project_output_onto: Tensor | None = None,
    norm: FixedNorm | None = None,
) -> Float[Tensor, "*lead"]:
    """What each neuron of a layer adds to the stream at the place of the term, or its products with directions.

    `norm` is a norm to apply to the result. Norms and directions are applied to the output weights, before these are
    multiplied by the activations, so that no tensor is larger than the result.
    """
    layer = term.layer
    if isinstance(model.blocks[layer].mlp, AbstractMoE):
        raise ValueError(
            f"the neurons of layer {layer} belong to experts, each of which processes only some tokens: see 'blocks.{layer}"
            ".mlp.experts.*.hook_post', or decompose by whole layers with expand_neurons=False"
        )
    post_norm = output_norm(model, cache, term, pos)
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
    layer, pos = layer_bound(model, layer), positions_in(cache, pos_slice)
    norm = input_norm(model, cache, layer, False, pos) if apply_ln else None
    terms, neurons = terms_at(model, layer).of("mlp"), Slice.unwrap(neuron_slice)
    parts, labels = _neurons(model, cache, terms, neurons, pos, project_output_onto, norm)
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
    terms: Sequence[Term],
    neurons: Slice,
    pos: Slice,
    project: Tensor | None,
    norm: FixedNorm | None,
) -> tuple[list[Projected], list[str]]:
    """One stack of neurons for each of these terms, and the labels of all."""
    parts, labels = [], []
    neuron_axis = -1 if project is not None and project.ndim == 1 else -2
    for term in terms:
        parts.append(neuron_results(model, cache, term, neurons, pos, project, norm).movedim(neuron_axis, 0))
        numbers = neurons.apply(torch.arange(model.blocks[term.layer].mlp.W_out.shape[0]))
        labels += [f"L{term.layer}N{n}" for n in numbers.tolist()]
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
    layer, pos = layer_bound(model, layer), positions_in(cache, pos_slice)
    norm = input_norm(model, cache, layer, mlp_input, pos) if apply_ln else None
    of = terms_at(model, layer, mlp_input)
    first = entering(model, cache, of, pos)
    like = first["embed"]
    heads, labels = _heads(model, cache, of.of("attn"), pos, lambda: like)
    mlps = of.of("mlp")
    whole = [term for term in of.terms if term.step is not None and term.part not in ("attn", "mlp")]
    whole += [rest for term in mlps for rest in term.rest] if expand_neurons else mlps
    others = written(cache, whole, pos)
    stack = torch.cat(together([heads, *(part[None] for part in others.values())], model.device))
    neurons, more = (
        _neurons(model, cache, mlps, Slice(), pos, project_output_onto, norm) if expand_neurons else ([], [])
    )
    rest = first | {"bias": biases(model, cache, of.of("attn", "mlp") if expand_neurons else of.of("attn"), pos, like)}
    stack = _normed_and_projected(stack, norm, project_output_onto)
    last = _normed_and_projected(torch.stack(together([*rest.values()], model.device)), norm, project_output_onto)
    return torch.cat(together([stack, *neurons, last], model.device)), [*labels, *others, *more, *rest]


def biases(model: HookedRootModule, cache: Cache, terms: Sequence[Term], pos: Slice, like: Vectors) -> Vectors:
    """The sum of the output biases of attention and MLPs and of the norms after them, as added to the stream. The outputs of
    other parts are components that include them."""
    total = torch.zeros_like(like)
    for term in terms:
        part: Any = getattr(model.blocks[term.layer], term.part)
        bias = part.b_O if term.part == "attn" else part.b_out
        total = total + output_norm(model, cache, term, pos).bias_in_stream(bias, like)
    return total
