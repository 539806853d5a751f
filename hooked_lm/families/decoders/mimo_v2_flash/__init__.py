"""MiMo-V2-Flash (Xiaomi 2026, arXiv:2601.02780): narrow, scaled values; local layers with sinks and more key/value heads."""

from hooked_lm.families._shared import llama_like, moe
from hooked_lm.families._shared.llama_like import PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import parameters, rotary
from hooked_lm.families.decoders.mimo_v2_flash.value_width import ValueWidthAttention
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# extra layers for multi-token prediction, which the next-token logits do not depend on
IGNORED = (*llama_like.IGNORED, "model.mtp.*")
NO_EFFECT = (*moe.NO_EFFECT, "sliding_window_size")  # the window without the query itself

SHARE = 0.334  # of a head that is rotated, unless a config says otherwise


def config(hf: HFConfig) -> DecoderConfig:
    full, local = (hf.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
    is_sparse, n_layers = moe.of_sparse_type(hf), hf.num_hidden_layers
    hf.ignored_by_transformers(
        hybrid_layer_pattern=[int(kind == "sliding_attention") for kind in hf.layer_types],
        moe_layer_freq=[int(is_sparse(layer)) for layer in range(n_layers)],
        swa_num_attention_heads=hf.num_attention_heads,
        swa_num_key_value_heads=2 * hf.num_key_value_heads,
        swa_head_dim=hf.head_dim,
        swa_v_head_dim=hf.v_head_dim,
        swa_rope_theta=local["rope_theta"],
        rope_theta=full["rope_theta"],
        partial_rotary_factor=full.get("partial_rotary_factor", SHARE),
        attention_chunk_size=hf.sliding_window - 1,
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
        layernorm_epsilon=hf.rms_norm_eps,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        n_shared_experts=0,
    )
    experts = moe.deepseek_experts(hf, hf.n_routed_experts, None)
    attns = [_attention(hf, layer) for layer in range(n_layers)]
    return moe.decoder(hf, attns, moe.some_sparse(hf, experts, is_sparse))


def _attention(hf: HFConfig, layer: int) -> ValueWidthAttention.Config:
    kind, window = hf.layer_types[layer], llama_like.windows(hf)[layer]
    fields = parameters(hf, kind)
    if fields.get("rope_type", "default") == "default":
        fields.setdefault("partial_rotary_factor", SHARE)
    return ValueWidthAttention.Config(
        d_model=hf.hidden_size,
        n_heads=hf.num_attention_heads,
        d_head=hf.head_dim,
        n_key_value_heads=hf.num_key_value_heads * (1 if window is None else 2),
        d_value=hf.v_head_dim,
        value_scale=1.0 if hf.attention_value_scale is None else float(hf.attention_value_scale),
        qkv_bias=hf.attention_bias,
        rotary=rotary(hf.changed(rope_parameters=fields), hf.head_dim, partial=True),
        window=window,
        sinks=window is not None,
    )


def rows(tree: DecoderConfig) -> list[Row]:
    others = [row for row in moe.rows(tree) if not row.target.endswith("sinks")]
    return [*others, Row("model.layers.{l}.self_attn.attention_sink_bias", "blocks.{l}.attn.sinks")]
