"""A mixture of attention heads (Zhang et al. 2022, arXiv:2210.05144): each token's queries go to a few of many experts' heads."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.components.attention.multihead import Attention, Keys, Mixed, PerHead, Values
from hooked_lm.components.context import Context
from hooked_lm.components.norm import upcast
from hooked_lm.components.router import Router, TopKRouter
from hooked_lm.hooks import HookPoint

PerExpert = Float[Tensor, "batch pos expert"]
Weights = Float[Tensor, "batch pos top_k"]
Indices = Int[Tensor, "batch pos top_k"]
Gate = Float[Tensor, "batch pos head 1"]


class RoutedAttention(Attention):
    """Attention with `z = (pattern v) * gate`, where the gate of a head is the weight of its expert, zero unless it is chosen.

    An expert has a query head for every key/value head: head `kv * n_experts + e` belongs to expert e and attends to the keys of
    key/value head kv, which all experts share. So heads keep their weights from token to token, and `hook_result` is what each
    adds. The router chooses by `x W_router`, as in `MoE`; edits of `hook_expert_indices` open other heads.

    Only the chosen heads attend, unless something listens to scores or patterns.
    """

    @dataclass(frozen=True)
    class Config(Attention.Config):
        n_experts: int = 1
        top_k: int = 1
        router: Router = field(default_factory=TopKRouter)

        def build(self) -> "RoutedAttention":
            return RoutedAttention(self)

    cfg: Config

    def make_mixing(self, cfg: Config, d_value: int) -> None:  # type: ignore[override]
        if cfg.n_heads != cfg.n_kv * cfg.n_experts or not 1 <= cfg.top_k <= cfg.n_experts:
            raise ValueError(
                f"{cfg.n_experts} experts with a head for each of {cfg.n_kv} key/value heads are not {cfg.n_heads} heads, "
                f"or top_k={cfg.top_k} is not from 1 to {cfg.n_experts}"
            )
        self.W_router = nn.Parameter(torch.empty(cfg.d_model, cfg.n_experts))
        self.b_router = None
        self.hook_router_logits = HookPoint("batch", "pos", "expert")
        self.hook_expert_weights = HookPoint("batch", "pos", "top_k")
        self.hook_expert_indices = HookPoint("batch", "pos", "top_k")
        super().make_mixing(cfg, d_value)

    def gate(self, query_input: Float[Tensor, "batch pos *head d_model"]) -> Gate:
        """What the mixed values are multiplied by."""
        weights, indices = self.choice(self.hook_router_logits(self.router_logits(query_input)))
        weights = self.hook_expert_weights(weights.to(query_input.dtype))
        return self.of_heads(weights, self.hook_expert_indices(indices))

    def router_logits(self, x: Float[Tensor, "batch pos *head d_model"]) -> PerExpert:
        """The router's logits; of per-head copies an expert's logit reads the mean of those of its heads."""
        x, weight = (upcast(x), upcast(self.W_router)) if self.cfg.router.in_fp32 else (x, self.W_router)
        if x.ndim == 3:
            return F.linear(x, weight.T)
        return torch.einsum("bpem,me->bpe", x.unflatten(2, (-1, self.cfg.n_experts)).mean(2), weight)

    def choice(self, logits: PerExpert) -> tuple[Weights, Indices]:
        """The weights and indices of the experts that the router chooses."""
        return self.cfg.router(logits, self.cfg.top_k, None)

    def of_heads(self, weights: Weights, indices: Indices) -> Gate:
        """The gate of each head, from the weights and indices of the chosen experts."""
        of_experts = weights.new_zeros(*weights.shape[:-1], self.cfg.n_experts).scatter_add(-1, indices, weights)
        return of_experts.repeat(1, 1, self.cfg.n_kv)[..., None]

    def mix(
        self, q: PerHead, k: Keys, v: Values, context: Context, layer: int = 0, gate: Tensor | None = None
    ) -> Mixed:
        cfg = self.cfg
        if gate is None or self.ungrouped or self.mixing() != self.mix_fused:
            return super().mix(q, k, v, context, layer, gate)
        chosen = gate[:, :, : cfg.n_experts].abs().topk(cfg.top_k, 2).indices[:, :, None]  # [batch pos 1 top_k 1]
        queries = q.unflatten(2, (cfg.n_kv, -1)).take_along_dim(chosen, 3).flatten(2, 3)
        z = context.attend_rows(layer, self.mix_fused, queries, k, v).unflatten(2, (cfg.n_kv, -1))
        whole = z.new_zeros(*z.shape[:3], cfg.n_experts, z.shape[-1]).scatter(3, chosen.expand_as(z), z)
        return self.hook_z(whole.flatten(2, 3) * gate)

    @property
    def is_linear_in_values(self) -> bool:
        """Whether a vector added to all values is added to the output, through `W_O`."""
        return False
