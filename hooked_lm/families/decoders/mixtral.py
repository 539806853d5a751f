"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral with experts instead of each MLP."""

from hooked_lm.components.experts.router import SoftmaxRouter
from hooked_lm.families._shared import llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = (*moe.NO_EFFECT, "router_jitter_noise")


def config(hf: HFConfig) -> DecoderConfig:
    attn = llama_like.attention(hf, window=hf.sliding_window)
    experts = moe.experts(hf, hf.num_local_experts, SoftmaxRouter(renormalize=True))
    return moe.decoder(hf, attn, [experts] * hf.num_hidden_layers)


def rows(tree: DecoderConfig) -> list[Row]:
    return [*llama_like.rows(tree), *moe.sparse_rows(tree, "block_sparse_moe", ("w1", "w3", "w2"))]
