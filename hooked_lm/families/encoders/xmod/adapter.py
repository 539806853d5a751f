"""A post-norm block with an adapter for each language (X-MOD, Pfeiffer et al. 2022, arXiv:2205.06266)."""

from dataclasses import dataclass, field

import torch
from torch import nn

from hooked_lm.components.blocks.block import AttentionPart, Stream
from hooked_lm.components.blocks.post_norm import PostNormPart
from hooked_lm.components.blocks.wiring import NORMALIZED_MID, POST, InStream, Sublayer, Sum, Wiring, added, attn_step
from hooked_lm.components.context import Context
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.norm import RESIDUAL, NormConfig, add_norm, norm_of, norm_unhooked
from hooked_lm.hooks import HookPoint, hook_if_listening


class AdapterPostNormBlock(AttentionPart, PostNormPart):
    """A post-norm block whose stream passes a small MLP after the large one: `ln2(s + adapter(n))` for the sum s.

    `hook_resid_mlp` is s, `hook_adapter_in` its normalised value n, and `hook_resid_post` the sum with the adapter's output. The
    weights of the adapters of other languages are kept, in `other_adapters`, and not used.
    """

    @dataclass(frozen=True)
    class Config(PostNormPart.Config, AttentionPart.Config):
        """n is s after the norm `adapter_ln`, after `ln2` if `reuses_ln2`, else s. With `adds_normalized` the adapter's output is
        added to n instead of s."""

        adapter: MLP.Config = field(kw_only=True)
        adapter_ln: NormConfig | None = None
        reuses_ln2: bool = False
        adds_normalized: bool = False
        language: str = ""  # of the adapter
        other_languages: tuple[str, ...] = ()

        def build(self, layer: int) -> "AdapterPostNormBlock":
            return AdapterPostNormBlock(self, layer)

    cfg: Config

    def make_parts(self) -> None:
        self.make_attention()
        self.make_post_norms()
        self.hook_resid_mlp = HookPoint(*RESIDUAL)
        add_norm(self, "adapter_ln", self.cfg.adapter_ln)
        self.hook_adapter_in = HookPoint(*RESIDUAL)
        self.adapter = self.cfg.adapter.build()
        self.hook_adapter_out = HookPoint(*RESIDUAL)
        self.move_to_end("hook_resid_post", "ln2", "hook_normalized_resid_post")
        if self.cfg.other_languages:
            of_language = {language: Weights(self.cfg.adapter) for language in self.cfg.other_languages}
            self.other_adapters = nn.ModuleDict(of_language)

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        resid = self.hook_resid_pre(resid)
        resid = self.hook_resid_mid(resid + self.attn_out(resid, context, resid))
        resid = self.hook_normalized_resid_mid(self.ln1(resid))
        resid = self.hook_resid_mlp(resid + self.apply_mlp(hook_if_listening(self.hook_mlp_in, resid)))
        normalized = self.hook_adapter_in(self.adapter_norm(resid))
        base = normalized if self.cfg.adds_normalized else resid
        resid = self.hook_resid_post(base + self.hook_adapter_out(self.adapter(normalized)))
        return self.hook_normalized_resid_post(self.ln2(resid))

    def wiring(self) -> Wiring:
        *before, _, end = self.wired(attn_step(self, norm="")).steps  # but for the sum of which `ln2` is the norm
        after, read = "hook_resid_mlp", "hook_adapter_in"
        norm = InStream("ln2" if self.cfg.reuses_ln2 else "adapter_ln", after, read)
        adapter = Sublayer("adapter", read, "hook_adapter_out")
        last = added(POST, adapter, stream=read if self.cfg.adds_normalized else after)
        return Wiring((*before, Sum(after, NORMALIZED_MID, ("hook_mlp_out",)), norm, adapter, last, end))

    def adapter_norm(self, resid: Stream) -> Stream:
        """The input of the adapter."""
        return norm_unhooked(self.ln2, resid) if self.cfg.reuses_ln2 else norm_of(self, "adapter_ln")(resid)


class Weights(nn.Module):
    """The weights of an MLP that is not run."""

    axes = MLP.axes

    def __init__(self, cfg: MLP.Config) -> None:
        super().__init__()
        self.W_in = nn.Parameter(torch.empty(cfg.d_model, cfg.d_mlp))
        self.b_in = nn.Parameter(torch.zeros(cfg.d_mlp))
        self.W_out = nn.Parameter(torch.empty(cfg.d_mlp, cfg.d_model))
        self.b_out = nn.Parameter(torch.zeros(cfg.d_model))
