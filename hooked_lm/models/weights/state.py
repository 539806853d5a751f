"""Loads state dicts whose norms and biases differ from the model's, and keeps the config in step with the modules."""

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from hooked_lm.components.attention.tl_attributes import order_parameters
from hooked_lm.components.axes import axes_of
from hooked_lm.components.blocks.wiring import has_part
from hooked_lm.components.embeddings.embed import TiedUnembed
from hooked_lm.components.embeddings.factored_embed import FactoredUnembed
from hooked_lm.components.embeddings.pos_embed import PosEmbed
from hooked_lm.components.experts.moe import AbstractMoE
from hooked_lm.components.mlp import AbstractGatedMLP, AbstractMLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import RMSNorm, norm_of
from hooked_lm.hooks import HookedRootModule
from hooked_lm.models.weights.foreign_state_dict import TABLES, to_native_names
from hooked_lm.models.weights.quantize import refuse_quantized
from hooked_lm.models.weights.weight_scope import refuse_open_scopes

# Config flag -> {bias: its weight}; one flag covers all biases of a group that a module with this flag has.
BIASES = {
    "qkv_bias": {"b_Q": "W_Q", "b_K": "W_K", "b_V": "W_V", "b_gate": "W_gate"},
    "out_bias": {"b_O": "W_O"},
    "down_bias": {"b_DQ": "W_DQ", "b_DKV": "W_DKV", "b_KR": "W_KR"},
    "bias": {"b_in": "W_in", "b_gate": "W_gate", "b_out": "W_out", "b_U": "W_U", "b_gate_in": "W_gate_in"}
    | {"b_x": "W_x", "b_B": "W_B", "b_C": "W_C", "b_dt": "W_dt"}
    | {"b_Q": "W_Q", "b_K": "W_K", "b_V": "W_V", "b_g": "W_g", "b_beta": "W_beta"},
    "router_bias": {"b_router": "W_router", "b_shared_gate": "W_shared_gate"},
}


def load_state(model: HookedRootModule, state_dict: dict[str, Tensor]) -> None:
    """Loads a state dict, also one of another library (see `to_native_names`), and clears `cfg.processed`.

    Norms and biases follow the state dict: those absent from it become identities or zeros; those absent from the model
    are created, unless all zeros. A `W_U` that differs from `W_E` unties the unembedding, and replaces a factored one.
    Raises ValueError, before any change, for other missing or unexpected names and for different shapes.
    """
    refuse_open_scopes(model, "loading a state dict")
    refuse_quantized(model, "loading a state dict", "load other weights into a model before quantize()")
    given = to_native_names(model, state_dict)
    _check_fit(model, given)
    if isinstance(model.unembed, TiedUnembed) and "unembed.W_U" in given:
        W_E, W_U = given.get("embed.W_E", model.embed.W_E), given["unembed.W_U"]
        if not torch.equal(W_U.T.to(W_E), W_E):
            model.untie()
    if _has_product(model, given):
        model.untie()
    for name, module in model.named_modules():
        if isinstance(module, (LayerNorm, RMSNorm)):
            _match_norm(module, f"{name}.", given, model.embed.W_E)
        elif module is not model:
            _match_biases(module, f"{name}.", given)
        if isinstance(module, PosEmbed) and module.cfg.offset:
            given.setdefault(f"{name}.before", module.before)
    sync_config(model)
    model.cfg.processed = ()
    model.load_state_dict(given)


def check_state(model: HookedRootModule, state_dict: dict[str, Tensor]) -> None:
    """Raises ValueError for a state dict that `load_state` would refuse. The model may be on the meta device."""
    _check_fit(model, to_native_names(model, state_dict))


def _check_fit(model: HookedRootModule, given: Mapping[str, Tensor]) -> None:
    """Raises ValueError listing every name and shape of a state dict that does not fit the model."""
    state = {name: value for name, value in model.state_dict().items() if not name.endswith(TABLES)}
    own = {name: tuple(value.shape) for name, value in state.items()}
    integers = {name for name, value in state.items() if not value.is_floating_point()}
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
        elif not value.is_floating_point() and name not in integers:
            problems.append(f"'{name}' is {value.dtype}, expected floating point numbers")
    if problems:
        shown = "".join(f"\n- {problem}" for problem in problems[:20])
        raise ValueError(f"the weights do not fit the model, which was not changed:{shown}")


def _has_product(model: HookedRootModule, given: Mapping[str, Tensor]) -> bool:
    """Whether a state dict has a single `W_U` for a model with a factored unembedding."""
    return isinstance(model.unembed, FactoredUnembed) and "unembed.W_U" in given


def _optional_shapes(model: HookedRootModule) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the weights that a state dict may omit: norms, biases and a tied unembedding."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, module in model.named_modules():
        if isinstance(module, (LayerNorm, RMSNorm)):
            leaves = ("w", "b") if isinstance(module, LayerNorm) else ("w",)
            shapes |= {f"{path}.{leaf}": module.cfg.shape for leaf in leaves}
        if isinstance(module, PosEmbed) and module.cfg.offset:
            shapes[f"{path}.before"] = tuple(module.before.shape)
        for biases in BIASES.values() if module is not model else ():
            found = {b: _bias_shape(module, w) for b, w in biases.items() if hasattr(module, w)}
            shapes |= {f"{path}.{b}": shape for b, shape in found.items() if shape is not None}
    return shapes | ({"unembed.W_U": tuple(model.W_U.shape)} if isinstance(model.unembed, TiedUnembed) else {})


def _bias_shape(module: nn.Module, weight_name: str) -> tuple[int, ...] | None:
    """The shape of a weight's bias: the axes that a product with it does not sum over; None if they are not stated."""
    axes, shape = axes_of(module, weight_name), getattr(module, weight_name).shape
    return None if axes is None else tuple(shape[axis] for axis in axes.outputs)


def _match_norm(norm: LayerNorm | RMSNorm, prefix: str, given: dict[str, Tensor], like: Tensor) -> None:
    """Gives norm and state dict the same parameters; new ones have dtype and device of `like`."""
    for name, flag in (("w", "weight"), ("b", "bias")):
        if prefix + name in given and getattr(norm.cfg, flag, None) is False:
            setattr(norm, name, nn.Parameter(like.new_empty(given[prefix + name].shape)))
            norm.cfg = replace(norm.cfg, **{flag: True})
    identity = {"w": 1 - getattr(norm.cfg, "offset", 0.0), "b": 0.0}
    for name, parameter in norm.named_parameters(recurse=False):
        given.setdefault(prefix + name, torch.full_like(parameter, identity[name]))


def _match_biases(module: nn.Module, prefix: str, given: dict[str, Tensor]) -> None:
    """Gives module and state dict the same biases."""
    for name in (bias for group in BIASES.values() for bias in group):
        if prefix + name in given and getattr(module, name, True) is None:
            if given[prefix + name].any():
                make_biases(module, name)
            else:
                del given[prefix + name]
        if isinstance(parameter := getattr(module, name, None), nn.Parameter):
            given.setdefault(prefix + name, torch.zeros_like(parameter))


def make_biases(module: Any, name: str) -> None:
    """Creates a bias of zeros, and the others of the same config flag."""
    flag, group = next((flag, group) for flag, group in BIASES.items() if name in group and hasattr(module.cfg, flag))
    for bias, weight_name in group.items():
        if hasattr(module, weight_name) and getattr(module, bias, True) is None:
            weight, shape = getattr(module, weight_name), _bias_shape(module, weight_name)
            assert shape is not None, "a component states the axes of its weights"
            zeros = weight.new_zeros(shape)
            setattr(module, bias, nn.Parameter(zeros, requires_grad=weight.requires_grad))
    order_parameters(module)
    module.cfg = replace(module.cfg, **{flag: True})


def sync_config(model: HookedRootModule) -> None:
    """Updates the config, tree and flat names, from the model's modules.

    The model gets a copy of its config, which may be shared. A replaced module keeps the config of the original.
    """
    for block in filter(_has_config, model.blocks):
        norms = {name: m.cfg for name, m in block.named_children() if isinstance(m, (LayerNorm, RMSNorm))}
        parts = {
            name: getattr(block, name).cfg for name in ("attn", "mixer") if _has_config(getattr(block, name, None))
        }
        parts |= {"mlp": _mlp_cfg(block.mlp)} if has_part(block, "mlp") and _has_config(block.mlp) else {}
        block.cfg = replace(block.cfg, **parts, **norms)
    ln_final = norm_of(model, "ln_final")
    final = ln_final.cfg if isinstance(ln_final, (LayerNorm, RMSNorm)) else None
    before = zip(model.blocks, model.cfg.tree.blocks, strict=True)
    blocks = tuple(block.cfg if _has_config(block) else cfg for block, cfg in before)
    if isinstance(norm := getattr(model.embed, "ln", None), (LayerNorm, RMSNorm)):
        model.embed.cfg = replace(model.embed.cfg, norm=norm.cfg)
    model.cfg = copy(model.cfg)
    ends = {name: getattr(model, name).cfg for name in ("embed", "unembed") if _has_config(getattr(model, name))}
    if "unembed" in ends:  # the soft cap may be set on the config
        ends["unembed"] = replace(ends["unembed"], soft_cap=model.cfg.tree.unembed.soft_cap)
    model.cfg.adopt_tree(replace(model.cfg.tree, blocks=blocks, ln_final=final, **ends))
    model.cfg.seal()


def _has_config(module: object) -> bool:
    """Whether a module is one of our components, with a config that builds it."""
    return hasattr(getattr(module, "cfg", None), "build")


def _mlp_cfg(mlp: nn.Module) -> Any:
    norm = getattr(mlp, "ln", None)
    if isinstance(mlp, (AbstractMLP, AbstractGatedMLP)) and isinstance(norm, (LayerNorm, RMSNorm)):
        mlp.cfg = replace(mlp.cfg, mid_norm=norm.cfg)
    if isinstance(mlp, AbstractMoE):
        mlp.sync_config()
    return mlp.cfg
