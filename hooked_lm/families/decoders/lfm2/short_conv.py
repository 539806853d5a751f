"""The gated short convolution of LFM2 (Liquid AI 2025, arXiv:2511.23404)."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import RESIDUAL, upcast
from hooked_lm.components.ssm.convolution import Window
from hooked_lm.components.ssm.mixer import INNER, Inner, Mixer, Stream
from hooked_lm.components.ssm.scan import all_states, hooked_states
from hooked_lm.hooks import HookPoint, is_listening

State = Float[Tensor, "batch d_inner width"]
States = Float[Tensor, "batch pos d_inner width"]


class ShortConv(Mixer):
    """`(act(conv(B * x)) * gate) W_out`, where x, B and the gate are projections of the stream.

    `W_x`, `W_B` and `W_gate` are [d_model, d_inner], `W_out` is [d_inner, d_model], and d_inner equals d_model. The state is the
    window of the convolution: the last `conv_width` products `B * x` of each channel, the newest last.

    Sites: `hook_x`; `hook_B`, the factor of x; `hook_gate` (the paper's C), to which no activation is applied; on demand
    `hook_state`, the window after every position, whose edits change later windows (see `scan.hooked_states`); `hook_y`, the
    output of the convolution, in at least fp32.
    """

    axes = {"W_B": "[d_model] d_inner"}

    @dataclass(frozen=True)
    class Config:
        d_model: int
        conv_width: int = 3
        bias: bool = False  # of the projections and the convolution
        act_fn: str = "linear"  # after the convolution

        @property
        def d_inner(self) -> int:
            return self.d_model

        @property
        def conv_bias(self) -> bool:
            return self.bias

        @property
        def n_weights(self) -> int:
            """The number of entries of its matrices."""
            return 4 * self.d_model * self.d_inner

        def build(self) -> "ShortConv":
            return ShortConv(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.make_inputs()
        self.W_B = nn.Parameter(torch.empty(cfg.d_inner, cfg.d_model).T)
        self.b_B = nn.Parameter(torch.zeros(cfg.d_inner)) if cfg.bias else None
        self.W_out = nn.Parameter(torch.empty(cfg.d_model, cfg.d_inner).T)
        self.b_out = nn.Parameter(torch.zeros(cfg.d_model)) if cfg.bias else None

        self.hook_in = HookPoint(*RESIDUAL, on_demand=True)
        self.hook_x, self.hook_gate, self.hook_B = HookPoint(*INNER), HookPoint(*INNER), HookPoint(*INNER)
        self.hook_state = HookPoint(*INNER, "tap", on_demand=True)
        self.hook_y = HookPoint(*INNER)
        self.hook_out = HookPoint(*RESIDUAL, on_demand=True)

    def recurrence(
        self, x: Inner, stream: Stream, context: Context, window: Window | None, state: Window | None
    ) -> tuple[Inner, Window, Window]:
        """y, and the window after the last position, which is also the state; see `Mixer`."""
        real = context.new_real()
        product = self.hook_B(F.linear(stream, self.W_B.T, self.b_B)) * x
        if is_listening(self.hook_state):
            states, edited = self.states(product, state, real)
            if edited:
                last = states[:, -1, :, 1:].mT
                return self.read(states), last, last
        y, last = self.conv(product, state, real)
        return self.act(y), last, last

    def states(
        self, product: Inner, window: Window | None = None, real: Bool[Tensor, "batch pos"] | None = None
    ) -> tuple[States, bool]:
        """The state after every position from the products `B * x`, as `hooked_states` returns it; padding does not change it."""
        start = product.new_zeros(*product[:, 0].shape, self.cfg.conv_width)
        if window is not None:
            start[..., 1:] = window.mT

        def step(pos: int, state: State) -> State:
            after = torch.cat([state[..., 1:], product[:, pos, :, None]], -1)
            return after if real is None else torch.where(real[:, pos, None, None], after, state)

        return hooked_states(self.hook_state, partial(all_states, step, start, product.shape[1]))

    def read(self, states: States) -> Inner:
        """The output of the convolution at every position, in at least fp32."""
        out = (upcast(states) * upcast(self.conv.W_conv).T).sum(-1)
        return self.act(out if self.conv.b_conv is None else out + upcast(self.conv.b_conv))

    def output(self, y: Inner, gate: Inner) -> Stream:
        """Gates the output of the convolution and projects it into the stream."""
        return F.linear((y * upcast(gate)).to(gate.dtype), self.W_out.T, self.b_out)
