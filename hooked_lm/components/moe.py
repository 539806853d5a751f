"""Mixture of experts in the place of an MLP (Shazeer et al. 2017, arXiv:1701.06538): each token goes to few of many MLPs.

Only the experts that tokens were sent to are computed, each once, for its tokens together.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.components.mlp import MLP, GatedMLP, hooked_input, multiply_into
from hooked_lm.components.norm import RESIDUAL, wide
from hooked_lm.components.router import Router
from hooked_lm.hooks import Hook, HookPoint, is_listening
from hooked_lm.hooks.scope import Frame

Stream = Float[Tensor, "batch pos d_model"]
Routed = Float[Tensor, "routed d_model"]
Weights = Float[Tensor, "batch pos top_k"]
Indices = Int[Tensor, "batch pos top_k"]


class ClampedGatedMLP(nn.Module):
    """`(g * sigmoid(alpha * g) * (l + 1)) W_out + b_out`, where the gate g is at most `limit`, and l within it either way.

    The gate and the linear branch (`hook_pre`, `hook_pre_linear`, both before the clamp) are the even and the odd outputs
    of one weight, `W_gate_in` [d_model, 2 d_mlp]; `W_gate` and `W_in` are views of it. gpt-oss (OpenAI 2025,
    arXiv:2508.10925).
    """

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
        """The neurons, from the gate and the linear branch."""
        limit = self.cfg.limit
        gate, linear = pre.clamp(max=limit), pre_linear.clamp(-limit, limit)  # tensors of their own
        switch = (self.cfg.alpha * gate).sigmoid_()
        return multiply_into(multiply_into(gate, switch), linear.add_(1))


ExpertConfig = GatedMLP.Config | MLP.Config | ClampedGatedMLP.Config


class ExpertPoint(HookPoint):
    """A site of an expert.

    Those of a mixture share `hooked`, where each goes that is given a hook: hundreds of experts without tokens need not be
    asked in every run whether something listens.
    """

    def __init__(self, *dims: str, hooked: set["ExpertPoint"]) -> None:
        super().__init__(*dims, on_demand=True)
        self.hooked = hooked

    def install(self, hook: Hook, frame: Frame | None) -> None:
        """Activate a handle for the length of a frame, or for good (None)."""
        super().install(hook, frame)
        self.hooked.add(self)

    def leave_if_unhooked(self) -> None:
        """Strike this point off, if nothing is left of its hooks."""
        if not self._hooks:
            self.hooked.discard(self)
            if self._hooks:  # another thread was here
                self.hooked.add(self)


class MoE(nn.Module):
    """`sum over the chosen e of weight_e * experts[e](x)`; the router chooses by `x W_router + b_router`.

    `W_router` is [d_model, expert]; routers that correct their choice add `b_choice` [expert] for it. A `shared` expert
    receives every token, and is multiplied by `sigmoid(x W_shared_gate + b_shared_gate)` where there is that gate, at
    `hook_shared_gate`. What passes `hook_expert_indices` decides who computes: editing it sends tokens elsewhere.

    The sites of an expert are on demand and show the tokens that were sent there; `hook_routed_positions` says which,
    as [row, position], and decides nothing.
    """

    @dataclass(frozen=True)
    class Config:
        """`router_bias` gives a bias to the router, and to the shared expert's gate."""

        expert: ExpertConfig
        n_experts: int
        top_k: int
        router: Router
        router_bias: bool = False
        shared: ExpertConfig | None = None
        shared_gate: bool = False

        @property
        def d_model(self) -> int:
            return self.expert.d_model

        def build(self) -> "MoE":
            return MoE(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        if not 1 <= cfg.top_k <= cfg.n_experts:
            raise ValueError(f"top_k={cfg.top_k}: a token can go to 1 to {cfg.n_experts} experts")
        if cfg.shared_gate and cfg.shared is None:
            raise ValueError("shared_gate=True needs a shared expert")
        self.cfg = cfg
        self.W_router = nn.Parameter(torch.empty(cfg.d_model, cfg.n_experts))
        self.b_router = nn.Parameter(torch.zeros(cfg.n_experts)) if cfg.router_bias else None
        self.b_choice = nn.Parameter(torch.zeros(cfg.n_experts), requires_grad=False) if cfg.router.corrected else None
        self.hook_in = HookPoint(*RESIDUAL, on_demand=True)
        self.hook_router_logits = HookPoint("batch", "pos", "expert")
        self.hook_expert_weights = HookPoint("batch", "pos", "top_k")
        self.hook_expert_indices = HookPoint("batch", "pos", "top_k")
        self.hooked: set[ExpertPoint] = set()
        self.experts = nn.ModuleList(_expert(cfg.expert, self.hooked) for _ in range(cfg.n_experts))
        self.shared = None if cfg.shared is None else cfg.shared.build()
        if cfg.shared_gate:
            self.W_shared_gate = nn.Parameter(torch.empty(cfg.d_model, 1))
            self.b_shared_gate = nn.Parameter(torch.zeros(1)) if cfg.router_bias else None
            self.hook_shared_gate = HookPoint("batch", "pos", "1")
        self.hook_out = HookPoint(*RESIDUAL, on_demand=True)

    def forward(self, x: Stream) -> Stream:
        x = hooked_input(self, x)
        weights, indices = self.route(x)
        out = self.mix(x, weights, indices)
        if self.shared is not None:
            shared = self.shared(x)
            out = out + (shared * self.hook_shared_gate(self.shared_gate(x)) if self.cfg.shared_gate else shared)
        return self.hook_out(out)

    @property
    def num_experts(self) -> int:
        """How many experts there are."""
        return self.cfg.n_experts

    @property
    def experts_per_token(self) -> int:
        """To how many of them a token goes."""
        return self.cfg.top_k

    @property
    def d_mlp(self) -> int:
        """How many neurons an expert has."""
        return self.cfg.expert.d_mlp

    def route(self, x: Stream) -> tuple[Weights, Indices]:
        """Which experts each token goes to, and with which weights, at their sites."""
        weights, indices = self.choice(self.hook_router_logits(self.router_logits(x)))
        return self.hook_expert_weights(weights.to(x.dtype)), self.hook_expert_indices(indices)

    def router_logits(self, x: Stream) -> Float[Tensor, "batch pos expert"]:
        """A number for each expert."""
        if not self.cfg.router.in_fp32:
            return F.linear(x, self.W_router.T, self.b_router)
        bias = None if self.b_router is None else wide(self.b_router)
        return F.linear(wide(x), wide(self.W_router).T, bias)

    def choice(self, logits: Float[Tensor, "batch pos expert"]) -> tuple[Weights, Indices]:
        """What the router makes of its logits."""
        return self.cfg.router(logits, self.cfg.top_k, self.b_choice)

    def shared_gate(self, x: Stream) -> Float[Tensor, "batch pos 1"]:
        """What the shared expert is multiplied by."""
        return F.linear(x, self.W_shared_gate.T, self.b_shared_gate).sigmoid()

    def mix(self, x: Stream, weights: Weights, indices: Indices) -> Stream:
        """The weighted sum of what the chosen experts make of their tokens, in at least fp32."""
        top_k, tokens = indices.shape[-1], x.flatten(0, 1)
        slots = indices.flatten()
        wrong, *counts = (slots + 1).clamp(min=0).bincount(minlength=len(self.experts) + 1).tolist()
        if wrong or len(counts) > len(self.experts):
            name = int(slots.min()) if wrong else len(counts) - 1
            raise ValueError(f"no expert {name}: hook_expert_indices go from 0 to {len(self.experts) - 1}")
        order = slots.argsort(stable=True)  # by expert, then by token
        by_expert, weight = order // top_k, wide(weights).flatten().index_select(0, order)[:, None]
        heard, start = self._heard(), 0
        # an expert meets a token once, so sums do not depend on the order in which a device adds
        total = torch.zeros_like(tokens, dtype=weight.dtype)
        for expert, count in zip(self.experts, counts, strict=True):
            if count or expert in heard:
                sent = by_expert[start : start + count]
                positions = getattr(expert, "hook_routed_positions", None)
                if positions is not None and is_listening(positions):
                    positions(torch.stack([sent // x.shape[1], sent % x.shape[1]], -1))
                out = expert(tokens.index_select(0, sent)) * weight[start : start + count]
                total.index_add_(0, sent, out)
            start += count
        return total.to(x.dtype).view_as(x)

    def _heard(self) -> list[nn.Module]:
        """The experts whose sites somebody wants, whether tokens were sent there or not."""
        for point in tuple(self.hooked):
            point.leave_if_unhooked()
        if not self.hooked:
            return []
        return [e for e in self.experts if any(isinstance(p, HookPoint) and p.is_listening for p in e.children())]

    def constant_bias(self) -> Float[Tensor, " d_model"] | None:
        """What the biases add to every token alike; ValueError where that depends on its way."""
        parts: list[Any] = [*self.experts, *([self.shared] if self.cfg.shared_gate else [])]
        if any(part.b_out is not None for part in parts):
            raise ValueError("what the biases of experts add depends on where each token is sent")
        return None if self.shared is None else self.shared.b_out

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MoE":
        """As for any module; but the weights of which rounding would send tokens elsewhere stay in fp32."""
        kept = {name: getattr(self, name).data for name in self.cfg.router.kept_wide}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            cast = getattr(self, name)
            if torch.finfo(cast.dtype).bits < torch.finfo(before.dtype).bits:
                setattr(self, name, nn.Parameter(before.to(cast.device), requires_grad=cast.requires_grad))
        return self

    def sync_config(self) -> None:
        """Make the config say what the experts are now, the first one speaking for all."""
        first: Any = self.experts[0]
        self.cfg = replace(self.cfg, expert=first.cfg, shared=None if self.shared is None else self.shared.cfg)


def _expert(cfg: ExpertConfig, hooked: set[ExpertPoint]) -> nn.Module:
    """An MLP whose sites show the tokens that were sent to it, if somebody asks."""
    expert: nn.Module = cfg.build()
    points = {name: part for name, part in expert.named_children() if isinstance(part, HookPoint)}
    for name in points:
        delattr(expert, name)
    expert.hook_routed_positions = ExpertPoint("routed", "2", hooked=hooked)  # the first: later hooks may need it
    for name, point in points.items():
        setattr(expert, name, ExpertPoint("routed", point.dims[-1], hooked=hooked))
    return expert
