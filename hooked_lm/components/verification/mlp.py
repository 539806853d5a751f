"""MLPs."""

from collections.abc import Iterator
from functools import singledispatch

from torch import Tensor

from hooked_lm.components.bounded_mlp import BoundedGatedMLP
from hooked_lm.components.experts.moe import ClampedGatedMLP
from hooked_lm.components.mlp import AbstractGatedMLP, AbstractMLP
from hooked_lm.components.verification.registry import (
    Identity,
    LazyTensor,
    Sites,
    add_bias,
    identities,
    norm_output,
    output_from_sites,
)


@identities.register
def _(mlp: AbstractMLP, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    yield "ln2.normalized * w + b -> pre", lambda: (add_bias(get_input() @ mlp.W_in, mlp.b_in), at("hook_pre"))
    if mlp.cfg.mid_norm is None:
        yield "act(pre) == post", lambda: (mlp.act_fn(at("hook_pre")), at("hook_post"))
    else:
        yield "act(pre) == mid", lambda: (mlp.act_fn(at("hook_pre")), at("hook_mid"))
        yield ("mid, normed == post", lambda: (norm_output(mlp, "ln", at, lambda: at("hook_mid")), at("hook_post")))


@identities.register
def _(mlp: AbstractGatedMLP, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    yield "ln2.normalized * w + b -> pre", lambda: (branches(mlp, get_input())[0], at("hook_pre"))
    yield "ln2.normalized * w + b -> pre_linear", lambda: (branches(mlp, get_input())[1], at("hook_pre_linear"))
    product = "hook_post" if mlp.cfg.mid_norm is None else "hook_mid"
    label = "act(pre) * pre_linear" + (", bounded" if isinstance(mlp, BoundedGatedMLP) else "")
    yield (
        f"{label} == {product.removeprefix('hook_')}",
        lambda: (_product(mlp, at("hook_pre"), at("hook_pre_linear")), at(product)),
    )
    if mlp.cfg.mid_norm is not None:
        yield ("mid, normed == post", lambda: (norm_output(mlp, "ln", at, lambda: at("hook_mid")), at("hook_post")))


@singledispatch
def branches(mlp: AbstractGatedMLP, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gate before its activation, and the linear branch, of an input."""
    return add_bias(x @ mlp.W_gate, mlp.b_gate), add_bias(x @ mlp.W_in, mlp.b_in)


def _product(mlp: AbstractGatedMLP, pre: Tensor, pre_linear: Tensor) -> Tensor:
    return mlp.product(pre, pre_linear) if isinstance(mlp, BoundedGatedMLP) else mlp.act_fn(pre) * pre_linear


@output_from_sites.register(AbstractMLP)
@output_from_sites.register(AbstractGatedMLP)
@output_from_sites.register(ClampedGatedMLP)
def _(mlp: AbstractMLP | AbstractGatedMLP | ClampedGatedMLP, at: Sites) -> Tensor:
    """The output, from the input of `W_out`."""
    return add_bias(at("hook_post") @ mlp.W_out, mlp.b_out)


@identities.register
def _(mlp: ClampedGatedMLP, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""

    def both(part: slice) -> Tensor:
        return add_bias(get_input() @ mlp.W_gate_in, mlp.b_gate_in)[..., part]

    yield "ln2.normalized * w + b -> pre", lambda: (both(slice(0, None, 2)), at("hook_pre"))
    yield "ln2.normalized * w + b -> pre_linear", lambda: (both(slice(1, None, 2)), at("hook_pre_linear"))
    yield (
        "act(pre) * pre_linear == post",
        lambda: (mlp.product(at("hook_pre"), at("hook_pre_linear")), at("hook_post")),
    )
