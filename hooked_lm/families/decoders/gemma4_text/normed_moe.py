"""Experts in parallel with an MLP, each with norms of its own (Gemma 4, Google DeepMind 2026)."""

from dataclasses import dataclass, field

import torch
from torch import nn

from hooked_lm.components.experts.moe import AbstractMoE, Indices, MoE, Stream, Weights
from hooked_lm.components.mlp import hooked_input
from hooked_lm.components.norms.norm import NormConfig


class NormedMoE(AbstractMoE):
    """`ln_shared_post(shared(ln_shared(x))) + ln_experts_post(sum of weight_e * experts[e](ln_experts(x)))`.

    x is the stream before any norm. The router's input is `ln_router(x) * d_model ** -0.5`, and its weights are multiplied by
    `expert_scale` [expert].
    """

    @dataclass(frozen=True)
    class Config(MoE.Config):
        """`norm` is the config of all five norms."""

        norm: NormConfig = field(kw_only=True)

        def build(self) -> "NormedMoE":
            return NormedMoE(self)

    cfg: Config

    def __init__(self, cfg: Config) -> None:
        if cfg.shared is None:
            raise ValueError("NormedMoE needs a shared expert: set `shared`")
        if cfg.router_bias:
            raise ValueError("the router of a NormedMoE has no bias: set router_bias=False")
        if cfg.out_scale != 1 or cfg.out_bias:
            given = f"out_scale={cfg.out_scale} must be 1, out_bias={cfg.out_bias} False"
            raise ValueError(f"norms are after the experts of a NormedMoE: {given}")
        super().__init__(cfg)
        self.expert_scale = nn.Parameter(torch.ones(cfg.n_experts))
        self.ln_router, self.ln_experts, self.ln_experts_post = (cfg.norm.build() for _ in range(3))
        self.ln_shared, self.ln_shared_post = cfg.norm.build(), cfg.norm.build()
        routing = ("ln_router", "hook_router_logits", "hook_expert_weights", "hook_expert_indices")
        computing = ("ln_experts", "experts", "ln_experts_post", "ln_shared", "shared", "ln_shared_post", "hook_out")
        for name in (*routing, *computing):  # sites are listed in the order of computation
            self._modules[name] = self._modules.pop(name)

    def forward(self, x: Stream) -> Stream:
        x = hooked_input(self, x)
        weights, indices = self.route(x)
        mixed = self.ln_experts_post(self.mix(self.ln_experts(x), weights, indices))
        assert self.shared is not None
        return self.hook_out(self.ln_shared_post(self.shared(self.ln_shared(x))) + mixed)

    def router_input(self, x: Stream) -> Stream:
        return self.ln_router(x) * self.cfg.d_model**-0.5

    def scaled(self, weights: Weights, indices: Indices) -> Weights:
        return weights * self.expert_scale[indices]
