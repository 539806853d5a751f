"""Kolibri (Aleph Alpha 2026): GLM-4's four norms, EXAONE 4's attention, and experts chosen by corrected logits."""

from dataclasses import replace

from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.experts.router import GroupedSigmoidRouter
from hooked_lm.families._shared import classic, llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = moe.NO_EFFECT


def config(hf: HFConfig) -> DecoderConfig:
    attn, norm = llama_like.attention(hf, qk_norm=llama_like.head_norm(hf)), llama_like.rms_norm(hf)
    router = GroupedSigmoidRouter(renormalize=hf.norm_topk_prob, eps=0.0, corrects_logits=True)
    experts = moe.experts(hf, hf.num_local_experts, router, hf.moe_intermediate_size)
    experts = replace(experts, shared=replace(experts.expert, d_mlp=hf.shared_expert_intermediate_size))
    block = PreNormBlock.Config(attn=attn, ln1=norm, ln1_post=norm, mlp=experts, ln2=norm, ln2_post=norm)
    attns = llama_like.rotary_in_windows(hf, attn)
    return llama_like.around(hf, [replace(block, attn=each) for each in attns], norm)


def rows(tree: DecoderConfig) -> list[Row]:
    correction = Row("model.layers.{l}.moe.router.expert_bias", "blocks.{l}.mlp.b_choice")
    return [
        *llama_like.rows(tree),
        *classic.norm("model.layers.{l}.post_attn_norm", "blocks.{l}.ln1_post"),
        *classic.norm("model.layers.{l}.post_ffn_norm", "blocks.{l}.ln2_post"),
        *(row for row in moe.sparse_rows(tree) if row.target != correction.target),
        correction,
    ]
