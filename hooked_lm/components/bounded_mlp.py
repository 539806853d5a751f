"""A gated MLP with bounded branches."""

from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from hooked_lm.components.mlp import AbstractGatedMLP, GatedMLP, Stream, hooked_input

Hidden = Float[Tensor, "*batch d_mlp"]


class BoundedGatedMLP(AbstractGatedMLP):
    """`(min(act(x W_gate), limit) * clamp(x W_in, -limit, limit)) W_out`: a `GatedMLP` whose branches are bounded.

    `hook_pre` and `hook_pre_linear` are before the bounds. Step 3.5 Flash (StepFun 2026). With `before_act` the first branch is
    bounded before its activation: `act(min(x W_gate, limit))`. Hy4 (Tencent 2026).
    """

    @dataclass(frozen=True)
    class Config(GatedMLP.Config):
        limit: float = 7.0
        before_act: bool = False

        def build(self) -> "BoundedGatedMLP":
            if self.mid_norm is not None:
                raise ValueError("a BoundedGatedMLP has no mid_norm")
            return BoundedGatedMLP(self)

    cfg: Config

    def forward(self, x: Stream) -> Stream:
        x = hooked_input(self, x)
        gate = self.hook_pre(F.linear(x, self.W_gate.T, self.b_gate))
        post = self.product(gate, self.hook_pre_linear(F.linear(x, self.W_in.T, self.b_in)))
        return self.hook_out(F.linear(self.hook_post(post), self.W_out.T, self.b_out))

    def product(self, pre: Hidden, pre_linear: Hidden) -> Hidden:
        """The activations of the neurons, from the gate and the linear branch."""
        limit = self.cfg.limit
        gate = self.act_fn(pre.clamp(max=limit)) if self.cfg.before_act else self.act_fn(pre).clamp(max=limit)
        return gate * pre_linear.clamp(-limit, limit)
