"""The weights of a decoder as a dictionary, and which of them there are: norms and biases may come and go."""

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from hooked_lm.components.attention.public_attributes import order_parameters
from hooked_lm.components.blocks.block import MLPPart
from hooked_lm.components.embed import TiedUnembed
from hooked_lm.components.factored_embed import FactoredUnembed
from hooked_lm.components.layer_norm import LayerNorm
from hooked_lm.components.mlp import MLP, GatedMLP
from hooked_lm.components.moe import MoE
from hooked_lm.components.norm import RMSNorm, norm_of
from hooked_lm.models.weights.foreign_state_dict import TABLES, in_our_names

# A config has one flag for all the biases of a group: flag -> bias and weight of each.
BIASES = {
    "qkv_bias": {"b_Q": "W_Q", "b_K": "W_K", "b_V": "W_V"},
    "out_bias": {"b_O": "W_O"},
    "down_bias": {"b_DQ": "W_DQ", "b_DKV": "W_DKV", "b_KR": "W_KR"},
    "bias": {"b_in": "W_in", "b_gate": "W_gate", "b_out": "W_out", "b_U": "W_U", "b_gate_in": "W_gate_in"}
    | {"b_x": "W_x", "b_B": "W_B", "b_C": "W_C", "b_dt": "W_dt"},
    "router_bias": {"b_router": "W_router", "b_shared_gate": "W_shared_gate"},
}


def load_state(model: Any, state_dict: dict[str, Tensor]) -> None:
    """Load a dictionary of weights, also one that was saved elsewhere; nothing counts as processed afterwards.

    Names and tables of other libraries are understood, see `in_our_names`. A norm or bias follows the dictionary: absent
    there it becomes an identity or zeros; absent here it is made, unless it is all zeros. A `W_U` that differs from `W_E`
    unties, one instead of its factors takes their place. Raises ValueError, before anything is changed, for other names
    that are missing or too many, and for shapes that differ.
    """
    given = in_our_names(model, state_dict)
    _check_fit(model, given)
    if isinstance(model.unembed, TiedUnembed) and "unembed.W_U" in given:
        W_E, W_U = given.get("embed.W_E", model.embed.W_E), given["unembed.W_U"]
        if not torch.equal(W_U.T.to(W_E), W_E):
            model.untie()
    if _has_product(model, given):
        model.untie()
    for name, module in model.named_modules():
        if isinstance(module, (LayerNorm, RMSNorm)):
            _follow_norm(module, f"{name}.", given, model.embed.W_E)
        elif module is not model:
            _follow_biases(module, f"{name}.", given)
    sync_config(model)
    model.cfg.processed = ()
    model.load_state_dict(given)


def _check_fit(model: Any, given: Mapping[str, Tensor]) -> None:
    """Raises ValueError with all names and shapes in which a dictionary and a model do not fit."""
    own = {name: tuple(value.shape) for name, value in model.state_dict().items() if not name.endswith(TABLES)}
    if _has_product(model, given):
        own = {name: shape for name, shape in own.items() if name not in ("unembed.W_proj", "unembed.W_vocab")}
        own["unembed.W_U"] = tuple(model.W_U.shape)
    optional = _optional_shapes(model)
    known = {**optional, **own}
    problems = [f"no '{name}'" for name in own if name not in given and name not in optional]
    for name, value in given.items():
        if name not in known:
            near = get_close_matches(name, known, n=1)
            problems.append(f"the model has no '{name}'" + (f"; did you mean '{near[0]}'?" if near else ""))
        elif tuple(value.shape) != known[name]:
            problems.append(f"'{name}' is {tuple(value.shape)}, expected {known[name]}")
    if problems:
        shown = "".join(f"\n- {problem}" for problem in problems[:20])
        raise ValueError(f"the weights do not fit the model, which was left as it is:{shown}")


def _has_product(model: Any, given: Mapping[str, Tensor]) -> bool:
    """Whether a dictionary holds the product of what a factored unembedding keeps apart."""
    return isinstance(model.unembed, FactoredUnembed) and "unembed.W_U" in given


def _optional_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """The weights that a dictionary may have or leave out: those of norms, biases, and a tied unembedding."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, module in model.named_modules():
        if isinstance(module, (LayerNorm, RMSNorm)):
            leaves = ("w", "b") if isinstance(module, LayerNorm) else ("w",)
            shapes |= {f"{path}.{leaf}": module.cfg.shape for leaf in leaves}
        for biases in BIASES.values() if module is not model else ():
            shapes |= {
                f"{path}.{b}": _bias_shape(getattr(module, w), b) for b, w in biases.items() if hasattr(module, w)
            }
    return shapes | ({"unembed.W_U": tuple(model.W_U.shape)} if isinstance(model.unembed, TiedUnembed) else {})


def _bias_shape(weight: Tensor, name: str) -> tuple[int, ...]:
    """One number for each output: every axis of the weight but the one it reads, for W_O the two."""
    return tuple(weight.shape[-1:] if name == "b_O" else weight.shape[:-2] + weight.shape[-1:])


def _follow_norm(norm: Any, prefix: str, given: dict[str, Tensor], like: Tensor) -> None:
    """Make a norm and the dictionary agree on which of weight and bias there are; new ones have the dtype of `like`."""
    for name, flag in (("w", "weight"), ("b", "bias")):
        if prefix + name in given and getattr(norm.cfg, flag, None) is False:
            setattr(norm, name, nn.Parameter(like.new_empty(given[prefix + name].shape)))
            norm.cfg = replace(norm.cfg, **{flag: True})
    identity = {"w": 1 - getattr(norm.cfg, "offset", 0.0), "b": 0.0}
    for name, parameter in norm.named_parameters(recurse=False):
        given.setdefault(prefix + name, torch.full_like(parameter, identity[name]))


def _follow_biases(module: Any, prefix: str, given: dict[str, Tensor]) -> None:
    """Make a module and the dictionary agree on which biases there are."""
    for name in (bias for group in BIASES.values() for bias in group):
        if prefix + name in given and getattr(module, name, True) is None:
            if given[prefix + name].any():
                make_biases(module, name)
            else:
                del given[prefix + name]
        if isinstance(parameter := getattr(module, name, None), nn.Parameter):
            given.setdefault(prefix + name, torch.zeros_like(parameter))


def make_biases(module: Any, name: str) -> None:
    """Give a module that bias, and the others of the same config flag, as zeros."""
    flag, group = next((flag, group) for flag, group in BIASES.items() if name in group)
    for bias, weight_name in group.items():
        if hasattr(module, weight_name) and getattr(module, bias, True) is None:
            weight = getattr(module, weight_name)
            zeros = weight.new_zeros(_bias_shape(weight, bias))
            setattr(module, bias, nn.Parameter(zeros, requires_grad=weight.requires_grad))
    order_parameters(module)
    module.cfg = replace(module.cfg, **{flag: True})


def sync_config(model: Any) -> None:
    """Make the config tree, and the flat names that depend on it, say what the modules are now.

    The model gets a config of its own: the one it was built from may build others. Where somebody put another module, it
    says what stood there.
    """
    own = [block for block in model.blocks if _is_ours(block)]
    for block in own:
        norms = {name: m.cfg for name, m in block.named_children() if isinstance(m, (LayerNorm, RMSNorm))}
        parts = {name: getattr(block, name).cfg for name in ("attn", "mixer") if _is_ours(getattr(block, name, None))}
        parts |= {"mlp": _mlp_cfg(block.mlp)} if isinstance(block, MLPPart) and _is_ours(block.mlp) else {}
        block.cfg = replace(block.cfg, **parts, **norms)
    ln_final = norm_of(model, "ln_final")
    final = ln_final.cfg if isinstance(ln_final, (LayerNorm, RMSNorm)) else None
    before = zip(model.blocks, model.cfg.tree.blocks, strict=True)
    blocks = tuple(block.cfg if _is_ours(block) else cfg for block, cfg in before)
    if isinstance(norm := getattr(model.embed, "ln", None), (LayerNorm, RMSNorm)):
        model.embed.cfg = replace(model.embed.cfg, norm=norm.cfg)
    model.cfg = copy(model.cfg)
    ends = {name: getattr(model, name).cfg for name in ("embed", "unembed") if _is_ours(getattr(model, name))}
    if "unembed" in ends:  # the cap is the config's to say
        ends["unembed"] = replace(ends["unembed"], soft_cap=model.cfg.tree.unembed.soft_cap)
    model.cfg.adopt_tree(replace(model.cfg.tree, blocks=blocks, ln_final=final, **ends))
    model.cfg.seal()


def _is_ours(module: Any) -> bool:
    """Whether it says what it is made of; a foreign module in its place does not, and the config stays."""
    return hasattr(getattr(module, "cfg", None), "build")


def _mlp_cfg(mlp: Any) -> Any:
    if isinstance(mlp, (MLP, GatedMLP)) and isinstance(norm := getattr(mlp, "ln", None), (LayerNorm, RMSNorm)):
        mlp.cfg = replace(mlp.cfg, mid_norm=norm.cfg)
    if isinstance(mlp, MoE):
        mlp.sync_config()
    return mlp.cfg
