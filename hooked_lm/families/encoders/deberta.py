"""DeBERTa (He et al. 2020, arXiv:2006.03654): attention to content and to relative position, with keys without biases."""

from hooked_lm.families._shared import bert_like, classic, deberta_like
from hooked_lm.families._shared.bert_like import RENAMED
from hooked_lm.families._shared.deberta_like import IGNORED, NO_EFFECT, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]


def config(hf: HFConfig) -> EncoderConfig:
    attn = deberta_like.attention(hf, hf.hidden_size // hf.num_attention_heads, key_bias=False)
    return deberta_like.encoder(hf, bert_like.blocks(hf, attn), deberta_like.table(hf))


def rows(tree: EncoderConfig) -> list[Row]:
    source, target = "deberta.encoder.layer.{l}.attention.self.", "blocks.{l}.attn."
    return [
        *deberta_like.rows(tree),
        Row(source + "in_proj.weight", target + "W_{qkv}", "(n qkv h) m -> n m h", qkv="QKV"),
        Row(source + "q_bias", target + "b_Q", "(n h) -> n h"),
        Row(source + "v_bias", target + "b_V", "(n h) -> n h"),
        *classic.heads_in(source + "pos_proj", "pos_K"),
        *classic.heads_in(source + "pos_q_proj", "pos_Q"),
    ]
