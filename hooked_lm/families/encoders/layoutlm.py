"""LayoutLM (Xu et al. 2019, arXiv:1912.13318): BERT whose tokens have boxes on a page, the argument `bbox`."""

from dataclasses import replace

from hooked_lm.components.embeddings.extra_embed import BoxEmbed
from hooked_lm.families._shared import bert_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.encoders import bert
from hooked_lm.families.encoders.bert import HEADS, IGNORED, NO_EFFECT, RENAMED
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "layoutlm."


def config(hf: HFConfig) -> EncoderConfig:
    tree = bert.config(hf)
    boxes = BoxEmbed.Config("bbox", hf.hidden_size, (hf.max_2d_position_embeddings,) * 4)
    return replace(tree, embed=replace(tree.embed, extra=boxes))


def rows(tree: EncoderConfig) -> list[Row]:
    source = PREFIX + "embeddings."
    boxes = [Row(f"{source}{axis}_position_embeddings.weight", f"embed.extra.W_{axis}") for axis in "xyhw"]
    return [*bert_like.rows(tree, HEADS, PREFIX), *boxes]
