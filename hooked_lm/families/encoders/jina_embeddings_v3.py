"""Jina Embeddings v3 (Sturua et al. 2024, arXiv:2409.10173), adapters merged or left out: XLM-R with rotary positions."""

from dataclasses import replace

from hooked_lm.families._shared import bert_like, classic
from hooked_lm.families._shared.bert_like import NO_EFFECT, RENAMED, ROBERTA
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import n_ctx, rotary
from hooked_lm.families.encoders.nomic_bert import IGNORED
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "roberta."


def config(hf: HFConfig) -> EncoderConfig:
    attn = bert_like.attention(hf, rotary=rotary(hf, hf.hidden_size // hf.num_attention_heads))
    return EncoderConfig(
        n_ctx=n_ctx(hf),
        embed=replace(bert_like.embed(hf, n_types=hf.type_vocab_size), pos_embed=None),
        blocks=bert_like.blocks(hf, attn),
        **bert_like.heads(hf, ROBERTA),
    )


def rows(tree: EncoderConfig) -> list[Row]:
    source = "roberta.encoder.layers.{l}."
    return [
        Row("roberta.embeddings.word_embeddings.weight", "embed.embed.W_E"),
        Row("roberta.embeddings.token_type_embeddings.weight", "embed.token_type_embed.W_token_type"),
        *classic.norm("roberta.emb_ln", "embed.ln"),
        *classic.stacked_attention(source + "mixer.Wqkv"),
        *classic.out_of_attention(source + "mixer.out_proj"),
        *classic.norm(source + "norm1", "blocks.{l}.ln1"),
        *classic.into_mlp(source + "mlp.fc1"),
        *classic.out_of_mlp(source + "mlp.fc2"),
        *classic.norm(source + "norm2", "blocks.{l}.ln2"),
        *bert_like.head_rows(tree, ROBERTA, PREFIX),
    ]
