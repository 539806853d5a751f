"""RoFormer (Su et al. 2021, arXiv:2104.09864): BERT with rotary positions; files may contain the table of sines."""

from dataclasses import replace

from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.components.embeddings.stored_rotary import RotaryTable
from hooked_lm.families._shared import bert_like
from hooked_lm.families._shared.bert_like import IGNORED, RENAMED
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.encoders import bert
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "roformer."
NO_EFFECT = (*bert_like.NO_EFFECT, "embedding_size")
HEADS = replace(bert.HEADS, text_dense="classifier.dense", text_out="classifier.out_proj")
TABLE = "encoder.embed_positions.weight"


def config(hf: HFConfig) -> EncoderConfig:
    bert_like.check_bidirectional(hf)
    if hf.rotary_value:
        raise ValueError("rotary_value=True: rotated values are not supported")
    d_model, d_embed, n_ctx = hf.hidden_size, hf.embedding_size, hf.max_position_embeddings
    rotary = Rotary(d_model // hf.num_attention_heads, adjacent_pairs=True)
    embed = replace(bert_like.embed(hf, n_types=hf.type_vocab_size, d_embed=d_embed), pos_embed=None)
    return EncoderConfig(
        n_ctx=n_ctx,
        embed=embed if d_embed == d_model else bert_like.projected(embed, d_model),
        blocks=bert_like.blocks(hf, bert_like.attention(hf, rotary=rotary)),
        rotary=RotaryTable.Config(rotary, n_ctx) if hf.holds(TABLE) else None,
        **bert_like.heads(hf, HEADS, d_embed=d_embed, mlm=hf.hidden_act, text=hf.hidden_act),
    )


def rows(tree: EncoderConfig) -> list[Row]:
    return [
        *bert_like.rows(tree, HEADS, PREFIX),
        *bert_like.projection_rows("roformer.embeddings_project"),
        Row(PREFIX + TABLE, "rotary.table"),
    ]
