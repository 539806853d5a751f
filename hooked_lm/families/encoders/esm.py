"""ESM-1b and ESM-2 (Rives et al. 2021, doi:10.1073/pnas.2016239118; Lin et al. 2023, doi:10.1126/science.ade2574):
language models of proteins, with norms before the sublayers."""

from typing import Any

from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.embeddings.embed import Embed
from hooked_lm.components.embeddings.encoder_embed import EncoderEmbed, MaskScaledEncoderEmbed
from hooked_lm.components.embeddings.pos_embed import PosEmbed
from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.components.embeddings.stored_rotary import StoredRotary
from hooked_lm.components.heads import ContactHead
from hooked_lm.components.mlp import MLP
from hooked_lm.families._shared import bert_like, classic
from hooked_lm.families._shared.bert_like import IGNORED, Names
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "esm."
N_TOKENS, PAD = 33, 1  # defaults of ESM's alphabet
END = 2  # as contacts see it: transformers does not ask the config
HEADS = Names(untied_bias="lm_head.bias")
RENAMED = bert_like.RENAMED | {
    r"encoder\.layer\.[^.]+\.attention\.self\.rotary_embeddings": "rotary_embeddings"  # each layer had a copy
}
NO_EFFECT = (*bert_like.NO_EFFECT, "vocab_list", "esmfold_config", "hidden_act")  # the activation is always GELU


def config(hf: HFConfig) -> EncoderConfig:
    kind = hf.position_embedding_type
    if kind not in ("absolute", "rotary") or hf.is_folding_model or hf.is_decoder or hf.add_cross_attention:
        raise ValueError(
            "of ESM, language models with absolute or rotary positions are supported, not "
            f"position_embedding_type={kind!r} or a folding model, decoder or cross attention"
        )
    d_model, d_head, norm = hf.hidden_size, hf.hidden_size // hf.num_attention_heads, bert_like.layer_norm(hf)
    offset, turns = (PAD if hf.pad_token_id is None else hf.pad_token_id) + 1, kind == "rotary"
    n_ctx = hf.max_position_embeddings - offset
    parts: dict[str, Any] = {
        "embed": Embed.Config(hf.vocab_size or N_TOKENS, d_model),
        "pos_embed": None if turns else PosEmbed.Config(n_ctx, d_model, offset),
        "norm": norm if hf.emb_layer_norm_before else None,
    }
    embed = EncoderEmbed.Config(**parts)
    if hf.token_dropout:
        if hf.mask_token_id is None:
            raise ValueError("token_dropout needs mask_token_id, and this config has none")
        embed = MaskScaledEncoderEmbed.Config(**parts, mask_token=hf.mask_token_id)
    theta = hf.rope_theta
    rotary = Rotary(d_head, theta) if turns else None
    stored = rotary is not None and hf.holds("rotary_embeddings.inv_freq")
    attn = bert_like.attention(hf, rotary=rotary)
    mlp = MLP.Config(d_model, hf.intermediate_size, "gelu")
    n_maps = hf.num_hidden_layers * hf.num_attention_heads
    return EncoderConfig(
        n_ctx=n_ctx,
        embed=embed,
        blocks=(PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm),) * hf.num_hidden_layers,
        ln_final=norm,
        rotary=StoredRotary.Config(rotary) if rotary and stored else None,
        contact_head=ContactHead.Config(n_maps, END) if hf.holds("contact_head.regression.weight") else None,
        **bert_like.heads(hf, HEADS),
    )


def rows(tree: EncoderConfig) -> list[Row]:
    return [
        *bert_like.embedding_rows("esm.embeddings.", "layer_norm", tree.embed),
        *bert_like.layer_rows("esm.encoder.layer.{l}.", "attention.LayerNorm", "LayerNorm"),
        *classic.norm("esm.encoder.emb_layer_norm_after", "ln_final"),
        Row("esm.rotary_embeddings.inv_freq", "rotary.frequencies"),
        *bert_like.linear("esm.contact_head.regression", "contact_head"),
        *bert_like.head_rows(tree, HEADS, PREFIX),
    ]
