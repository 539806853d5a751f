"""nanochat (Karpathy 2025, github.com/karpathy/nanochat): norms without weights, one of them after the embedding; queries
and keys rotated in the opposite direction and then normalised; squared ReLU, and a soft cap on the logits."""

from dataclasses import replace

from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.embeddings.rotary_scaling import Backward
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.families._shared import classic, llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import rotary
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = ("logits_soft_cap",)  # an older name of `final_logit_softcapping`, which is used instead


def config(hf: HFConfig) -> DecoderConfig:
    d_head = llama_like.head_dim(hf)
    norm, turn = RMSNorm.Config(hf.hidden_size, hf.rms_norm_eps, weight=False), rotary(hf, d_head)
    attn = llama_like.attention(
        hf,
        rotary=replace(turn, scaling=Backward(turn.scaling)),
        qkv_bias=hf.attention_bias,
        out_bias=hf.attention_bias,
        qk_norm=replace(norm, d_model=d_head),
        rotary_first=True,
    )
    mlp = MLP.Config(hf.hidden_size, hf.intermediate_size, hf.hidden_act, bias=False)
    block = PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm)
    tree = llama_like.around(hf, [block] * hf.num_hidden_layers, norm, soft_cap=hf.final_logit_softcapping)
    return replace(tree, embed=replace(tree.embed, norm=norm))


def rows(tree: DecoderConfig) -> list[Row]:
    return [
        *llama_like.outer_rows(tree),
        *llama_like.attention_rows(),
        *classic.into_mlp("model.layers.{l}.mlp.fc1"),
        *classic.out_of_mlp("model.layers.{l}.mlp.fc2"),
    ]
