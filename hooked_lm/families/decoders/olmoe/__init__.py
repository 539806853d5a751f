"""OLMoE (Muennighoff et al. 2024, arXiv:2409.02060): queries and keys are normalised over all heads together."""

from hooked_lm.components.experts.router import SoftmaxRouter
from hooked_lm.families._shared import llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import olmo2
from hooked_lm.families.decoders.olmoe.clipped import NormThenClipAttention
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = moe.NO_EFFECT


def config(hf: HFConfig) -> DecoderConfig:
    experts = moe.experts(hf, hf.num_experts, SoftmaxRouter(hf.norm_topk_prob))
    attn = olmo2.attention(hf)
    if hf.clip_qkv is not None:
        attn = NormThenClipAttention.Config(**vars(attn) | {"clip": float(hf.clip_qkv)})
    return moe.decoder(hf, attn, [experts] * hf.num_hidden_layers)


def rows(tree: DecoderConfig) -> list[Row]:
    return [
        *llama_like.outer_rows(tree),
        *llama_like.norm_rows(),
        *olmo2.attention_rows(),
        *moe.sparse_rows(tree),
    ]
