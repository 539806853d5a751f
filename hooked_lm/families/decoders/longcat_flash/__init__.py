"""LongCat-Flash (Meituan 2025, arXiv:2509.01322): a layer has two attentions and two MLPs, here two blocks, and experts with a
shortcut from the first to the end of the second, some of which are the identity."""

import re
from dataclasses import replace

from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.experts.router import CorrectedSoftmaxRouter
from hooked_lm.families._shared import deepseek, llama_like, moe
from hooked_lm.families._shared.llama_like import PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders.longcat_flash.shortcut import ShortcutEnd, ShortcutStart
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# Multi-token prediction; and `LongcatFlashExperts.__init__` (modeling_longcat_flash.py) makes weights of the identity experts,
# which published files lack and nothing uses. Transformers cannot load files without them.
IGNORED = (
    *(*llama_like.IGNORED, "model.mtp.*"),
    *("model.layers.*.mlp.experts.*.gate_proj.weight", "model.layers.*.mlp.experts.*.up_proj.weight"),
)
NO_EFFECT = deepseek.NO_EFFECT


def config(hf: HFConfig) -> DecoderConfig:
    hf.require(mla_scale_q_lora=True, mla_scale_kv_lora=True, zero_expert_type="identity", attention_method="MLA")
    hf.require(router_bias=False, norm_topk_prob=False)
    hf.require(qk_head_dim=hf.qk_nope_head_dim + hf.qk_rope_head_dim)
    hf.require(head_dim=hf.qk_rope_head_dim)  # only the rotary embedding of transformers reads it
    hf = hf.changed(num_hidden_layers=2 * hf.num_layers, intermediate_size=hf.ffn_hidden_size)
    attn, norm = deepseek.attention(hf, adjacent_pairs=True), llama_like.rms_norm(hf)
    factors = {
        "q_factor": (hf.hidden_size / hf.q_lora_rank) ** 0.5,
        "kv_factor": (hf.hidden_size / hf.kv_lora_rank) ** 0.5,
    }
    block = PreNormBlock.Config(attn=replace(attn, **factors), ln1=norm, mlp=llama_like.gated_mlp(hf), ln2=norm)
    router = CorrectedSoftmaxRouter(renormalize=False, scale=hf.routed_scaling_factor)
    routed = moe.experts(hf.changed(num_experts_per_tok=1), hf.n_routed_experts, router, hf.expert_ffn_hidden_size)
    shortcut = replace(routed, top_k=hf.moe_topk, n_identity=hf.zero_expert_num or 0)
    pair = (ShortcutStart.Config(**vars(block), shortcut=shortcut), ShortcutEnd.Config(**vars(block)))
    return llama_like.around(hf, pair * hf.num_layers, norm)


def rows(tree: DecoderConfig) -> list[Row]:
    found = [row for row in deepseek.rows(tree) if "{e}" not in row.source]
    outer = [row for row in found if "{l}" not in row.source]
    inner = [row for row in found if "{l}" in row.source]
    placed = [_of_block(row, block) for block in range(len(tree.blocks)) for row in inner]
    return [*outer, *placed, *(row for block in range(0, len(tree.blocks), 2) for row in _of_experts(tree, block))]


def _of_block(row: Row, block: int) -> Row:
    """A row of all layers, for one block."""

    def name(found: re.Match[str]) -> str:
        return f"layers.{block // 2}.{'mlps' if found[1] == 'mlp' else found[1]}.{block % 2}."

    source = re.sub(r"layers\.\{l\}\.(\w+)\.", name, row.source)
    return row.between(source, row.target.replace("{l}", str(block)), row.tied)


def _of_experts(tree: DecoderConfig, block: int) -> list[Row]:
    source, target = f"model.layers.{block // 2}.mlp.", f"blocks.{block}.shortcut."
    e, parts = tree.blocks[block].shortcut.n_experts, {"gate": "gate", "up": "in", "down": "out"}
    return [
        Row(source + "router.classifier.weight", target + "W_router", "e m -> m e"),
        Row(source + "router.e_score_correction_bias", target + "b_choice"),
        *(
            Row(f"{source}experts.{{e}}.{x}_proj.weight", f"{target}experts.{{e}}.W_{y}", "o m -> m o", e=e)
            for x, y in parts.items()
        ),
    ]
