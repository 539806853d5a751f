"""Nomic BERT (Nussbaum et al. 2024, arXiv:2402.01613): BERT with rotary positions, gated MLPs and few biases."""

from dataclasses import replace

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.embeddings.embed import Embed
from hooked_lm.components.embeddings.encoder_embed import EncoderEmbed, TokenTypeEmbed
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.families._shared import bert_like, classic
from hooked_lm.families._shared.bert_like import NO_EFFECT, RENAMED
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import n_ctx, rotary
from hooked_lm.families.encoders import bert
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "nomic_bert."
IGNORED = (*bert_like.IGNORED, "*.rotary_emb.inv_freq")
HEADS = replace(bert.HEADS, mlm_norm="cls.predictions.transform.layer_norm")


def config(hf: HFConfig) -> EncoderConfig:
    d_model, d_head = hf.hidden_size, hf.head_dim
    attn = Attention.Config(d_model, hf.num_attention_heads, d_head, rotary=rotary(hf, d_head), causal=False)
    mlp = GatedMLP.Config(d_model, hf.intermediate_size, hf.hidden_act)
    types = TokenTypeEmbed.Config(hf.type_vocab_size, d_model)
    return EncoderConfig(
        n_ctx=n_ctx(hf),
        embed=EncoderEmbed.Config(Embed.Config(hf.vocab_size, d_model), None, types, bert_like.layer_norm(hf)),
        blocks=tuple(replace(block, mlp=mlp) for block in bert_like.blocks(hf, attn)),
        **bert_like.heads(hf, HEADS, mlm=hf.hidden_act),
    )


def rows(tree: EncoderConfig) -> list[Row]:
    source, target = "nomic_bert.encoder.layers.{l}.", "blocks.{l}."
    return [
        Row("nomic_bert.embeddings.word_embeddings.weight", "embed.embed.W_E"),
        Row("nomic_bert.embeddings.token_type_embeddings.weight", "embed.token_type_embed.W_token_type"),
        *classic.norm("nomic_bert.emb_ln", "embed.ln"),
        *classic.stacked_attention(source + "attn.Wqkv"),
        *classic.out_of_attention(source + "attn.out_proj"),
        *classic.norm(source + "norm1", target + "ln1"),
        *classic.linear(source + "mlp.fc12", target + "mlp.", "gate"),
        *classic.linear(source + "mlp.fc11", target + "mlp.", "in"),
        *classic.linear(source + "mlp.fc2", target + "mlp.", "out"),
        *classic.norm(source + "norm2", target + "ln2"),
        *bert_like.head_rows(tree, HEADS, PREFIX),
    ]
