"""The vision tower of SigLIP and SigLIP 2 (Zhai et al. 2023, arXiv:2303.15343; Tschannen et al. 2025, arXiv:2502.14786)."""

from hooked_lm.components.attention.cross import CrossAttention
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.vision.heads import ProbePooler
from hooked_lm.families._shared import classic, vision_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import VisionConfig
from hooked_lm.weights import Row, expand

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREFIX = "vision_model."
IGNORED = ("*embeddings.position_ids",)
# PaliGemma writes into the config of its tower what its projector reads
NO_EFFECT = ("tie_word_embeddings", "num_image_tokens", "projection_dim", "projector_hidden_act")


def config(hf: HFConfig) -> VisionConfig:
    embed = vision_like.patch_embed(hf)
    pos_embed = vision_like.positions(hf, embed.patch_size)
    return VisionConfig(
        n_ctx=pos_embed.n_ctx,
        embed=embed,
        pos_embed=pos_embed,
        blocks=(vision_like.block(hf, hf.hidden_act, hf.layer_norm_eps),) * hf.num_hidden_layers,
        ln_final=LayerNorm.Config(hf.hidden_size, hf.layer_norm_eps),
        pooler=_pooler(hf) if hf.vision_use_head else None,
    )


def _pooler(hf: HFConfig) -> ProbePooler.Config:
    d_model, n_heads = hf.hidden_size, hf.num_attention_heads
    return ProbePooler.Config(
        CrossAttention.Config(d_model, n_heads, d_model // n_heads, qkv_bias=True, out_bias=True),
        LayerNorm.Config(d_model, hf.layer_norm_eps),
        MLP.Config(d_model, hf.intermediate_size, hf.hidden_act),
    )


def rows(tree: VisionConfig) -> list[Row]:
    embeddings, head, attn = PREFIX + "embeddings.", PREFIX + "head.", "pooler.attn."
    return [
        *vision_like.patch_rows(embeddings + "patch_embedding", tree.embed),
        Row(embeddings + "position_embedding.weight", "pos_embed.W_pos"),
        *vision_like.of_layers(vision_like.clip_layer(PREFIX + "encoder.layers.{v}."), tree),
        *classic.norm(PREFIX + "post_layernorm", "ln_final"),
        Row(head + "probe", "pooler.W_probe", "1 1 m -> m"),
        *expand(
            [
                Row(head + "attention.in_proj_weight", attn + "W_{qkv}", "(qkv n h) m -> n m h", qkv="QKV"),
                Row(head + "attention.in_proj_bias", attn + "b_{qkv}", "(qkv n h) -> n h", qkv="QKV"),
            ]
        ),
        *classic.out_of_attention(head + "attention.out_proj", attn),
        *classic.norm(head + "layernorm", "pooler.ln"),
        *classic.into_mlp(head + "mlp.fc1", "pooler.mlp."),
        *classic.out_of_mlp(head + "mlp.fc2", "pooler.mlp."),
    ]
