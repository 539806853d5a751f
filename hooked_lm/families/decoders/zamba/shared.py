"""Blocks that share a transformer (Zamba, Glorioso et al. 2024, arXiv:2405.16712): several layers apply the same weights, each
with keys, values and sites of its own, to the stream and the embedding of the tokens."""

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.components.blocks.block import Stream
from hooked_lm.components.blocks.mixer import MixerPart
from hooked_lm.components.blocks.per_layer import layer_input
from hooked_lm.components.blocks.wiring import POST, PRE, Sum, Wiring, added, mixer_step
from hooked_lm.components.context import Context
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.norms.norm import RESIDUAL, NormConfig, build_norm
from hooked_lm.families.decoders.zamba.wide import WideAttention
from hooked_lm.hooks import HookPoint

WIDE = ("batch", "pos", "d_wide")


class RepeatedEmbed(nn.Module):
    """The embedding of the tokens in the stream, as a second input of each layer."""

    @dataclass(frozen=True)
    class Config:
        n_layers: int

        def build(self) -> "RepeatedEmbed":
            return RepeatedEmbed(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.hook_out = HookPoint("batch", "pos", "layer", "d_model")

    def forward(self, tokens: Int[Tensor, "batch pos"], embed: Stream) -> Float[Tensor, "batch pos layer d_model"]:
        return self.hook_out(embed[:, :, None].expand(-1, -1, self.cfg.n_layers, -1))


class SharedBlock(MixerPart):
    """`resid + mixer(ln3(resid + transformer([resid, embedding]) W_shared))`.

    `transformer(x) = mlp(ln2(attn(ln1(x))))` adds nothing to its input; its weights are those of all blocks with the same
    `shared_set`, but for adapters. `W_shared` [d_model, d_model], `ln3` and the mixer belong to the layer.

    `hook_per_layer_in` is the embedding of the tokens, `hook_attn_in` what `ln1` reads, `hook_attn_mixed` and `hook_transformed`
    are the outputs of attention and of the MLP, `hook_shared_out` is what is added to the input of the mixer.
    """

    axes = {"W_shared": "[d_transformed] d_model"}

    @dataclass(frozen=True)
    class Config(MixerPart.Config):
        attn: WideAttention.Config = field(kw_only=True)
        mlp: GatedMLP.Config = field(kw_only=True)
        ln2: NormConfig = field(kw_only=True)
        ln3: NormConfig = field(kw_only=True)
        shared_set: int = 0

        def __post_init__(self) -> None:
            if self.ln1_post is not None or self.residual_scale != 1.0:
                raise ValueError("a shared block has no norm or scale after its mixer")

        @property
        def n_weights(self) -> int:
            """The number of entries of the matrices that belong to the layer: the mixer's, `W_shared`, adapters."""
            adapters = (getattr(part, "n_adapter_weights", 0) for part in (self.attn, self.mlp))
            return self.mixer.n_weights + self.ln3.d_model**2 + sum(adapters)

        @property
        def n_shared_weights(self) -> int:
            """The number of entries of the matrices of the transformer."""
            attn, mlp = self.attn, self.mlp
            n_in = attn.d_model * (attn.n_heads + 2 * attn.n_kv) * attn.d_head
            return n_in + attn.n_heads * attn.d_head * attn.d_out + 3 * mlp.d_model * mlp.d_mlp

        def build(self, layer: int) -> "SharedBlock":
            return SharedBlock(self, layer)

    cfg: Config
    mixing_norm = "ln3"
    shared_parts = ("ln1", "attn", "ln2", "mlp")

    def make_parts(self) -> None:
        cfg = self.cfg
        self.hook_mixer_in = HookPoint(*RESIDUAL, on_demand=True)
        self.hook_per_layer_in = HookPoint(*RESIDUAL)
        assert cfg.ln1 is not None, "ln1 reads the stream and the embedding"
        self.ln1 = cfg.ln1.build(WIDE)
        self.attn = cfg.attn.build()
        self.attn.layer_id = self.layer
        self.hook_attn_mixed = HookPoint(*RESIDUAL)
        self.ln2 = build_norm(cfg.ln2)
        self.mlp = cfg.mlp.build()
        self.hook_transformed = HookPoint(*RESIDUAL)
        d_model = cfg.ln2.d_model
        self.W_shared = nn.Parameter(torch.empty(d_model, d_model).T)
        self.hook_shared_out = HookPoint(*RESIDUAL)
        self.ln3 = build_norm(cfg.ln3)
        self.mixer = cfg.mixer.build()
        self.hook_mixer_out = HookPoint(*RESIDUAL)
        self.hook_resid_post = HookPoint(*RESIDUAL)

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        resid = self.hook_resid_pre(resid)
        return self.hook_resid_post(resid + self.mixer_out(resid, context))

    def wiring(self) -> Wiring:
        mixed = Sum("mixer_stream", PRE, ("hook_shared_out",))
        mixer = mixer_step(self, "mixer_stream", "ln3")
        steps = (mixed, replace(mixer, at=()), added(POST, mixer, stream=PRE))
        own = "hook_shared_out is W_shared times the transformer of the stream and the embedding of the tokens"
        return Wiring(steps, f"{own}; hook_mixer_in is a copy of the stream for both")

    def mixer_stream(self, resid: Stream, context: Context) -> Stream:
        """The stream plus the output of the shared transformer."""
        embedding = self.hook_per_layer_in(layer_input(self, context, "reads the embedding of the tokens"))
        return resid + self.shared_out(resid, embedding, context)

    def shared_out(self, resid: Stream, embedding: Stream, context: Context) -> Stream:
        """What the shared transformer adds to the input of the mixer."""
        wide = self.ln1(torch.cat([resid, embedding], -1))
        mixed = self.hook_attn_mixed(self.attn(wide, wide, wide, context, self.layer))
        transformed = self.hook_transformed(self.mlp(self.ln2(mixed)))
        return self.hook_shared_out(F.linear(transformed, self.W_shared.T))
