"""A mixture of attention heads (Zhang et al. 2022, arXiv:2210.05144): each token's queries go to a few of many experts' heads."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.components.attention.multihead import Attention, Mixed, PerHead, Stream
from hooked_lm.components.context import Context
from hooked_lm.components.experts.router import Router, TopKRouter
from hooked_lm.components.norms.norm import upcast
from hooked_lm.hooks import HookPoint, is_listening

PerExpert = Float[Tensor, "batch pos expert"]
Weights = Float[Tensor, "batch pos top_k"]
Indices = Int[Tensor, "batch pos top_k"]
Gate = Float[Tensor, "batch pos head 1"]
Choices = Int[Tensor, " _choice"]


class RoutedAttention(Attention):
    """Attention with `z = (pattern v) * gate`, where the gate of a head is the weight of its expert, zero unless it is chosen.

    An expert has a query head for every key/value head: head `kv * n_experts + e` belongs to expert e and attends to the keys of
    key/value head kv, which all experts share. So heads keep their weights from token to token, and `hook_result` is what each
    adds. The router chooses by `x W_router`, as in `MoE`; edits of `hook_expert_indices` open other heads.

    Only the chosen heads are computed, each expert's on all its tokens together, unless something listens to values of all heads.
    """

    axes = {"W_router": "[d_model] expert"}

    mixes_heads, mixes_linearly = True, False

    @dataclass(frozen=True)
    class Config(Attention.Config):
        n_experts: int = 1
        top_k: int = 1
        router: Router = field(default_factory=TopKRouter)

        def build(self) -> "RoutedAttention":
            return RoutedAttention(self)

    cfg: Config

    def make_parts(self, d_value: int) -> None:
        cfg = self.cfg
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

    def forward(
        self,
        query_input: Float[Tensor, "batch pos *head d_in"],
        key_input: Float[Tensor, "batch key_row *key_head d_in"] | None = None,
        value_input: Float[Tensor, "batch key_row *value_head d_in"] | None = None,
        context: Context | None = None,
        layer: int = 0,
    ) -> Stream:
        """As `Attention.forward`."""
        if self.computes_every_head(query_input):
            return super().forward(query_input, key_input, value_input, context, layer)
        context, rotary = context or Context(query_input.shape[1], query_input.device), self.cfg.rotary
        gate = self.gate(query_input)[:, :, : self.cfg.n_experts, 0]
        chosen = gate.abs().topk(self.cfg.top_k, -1).indices
        sent = self.by_expert(chosen)
        q = self.queries_of(sent, query_input)
        k = self.hook_k(self._project_kv(query_input if key_input is None else key_input, self.W_K, self.b_K))
        v = self.hook_v(self._project_kv(query_input if value_input is None else value_input, self.W_V, self.b_V))
        if rotary is not None:
            q = rotary.rotate(q, context.query_angles(rotary))
            k = self.hook_rot_k(rotary.rotate(k, context.key_angles(rotary)))
        k, v = context.update_kv(layer, k, v)
        z = context.attend_rows(layer, self.mix_fused, q, k, v)
        return self.output_of(sent, z, gate.gather(-1, chosen))

    def computes_every_head(self, query_input: Tensor) -> bool:
        """Whether the heads of experts that are not chosen are needed, or there is a mechanism between projection and mixing."""
        cfg, sites = self.cfg, [self.hook_q, self.hook_z, self.hook_result]
        sites += [] if cfg.rotary is None else [self.hook_rot_q]
        others = (cfg.qk_norm, cfg.v_norm, cfg.z_norm, cfg.clip)
        unusual = self.ungrouped or cfg.is_kv_source or cfg.values_from_keys
        unusual = unusual or any(other is not None for other in others) or self.settings.attn_result
        return unusual or query_input.ndim == 4 or self.kernel() != self.mix_fused or is_listening(*sites)

    def by_expert(self, chosen: Indices) -> list[tuple[Choices, Choices]]:
        """The tokens of each expert, and the numbers of their choices among those of all tokens."""
        experts = chosen.flatten()
        order, counts = experts.argsort(stable=True), experts.bincount(minlength=self.cfg.n_experts).tolist()
        return list(zip((order // self.cfg.top_k).split(counts), order.split(counts), strict=True))

    def queries_of(self, sent: list[tuple[Choices, Choices]], x: Stream) -> PerHead:
        """The queries of the chosen experts; the heads of a key/value head follow each other."""
        n_kv, rows = self.cfg.n_kv, x.flatten(0, 1)
        found = x.new_empty(len(rows) * self.cfg.top_k, n_kv, self.cfg.d_head)
        biases = self.W_Q.new_zeros(self.W_Q.shape[0], 1) if self.b_Q is None else self.b_Q
        weights, biases = (of_heads.unflatten(0, (n_kv, -1)).unbind(1) for of_heads in (self.W_Q, biases))
        for weight, bias, (tokens, choices) in zip(weights, biases, sent, strict=True):
            own = torch.baddbmm(bias[:, None], rows.index_select(0, tokens).expand(n_kv, -1, -1), weight)
            found.index_copy_(0, choices, own.transpose(0, 1))
        return found.view(*x.shape[:2], self.cfg.top_k, n_kv, self.cfg.d_head).transpose(2, 3).flatten(2, 3)

    def output_of(self, sent: list[tuple[Choices, Choices]], z: Mixed, gate: Weights) -> Stream:
        """The output of the mixed values of the chosen experts."""
        n_kv, total = self.cfg.n_kv, z.new_zeros(gate[..., 0].numel(), self.cfg.d_model)
        gated = (z.unflatten(2, (n_kv, -1)) * gate[:, :, None, :, None]).permute(2, 0, 1, 3, 4).flatten(1, 3)
        for weight, (tokens, choices) in zip(self.W_O.unflatten(0, (n_kv, -1)).unbind(1), sent, strict=True):
            total.index_add_(0, tokens, torch.addbmm(total[:1], gated.index_select(1, choices), weight, beta=0))
        out = total.view(*gate.shape[:2], self.cfg.d_model)
        return out if self.b_O is None else out + self.b_O
