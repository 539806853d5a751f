"""The text model of dots3 note (rednote-hilab 2026): latent attention of two sizes with gates, to chosen keys or in a window."""

from dataclasses import replace

from hooked_lm.components.attention.gated import GatedLatentAttention, GatedSparseLatentAttention
from hooked_lm.families._shared import deepseek, llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import parameters
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREPENDS_BOS = False
# The sizes of heads are those of their parts; MLPs have no biases.
NO_EFFECT = (*deepseek.NO_EFFECT, "mlp_bias")
KINDS = ("full_attention", "sliding_attention", "indexed_attention")


def config(hf: HFConfig) -> DecoderConfig:
    changes = {int(layer): fields for layer, fields in (hf.get("per_layer_config") or {}).items()}
    kinds = hf.layer_types[: hf.num_hidden_layers]
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"layer_types {sorted(unknown)} are not supported; {', '.join(KINDS)} are")
    attns = [_attention(hf.changed(**changes.get(layer, {})), kind) for layer, kind in enumerate(kinds)]
    experts = moe.deepseek_experts(hf, hf.n_routed_experts, hf.n_shared_experts)
    shared = replace(experts.expert, d_mlp=hf.shared_experts_intermediate_size * hf.n_shared_experts)
    mlps = moe.some_sparse(hf, replace(experts, shared=shared), moe.of_sparse_type(hf))
    return moe.decoder(hf, attns, mlps)


def _attention(hf: HFConfig, kind: str) -> GatedLatentAttention.Config | GatedSparseLatentAttention.Config:
    turning = parameters(hf, kind)
    if int(hf.head_dim * turning.pop("partial_rotary_factor", 1.0)) != hf.qk_rope_head_dim:
        raise ValueError(f"partial_rotary_factor of {kind} must be qk_rope_head_dim / head_dim")
    hf, window = hf.changed(rope_parameters=turning), hf.sliding_window  # read also where no layer has it
    attn = replace(
        deepseek.attention(hf, adjacent_pairs=True),
        scale=None,
        latent_eps=hf.rms_norm_eps,
        q_factor=(hf.hidden_size / hf.q_lora_rank) ** 0.5,
        kv_factor=(hf.hidden_size / hf.kv_lora_rank) ** 0.5,
        kr_norm=True,
        window=window if kind == "sliding_attention" else None,
    )
    if kind != "indexed_attention":
        return GatedLatentAttention.Config(**vars(attn), gate_per_head=True)
    indexer = deepseek.indexer(hf, adjacent_pairs=True)
    return GatedSparseLatentAttention.Config(**vars(attn), gate_per_head=True, indexer=indexer)


def rows(tree: DecoderConfig) -> list[Row]:
    source, target = "model.layers.{l}.self_attn.", "blocks.{l}.attn."
    found = [
        Row(source + "g_proj.weight", target + "W_gate", "(n o) m -> n m o", o=1),
        Row(source + "k_rope_only_layernorm.weight", target + "kr_norm.w"),
        *llama_like.outer_rows(tree),
        *llama_like.norm_rows(),
        *llama_like.mlp_rows(),
        *moe.sparse_rows(tree),
    ]
    for layer, block in enumerate(tree.blocks):  # layers differ in the sizes of the parts of fused tensors
        found += [one for row in deepseek.attention_rows(block.attn) for one in row.expand({"l": [layer]})]
    return found
