"""The parts of attention, made once: what a forward pass does not enter."""

from typing import Any

import torch
from torch import nn

from hooked_lm.components.attention.tl_attributes import AttentionTLAttributes, order_parameters
from hooked_lm.components.norms.norm import add_norm
from hooked_lm.hooks import HookPoint

QUERY = ("batch", "pos", "head", "d_head")
KEY = ("batch", "pos", "kv_head", "d_head")
SCORES = ("batch", "head", "query_pos", "key_pos")


class AttentionParts(AttentionTLAttributes):
    """Makes weights, norms and sites in the order of computation, in which sites are listed."""

    cfg: Any

    def make_mixing(self, d_value: int) -> None:
        cfg = self.cfg
        self.make_parts(d_value)
        self.scale = cfg.d_head**-0.5 if cfg.scale is None else cfg.scale
        self.causal, self.window, self.soft_cap = cfg.causal, cfg.window, cfg.soft_cap
        self.position_bias = None if cfg.position_bias is None else cfg.position_bias.build()
        self.W_O = nn.Parameter(torch.empty(cfg.n_heads, d_value, cfg.d_model))
        self.b_O = nn.Parameter(torch.zeros(cfg.d_model)) if cfg.out_bias else None
        self.sinks = nn.Parameter(torch.zeros(cfg.n_heads)) if cfg.sinks else None
        self.hook_attn_scores, self.hook_pattern = HookPoint(*SCORES), HookPoint(*SCORES)
        self.hook_z = HookPoint(*QUERY)
        add_norm(self, "z_norm", cfg.z_norm, QUERY)
        self.hook_result = HookPoint("batch", "pos", "head", "d_model", on_demand=True)
        order_parameters(self)

    def make_parts(self, d_value: int) -> None:
        """Makes the parts of a mechanism that come before those of mixing."""

    def _make_norms(self) -> None:
        if self.cfg.qk_norm is not None:
            self.q_norm = self.cfg.qk_norm.build(QUERY)
            self.k_norm = (self.cfg.k_norm or self.cfg.qk_norm).build(KEY)
        else:  # as in the public interface
            self.q_norm = self.k_norm = None

    def _make_rotary_points(self) -> None:
        if self.cfg.rotary is not None:
            self.hook_rot_q, self.hook_rot_k = HookPoint(*QUERY), HookPoint(*KEY)
