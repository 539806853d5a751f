"""Blocks that weigh the stream before they add to it, as in Doge (Shi et al. 2024, arXiv:2412.11834)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hooked_lm.components.blocks.block import AttentionPart, MLPPart, Stream
from hooked_lm.components.blocks.wiring import MID, POST, Wiring, added, attn_step, mlp_step
from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import RESIDUAL
from hooked_lm.hooks import HookPoint


class WeightedResidualBlock(AttentionPart, MLPPart):
    """`w_attn * resid + attn(ln1(resid))`, then `w_mlp * resid + mlp(ln2(resid))`, with weights [d_model].

    With `stream_bias` the weights multiply `resid + b_attn` and `resid + b_mlp`.
    """

    @dataclass(frozen=True)
    class Config(MLPPart.Config, AttentionPart.Config):
        stream_bias: bool = False

        def build(self, layer: int) -> "WeightedResidualBlock":
            return WeightedResidualBlock(self, layer)

    cfg: Config
    w_attn: Tensor
    w_mlp: Tensor

    def make_parts(self) -> None:
        self.make_attention()
        self.hook_resid_mid = HookPoint(*RESIDUAL)
        self.make_mlp()
        self.hook_resid_post = HookPoint(*RESIDUAL)
        d_model = self.cfg.attn.d_model
        for part in ("attn", "mlp"):
            self.register_parameter(f"w_{part}", nn.Parameter(torch.ones(d_model)))
            bias = nn.Parameter(torch.zeros(d_model)) if self.cfg.stream_bias else None
            self.register_parameter(f"b_{part}", bias)

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        resid = self.hook_resid_pre(resid)
        resid = self.hook_resid_mid(self.weighted("attn", resid) + self.attn_out(resid, context))
        return self.hook_resid_post(self.weighted("mlp", resid) + self.mlp_out(resid))

    def wiring(self) -> Wiring:
        attn, mlp = attn_step(self), mlp_step(self)
        mid = replace(added(MID, attn), weighed=("weighted", "attn"))
        return Wiring((attn, mid, mlp, replace(added(POST, mlp), weighed=("weighted", "mlp"))))

    def weighted(self, part: str, resid: Stream) -> Stream:
        """The stream to which a sublayer adds."""
        bias = getattr(self, f"b_{part}")
        return getattr(self, f"w_{part}") * (resid if bias is None else resid + bias)
