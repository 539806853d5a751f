"""Blocks with a state-space mixer instead of attention."""

from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from hooked_lm.components.blocks.block import Block, MLPPart, Stream
from hooked_lm.components.blocks.wiring import MID, POST, Wiring, added, mixer_step, mlp_step
from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import RESIDUAL, NormConfig, add_norm, build_norm, norm_of, upcast
from hooked_lm.hooks import HookPoint, hook_if_listening


@runtime_checkable
class MixerConfig(Protocol):
    """The config of a mixer."""

    @property
    def n_weights(self) -> int:
        """The number of entries of its matrices."""

    def build(self) -> nn.Module:
        """The mixer: it is called with the stream, the context and the index of its layer."""


class MixerPart(Block):
    """The half of a block with a mixer, in place of attention."""

    @dataclass(frozen=True)
    class Config:
        """A norm may be None; `residual_scale` multiplies the output of the mixer."""

        mixer: MixerConfig = field(kw_only=True)
        ln1: NormConfig | None = None
        ln1_post: NormConfig | None = None
        residual_scale: float = 1.0

    cfg: Config

    def make_mixer(self) -> None:
        self.hook_mixer_in = HookPoint(*RESIDUAL, on_demand=True)
        self.ln1 = build_norm(self.cfg.ln1)
        self.mixer = self.cfg.mixer.build()
        add_norm(self, "ln1_post", self.cfg.ln1_post)
        self.hook_mixer_out = HookPoint(*RESIDUAL)

    def mixer_out(self, resid: Stream, context: Context | None) -> Stream:
        """The output of the mixer to the stream. Its input is cast to the dtype of its weights."""
        context = context or Context(resid.shape[1], resid.device)
        if context.is_partial:
            return context.of_rows(partial(self._mixed, context), self._mixer_from, resid)  # type: ignore[attr-defined]
        return self._mixed(context, resid)

    def _mixed(self, context: Context, resid: Stream) -> Stream:
        read = self.mixer_stream(hook_if_listening(self.hook_mixer_in, resid), context)
        normalized = norm_of(self, self.mixing_norm)(read).to(self.mixer_dtype(resid))
        out = norm_of(self, "ln1_post")(context.scan(self.layer, self.mixer, normalized))
        return self.hook_mixer_out(self.scaled(out))

    def _mixer_from(self, site: str, value: Tensor) -> Stream:
        """The output of the mixer to the stream, from its value there: no site before it suffices."""
        return self.hook_mixer_out(value)

    def make_keys(self, resid: Stream, context: Context) -> None:
        """Computes the state after some tokens."""
        self.mixer_out(self.hook_resid_pre(resid), context)

    def mixer_stream(self, resid: Stream, context: Context) -> Stream:
        """What the norm in front of the mixer reads, in most blocks the stream."""
        return resid

    def mixer_dtype(self, resid: Stream) -> torch.dtype:
        """The dtype of the mixer's weights, or that of the stream for a module without weights."""
        return next(self.mixer.parameters(), resid).dtype


class MixerBlock(MixerPart):
    """`resid + mixer(ln1(resid))`: a layer of a pure state-space model. With `wide_stream` the stream is in at least fp32."""

    @dataclass(frozen=True)
    class Config(MixerPart.Config):
        wide_stream: bool = False

        def build(self, layer: int) -> "MixerBlock":
            return MixerBlock(self, layer)

    cfg: Config

    def make_parts(self) -> None:
        self.make_mixer()
        self.hook_resid_post = HookPoint(*RESIDUAL)

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        resid = self.hook_resid_pre(upcast(resid) if self.cfg.wide_stream else resid)
        return self.hook_resid_post(resid + self.mixer_out(resid, context))

    def wiring(self) -> Wiring:
        mixer = mixer_step(self)
        return Wiring((mixer, added(POST, mixer)))


class MixerMLPBlock(MixerPart, MLPPart):
    """`resid + mixer(ln1(resid))`, then `resid + mlp(ln2(resid))`: a state-space layer of a hybrid."""

    @dataclass(frozen=True)
    class Config(MLPPart.Config, MixerPart.Config):
        def build(self, layer: int) -> "MixerMLPBlock":
            return MixerMLPBlock(self, layer)

    cfg: Config

    def make_parts(self) -> None:
        self.make_mixer()
        self.hook_resid_mid = HookPoint(*RESIDUAL)
        self.make_mlp()
        self.hook_resid_post = HookPoint(*RESIDUAL)

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        resid = self.hook_resid_pre(resid)
        resid = self.hook_resid_mid(resid + self.mixer_out(resid, context))
        return self.hook_resid_post(resid + self.mlp_out(resid))

    def wiring(self) -> Wiring:
        mixer, mlp = mixer_step(self), mlp_step(self)
        return Wiring((mixer, added(MID, mixer), mlp, added(POST, mlp)))
