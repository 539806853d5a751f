"""ERNIE (Sun et al. 2019, arXiv:1904.09223; 2021, arXiv:2107.02137): BERT trained on masked phrases and entities."""

from hooked_lm.families._shared import bert_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.encoders import bert
from hooked_lm.families.encoders.bert import HEADS, IGNORED, RENAMED
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "ernie."
NO_EFFECT = (*bert.NO_EFFECT, "task_type_vocab_size")


def config(hf: HFConfig) -> EncoderConfig:
    if hf.use_task_id:
        raise ValueError("use_task_id=True: embeddings of task types are not supported")
    return bert.config(hf)


def rows(tree: EncoderConfig) -> list[Row]:
    return bert_like.rows(tree, HEADS, PREFIX)
