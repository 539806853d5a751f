"""Longformer (Beltagy et al. 2020, arXiv:2004.05150): RoBERTa with windows, and tokens that all attend to and that attend to all.

As in transformers these are the first token of a text that is classified, and the question before a text in which the answer
is looked for; otherwise those of `global_attention_mask`.
"""

from dataclasses import replace

from hooked_lm.components.attention.global_tokens import GlobalTokens, WindowAttention
from hooked_lm.components.heads import SpanClassifier
from hooked_lm.families._shared import bert_like, classic
from hooked_lm.families._shared.bert_like import IGNORED, RENAMED, ROBERTA
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.encoders import roberta
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "longformer."
NO_EFFECT = (*bert_like.NO_EFFECT, "onnx_export")


def config(hf: HFConfig) -> EncoderConfig:
    tree = roberta.config(hf)
    chosen = GlobalTokens.Config("none" if tree.classifier is None else "first")
    if isinstance(tree.token_classifier, SpanClassifier.Config):
        chosen = GlobalTokens.Config("question", hf.sep_token_id)
    attn = bert_like.attention(hf, WindowAttention.Config)
    windows = bert_like.windows_on_both_sides(hf, len(tree.blocks))
    blocks = [replace(block, attn=replace(attn, window=w)) for block, w in zip(tree.blocks, windows, strict=True)]
    return replace(tree, blocks=tuple(blocks), global_tokens=chosen)


def rows(tree: EncoderConfig) -> list[Row]:
    attn = PREFIX + "encoder.layer.{l}.attention.self."
    names = {"query": "Q", "key": "K", "value": "V"}
    of_global = [row for x, y in names.items() for row in classic.heads_in(f"{attn}{x}_global", y + "_global")]
    return [*bert_like.rows(tree, ROBERTA, PREFIX), *of_global]
