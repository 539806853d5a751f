"""The multi-layer perceptrons of a block: plain, and gated (Shazeer 2020, arXiv:2002.05202)."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.activations import Activated, Activation, activation
from hooked_lm.components.norms.norm import RESIDUAL, NormConfig
from hooked_lm.hooks import HookPoint, hook_if_listening, is_listening

HIDDEN = ("batch", "pos", "d_mlp")
Stream = Float[Tensor, "*batch d_model"]  # the tokens of an expert have no batch and pos


def hooked_input(module: Any, x: Tensor) -> Tensor:
    """The input of a module, after its `hook_in`.

    A tool that replaced this instance's `forward` and `hook_in` has called its hooks already.
    """
    is_hooked = "forward" in module.__dict__ and not getattr(module.hook_in, "on_demand", False)
    return x if is_hooked else hook_if_listening(module.hook_in, x)


def multiply_into(x: Float[Tensor, "*shape"], y: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """`x * y`; computed in place where autograd does not need `x`, which nothing else may use."""
    return x * y if torch.is_grad_enabled() or x.dtype != y.dtype else x.mul_(y)


class AbstractMLP(Activated):
    """The weights and sites of an MLP; subclasses compute its output."""

    axes = {"W_in": "[d_model] d_mlp", "W_out": "[d_mlp] d_model"}
    parameter_order = ("W_in", "b_in", "W_out", "b_out")

    def __init__(self, cfg: "MLP.Config") -> None:
        super().__init__()
        self.cfg = cfg
        self.act_fn = activation(cfg.act_fn)
        self.W_in = nn.Parameter(torch.empty(cfg.d_model, cfg.d_mlp))
        self.b_in = nn.Parameter(torch.zeros(cfg.d_mlp)) if cfg.bias else None
        self.W_out = nn.Parameter(torch.empty(cfg.d_mlp, cfg.d_model))
        self.b_out = nn.Parameter(torch.zeros(cfg.d_model)) if cfg.bias else None
        self.hook_in = HookPoint(*RESIDUAL, on_demand=True)
        self.hook_pre = HookPoint(*HIDDEN)
        if cfg.mid_norm is not None:
            self.hook_mid, self.ln = HookPoint(*HIDDEN), cfg.mid_norm.build(HIDDEN)
        self.hook_post = HookPoint(*HIDDEN)
        self.hook_out = HookPoint(*RESIDUAL, on_demand=True)

    @property
    def d_mlp(self) -> int:
        """The number of neurons."""
        return self.cfg.d_mlp


class MLP(AbstractMLP):
    """`act(x W_in + b_in) W_out + b_out`; `W_in` is [d_model, d_mlp], `W_out` [d_mlp, d_model].

    With a `mid_norm` the activation is normalised before `W_out` (SoLU models): `hook_mid` is before that norm.
    `act_fn` names a function, or is the config of a module with weights of its own.
    """

    @dataclass(frozen=True)
    class Config:
        d_model: int
        d_mlp: int
        act_fn: Activation = "gelu"
        bias: bool = True
        mid_norm: NormConfig | None = None

        def build(self) -> "AbstractMLP":
            return MLP(self)

    def forward(self, x: Stream) -> Stream:
        x = hooked_input(self, x)
        post = self.act_fn(self.hook_pre(F.linear(x, self.W_in.T, self.b_in)))
        if self.cfg.mid_norm is not None:
            post = self.ln(self.hook_mid(post))
        return self.hook_out(F.linear(self.hook_post(post), self.W_out.T, self.b_out))


class AbstractGatedMLP(Activated):
    """The weights and sites of a gated MLP; subclasses compute its output."""

    axes = {"W_in": "[d_model] d_mlp", "W_gate": "[d_model] d_mlp", "W_out": "[d_mlp] d_model"}
    parameter_order = ("W_in", "W_out", "W_gate", "b_gate", "b_in", "b_out")

    def __init__(self, cfg: "GatedMLP.Config") -> None:
        super().__init__()
        self.cfg = cfg
        self.act_fn = activation(cfg.act_fn)
        self.W_in = nn.Parameter(torch.empty(cfg.d_model, cfg.d_mlp))
        self.W_out = nn.Parameter(torch.empty(cfg.d_mlp, cfg.d_model))
        self.W_gate = nn.Parameter(torch.empty(cfg.d_model, cfg.d_mlp))
        self.b_gate = nn.Parameter(torch.zeros(cfg.d_mlp)) if cfg.bias else None
        self.b_in = nn.Parameter(torch.zeros(cfg.d_mlp)) if cfg.bias else None
        self.b_out = nn.Parameter(torch.zeros(cfg.d_model)) if cfg.bias or cfg.out_bias else None
        self.hook_in = HookPoint(*RESIDUAL, on_demand=True)
        self.hook_pre, self.hook_pre_linear = HookPoint(*HIDDEN), HookPoint(*HIDDEN)
        if cfg.mid_norm is not None:
            self.hook_mid, self.ln = HookPoint(*HIDDEN), cfg.mid_norm.build(HIDDEN)
        self.hook_post = HookPoint(*HIDDEN)
        self.hook_out = HookPoint(*RESIDUAL, on_demand=True)

    @property
    def d_mlp(self) -> int:
        """The number of neurons."""
        return self.cfg.d_mlp


class GatedMLP(AbstractGatedMLP):
    """`(act(x W_gate + b_gate) * (x W_in + b_in)) W_out + b_out`.

    `hook_pre` is the gate before the activation, `hook_pre_linear` the other branch, `hook_post` their product. With a
    `mid_norm` the product is normalised before `W_out`: `hook_mid` is before that norm, `hook_post` after it.
    """

    @dataclass(frozen=True)
    class Config:
        d_model: int
        d_mlp: int
        act_fn: Activation = "silu"
        bias: bool = False
        out_bias: bool = False  # whether there is a `b_out`, also without the other biases
        mid_norm: NormConfig | None = None

        def build(self) -> "AbstractGatedMLP":
            return GatedMLP(self)

    def forward(self, x: Stream) -> Stream:
        x = hooked_input(self, x)
        gate = self.act_fn(self.hook_pre(F.linear(x, self.W_gate.T, self.b_gate)))
        linear = self.hook_pre_linear(F.linear(x, self.W_in.T, self.b_in))
        # hooks and modules may have kept what they returned
        is_shared = isinstance(self.act_fn, nn.Module) or is_listening(self.hook_pre, self.hook_pre_linear)
        post = gate * linear if is_shared else multiply_into(gate, linear)
        if self.cfg.mid_norm is not None:
            post = self.ln(self.hook_mid(post))
        return self.hook_out(F.linear(self.hook_post(post), self.W_out.T, self.b_out))


MLPConfig = MLP.Config | GatedMLP.Config
