"""Experts that are chosen by a table of token ids (Roller et al. 2021, arXiv:2106.04426), as in the first layers of DeepSeek-V4
(DeepSeek-AI 2026)."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.components.blocks.hyper import HyperBlock
from hooked_lm.components.blocks.per_layer import layer_input
from hooked_lm.components.context import Context
from hooked_lm.components.experts.moe import AbstractMoE, Indices, MoE, Stream, Weights
from hooked_lm.components.experts.router import GroupedSigmoidRouter
from hooked_lm.components.mlp import hooked_input
from hooked_lm.components.norms.norm import upcast
from hooked_lm.hooks import HookPoint


class HashMoE(AbstractMoE):
    """A mixture whose experts are those of the token's id, `experts_of_token` [d_vocab, top_k]; the logits only weigh them."""

    @dataclass(frozen=True)
    class Config(MoE.Config):
        """The router weighs the experts and chooses none, so it has no correction."""

        router: GroupedSigmoidRouter
        d_vocab: int = field(kw_only=True)

        def build(self) -> "HashMoE":
            return HashMoE(self)

    cfg: Config

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.experts_of_token = nn.Buffer(torch.zeros(cfg.d_vocab, cfg.top_k, dtype=torch.long))

    def forward(self, x: Stream, ids: Int[Tensor, "batch pos 1"] | None = None) -> Stream:
        if ids is None:
            raise ValueError("the experts are chosen by token ids: pass these, [batch, pos, 1], after the input")
        x = hooked_input(self, x)
        indices = self.experts_of_token[ids[..., 0]]
        weights = self.weigh(self.hook_router_logits(self.router_logits(x)), indices)
        return self.output(x, self.hook_expert_weights(weights.to(x.dtype)), self.hook_expert_indices(indices))

    def weigh(self, logits: Float[Tensor, "batch pos expert"], indices: Indices) -> Weights:
        """The weights of these experts of each token."""
        return self.cfg.router.weights(self.cfg.router.scores(upcast(logits)), indices)


class RepeatedIds(nn.Module):
    """The token ids, as a second input of each layer."""

    @dataclass(frozen=True)
    class Config:
        n_layers: int

        def build(self) -> "RepeatedIds":
            return RepeatedIds(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.hook_out = HookPoint("batch", "pos", "layer", "1")

    def forward(self, tokens: Int[Tensor, "batch pos"], embed: Stream) -> Int[Tensor, "batch pos layer 1"]:
        return self.hook_out(tokens[:, :, None, None].expand(-1, -1, self.cfg.n_layers, -1))


class HashHyperBlock(HyperBlock):
    """A `HyperBlock` whose experts are chosen by the ids of the tokens, `hook_per_layer_in`."""

    @dataclass(frozen=True)
    class Config(HyperBlock.Config):
        mlp: HashMoE.Config = field(kw_only=True)

        def build(self, layer: int) -> "HashHyperBlock":
            return HashHyperBlock(self, layer)

    cfg: Config
    mlp: HashMoE

    def make_before_mlp(self) -> None:
        self.hook_per_layer_in = HookPoint("batch", "pos", "1")

    def beside_mlp(self, context: Context | None) -> tuple[Tensor, ...]:
        """The token ids; ValueError if the context has none."""
        return (self.hook_per_layer_in(layer_input(self, context, "chooses experts by token ids")),)
