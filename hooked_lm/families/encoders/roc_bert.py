"""RoCBert (Su et al. 2022, ACL): Chinese BERT whose tokens also have a shape and a pronunciation, the arguments `input_shape_ids`
and `input_pronunciation_ids`."""

from dataclasses import replace

from hooked_lm.components.embeddings.encoder_embed import ConcatenatedEncoderEmbed
from hooked_lm.components.embeddings.extra_embed import ExtraEmbed
from hooked_lm.families._shared import bert_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.encoders import bert
from hooked_lm.families.encoders.bert import HEADS, IGNORED, NO_EFFECT, RENAMED
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "roc_bert."
SOURCES = {"input_shape_ids": "shape_embed", "input_pronunciation_ids": "pronunciation_embed"}


def config(hf: HFConfig) -> EncoderConfig:
    if not hf.concat_input:
        raise ValueError("concat_input=False: the mean of the embeddings that are given is not supported")
    shapes = ExtraEmbed.Config("input_shape_ids", hf.shape_embed_dim, hf.shape_vocab_size)
    sounds = ExtraEmbed.Config("input_pronunciation_ids", hf.pronunciation_embed_dim, hf.pronunciation_vocab_size)
    enabled = {shapes: hf.enable_shape, sounds: hf.enable_pronunciation}
    parts, spare = (tuple(ids for ids, on in enabled.items() if on == wanted) for wanted in (True, False))
    tree = bert.config(hf)
    return replace(tree, embed=ConcatenatedEncoderEmbed.Config(**vars(tree.embed), parts=parts, spare=spare))


def rows(tree: EncoderConfig) -> list[Row]:
    source, embed = PREFIX + "embeddings.", tree.embed
    return [
        *bert_like.rows(tree, HEADS, PREFIX),
        *(
            Row(f"{source}{SOURCES[ids.name]}.weight", f"embed.{place}.{i}.W_extra")
            for place in ("parts", "spare")  # files have embeddings that are not enabled too
            for i, ids in enumerate(getattr(embed, place))
        ),
        Row(source + "map_inputs_layer.weight", "embed.W_map", "m e -> e m"),
        Row(source + "map_inputs_layer.bias", "embed.b_map"),
    ]
