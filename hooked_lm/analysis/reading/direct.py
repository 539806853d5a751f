"""Direct logit attribution: the direct contribution of each component to a logit."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.components.blocks.wiring import has_part
from hooked_lm.components.embeddings.transformed_unembed import check_linear
from hooked_lm.components.experts.moe import AbstractMoE
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import norm_of
from hooked_lm.engine.answers import Answers, answers_of_prompts, right_and_wrong
from hooked_lm.engine.conversations import reads_chats
from hooked_lm.engine.prompts import AxisSelection, Prompts, chosen, position_labels, rows_of
from hooked_lm.hooks import Slice
from hooked_lm.models.caches import decompose, residual
from hooked_lm.models.caches.activation_cache import ActivationCache
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.vision.inputs import Rows
from hooked_lm.models.weights.fixed_norm import norm_gain
from hooked_lm.models.weights.terms import Term, terms_at
from hooked_lm.results import Label
from hooked_lm.results.gap import warn_if_small
from hooked_lm.results.groups import Groups, checked_groups
from hooked_lm.results.scores import Scores, provenance

__all__ = ["direct_logit_attribution", "source_attribution"]

Part = tuple[list[str], Float[Tensor, "component prompt"]]
Parts = list[Part]


@torch.no_grad()
@reads_chats
def direct_logit_attribution(
    model: Decoder,
    prompts: Prompts,
    answers: Answers,
    wrong_answers: Answers | None = None,
    *,
    by: str = "layer",
    layers: AxisSelection = "each",
    positions: int = -1,
    groups: Groups = None,
) -> Scores:
    """The direct contribution of each component to the logit of an answer, or to its difference from that of a wrong answer.

    The residual stream at a position is the sum of the outputs of the embeddings and all sublayers. With the scale of the final
    norm held fixed, the logit before any soft cap is linear in it, so the contributions of all components sum to that logit.
    (`about` names the soft cap of a model.) Indirect effects through later components are not included. The method is due to
    Elhage et al. 2021, "A mathematical framework for transformer circuits".

    Warns if the mean difference is within two standard errors over prompts of 0, as in a model that does not do the task. One
    prompt has no standard error, and a logit alone no zero that means something: neither warns.

    Args:
        prompts: texts or ids [batch, pos], of one length; `VisionInputs` for a model that reads images.
        answers, wrong_answers: strings or ids; one for all prompts, or a list or tensor with one for each prompt.
        by: "layer": attention and MLP of each layer; "head": attention split into heads and bias; "neuron": MLPs split into
            neurons and bias.
        layers: the layers to split into heads or neurons; the others stay whole, so that the sum holds.
        positions: the position of the logits, -1 for the last.
        groups: a label for each prompt, such as its template: intervals count groups, not prompts (see `Scores`).

    Returns Scores with the axis component: "embed", "pos_embed", "0_attn_out" or "L0H0", ... and "0_attn_bias", "0_mlp_out" or
    "L0N0", ... and "0_mlp_bias", "ln_final_bias" and "unembed_bias", those that the model has.

    Raises ValueError for answers that do not fit, for a model whose residual stream is not a sum of outputs (such as a post-norm
    model), and for neurons of a mixture of experts; IndexError for positions and layers out of range.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> found = direct_logit_attribution(
    ...     model, "The capital of France is", " Paris", " Rome", by="head"
    ... )
    >>> logits = model("The capital of France is")[0, -1]
    >>> difference = (
    ...     logits[model.to_single_token(" Paris")] - logits[model.to_single_token(" Rome")]
    ... )
    >>> bool((found.values.sum() - difference).abs() < 1e-3)
    True
    """
    if by not in ("layer", "head", "neuron"):
        raise ValueError(f"by must be 'layer', 'head' or 'neuron', got {by!r}")
    apart = _apart(model, by, layers)
    tokens, ids, others, pos = _checked(model, prompts, answers, wrong_answers, positions)
    of_prompts = checked_groups(groups, len(tokens))
    run = _Run(model, tokens, ids, others, pos, _sites(model, by, apart))
    whole, names = run.cache.decompose_resid(pos_slice=pos, return_labels=True)
    parts: Parts = []
    split = {
        term.label: term for term in run.terms.of({"head": "attn", "neuron": "mlp"}.get(by, "")) if term.layer in apart
    }
    for name, component, value in zip(names, whole, run.read(whole), strict=True):
        if (term := split.get(name)) is None:
            parts.append(([name], value[None]))
        else:
            parts.append(run.heads(term, component) if by == "head" else run.neurons(term, component))
    parts.append(run.constants())
    axes = {"component": [name for names, _ in parts for name in names]}
    found = torch.cat([values for _, values in parts])
    run.warn_if_small(found.sum(0))
    return Scores(found, axes, about=_about(model, wrong_answers, pos), groups=of_prompts)


@torch.no_grad()
@reads_chats
def source_attribution(
    model: Decoder,
    prompts: Prompts,
    answers: Answers,
    wrong_answers: Answers | None = None,
    *,
    layers: AxisSelection = "each",
    positions: int = -1,
    groups: Groups = None,
) -> Scores:
    """The direct contribution of each head to a logit (difference), split by source position: pattern x value through `W_O`.

    Arguments, warnings and errors are those of `direct_logit_attribution`. Returns Scores with the axes layer, head and position,
    whose sum over positions is the contribution of the head. NaN where a layer has fewer heads. Also raises ValueError for layers
    whose heads are not a sum over positions, such as those that normalise `z`.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> found = source_attribution(
    ...     model, "The capital of France is", " Paris", " Rome", layers=[2, 3]
    ... )
    >>> {name: len(labels) for name, labels in found.axes.items()}
    {'layer': 2, 'head': 8, 'position': 6}
    """
    which = chosen(layers, model.cfg.n_layers, "layer") or list(range(model.cfg.n_layers))
    tokens, ids, others, pos = _checked(model, prompts, answers, wrong_answers, positions)
    of_prompts = checked_groups(groups, len(tokens))
    if without := [layer for layer in which if not has_part(model.blocks[layer], "attn")]:
        raise ValueError(f"layers {without} have no attention: leave them out of layers")
    sites = [f"blocks.{layer}.attn.hook_{name}" for layer in which for name in ("pattern", "v", "z")]
    last = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    run = _Run(model, tokens, ids, others, pos, [*sites, *_norms(model), last])
    each = [run.sources(layer) for layer in which]  # [prompt, head, pos]
    run.warn_if_small(run.read(run.pos.apply(run.cache[last], -2)[None])[0] + run.constants()[1].sum(0))
    n_heads = max(part.shape[1] for part in each)
    values = torch.full((len(which), n_heads, tokens.shape[1], len(tokens)), float("nan"))
    for place, part in enumerate(each):
        values[place, : part.shape[1]] = part.permute(1, 2, 0).cpu()
    axes: dict[str, Sequence[Label]] = {
        "layer": which,
        "head": list(range(n_heads)),
        "position": position_labels(model, tokens),
    }
    return Scores(values, axes, about=_about(model, wrong_answers, pos), groups=of_prompts)


class _Run:
    """A cached run, and the contributions of its components to the logits at one position."""

    def __init__(
        self,
        model: Decoder,
        tokens: Rows,
        ids: Int[Tensor, " prompt"],
        others: Int[Tensor, " prompt"] | None,
        pos: int,
        sites: Sequence[str],
    ) -> None:
        self.model, self.ids, self.others, self.pos = model, ids, others, Slice(pos)
        self.terms = terms_at(model, model.cfg.n_layers)
        _, self.cache = model.run_with_cache(tokens, names_filter=list(sites), return_type=None)

    def read(self, written: Float[Tensor, "component prompt d_model"]) -> Float[Tensor, "component prompt"]:
        """The contributions of residual stream vectors to the logits."""
        cache: ActivationCache = self.cache
        return cache.logit_attrs(written, self.ids, self.others, pos_slice=self.pos)

    def warn_if_small(self, difference: Float[Tensor, " prompt"]) -> None:
        """Warns if the mean difference of logits may be 0."""
        if self.others is not None:
            between = "the logits of the answers and of the wrong answers"
            advice = "the model may not do this task, as an untrained one does not"
            warn_if_small(difference, between, advice)

    def heads(self, term: Term, like: Float[Tensor, "prompt d_model"]) -> Part:
        """The contributions of the heads and the attention bias of a layer."""
        layer = term.layer
        results = decompose.head_results(self.model, self.cache, layer, self.pos)
        post_norm = residual.output_norm(self.model, self.cache, term, self.pos)
        bias = decompose.biases(self.model, self.cache, [term], self.pos, like)
        written = torch.cat([post_norm(results, extra_axes=1).movedim(-2, 0), bias[None]])
        return [*(f"L{layer}H{head}" for head in range(len(written) - 1)), f"{layer}_attn_bias"], self.read(written)

    def neurons(self, term: Term, like: Float[Tensor, "prompt d_model"]) -> Part:
        """The contributions of the neurons and the MLP bias of a layer, without computing each neuron's output vector, and of
        what is added to the output of the MLP."""
        model, layer = self.model, term.layer
        norm = residual.input_norm(model, self.cache, model.cfg.n_layers, False, self.pos)
        directions, of_prompt = self.directions()
        each = decompose.neuron_results(model, self.cache, term, Slice(), self.pos, directions, norm)
        values = each.gather(-1, of_prompt[:, None, None].expand(-1, each.shape[1], 1))[..., 0].T
        rest = {f"{layer}_mlp_bias": decompose.biases(model, self.cache, [term], self.pos, like)}
        rest |= decompose.written(self.cache, term.rest, self.pos)
        names = [*(f"L{layer}N{neuron}" for neuron in range(len(values))), *rest]
        return names, torch.cat([values, self.read(torch.stack([*rest.values()]))])

    def directions(self) -> tuple[Float[Tensor, "d_model direction"], Int[Tensor, " prompt"]]:
        """The distinct directions of the logits after the final norm's division, and the index of each prompt's direction."""
        check_linear(self.model.unembed)
        columns = [self.ids] if self.others is None else [self.ids, self.others]
        pairs, of_prompt = torch.stack(columns, 1).unique(dim=0, return_inverse=True)
        W_U, scale = self.model.W_U.detach(), self.model.unembed.cfg.scale
        directions = W_U[:, pairs[:, 0]] - (0 if self.others is None else W_U[:, pairs[:, 1]])
        if (gain := norm_gain(norm_of(self.model, "ln_final"))) is not None:
            directions = directions * gain[:, None].to(directions)
        return directions * scale, of_prompt

    def sources(self, layer: int) -> Float[Tensor, "prompt head key_pos"]:
        """The contribution of each head to the logits, by source position."""
        model, cache, attn = self.model, self.cache, self.model.blocks[layer].attn
        pattern = self.pos.apply(cache["pattern", layer], -2)
        values = cache["v", layer]
        values = values.repeat_interleave(pattern.shape[1] // values.shape[2], 2).transpose(1, 2)
        moved = pattern[..., None] * values  # [prompt, head, key_pos, d_head]
        z = self.pos.apply(cache["z", layer], -3)
        off = (moved.sum(2) - z).abs().max() if moved.sum(2).shape == z.shape else float("inf")
        rounding = max(1e-3, 16 * torch.finfo(z.dtype).eps) * max(1.0, float(z.abs().max()))
        if not isinstance(norm_of(attn, "z_norm"), torch.nn.Identity) or not off <= rounding:
            raise ValueError(
                f"the heads of layer {layer} are not a sum over positions of pattern x value: leave it out of layers"
            )
        [term] = (term for term in self.terms.of("attn") if term.layer == layer)
        post_norm = residual.output_norm(model, cache, term, self.pos)
        found = []
        for head in range(moved.shape[1]):
            written = post_norm(moved[:, head] @ attn.W_O[head].detach().to(moved), extra_axes=1)
            found.append(self.read(written.transpose(0, 1)))
        return torch.stack(found).permute(2, 0, 1)

    def constants(self) -> Part:
        """The contributions of the biases of the final norm and the unembedding."""
        model, parts = self.model, []
        final = norm_of(model, "ln_final")
        if isinstance(final, LayerNorm) and (shift := final.shift()) is not None:
            parts.append(("ln_final_bias", shift.detach() @ model.W_U.detach()))
        if model.unembed.b_U is not None:
            parts.append(("unembed_bias", model.unembed.b_U.detach()))
        scale = model.unembed.cfg.scale
        values = [scale * (b[self.ids] - (0 if self.others is None else b[self.others])) for _, b in parts]
        return [name for name, _ in parts], torch.stack(values) if values else model.W_U.new_empty(0, len(self.ids))


def _apart(model: Decoder, by: str, layers: AxisSelection) -> set[int]:
    """The layers to split into heads or neurons."""
    if by == "layer":
        return set()
    which = set(chosen(layers, model.cfg.n_layers, "layer") or range(model.cfg.n_layers))
    experts = {
        i for i, block in enumerate(model.blocks) if has_part(block, "mlp") and isinstance(block.mlp, AbstractMoE)
    }
    if by == "neuron" and which & experts:
        rest = sorted(which - experts)
        fix = f"give layers={rest}, or by='layer'" if rest else "take them whole, by='layer'"
        raise ValueError(
            f"layers {sorted(which & experts)} are mixtures of experts, whose neurons see a few tokens each: {fix}"
        )
    return which


def _checked(
    model: Decoder, prompts: Prompts, answers: Answers, wrong_answers: Answers | None, pos: int
) -> tuple[Rows, Int[Tensor, " prompt"], Int[Tensor, " prompt"] | None, int]:
    """The ids of prompts, answers and wrong answers, and the non-negative position."""
    if not len(prompts):
        raise ValueError("there are no prompts: give at least one text or row of ids")
    tokens = rows_of(model, prompts).to(model.device)
    if not -tokens.shape[1] <= pos < tokens.shape[1]:
        raise IndexError(f"position {pos} is out of range: the prompts have {tokens.shape[1]} tokens")
    ids = _one_each(model, answers, len(tokens), "answers")
    others = None if wrong_answers is None else _one_each(model, wrong_answers, len(tokens), "wrong_answers")
    if others is not None:
        right_and_wrong(ids, others, model)  # raises for two that are the same
    return tokens, ids, others, pos % tokens.shape[1]


def _one_each(model: Decoder, answers: Answers, batch: int, name: str) -> Int[Tensor, " prompt"]:
    """One token id for each prompt."""
    ids = answers_of_prompts(answers, batch, name, model)
    if ids.shape[1] > 1:
        raise ValueError(f"{name} must be one token for each prompt, got {ids.shape[1]}")
    return ids[:, 0]


def _norms(model: Decoder) -> list[str]:
    """The `hook_scale` sites of the norms after sublayers, and of the final norm."""
    ends = ("ln1_post.hook_scale", "ln2_post.hook_scale", "ln_final.hook_scale")
    return [name for name in model.all_points() if name.endswith(ends)]


def _sites(model: Decoder, by: str, apart: set[int]) -> list[str]:
    """The sites that a decomposition needs."""
    terms = terms_at(model, model.cfg.n_layers).terms
    sites = [*residual.embedding_sites(model).values(), *(term.site for term in terms)]
    for layer in apart:
        block = model.blocks[layer]
        if by == "head" and has_part(block, "attn"):
            sites += [name for name in model.all_points() if name.startswith(f"blocks.{layer}.attn.") and _of_z(name)]
        if by == "neuron" and has_part(block, "mlp"):
            sites += [site for site in [f"blocks.{layer}.mlp.hook_post"] if site in model.hook_dict]
            sites += [rest.site for term in terms if term.layer == layer for rest in term.rest]
    return [*sites, *_norms(model)]


def _of_z(name: str) -> bool:
    return name.endswith("attn.hook_z") or ".z_norm." in name


def _about(model: Decoder, wrong_answers: Answers | None, pos: int) -> dict[str, Any]:
    of = "logit" if wrong_answers is None else "logit difference"
    cap = getattr(model.unembed.cfg, "soft_cap", None)
    return provenance(model, of=of if cap is None else f"{of} before the soft cap of {cap:g}", position=pos)
