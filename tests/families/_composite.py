"""Composites of transformers with a given language model and towers as small as they may be."""

from collections.abc import Mapping
from typing import Any

import transformers
from torch import nn

from hooked_lm.hub.composite import FLAT

# Sizes of towers, by whatever names their configs have for them.
TINY = {
    **dict.fromkeys(("hidden_size", "embed_dim", "width", "d_model", "output_dim", "hidden_dim"), 16),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "mlp_dim"), 16),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "n_layers", "depth", "num_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "encoder_attention_heads", "num_heads"), 2),
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 7,
    "out_hidden_size": 32,
}
SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}
SIGLIP |= {"patch_size": 7, "model_type": "siglip_vision_model"}
AUDIO = {
    "hidden_size": 16,
    "conf_num_attention_heads": 2,
    "conf_num_hidden_layers": 1,
    "sscp_conv_channel_size": [4, 2],
}
DOTS_TOWER = {**{name: SIGLIP[name] for name in list(SIGLIP)[:4]}, "adapter_out_dim": 32}
VOCABULARY = {"<image>": 5, **{f"<|visual token {i:06d}|>": 10 + i for i in range(4)}}
VQ = {"base_channels": 32, "num_res_blocks": 1, "embed_dim": 4, "channel_multiplier": [1, 1], "codebook_size": 8}
# Fields of composites whose defaults do not build, or that have to fit the language model.
FIELDS: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": SIGLIP},
    "emu3": {"vocabulary_map": VOCABULARY, "vq_config": VQ},
    "gemma3n": {"audio_config": AUDIO},
    "apertus1p5": {
        "vision_config": {"base_channels": 32, "latent_channels": 32, "codebook_size": 8, "num_res_blocks": 1},
        "audio_config": {"hidden_size": 16, "codebook_dim": 16, "codebook_size": 8, "num_filters": 4},
        "image_token_offset": 40,
        "audio_token_offset": 48,
    },
    "muse_glimmer": {"out_hidden_size": 16, "projector_hidden_size": 16},
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 32, "intermediate_size": 8}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 1000},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 1000},
    "dots3_note": {
        "vision_config": {**DOTS_TOWER, "patch_size": 7, "adapter_in_dim": 16, "mlp_layer_types": ["dense"]},
        "audio_config": {**DOTS_TOWER, "feature_size": 8, "downsample_hidden_size": 4, "adapter_input_size": 16},
    },
    "molmo2": {
        "adapter_config": {
            **dict.fromkeys(("hidden_size", "intermediate_size"), 16),
            **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2),
            "vision_feature_layer": [0],
            "text_hidden_size": 32,
            "head_dim": 8,
        }
    },
    "florence2": {
        "vision_config": {
            "embed_dim": [8, 8, 16, 16],
            "num_heads": [1, 1, 2, 2],
            "num_groups": [1, 1, 2, 2],
            "depths": [1] * 4,
            "projection_dim": 32,
        }
    },
    "granite_docling": {
        "vision_config": {**SIGLIP, "model_type": "granite_docling_vision", "out_hidden_size": 32, "vocab_size": 64}
    },
    "granite4_vision": {
        "vision_config": {**SIGLIP, "hidden_size": 64},
        "downsample_rate": "1/2",
        "deepstack_layer_map": [],
    },
}

# Composite -> its language model, a family that also exists alone. Those of `composites.py`, whose language
# models exist only inside of them, come on top.
COMPOSITES = {
    **dict.fromkeys(("llava", "llava_next_video", "video_llava", "vipllava", "idefics3", "smolvlm"), "llama"),
    **dict.fromkeys(("deepseek_vl", "deepseek_vl_hybrid", "voxtral", "glmasr"), "llama"),
    **dict.fromkeys(("llava_next", "idefics2"), "mistral"),
    "mistral3": "ministral3",
    "llama4": "llama4_text",
    **dict.fromkeys(("llava_onevision", "internvl", "got_ocr2", "pp_chart2table", "ovis2", "video_llama_3"), "qwen2"),
    **dict.fromkeys(("qwen2_audio", "audioflamingo3", "musicflamingo"), "qwen2"),
    **dict.fromkeys(("qianfan_ocr", "lighton_ocr", "qwen3_asr", "fun_asr_nano", "moss_transcribe_diarize"), "qwen3"),
    **dict.fromkeys(("cohere2_vision", "aya_vision"), "cohere2"),
    **dict.fromkeys(("granite_speech", "granite_speech_plus"), "granite"),
    **dict.fromkeys(("blip-2", "instructblip", "instructblipvideo"), "opt"),
    "qwen3_5": "qwen3_5_text",
    "minicpmv4_6": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "aria": "aria_text",
    "lfm2_vl": "lfm2",
    "lfm3_vl": "lfm3",
    "paligemma": "gemma",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "apertus1p5": "apertus1p5_text",
    "gemma3n": "gemma3n_text",
    "fuyu": "persimmon",
    "exaone4_5": "exaone4",
    "kimi_k25": "deepseek_v3",
    "dots3_note": "dots3_note_text",
    "phi4_multimodal": "phi3",
    "cosmos3_omni": "qwen3_vl_text",
}
COMPOSITES = {
    kind: text for kind, text in COMPOSITES.items() if kind in transformers.CONFIG_MAPPING
}  # as `known` of cases


class NoImages(transformers.PreTrainedModel):
    """Stands for the vision tower of Gemma 3n, which is a model of timm."""

    config_class = transformers.models.gemma3n.Gemma3nVisionConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.weight = nn.Linear(config.hidden_size, 2)
        self.post_init()


transformers.AutoModel.register(NoImages.config_class, NoImages, exist_ok=True)


def composite(kind: str, text: Mapping[str, Any], attention: str = "eager", **fields: Any) -> Any:
    """A composite of this model type around a language model with the fields `text`; `fields` are its own."""
    if "tie_word_embeddings" in text:  # most composites are tied as their own config says
        fields = {"tie_word_embeddings": text["tie_word_embeddings"], **fields}
    given = dict(text) if kind in FLAT else {"text_config": dict(text)}
    given.pop("model_type", None)
    parts = {**given, **towers(kind), **FIELDS.get(kind, {}), **fields}
    for name, part in parts.items():  # a tower's output is as wide as the stream
        if isinstance(part, dict) and "out_hidden_size" in part:
            parts[name] = {**part, "out_hidden_size": text.get("hidden_size", part["out_hidden_size"])}
    config = transformers.CONFIG_MAPPING[kind](**parts)
    for part in (config, getattr(config, "text_config", config)):
        part._attn_implementation, part._experts_implementation = attention, "eager"
    return model_class(kind)._from_config(config)


def model_class(kind: str) -> Any:
    """The class of transformers that gives the composite's logits."""
    from transformers.models.auto import modeling_auto as auto

    known: dict[str, str] = {}
    for table in ("CAUSAL_LM", "TEXT_TO_WAVEFORM", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "MULTIMODAL_LM"):
        known |= getattr(auto, f"MODEL_FOR_{table}_MAPPING_NAMES")
    thinkers = {"qwen2_5_omni_thinker": "Qwen2_5OmniThinkerForConditionalGeneration"}
    thinkers["qwen3_omni_moe_thinker"] = "Qwen3OmniMoeThinkerForConditionalGeneration"
    return getattr(transformers, (known | thinkers)[kind])


def towers(kind: str) -> dict[str, Any]:
    """The configs of a composite's towers, with tiny sizes; empty if the composite has no default config."""
    try:
        defaults = transformers.CONFIG_MAPPING[kind]().to_dict()
    except (ValueError, TypeError, AttributeError, ZeroDivisionError):
        return {}
    return {name: shrunk(part) for name, part in defaults.items() if is_tower(name, part)}


def is_tower(name: str, part: object) -> bool:
    """Whether a field is the config of a part that is not the language model."""
    return name.endswith("_config") and name not in ("text_config", "thinker_config") and isinstance(part, dict)


def shrunk(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a tower with tiny sizes, also in its own parts."""
    sizes = {name: TINY[name] for name, value in fields.items() if name in TINY and isinstance(value, int)}
    parts = {name: shrunk(part) for name, part in fields.items() if name.endswith("_config") and isinstance(part, dict)}
    return {**{name: value for name, value in fields.items() if name != "layer_types"}, **sizes, **parts}
