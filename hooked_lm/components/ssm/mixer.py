"""What all state-space mixers have in common: a recurrence between an input projection and a gated output projection."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.activations import activation
from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import RESIDUAL
from hooked_lm.components.ssm.convolution import CausalConvolution, Window
from hooked_lm.hooks import HookPoint, hook_if_listening

INNER = ("batch", "pos", "d_inner")

Stream = Float[Tensor, "batch pos d_model"]
Inner = Float[Tensor, "batch pos d_inner"]


def carried(
    run: Callable[[Window | None, Tensor | None], tuple[Tensor, Window, Tensor]],
    batch: int,
    context: Context,
    layer: int,
) -> Tensor:
    """The output of `run` for the window and the state after the past tokens; the context's cache keeps those after the new."""
    if context.cache is None:
        return run(None, None)[0]
    entry = context.cache.state(layer)
    if entry.length != context.n_past:
        raise ValueError(f"the cache has the state of layer {layer} after {entry.length} tokens, not {context.n_past}")
    out, window, state = run(*entry.past(batch))
    entry.keep(window, state, context.n_pos)
    return out


class CachedMixer(nn.Module, ABC):
    """A mixer of tokens that starts from the state after the past tokens, and keeps the state after the last one."""

    axes = {"W_out": "[d_inner] d_model"}

    hook_in: HookPoint
    hook_out: HookPoint

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.cfg = cfg
        self.act = activation(cfg.act_fn)

    def forward(self, stream: Stream, context: Context | None = None, layer: int = 0) -> Stream:
        """`layer` is the index of this layer's entry in the context's cache."""
        stream = hook_if_listening(self.hook_in, stream)
        context = context or Context(stream.shape[1], stream.device)
        return self.hook_out(carried(partial(self.mixed, stream, context), len(stream), context, layer))

    @abstractmethod
    def mixed(
        self, stream: Stream, context: Context, window: Window | None, state: Tensor | None
    ) -> tuple[Stream, Window, Tensor]:
        """The output, and the window of the convolutions and the state after the last position, from those given."""


class Mixer(CachedMixer):
    """`output(recurrence(stream W_x), stream W_gate)`; `W_x` and `W_gate` are [d_model, d_inner].

    `output` gates the result of the recurrence and projects it into the stream by `W_out` [d_inner, d_model].
    """

    axes = dict.fromkeys(("W_x", "W_gate"), "[d_model] d_inner")

    W_x: Tensor
    W_gate: Tensor
    W_out: Tensor
    b_x: Tensor | None
    b_gate: Tensor | None
    b_out: Tensor | None
    hook_y: HookPoint

    def make_inputs(self) -> None:
        """Adds the input projections and the convolution."""
        cfg = self.cfg
        self.W_x = nn.Parameter(torch.empty(cfg.d_inner, cfg.d_model).T)
        self.W_gate = nn.Parameter(torch.empty(cfg.d_inner, cfg.d_model).T)
        self.b_x = nn.Parameter(torch.zeros(cfg.d_inner)) if cfg.bias else None
        self.b_gate = nn.Parameter(torch.zeros(cfg.d_inner)) if cfg.bias else None
        self.conv = CausalConvolution.Config(cfg.d_inner, cfg.conv_width, cfg.conv_bias).build()

    def make_input_sites(self) -> None:
        """Adds the sites up to the recurrence."""
        self.hook_in = HookPoint(*RESIDUAL, on_demand=True)
        self.hook_x, self.hook_gate, self.hook_conv = HookPoint(*INNER), HookPoint(*INNER), HookPoint(*INNER)

    def mixed(
        self, stream: Stream, context: Context, window: Window | None, state: Tensor | None
    ) -> tuple[Stream, Window, Tensor]:
        x, gate = self.hook_x(self.projected(stream, "x")), self.hook_gate(self.projected(stream, "gate"))
        y, window, state = self.recurrence(x, stream, context, window, state)
        return self.output(self.hook_y(y), gate), window, state

    def projected(self, stream: Stream, name: str) -> Float[Tensor, "batch pos width"]:
        """One of the projections of the stream: `stream W_name + b_name`, scaled."""
        return self.scaled(F.linear(stream, getattr(self, f"W_{name}").T, getattr(self, f"b_{name}")), name)

    def scaled(self, projected: Float[Tensor, "batch pos width"], name: str) -> Float[Tensor, "batch pos width"]:
        """A projection times its scale, if it has one."""
        return projected

    @abstractmethod
    def recurrence(
        self, x: Inner, stream: Stream, context: Context, window: Window | None, state: Tensor | None
    ) -> tuple[Float[Tensor, "batch pos *inner"], Window, Tensor]:
        """The output of the recurrence at every position, and the convolution's window and the state after the last one.

        The given window and state are those after the past tokens.
        """

    @abstractmethod
    def output(self, y: Tensor, gate: Inner) -> Stream:
        """Gates the output of the recurrence and projects it into the stream."""
