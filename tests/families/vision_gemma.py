"""Vision-language models of the Gemma family: Gemma 3, PaliGemma."""

from dataclasses import replace

import torch
from torch import Tensor

from tests.families._vision import AUTO, IMAGE, TEXT, TOWER, Size, VisionCase, Writer, of_one_size

SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
GEMMA = {**TEXT, "head_dim": 8, "tie_word_embeddings": True}
LOCAL = {"layer_types": ["sliding_attention", "full_attention"]}
BEGIN, END = 54, 55  # of an image


def composite(text: dict, tower: dict, **fields: object) -> dict:
    return {"text_config": text, "vision_config": tower, "image_token_index": IMAGE, **fields}


def types_of_images(tokens: Tensor) -> dict[str, Tensor]:
    """What the processor of Gemma 3 adds, without which transformers masks later image tokens."""
    return {"token_type_ids": (tokens == IMAGE).long()}


def types_of_prefix(tokens: Tensor) -> dict[str, Tensor]:
    """What the processor of PaliGemma adds, without which transformers masks later tokens of a prompt."""
    return {"token_type_ids": torch.zeros_like(tokens)}


def between(n_tokens: int, **size: int) -> Writer:
    """Images between the tokens at which they begin and end."""

    def ids(size: Size) -> list[int]:
        return [BEGIN, *[IMAGE] * n_tokens, END]

    return replace(of_one_size(n_tokens, **size), ids=ids, more=types_of_images)


def of_prompt(n_tokens: int, **size: int) -> Writer:
    """Images without other tokens around them, in prompts that are read in both directions."""
    return replace(of_one_size(n_tokens, **size), more=types_of_prefix, whole_prompts=True)


GEMMA2 = {**GEMMA, "model_type": "gemma2", "query_pre_attn_scalar": 9}
GEMMA3 = {**GEMMA, "model_type": "gemma3_text", "query_pre_attn_scalar": 9}

# fmt: off
CASES = [
    VisionCase("gemma3", "window-in-images", composite({**GEMMA3, **LOCAL, "sliding_window": 3}, SIGLIP,
               mm_tokens_per_image=4), auto=AUTO, writer=between(4)),
    VisionCase("gemma3", "windows-patches-left-over-unused-head", composite({**GEMMA3,
               "layer_types": ["sliding_attention"] * 2, "sliding_window": 6,
               "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}}},
               {**SIGLIP, "image_size": 30, "hidden_size": 16, "vision_use_head": True}, mm_tokens_per_image=4),
               auto=AUTO, writer=replace(of_one_size(4, rows=5, columns=5), more=types_of_images)),
    VisionCase("paligemma", "gemma", composite({**GEMMA, "model_type": "gemma"}, SIGLIP, projection_dim=32), auto=AUTO,
               writer=of_prompt(16)),
    VisionCase("paligemma", "gemma2-window-in-prompts", composite({**GEMMA2, **LOCAL, "sliding_window": 5}, SIGLIP,
               projection_dim=32), auto=AUTO, writer=of_prompt(16)),
]
# fmt: on
