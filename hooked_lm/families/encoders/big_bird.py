"""BigBird (Zaheer et al. 2020, arXiv:2007.14062): BERT whose long texts have block-sparse attention."""

from dataclasses import replace

from hooked_lm.families._shared import bert_like
from hooked_lm.families._shared.bert_like import IGNORED, NO_EFFECT, RENAMED
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.encoders import bert
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "bert."
HEADS = replace(bert.HEADS, pooler="pooler", text_dense="classifier.dense")


def config(hf: HFConfig) -> EncoderConfig:
    bert_like.check_bidirectional(hf)
    if hf.holds("qa_classifier.qa_outputs.weight"):
        raise ValueError("a head that finds answers after a question is not supported; load the model without it")
    embed = bert_like.embed(hf, n_types=hf.type_vocab_size)
    scale = hf.hidden_size**0.5 if hf.rescale_embeddings else 1.0
    attn = bert_like.attention(hf, qkv_bias=hf.use_bias, position_bias=bert_like.block_sparse(hf))
    return EncoderConfig(
        n_ctx=hf.max_position_embeddings,
        embed=replace(embed, embed=replace(embed.embed, scale=scale)),
        blocks=bert_like.blocks(hf, attn),
        **bert_like.heads(hf, HEADS, mlm=hf.hidden_act, text=hf.hidden_act),
    )


def rows(tree: EncoderConfig) -> list[Row]:
    return bert_like.rows(tree, HEADS, PREFIX)
