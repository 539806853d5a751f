"""Vision towers: ViT, DINOv2 and the towers of CLIP and SigLIP."""

from tests.families import vision_idefics, vision_pixtral, vision_tiles
from tests.families._case import Case
from tests.families._vision import CLIP, TOWER
from tests.families.vision_dino import CASES as DINO

# fmt: off
CASES = [
    *vision_idefics.TOWERS,
    *vision_pixtral.TOWERS,
    Case("vit", "classifier", {**TOWER, "num_labels": 5}, auto="AutoModelForImageClassification"),
    Case("vit", "pooler-relu-one-channel", {**TOWER, "num_channels": 1, "hidden_act": "relu", "pooler_act": "gelu",
         "pooler_output_size": 20}, auto="AutoModel"),
    Case("clip_vision_model", "projected", CLIP, auto="CLIPVisionModelWithProjection"),
    Case("metaclip_2_vision_model", "projected", CLIP, auto="MetaClip2VisionModelWithProjection"),
    Case("siglip_vision_model", "probe-gelu-one-channel", {**TOWER, "hidden_act": "gelu", "num_channels": 1,
         "num_attention_heads": 2}, auto="AutoModel"),
    *DINO,
    *vision_tiles.TOWERS,
]
# fmt: on
