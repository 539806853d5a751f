"""ERNIE (Sun et al. 2019, arXiv:1904.09223; 2021, arXiv:2107.02137): BERT trained on masked phrases and entities, and on several
tasks, the argument `task_type_ids`."""

from dataclasses import replace

from hooked_lm.components.embeddings.extra_embed import ExtraEmbed
from hooked_lm.families._shared import bert_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.encoders import bert
from hooked_lm.families.encoders.bert import HEADS, IGNORED, NO_EFFECT, RENAMED
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "ernie."


def config(hf: HFConfig) -> EncoderConfig:
    tree = bert.config(hf)
    tasks = ExtraEmbed.Config("task_type_ids", hf.hidden_size, hf.task_type_vocab_size)
    return replace(tree, embed=replace(tree.embed, extra=tasks if hf.use_task_id else None))


def rows(tree: EncoderConfig) -> list[Row]:
    tasks = Row(PREFIX + "embeddings.task_type_embeddings.weight", "embed.extra.W_extra")
    return [*bert_like.rows(tree, HEADS, PREFIX), tasks]
