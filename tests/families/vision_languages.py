"""Vision-language models: LLaVA, and those of other modules."""

from tests.families import vision_gemma, vision_idefics, vision_pixtral, vision_qwen2, vision_qwen3, vision_tiles
from tests.families._vision import AUTO, CLIP, IMAGE, LLAMA, QWEN, VisionCase, of_one_size


def llava(text: dict, tower: dict, **fields: object) -> dict:
    return {
        "text_config": text,
        "vision_config": tower,
        "image_token_index": IMAGE,
        "tie_word_embeddings": False,
        **fields,
    }


TOWER = {**CLIP, "num_hidden_layers": 3, "model_type": "clip_vision_model"}

# fmt: off
CASES = [
    VisionCase("llava", "last-but-one", llava(LLAMA, TOWER), auto=AUTO, writer=of_one_size(16)),
    *vision_idefics.CASES,
    *vision_pixtral.CASES,
    VisionCase("llava", "three-layers-full-unbiased-qwen2", llava(QWEN, TOWER, vision_feature_layer=[-3, 1, -1],
               vision_feature_select_strategy="full", multimodal_projector_bias=False), auto=AUTO,
               writer=of_one_size(17)),
    VisionCase("llava", "last-relu-small-patches", llava(LLAMA, {**TOWER, "patch_size": 8}, vision_feature_layer=-1,
               projector_hidden_act="relu"), auto=AUTO, writer=of_one_size(9)),
    *vision_qwen2.CASES,
    *vision_gemma.CASES,
    *vision_tiles.CASES,
    *vision_qwen3.CASES,
]
# fmt: on
