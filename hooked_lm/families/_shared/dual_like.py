"""The towers of dual encoders such as CLIP."""

from collections.abc import Collection
from types import ModuleType

from hooked_lm.components.embeddings.embed import Embed
from hooked_lm.components.embeddings.pos_embed import PosEmbed
from hooked_lm.components.heads import EndToken, LastToken
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.vision.heads import Projection
from hooked_lm.families import VISION_ENCODERS, family
from hooked_lm.families._shared import classic, vision_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DualEncoderConfig, TextTowerConfig, VisionConfig
from hooked_lm.weights import Row

TEXT = "text_model."


def vision_side(hf: HFConfig) -> VisionConfig:
    """The vision tower, from the `vision_config`, with its heads."""
    module = _vision_family(hf.vision_config["model_type"])
    tree: VisionConfig = module.config(hf.part("vision_config", getattr(module, "NO_EFFECT", ())))
    return tree


def text_part(hf: HFConfig, no_effect: Collection[str] = ()) -> HFConfig:
    """The config of the text tower."""
    return hf.part("text_config", no_effect)


def text_tower(
    part: HFConfig,
    pooler: EndToken.Config | LastToken.Config,
    projection: Projection.Config,
    causal: bool,
    pads_to_n_ctx: bool = False,
) -> TextTowerConfig:
    """A text tower with this config."""
    d_model, n_ctx = part.hidden_size, part.max_position_embeddings
    block = vision_like.block(part, part.hidden_act, part.layer_norm_eps, causal=causal)
    return TextTowerConfig(
        n_ctx=n_ctx,
        embed=Embed.Config(part.vocab_size, d_model),
        pos_embed=PosEmbed.Config(n_ctx, d_model),
        blocks=(block,) * part.num_hidden_layers,
        ln_final=LayerNorm.Config(d_model, part.layer_norm_eps),
        pooler=pooler,
        projection=projection,
        pads_to_n_ctx=pads_to_n_ctx,
    )


def vision_rows(tree: DualEncoderConfig) -> list[Row]:
    """The rows of the vision tower, whose tensors have the names of a checkpoint of it alone, and of its heads."""
    rows = _vision_family(tree.vision_type).rows(tree.vision)
    return [row.between(row.source, vision_like.TOWER + row.target, None) for row in rows]


def text_rows(tree: DualEncoderConfig) -> list[Row]:
    """The rows of the text tower, without its projection."""
    layer = vision_like.clip_layer(TEXT + "encoder.layers.{v}.")
    rows = [
        Row(TEXT + "embeddings.token_embedding.weight", "embed.W_E"),
        Row(TEXT + "embeddings.position_embedding.weight", "pos_embed.W_pos"),
        *vision_like.of_layers(layer, tree.text),
        *classic.norm(TEXT + "final_layer_norm", "ln_final"),
    ]
    return [row.between(row.source, "text." + row.target, None) for row in rows]


def _vision_family(model_type: str) -> ModuleType:
    return family(model_type, *VISION_ENCODERS.values())
