"""Converts state dicts of other libraries to our names."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from hooked_lm.components.blocks.wiring import shares_norm
from hooked_lm.components.float8 import float8_problem
from hooked_lm.hooks import HookedRootModule

# Endings of buffers that other libraries save with the weights; ignored.
TABLES = (".mask", ".IGNORE", ".rotary_sin", ".rotary_cos", ".alibi")

# Pattern of their name, our name, and whether their matrix is transposed.
NAMES = [
    (re.compile(r"\._([Wb]_[KV])$"), r".\1", False),  # grouped keys and values
    (re.compile(r"(\.experts\.\d+\.W_(?:in|out|gate))\.weight$"), r"\1", True),
    (re.compile(r"(\.experts\.\d+)\.W_(in|out|gate)\.bias$"), r"\1.b_\2", False),
    (re.compile(r"\.mlp\.W_gate\.weight$"), ".mlp.W_router", True),
    (re.compile(r"\.mlp\.W_gate\.bias$"), ".mlp.b_router", False),
    (re.compile(r"^(encoder|decoder)\.0\.attn\.rel_pos_bias\.weight$"), r"\1_rel_pos_bias.W_rel", False),
]


def to_native_names(model: HookedRootModule, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Converts a state dict, which may be of another library, to the names and conventions of this model.

    Drops buffers (masks, rotary angles), all-zero biases that the model lacks, and the unused position embedding of alibi
    models. The `b_in` of a gated MLP without `b_gate` is added after the product there, so it is folded into `b_out`.

    Raises ValueError for such a gated MLP with "solu_ln", which reads no `W_in` there, and for 8-bit floating point weights.
    """
    if problem := float8_problem((name, value.dtype) for name, value in state_dict.items()):
        raise ValueError(f"the weights were not loaded: {problem}")
    given = dict(_renamed(name, value) for name, value in state_dict.items() if not name.endswith(TABLES))
    own = model.state_dict()
    for mlp in [name.removesuffix("W_gate") for name in given if name.endswith(".mlp.W_gate")]:
        if mlp + "W_gate" in own or mlp + "W_gate_in" in own:
            _bias_into_output(given, mlp, model.cfg.is_layer_norm_activation())
    for name in [name for name in own if name.endswith("_gate_in") and name not in given]:
        _interleave(given, name.removesuffix("gate_in"))
    _share_norms(model, given)
    if model.cfg.positional_embedding_type == "alibi":
        given.pop("pos_embed.W_pos", None)
    for name in given.keys() & own.keys():
        same_size = given[name].numel() == own[name].numel()
        if same_size and (own[name].numel() == 1 or "_norm." in name):  # scalars and head axes may have another shape
            given[name] = given[name].reshape(own[name].shape)
    return {name: value for name, value in given.items() if name in own or not _is_zero_bias(name, value)}


def _share_norms(model: HookedRootModule, given: dict[str, Tensor]) -> None:
    """Drops the second of two equal norms if the block has a single shared one."""
    for prefix, block in model.named_modules():
        for leaf in "wb" if shares_norm(block) else "":
            first, second = given.get(f"{prefix}.ln1.{leaf}"), given.get(f"{prefix}.ln2.{leaf}")
            if first is not None and second is not None and torch.equal(first, second):
                del given[f"{prefix}.ln2.{leaf}"]


def _renamed(name: str, value: Tensor) -> tuple[str, Tensor]:
    for pattern, name_here, is_transposed in NAMES:
        if pattern.search(name):
            return pattern.sub(name_here, name), value.T if is_transposed else value
    return name, value


def _bias_into_output(given: dict[str, Tensor], mlp: str, is_normalised: bool) -> None:
    b_in, b_out = given.get(mlp + "b_in"), given.get(mlp + "b_out")
    if b_in is None or b_out is None or mlp + "b_gate" in given:
        return
    if is_normalised:
        raise ValueError(
            f"{mlp}W_in: this state dict has no b_gate, so it is that of another library, whose gated MLP with 'solu_ln' does "
            "not read W_in; here W_in is multiplied by the gate"
        )
    given[mlp + "b_out"] = b_out + b_in @ given[mlp + "W_out"]
    given[mlp + "b_in"], given[mlp + "b_gate"] = torch.zeros_like(b_in), torch.zeros_like(b_in)


def _interleave(given: dict[str, Tensor], leaf: str) -> None:
    """Joins gate and linear branch into one weight, as its even and odd outputs."""
    if leaf + "gate" in given and leaf + "in" in given:
        given[leaf + "gate_in"] = torch.stack([given.pop(leaf + "gate"), given.pop(leaf + "in")], -1).flatten(-2)


def _is_zero_bias(name: str, value: Tensor) -> bool:
    return name.rpartition(".")[2].startswith("b_") and not value.any()
