"""Exports models to TransformerLens: its config and its state dict."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hooked_lm.components.blocks.wiring import shares_norm
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.models.weights.foreign_state_dict import TABLES
from hooked_lm.models.weights.state import BIASES, load_state
from hooked_lm.pretrained import HookedEncoderDecoder, HookedTransformer

TOLERANCE = 1e-3  # relative to the largest logit
NOT_IN_TRANSFORMER_LENS = {
    "tree", "processed", "device", "n_params", "default_padding_side", "eos_token_id", "pad_token_id", "n_token_types",
    "n_decoder_layers", "forced_bos_token_id", "suppress_tokens", "fused_attention", "left_out", "dequantized_from",
    "kept_quantized",
    "tokenizer_name",  # a tokenizer is passed separately
}  # fmt: skip


@torch.no_grad()
def for_transformer_lens(model: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config fields and the weights of the same model in TransformerLens.

    In TransformerLens: `model = HookedTransformer(HookedTransformerConfig.from_dict(fields))` (or `HookedEncoder`,
    `HookedEncoderDecoder`), then `model.load_state_dict(weights, strict=False)`, which keeps its masks and rotary tables.
    Absent biases are zeros; offsets of norms and scales of embeddings are folded into the weights.

    Raises ValueError if a flat config cannot describe the model, so that its logits would differ.

    >>> from hooked_lm import HookedTransformer
    >>> fields, weights = for_transformer_lens(HookedTransformer.from_pretrained("demo"))
    >>> fields["n_layers"], weights["blocks.0.attn.b_Q"].shape
    (4, torch.Size([8, 16]))
    """
    fields = _fields(model)
    weights = _weights(model, fills=fields["normalization_type"] in ("LN", "RMS"))
    _check(model, fields, weights)
    is_grouped = fields["n_key_value_heads"] not in (None, fields["n_heads"])
    return fields, dict(
        _transformer_lens_name(name, value.clone(), is_grouped) for name, value in weights.items() if _is_known(name)
    )


@torch.no_grad()
def transformer_lens_weights(model: Any, is_grouped: bool) -> dict[str, Tensor]:
    """The weights of an unfolded model by TransformerLens' names, with those that are absent here; views if possible.

    Keys and values are `_W_K`, `_W_V` if they are grouped. Unlike `for_transformer_lens` this does not check that a flat
    config describes the model.
    """
    weights, own = _weights(model, fills=True), {*model.state_dict()}
    for name in [name for name in own if name.endswith((".W_gate_in", ".b_gate_in"))]:
        both, leaf = weights.pop(name), name.removesuffix("gate_in")
        weights |= {leaf + "gate": both[..., 0::2], leaf + "in": both[..., 1::2]}
        own |= {leaf + "gate", leaf + "in"}
    known = {name: value for name, value in weights.items() if name in own or _is_known(name)}
    return dict(_transformer_lens_name(name, value, is_grouped) for name, value in known.items())


def _weights(model: Any, fills: bool) -> dict[str, Tensor]:
    """All weights as TransformerLens uses them, by the names of hooked_lm."""
    unread = (*TABLES, "pos_embed.before")
    weights = {name: value for name, value in model.state_dict().items() if not name.endswith(unread)}
    for prefix, module in model.named_modules():
        if module is not model:
            weights |= {f"{prefix}.{name}": value for name, value in _added_weights(module, fills, model.embed.W_E)}
    for prefix, block in model.named_modules():
        if shares_norm(block):  # TransformerLens has a separate norm for each of the two
            weights |= {
                f"{prefix}.ln2.{x}": weights[f"{prefix}.ln1.{x}"] for x in "wb" if f"{prefix}.ln1.{x}" in weights
            }
    _with_scales(model, weights)
    if model.cfg.positional_embedding_type == "alibi":
        weights["pos_embed.W_pos"] = model.W_E.new_zeros(model.cfg.n_ctx, model.cfg.d_model)
    return weights


def _fields(model: Any) -> dict[str, Any]:
    """The flat config with all fields that TransformerLens requires. There all norms have weights if one has."""
    cfg = model.cfg
    fields = {name: value for name, value in cfg.to_dict().items() if name not in NOT_IN_TRANSFORMER_LENS}
    norms = [m for name, m in model.named_modules() if name.endswith((".ln1", ".ln2", ".mlp.ln"))]
    final = [] if cfg.final_rms else [getattr(model, "ln_final", None)]
    if any(getattr(norm, "w", None) is not None for norm in [*norms, *final]):
        fields["normalization_type"] = cfg.normalization_type.removesuffix("Pre")
    if cfg.use_local_attn and cfg.attn_types is None:
        fields["attn_types"] = ["local"] * cfg.n_layers
    if cfg.use_yarn_rope and cfg.yarn_attention_factor is None:
        rotary = next(block.attn.rotary for block in cfg.tree.blocks if block.attn.rotary is not None)
        fields["yarn_attention_factor"] = rotary.scaling(rotary, cfg.n_ctx)[1]
    if not cfg.use_yarn_rope:
        del fields["yarn_attention_factor"]
    return fields


def _added_weights(module: Any, fills: bool, like: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The weights of one module that differ from the state dict: norms with an offset, and absent weights."""
    if isinstance(module, (LayerNorm, RMSNorm)) and (fills or module.cfg.weight):
        gain = module.gain()
        gain = like.new_ones(module.cfg.shape) if gain is None else gain.to(like.dtype)
        yield "w", gain.flatten() if getattr(module.cfg, "joint", False) else gain
        if isinstance(module, LayerNorm) and not module.cfg.bias:
            yield "b", like.new_zeros(module.cfg.shape)
    for bias, weight_name in (pair for group in BIASES.values() for pair in group.items()):
        weight = getattr(module, weight_name, None)
        if isinstance(weight, Tensor) and getattr(module, bias, weight) is None:
            yield bias, weight.new_zeros(weight.shape[-1:] if bias == "b_O" else (*weight.shape[:-2], weight.shape[-1]))


def _with_scales(model: Any, weights: dict[str, Tensor]) -> None:
    """Multiplies weights by the scales that the model applies after them."""
    if (scale := getattr(getattr(model.embed, "cfg", None), "scale", 1.0)) != 1.0:
        weights["embed.W_E"] = weights["embed.W_E"] * torch.tensor(scale).to(weights["embed.W_E"])
    if not isinstance(model, HookedEncoderDecoder) and model.unembed is not None and model.unembed.cfg.scale != 1.0:
        for name in ("unembed.W_U", "unembed.b_U"):
            weights[name] = weights[name] * model.unembed.cfg.scale


def _check(model: Any, fields: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Raises ValueError unless the fields and weights give the same model, and TransformerLens has all these weights."""
    for name, value in weights.items():
        if name.endswith(".mlp.b_gate") and (value.any() or weights[name.replace("b_gate", "b_in")].any()):
            raise ValueError(
                f"'{name}' or the bias b_in beside it is not zero, and gated MLPs of TransformerLens have no biases"
            )
    cfg = type(model.cfg).from_dict({**fields, "device": "cpu", "init_weights": False, "tie_word_embeddings": False})
    if isinstance(model, HookedEncoderDecoder):
        cfg = type(model.cfg).from_dict({**fields, "device": "cpu", "init_weights": False})
    same = type(model)(cfg)
    if isinstance(model, HookedTransformer):
        load_state(same, weights)
    else:
        same.load_state_dict(weights)
    tokens = torch.randint(model.cfg.d_vocab, (2, min(16, model.cfg.n_ctx)), generator=torch.Generator().manual_seed(0))
    here, there = (m(tokens.to(m.device), return_type="logits").cpu().float() for m in (model, same))
    if not (here - there).abs().max() <= TOLERANCE * here.abs().max():
        raise ValueError(
            "a flat config cannot describe this model: one built from its fields, with the same weights, has other logits"
        )


def _is_known(name: str) -> bool:
    """Whether TransformerLens can have a nonzero weight of this name."""
    return (
        not name.endswith((".mlp.b_gate", ".b_router", ".b_shared_gate"))
        and ".experts." not in name.rpartition(".b_")[0]
    )


def _transformer_lens_name(name: str, value: Tensor, is_grouped: bool) -> tuple[str, Tensor]:
    module, _, leaf = name.rpartition(".")
    if is_grouped and leaf in ("W_K", "W_V", "b_K", "b_V"):
        return f"{module}._{leaf}", value
    if ".experts." in module and leaf.startswith("W_"):
        return f"{name}.weight", value.T.contiguous()
    if ".experts." in module and leaf.startswith("b_"):
        return f"{module}.W{leaf[1:]}.bias", value
    if leaf == "b_router":
        return f"{module}.W_gate.bias", value
    if leaf == "W_router":
        return f"{module}.W_gate.weight", value.T.contiguous()
    if leaf == "W_rel":
        return f"{module.removesuffix('_rel_pos_bias')}.0.attn.rel_pos_bias.weight", value
    return name, value
