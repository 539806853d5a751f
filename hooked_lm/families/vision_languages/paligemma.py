"""PaliGemma (Beyer et al. 2024, arXiv:2407.07726): SigLIP's tower before Gemma, which reads a prompt in both directions."""

from hooked_lm.components.vision.image_rules import BidirectionalPrefix
from hooked_lm.components.vision.image_text import ImageText
from hooked_lm.components.vision.projector import LinearProjector
from hooked_lm.families._shared import vision_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.vision_languages.llava import IGNORED, LANGUAGE, PREFIX, PROJECTOR, RENAMED, TOWER
from hooked_lm.models.config.tree import VisionLanguageConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

# what the towers and the decoder say too, and what older versions wrote
NO_EFFECT = (
    *("hidden_size", "vocab_size", "num_hidden_layers", "num_positions", "num_image_tokens"),
    *("ignore_index", "projector_hidden_act"),
)


def config(hf: HFConfig) -> VisionLanguageConfig:
    sides = vision_like.both_sides(hf, use_bidirectional_attention=None)
    d_vision, d_model = sides["vision"].embed.d_model, sides["embed"].d_model
    hf.require(projection_dim=d_model)
    hf.part("vision_config").require(projection_dim=d_model)
    return VisionLanguageConfig(
        **sides,
        projector=LinearProjector.Config(d_vision, d_model),
        image_token=hf.image_token_index,
        rules=(BidirectionalPrefix(),),
        image_text=ImageText(bos_after_images=True, end_of_prompt="\n"),
    )


def rows(tree: VisionLanguageConfig) -> list[Row]:
    linear = PROJECTOR + "linear."
    return [
        *vision_like.tower_rows(tree, TOWER),
        Row(linear + "weight", "projector.W", "o m -> m o"),
        Row(linear + "bias", "projector.b"),
        *vision_like.language_rows(tree, LANGUAGE, "language_model."),
    ]
