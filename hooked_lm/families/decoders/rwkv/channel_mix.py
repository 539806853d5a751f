"""Channel mixing of RWKV-4 (Peng et al. 2023, arXiv:2305.13048): an MLP with a gate, which also reads the previous token."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import RESIDUAL, upcast
from hooked_lm.components.ssm.convolution import Window
from hooked_lm.components.ssm.mixer import CachedMixer, Stream
from hooked_lm.families.decoders.rwkv.token_shift import previous
from hooked_lm.hooks import HookPoint

HIDDEN = (*RESIDUAL[:-1], "d_mlp")

Hidden = Float[Tensor, "batch pos d_mlp"]


class ChannelMix(CachedMixer):
    """`sigmoid(gate) * (act(pre) W_out)`, where `pre = (mix_in x + (1 - mix_in) p) W_in` and
    `gate = (mix_gate x + (1 - mix_gate) p) W_gate`, of the input x and that of the previous token p.

    `W_in` is [d_model, d_mlp], `W_gate` [d_model, d_model], `W_out` [d_mlp, d_model], `mix_in` and `mix_gate` [d_model]. The
    state is the last input.

    Sites: `hook_prev`, the input of the previous token; `hook_pre`, `hook_post` and `hook_gate`, before the sigmoid.
    """

    axes = {"W_in": "[d_model] d_mlp", "W_gate": "[d_model] d_gate", "W_out": "[d_mlp] d_model"}

    @dataclass(frozen=True)
    class Config:
        d_model: int
        d_mlp: int
        act_fn: str = "relu2"

        @property
        def n_weights(self) -> int:
            """The number of entries of its matrices."""
            return self.d_model * (2 * self.d_mlp + self.d_model)

        def build(self) -> "ChannelMix":
            return ChannelMix(self)

    cfg: Config
    b_out = None

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        for name, width in (("in", cfg.d_mlp), ("gate", cfg.d_model)):
            self.register_parameter(f"mix_{name}", nn.Parameter(torch.full((cfg.d_model,), 0.5)))
            self.register_parameter(f"W_{name}", nn.Parameter(torch.empty(width, cfg.d_model).T))
        self.W_out = nn.Parameter(torch.empty(cfg.d_model, cfg.d_mlp).T)
        self.hook_in, self.hook_prev = HookPoint(*RESIDUAL, on_demand=True), HookPoint(*RESIDUAL)
        self.hook_pre, self.hook_post, self.hook_gate = HookPoint(*HIDDEN), HookPoint(*HIDDEN), HookPoint(*RESIDUAL)
        self.hook_out = HookPoint(*RESIDUAL, on_demand=True)

    def mixed(
        self, stream: Stream, context: Context, window: Window | None, state: Tensor | None
    ) -> tuple[Stream, Window, Tensor]:
        before, window = previous(stream, window, context.new_real())
        before = self.hook_prev(before)
        post = self.hook_post(self.act(self.hook_pre(self.projected(stream, before, "in"))))
        gate = self.hook_gate(self.projected(stream, before, "gate"))
        return self.output(post, gate), window, window

    def projected(self, x: Stream, before: Stream, name: str) -> Float[Tensor, "batch pos width"]:
        """The inner values or the gate, from the inputs of each token and of the one before it."""
        share = getattr(self, f"mix_{name}")
        return F.linear(x * share + before * (1 - share), getattr(self, f"W_{name}").T)

    def output(self, post: Hidden, gate: Stream) -> Stream:
        """The gated output."""
        return F.linear(post, self.W_out.T) * upcast(gate).sigmoid().to(gate.dtype)
