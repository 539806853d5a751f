"""MPNet (Song et al. 2020, arXiv:2004.09297): learned positions, and a bias on the scores per bucket of distances."""

from hooked_lm.components.attention.position_bias import SharedBias
from hooked_lm.components.attention.relative_bias import RelativeBias
from hooked_lm.families._shared import bert_like, classic
from hooked_lm.families._shared.bert_like import IGNORED, NO_EFFECT, RENAMED, ROBERTA
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "mpnet."
PAD = 1  # positions start at PAD + 1, regardless of `pad_token_id`
N_BUCKETS = 32  # transformers always uses 32


def config(hf: HFConfig) -> EncoderConfig:
    if hf.relative_attention_num_buckets != N_BUCKETS:
        raise ValueError(f"relative_attention_num_buckets={hf.relative_attention_num_buckets}: {N_BUCKETS} are used")
    bias = RelativeBias.Config(hf.num_attention_heads, N_BUCKETS, bidirectional=True)
    return EncoderConfig(
        n_ctx=hf.max_position_embeddings - PAD - 1,
        embed=bert_like.embed(hf, PAD + 1),
        blocks=bert_like.blocks(hf, bert_like.attention(hf, position_bias=SharedBias())),
        rel_pos_bias=bias,
        **bert_like.heads(hf, ROBERTA),
    )


def rows(tree: EncoderConfig) -> list[Row]:
    source = "mpnet.encoder.layer.{l}."
    attn = source + "attention.attn."
    return [
        *bert_like.embedding_rows("mpnet.embeddings.", embed=tree.embed),
        Row("mpnet.encoder.relative_attention_bias.weight", "rel_pos_bias.W_rel"),
        *classic.into_attention(attn + "q", attn + "k", attn + "v"),
        *classic.out_of_attention(attn + "o"),
        *classic.norm(source + "attention.LayerNorm", "blocks.{l}.ln1"),
        *classic.into_mlp(source + "intermediate.dense"),
        *classic.out_of_mlp(source + "output.dense"),
        *classic.norm(source + "output.LayerNorm", "blocks.{l}.ln2"),
        *bert_like.head_rows(tree, ROBERTA, PREFIX),
    ]
