"""CodeGen (Nijkamp et al. 2022, arXiv:2203.13474): GPT-J with queries, values and keys in one matrix."""

from hooked_lm.families._shared import classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import gptj
from hooked_lm.families.decoders.gptj import NO_EFFECT, PREFIX
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

IGNORED = (*gptj.IGNORED, "*.attn.causal_mask")

N_SHARDS = 4  # the fused matrix has one part per training device, each with the queries, values and keys of some heads


def config(hf: HFConfig) -> DecoderConfig:
    if hf.n_head % N_SHARDS:
        raise ValueError(f"n_head is {hf.n_head}; the layout of this family's weights needs a multiple of {N_SHARDS}")
    return gptj.config(hf)


def rows(tree: DecoderConfig) -> list[Row]:
    attn, pattern = "transformer.h.{l}.attn.", "(shard x n h) m -> (shard n) m h"
    return [
        *gptj.outer_rows(tree),
        Row(attn + "qkv_proj.weight", "blocks.{l}.attn.W_{x}", pattern, shard=N_SHARDS, x="QVK"),
        *classic.out_of_attention(attn + "out_proj"),
    ]
