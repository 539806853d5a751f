"""The pre-norm block of most decoders, and its two halves; other structures are in the other files of this folder."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.attention.head_inputs import INPUT_POINTS, Inputs, head_inputs
from hooked_lm.components.attention.multihead import AbstractAttention
from hooked_lm.components.blocks.attention_in_part import AttentionInPart
from hooked_lm.components.blocks.wiring import MID, POST, Wiring, added, attn_step, mlp_step
from hooked_lm.components.context import Context
from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.mlp import MLPConfig
from hooked_lm.components.norms.norm import RESIDUAL, NormConfig, add_norm, build_norm, norm_of, norm_unhooked
from hooked_lm.components.run_settings import RunSettings
from hooked_lm.components.tl_call import block_context
from hooked_lm.hooks import HookPoint, hook_if_listening, is_listening

Stream = Float[Tensor, "batch pos d_model"]
Copies = Float[Tensor, "batch pos *head d_model"]  # of the stream, one for each head


class Block(nn.Module, ABC):
    """A layer of a stack: the sublayers between the stream before and after it."""

    cfg: Any
    mixing_norm = "ln1"  # the name of the norm in front of attention or the mixer, "" for none

    def __init__(self, cfg: Any, layer: int) -> None:
        super().__init__()
        self.cfg, self.layer = cfg, layer
        self.hook_resid_pre = HookPoint(*RESIDUAL)
        self.make_parts()

    @abstractmethod
    def make_parts(self) -> None:
        """Adds the sublayers and sites, in the order of computation, in which sites are listed."""

    @abstractmethod
    def wiring(self) -> Wiring:
        """Which sublayers read the stream, and what is added where."""

    def move_to_end(self, *names: str) -> None:
        """Makes parts the last in the order."""
        self._modules.update([(name, self._modules.pop(name)) for name in names])

    def scaled(self, out: Stream) -> Stream:
        """The output of a sublayer times `residual_scale`."""
        return out if self.cfg.residual_scale == 1.0 else out * self.cfg.residual_scale


class AttentionPart(AttentionInPart, Block):
    """The half of a block with attention."""

    @dataclass(frozen=True)
    class Config:
        """A norm may be None. `ln1_post` normalises the output of attention, and `residual_scale` multiplies it."""

        attn: AbstractAttention.Config
        ln1: NormConfig | None = None
        ln1_post: NormConfig | None = None
        residual_scale: float = 1.0

    cfg: Config
    settings = RunSettings()
    call_context = staticmethod(block_context)

    def make_attention(self) -> None:
        self.ln1 = build_norm(self.cfg.ln1)
        per_head, per_kv_head = ("batch", "pos", "head", "d_model"), ("batch", "pos", "kv_head", "d_model")
        self.hook_attn_in, self.hook_q_input = (HookPoint(*per_head, on_demand=True) for _ in range(2))
        attn = self.cfg.attn.build()
        attn.layer_id = self.layer
        if attn.computes_kv:
            self.hook_k_input, self.hook_v_input = (HookPoint(*per_kv_head, on_demand=True) for _ in range(2))
        self.attn, self.computes_kv = attn, attn.computes_kv
        add_norm(self, "ln1_post", self.cfg.ln1_post)
        self.hook_attn_out = HookPoint(*RESIDUAL)

    def __call__(self, resid_pre: Stream, context: object = None, *args: object, **kwargs: object) -> Tensor:
        """Runs the block in a context; the arguments of the public interface are made into one (see `tl_call`)."""
        if args or kwargs or not (context is None or isinstance(context, Context)):
            context = self.call_context(resid_pre, context, *args, **kwargs)
        return super().__call__(resid_pre, context)

    def attn_out(self, resid: Stream, context: Context | None, shared: Stream | None = None) -> Stream:
        """The output of attention to the stream; `shared` is the normalised stream, if it is already computed."""
        context = context or Context(resid.shape[1], resid.device)
        if context.is_partial:
            return self.attn_out_in_part(context, resid, shared)  # type: ignore[arg-type]
        return self.attn_to_stream(self.attn(*self.attn_inputs(resid, shared, context), context, self.layer))

    def attn_to_stream(self, out: Stream) -> Stream:
        """The output of attention to the stream, for this output of its module."""
        return self.hook_attn_out(self.scaled(norm_of(self, "ln1_post")(out)))

    def attn_inputs(self, resid: Stream, shared: Stream | None, context: Context) -> Inputs:
        """The inputs of queries, keys and values: the normalised stream, or one copy of it per head if something listens."""
        points = [self._modules[name] for name in INPUT_POINTS if name in self._modules]
        if self.settings.attn_in or self.settings.split_qkv or is_listening(*points):  # type: ignore[arg-type]
            query, key, value = head_inputs(self, resid, shared, context)
        else:
            query = key = value = self.attn_norm(resid) if shared is None else shared
        if (shift := context.pos_embed) is not None:  # of a shortformer
            query, key = (x + (shift[:, :, None] if x.ndim == 4 else shift) for x in (query, key))
        return query, key, value

    def attn_norm(self, copies: Copies, at_sites: bool = True) -> Copies:
        """The input of attention, for the stream or copies of it; the norm has its sites only if `at_sites`."""
        norm = norm_of(self, self.mixing_norm)
        return norm(copies) if at_sites else norm_unhooked(norm, copies)


class MLPPart(Block):
    """The half of a block with an MLP."""

    @dataclass(frozen=True)
    class Config:
        """`ln2` normalises the input of the MLP; the others are as for attention."""

        mlp: MLPConfig | MoE.Config = field(kw_only=True)
        ln2: NormConfig | None = None
        ln2_post: NormConfig | None = None
        residual_scale: float = 1.0

    cfg: Config
    mlp_norm = "ln2"  # the name of the norm in front of the MLP

    def make_mlp(self) -> None:
        self.make_before_mlp()
        self.hook_mlp_in = HookPoint(*RESIDUAL, on_demand=True)
        self.ln2 = build_norm(self.cfg.ln2)
        self.mlp = self.cfg.mlp.build()
        add_norm(self, "ln2_post", self.cfg.ln2_post)
        self.hook_mlp_out = HookPoint(*RESIDUAL)

    def make_before_mlp(self) -> None:
        """Adds parts in front of those of the MLP; most blocks have none."""

    def mlp_out(self, resid: Stream) -> Stream:
        """The output of the MLP to the stream."""
        return self.apply_mlp(self.ln2(hook_if_listening(self.hook_mlp_in, resid)))

    def apply_mlp(self, normalized_resid: Stream, *beside: object) -> Stream:
        """The output of the MLP to the stream, for the normalised stream and what some MLPs read beside it."""
        return self.hook_mlp_out(self.scaled(norm_of(self, "ln2_post")(self.mlp(normalized_resid, *beside))))


class PreNormBlock(AttentionPart, MLPPart):
    """`resid + attn(ln1(resid))`, then `resid + mlp(ln2(resid))`."""

    @dataclass(frozen=True)
    class Config(MLPPart.Config, AttentionPart.Config):
        def build(self, layer: int) -> "PreNormBlock":
            return PreNormBlock(self, layer)

    cfg: Config

    def make_parts(self) -> None:
        self.make_attention()
        self.hook_resid_mid = HookPoint(*RESIDUAL)
        self.make_mlp()
        self.hook_resid_post = HookPoint(*RESIDUAL)

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        resid = self.hook_resid_pre(resid)
        resid = self.hook_resid_mid(resid + self.attn_out(resid, context))
        return self.hook_resid_post(resid + self.mlp_out(resid))

    def wiring(self) -> Wiring:
        attn, mlp = attn_step(self), mlp_step(self)
        return Wiring((attn, added(MID, attn), mlp, added(POST, mlp)))
