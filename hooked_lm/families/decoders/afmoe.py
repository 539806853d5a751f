"""Trinity (Arcee 2026, arXiv:2602.17004): norms before and after each sublayer, gated attention with positions in local layers
only, and DeepSeek-V3's experts."""

from dataclasses import replace

from hooked_lm.components.attention.gated import GatedAttention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.experts.router import GroupedSigmoidRouter
from hooked_lm.families._shared import classic, llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# the first repeats `layer_types`, the other balances the experts in training
NO_EFFECT = (*moe.NO_EFFECT, "global_attn_every_n_layers", "load_balance_coeff")


def config(hf: HFConfig) -> DecoderConfig:
    hf.require(route_norm=True, score_func="sigmoid")
    hf.require(n_group=1, topk_group=1, num_expert_groups=1, num_limited_groups=1)
    bias, norm = hf.attention_bias, llama_like.rms_norm(hf)
    plain = llama_like.attention(hf, qkv_bias=bias, out_bias=bias, qk_norm=llama_like.head_norm(hf))
    attn = GatedAttention.Config(**vars(plain))
    router = GroupedSigmoidRouter(scale=hf.route_scale, in_fp32=False)
    experts = moe.experts(hf, hf.num_experts, router, hf.moe_intermediate_size, hf.num_shared_experts)
    mlps = moe.some_sparse(hf, experts, moe.from_layer(hf.num_dense_layers))
    attns = [replace(each, rotary=each.rotary if each.window else None) for each in llama_like.by_window(hf, attn)]
    blocks = [
        PreNormBlock.Config(attn=attn, ln1=norm, ln1_post=norm, mlp=mlp, ln2=norm, ln2_post=norm)
        for attn, mlp in zip(attns, mlps, strict=True)
    ]
    return llama_like.around(hf, blocks, norm, hf.hidden_size**0.5 if hf.mup_enabled else 1.0)


def rows(tree: DecoderConfig) -> list[Row]:
    source, target = "model.layers.{l}.", "blocks.{l}."
    norms = {"input": "ln1", "post_attention": "ln1_post", "pre_mlp": "ln2", "post_mlp": "ln2_post"}
    return [
        *llama_like.outer_rows(tree),
        *(row for theirs, ours in norms.items() for row in classic.norm(f"{source}{theirs}_layernorm", target + ours)),
        *llama_like.attention_rows(),
        *classic.heads_in(source + "self_attn.gate_proj", "gate"),
        *llama_like.mlp_rows(),
        *moe.sparse_rows(tree, router="router.gate", correction="expert_bias"),
    ]
