"""A mixture of experts in place of an MLP (Shazeer et al. 2017, arXiv:1701.06538): each token goes to a few of many MLPs.

Only experts with tokens are computed, each once, on all its tokens together.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.components.experts.router import Router
from hooked_lm.components.mlp import MLP, GatedMLP, hooked_input, multiply_into
from hooked_lm.components.norms.norm import RESIDUAL, upcast
from hooked_lm.hooks import HookPoint, is_listening

Stream = Float[Tensor, "batch pos d_model"]
Routed = Float[Tensor, "routed d_model"]
Weights = Float[Tensor, "batch pos top_k"]
Indices = Int[Tensor, "batch pos top_k"]


class ClampedGatedMLP(nn.Module):
    """`(g * sigmoid(alpha * g) * (l + 1)) W_out + b_out`, with g clamped to at most `limit` and l to [-limit, limit].

    The gate g and the linear branch l (`hook_pre`, `hook_pre_linear`, both before the clamp) are the even and odd outputs of
    one weight, `W_gate_in` [d_model, 2 d_mlp]; `W_gate` and `W_in` are views of it. gpt-oss (OpenAI 2025,
    arXiv:2508.10925).
    """

    axes = {"W_gate_in": "[d_model] d_gate_in", "W_out": "[d_mlp] d_model"}

    @dataclass(frozen=True)
    class Config:
        d_model: int
        d_mlp: int
        alpha: float = 1.702
        limit: float = 7.0
        bias: bool = True

        @property
        def act_fn(self) -> str:
            return "clamped_swiglu"

        def build(self) -> "ClampedGatedMLP":
            return ClampedGatedMLP(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.W_gate_in = nn.Parameter(torch.empty(cfg.d_model, 2 * cfg.d_mlp))
        self.W_out = nn.Parameter(torch.empty(cfg.d_mlp, cfg.d_model))
        self.b_gate_in = nn.Parameter(torch.zeros(2 * cfg.d_mlp)) if cfg.bias else None
        self.b_out = nn.Parameter(torch.zeros(cfg.d_model)) if cfg.bias else None
        hidden = (*RESIDUAL[:-1], "d_mlp")
        self.hook_in = HookPoint(*RESIDUAL, on_demand=True)
        self.hook_pre, self.hook_pre_linear = HookPoint(*hidden), HookPoint(*hidden)
        self.hook_post = HookPoint(*hidden)
        self.hook_out = HookPoint(*RESIDUAL, on_demand=True)

    @property
    def W_gate(self) -> Float[Tensor, "d_model d_mlp"]:
        return self.W_gate_in[:, 0::2]

    @property
    def W_in(self) -> Float[Tensor, "d_model d_mlp"]:
        return self.W_gate_in[:, 1::2]

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        x = hooked_input(self, x)
        both = F.linear(x, self.W_gate_in.T, self.b_gate_in)
        post = self.product(self.hook_pre(both[..., 0::2]), self.hook_pre_linear(both[..., 1::2]))
        return self.hook_out(F.linear(self.hook_post(post), self.W_out.T, self.b_out))

    def product(self, pre: Float[Tensor, "*batch d_mlp"], pre_linear: Float[Tensor, "*batch d_mlp"]) -> Tensor:
        """The activations of the neurons, from the gate and the linear branch."""
        limit = self.cfg.limit
        gate, linear = pre.clamp(max=limit), pre_linear.clamp(-limit, limit)  # new tensors
        switch = (self.cfg.alpha * gate).sigmoid_()
        return multiply_into(multiply_into(gate, switch), linear.add_(1))


ExpertConfig = GatedMLP.Config | MLP.Config | ClampedGatedMLP.Config


class ExpertPoint(HookPoint):
    """A site of an expert.

    The sites of a mixture share `hooked_points`, the set of those with hooks, so that a run does not check every point of
    hundreds of experts.
    """

    def __init__(self, *dims: str, hooked_points: set["ExpertPoint"]) -> None:
        super().__init__(*dims, on_demand=True)
        self.hooked_points = hooked_points

    def _hooks_changed(self) -> None:
        if self._hooks:
            self.hooked_points.add(self)

    def discard_if_unhooked(self) -> None:
        """Removes this point from `hooked_points` if it has no hooks left."""
        if not self._hooks:
            self.hooked_points.discard(self)
            if self._hooks:  # another thread added one meanwhile
                self.hooked_points.add(self)


class AbstractMoE(nn.Module):
    """The weights and sites of a mixture, and the sum over the chosen experts; subclasses compute its output."""

    axes = {
        "W_router": "[d_model] choice",
        "b_choice": "choice",
        "W_shared_gate": "[d_model] 1; it decides, as a router does",
        "b_out": "d_model",
    }

    def __init__(self, cfg: "MoE.Config") -> None:
        super().__init__()
        n_choices = cfg.n_choices
        if not 1 <= cfg.top_k <= n_choices:
            raise ValueError(f"top_k={cfg.top_k} must be from 1 to n_experts={n_choices}")
        cfg.router.check(n_choices)
        if cfg.shared_gate and cfg.shared is None:
            raise ValueError("shared_gate=True needs a shared expert")
        self.cfg = cfg
        self.W_router = nn.Parameter(torch.empty(cfg.d_model, n_choices))
        self.b_router = nn.Parameter(torch.zeros(n_choices)) if cfg.router_bias else None
        self.b_choice = nn.Parameter(torch.zeros(n_choices), requires_grad=False) if cfg.router.corrected else None
        self.hook_in = HookPoint(*RESIDUAL, on_demand=True)
        self.hook_router_logits = HookPoint("batch", "pos", "expert")
        self.hook_expert_weights = HookPoint("batch", "pos", "top_k")
        self.hook_expert_indices = HookPoint("batch", "pos", "top_k")
        self.hooked_points: set[ExpertPoint] = set()
        self.experts = nn.ModuleList(_expert(cfg.expert, self.hooked_points) for _ in range(cfg.n_experts))
        self.shared = None if cfg.shared is None else cfg.shared.build()
        if cfg.shared_gate:
            self.W_shared_gate = nn.Parameter(torch.empty(cfg.d_model, 1))
            self.b_shared_gate = nn.Parameter(torch.zeros(1)) if cfg.router_bias else None
            self.hook_shared_gate = HookPoint("batch", "pos", "1")
        self.b_out = nn.Parameter(torch.zeros(cfg.d_model)) if cfg.out_bias else None
        self.hook_out = HookPoint(*RESIDUAL, on_demand=True)

    def output(self, x: Stream, weights: Weights, indices: Indices) -> Stream:
        """The output for these experts of each token, at its site."""
        out = self.mix(x, weights, indices)
        if self.shared is not None:
            shared = self.shared(x)
            out = out + (shared * self.hook_shared_gate(self.shared_gate(x)) if self.cfg.shared_gate else shared)
        out = out if self.cfg.out_scale == 1 else out * self.cfg.out_scale
        return self.hook_out(out if self.b_out is None else out + self.b_out)

    @property
    def num_experts(self) -> int:
        """The number of experts."""
        return self.cfg.n_experts

    @property
    def experts_per_token(self) -> int:
        """The number of experts that each token goes to."""
        return self.cfg.top_k

    @property
    def d_mlp(self) -> int:
        """The number of neurons of an expert."""
        return self.cfg.expert.d_mlp

    def route(self, x: Stream) -> tuple[Weights, Indices]:
        """The weights and indices of the experts of each token, at their sites."""
        weights, indices = self.choice(self.hook_router_logits(self.router_logits(x)))
        return self.hook_expert_weights(weights.to(x.dtype)), self.hook_expert_indices(indices)

    def router_logits(self, x: Stream) -> Float[Tensor, "batch pos expert"]:
        """The router's logits, before their site."""
        x = self.router_input(x)
        if not self.cfg.router.in_fp32:
            return F.linear(x, self.W_router.T, self.b_router)
        bias = None if self.b_router is None else upcast(self.b_router)
        return F.linear(upcast(x), upcast(self.W_router).T, bias)

    def router_input(self, x: Stream) -> Stream:
        """What the router reads, for the input of the mixture."""
        return x

    def choice(self, logits: Float[Tensor, "batch pos expert"]) -> tuple[Weights, Indices]:
        """The weights and indices of the experts that the router chooses."""
        weights, indices = self.cfg.router(logits, self.cfg.top_k, self.b_choice)
        return self.scaled(weights, indices), indices

    def scaled(self, weights: Weights, indices: Indices) -> Weights:
        """The router's weights of these experts, times a scale of each expert if there is one."""
        return weights

    def shared_gate(self, x: Stream) -> Float[Tensor, "batch pos 1"]:
        """The factor of the shared expert's output."""
        return F.linear(x, self.W_shared_gate.T, self.b_shared_gate).sigmoid()

    def mix(self, x: Stream, weights: Weights, indices: Indices) -> Stream:
        """The weighted sum of the outputs of the chosen experts, summed in at least fp32."""
        total = self.sum_of(range(self.cfg.n_experts), x, weights, indices)
        if self.cfg.n_identity:
            total += x * self.identity_weight(weights, indices)
        return total.to(x.dtype)

    def sum_of(self, numbers: Container[int], x: Stream, weights: Weights, indices: Indices) -> Stream:
        """The weighted sum of the outputs of these experts where they are chosen, in at least fp32."""
        top_k, tokens = indices.shape[-1], x.flatten(0, 1)
        slots = indices.flatten()
        n_choices = self.cfg.n_choices
        wrong, *counts = (slots + 1).clamp(min=0).bincount(minlength=n_choices + 1).tolist()
        if wrong or len(counts) > n_choices:
            name = int(slots.min()) if wrong else len(counts) - 1
            raise ValueError(f"hook_expert_indices contains {name}; indices of experts are 0 to {n_choices - 1}")
        order = slots.argsort(stable=True)  # by expert, then by token
        by_expert, weight = order // top_k, upcast(weights).flatten().index_select(0, order)[:, None]
        listened, start = self._experts_with_listeners(), 0
        # each index_add_ adds to a token at most once, so the order of the sum is fixed on every device
        total = torch.zeros_like(tokens, dtype=weight.dtype)
        for number, (expert, count) in enumerate(zip(self.experts, counts[: len(self.experts)], strict=True)):
            if number in numbers and (count or expert in listened):
                sent = by_expert[start : start + count]
                positions = getattr(expert, "hook_routed_positions", None)
                if positions is not None and is_listening(positions):
                    positions(torch.stack([sent // x.shape[1], sent % x.shape[1]], -1))
                out = self.weighted(expert, tokens.index_select(0, sent), weight[start : start + count])
                total.index_add_(0, sent, out)
            start += count
        return total.view_as(x)

    def identity_weight(self, weights: Weights, indices: Indices) -> Float[Tensor, "batch pos 1"]:
        """The sum of the weights of each token's choices whose output is the token, in at least fp32."""
        return (upcast(weights) * (indices >= self.cfg.n_experts)).sum(-1, keepdim=True)

    def weighted(self, expert: nn.Module, x: Routed, weight: Float[Tensor, "routed 1"]) -> Routed:
        """The weighted outputs of an expert."""
        return expert(x) * weight

    def _experts_with_listeners(self) -> list[nn.Module]:
        """The experts with a listener at one of their sites; they are called even without tokens."""
        for point in tuple(self.hooked_points):
            point.discard_if_unhooked()
        if not self.hooked_points:
            return []
        return [e for e in self.experts if any(isinstance(p, HookPoint) and p.is_listening for p in e.children())]

    def constant_bias(self) -> Float[Tensor, " d_model"] | None:
        """The bias that is added to every token; ValueError if it depends on the experts of the token."""
        parts: list[Any] = [*self.experts, *([self.shared] if self.cfg.shared_gate else [])]
        if any(part.b_out is not None for part in parts):
            raise ValueError(
                "the experts have output biases, so the bias that is added to a token depends on its experts"
            )
        shared: Any = None if self.shared is None else self.shared.b_out
        shared = None if shared is None else shared * self.cfg.out_scale
        return shared if self.b_out is None else self.b_out if shared is None else self.b_out + shared

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "AbstractMoE":
        """As `nn.Module._apply`, but the router's `fp32_weights`, whose rounding would change its choices, stay in fp32."""
        kept = {name: getattr(self, name).data for name in self.cfg.router.fp32_weights}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            cast = getattr(self, name)
            if torch.finfo(cast.dtype).bits < torch.finfo(before.dtype).bits:
                setattr(self, name, nn.Parameter(before.to(cast.device), requires_grad=cast.requires_grad))
        return self

    def sync_config(self) -> None:
        """Updates the config from the first expert and the shared expert."""
        first: Any = self.experts[0]
        self.cfg = replace(self.cfg, expert=first.cfg, shared=None if self.shared is None else self.shared.cfg)


class MoE(AbstractMoE):
    """`sum over the chosen e of weight_e * experts[e](x)`; the router chooses by `x W_router + b_router`.

    `W_router` is [d_model, expert]; some routers choose by logits with a correction, `b_choice` [expert]. A `shared` expert
    receives every token; with `shared_gate` its output is multiplied by `sigmoid(x W_shared_gate + b_shared_gate)`, at
    `hook_shared_gate`. Edits of `hook_expert_indices` send tokens to other experts.

    The sites of an expert are on demand and hold only its tokens; `hook_routed_positions` has their [row, position], and
    edits of it have no effect.
    """

    @dataclass(frozen=True)
    class Config:
        """`router_bias` adds a bias to the router and to the gate of the shared expert, `out_bias` one to the output, which
        `out_scale` multiplies before. After the experts the router has `n_identity` choices whose output is x itself, without
        an entry in `experts` (LongCat-Flash, Meituan 2025, arXiv:2509.01322)."""

        expert: ExpertConfig
        n_experts: int
        top_k: int
        router: Router
        router_bias: bool = False
        shared: ExpertConfig | None = None
        shared_gate: bool = False
        out_scale: float = 1.0
        out_bias: bool = False
        n_identity: int = 0

        @property
        def n_choices(self) -> int:
            """The number of experts that the router chooses from."""
            return self.n_experts + self.n_identity

        @property
        def d_model(self) -> int:
            return self.expert.d_model

        def build(self) -> "AbstractMoE":
            return MoE(self)

    def forward(self, x: Stream) -> Stream:
        x = hooked_input(self, x)
        return self.output(x, *self.route(x))


class InputWeightedMoE(MoE):
    """`sum over the chosen e of experts[e](weight_e * x)`: weights multiply the inputs of experts. Llama 4 (Meta 2025)."""

    @dataclass(frozen=True)
    class Config(MoE.Config):
        def build(self) -> "InputWeightedMoE":
            return InputWeightedMoE(self)

    def weighted(self, expert: nn.Module, x: Routed, weight: Float[Tensor, "routed 1"]) -> Routed:
        """The outputs of an expert for weighted inputs."""
        out: Tensor = expert((x * weight).to(x.dtype))
        return out.to(weight.dtype)


def _expert(cfg: ExpertConfig, hooked_points: set[ExpertPoint]) -> nn.Module:
    """An MLP whose sites are on demand and hold only the tokens routed to it."""
    expert: nn.Module = cfg.build()
    points = {name: part for name, part in expert.named_children() if isinstance(part, HookPoint)}
    for name in points:
        delattr(expert, name)
    # first: later hooks may read it
    expert.hook_routed_positions = ExpertPoint("routed", "2", hooked_points=hooked_points)
    for name, point in points.items():
        setattr(expert, name, ExpertPoint("routed", point.dims[-1], hooked_points=hooked_points))
    return expert
