"""Real processors of transformers for models of the families' tables, with a tokenizer of as many words as those have."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.families._case import reference
from tests.families._vision import VisionCase
from tests.families.vision_languages import CASES

WORDS = ["[PAD]", "[BOS]", "[EOS]", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "Ċ", "?"]
TEMPLATE = (
    "{{% for m in messages %}}{{% for c in m['content'] %}}"
    "{{% if c['type'] == 'image' %}}{image}{{% else %}}{{{{ c['text'] }}}}{{% endif %}}{{% endfor %}}{{% endfor %}}"
    "{{% if add_generation_prompt %}} z{{% endif %}}"
)


@dataclass(frozen=True)
class Real:
    """The processor of a case.

    `specials` are the special tokens by id, `named` the names under which the tokenizer knows them. `place` is what a chat
    template of the family writes for an image.
    """

    family: str
    processor: str  # class in transformers
    images: str
    sizes: dict[str, Any] = field(hash=False)
    more: dict[str, Any] = field(default_factory=dict, hash=False)
    specials: dict[int, str] = field(default_factory=lambda: {58: "<image>"}, hash=False)
    named: dict[str, str] = field(default_factory=dict, hash=False)
    place: str = "<image>"
    videos: str = ""
    bos: bool = False  # whether texts begin with it, and what a chat template writes

    @property
    def case(self) -> VisionCase:
        """The first model of the family in the table; not LLaVA with the tower of Pixtral, another format."""
        return next(case for case in CASES if case.family == self.family and case.name != "pixtral")


def tokenizer(real: Real) -> PreTrainedTokenizerFast:
    """Letters, and the special tokens of a family, with their ids."""
    words = {**{i: f"w{i}" for i in range(61)}, **dict(enumerate(WORDS)), **real.specials}
    made = Tokenizer(models.BPE({word: i for i, word in words.items()}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if real.bos:
        made.post_processor = processors.TemplateProcessing("[BOS] $A", special_tokens=[("[BOS]", 1)])
    made.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in real.specials.values()])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        bos_token="[BOS]",
        eos_token="[EOS]",
        padding_side="left",
        extra_special_tokens=real.named,
    )


SQUARE = {"height": 24, "width": 24}
SHORT = {"size": {"shortest_edge": 24}, "crop_size": SQUARE}
PATCHES = {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 1200}
AROUND = {41: "<|vision_start|>", 42: "<|vision_end|>", 58: "<|image_pad|>", 59: "<|video_pad|>"}
QWEN = "<|vision_start|><|image_pad|><|vision_end|>"


def qwen(family: str, name: str, **sizes: int) -> Real:
    patches, videos = {**PATCHES, **sizes}, "Qwen2VLVideoProcessor"
    return Real(family, name, "Qwen2VLImageProcessor", patches, specials=AROUND, place=QWEN, videos=videos)


def idefics(family: str, name: str, videos: str = "") -> Real:
    specials = {44: "<fake_token_around_image>", 45: "<end_of_utterance>", 58: "<image>", 57: "<global-img>"}
    places = {46 + 3 * i + j: f"<row_{i + 1}_col_{j + 1}>" for i in range(3) for j in range(3)}
    sizes = {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 24}}
    images = name.replace("Processor", "ImageProcessor")
    return Real(
        family, name, images, sizes, {"image_seq_len": 4}, specials | places, {"image_token": "<image>"}, videos=videos
    )


REALS = [
    Real(
        "llava",
        "LlavaProcessor",
        "CLIPImageProcessor",
        SHORT,
        {"patch_size": 6, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        bos=True,
    ),
    Real(
        "llava_next",
        "LlavaNextProcessor",
        "LlavaNextImageProcessor",
        {**SHORT, "image_grid_pinpoints": [[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]]},
        {"patch_size": 6, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    Real(
        "llava_onevision",
        "LlavaOnevisionProcessor",
        "LlavaOnevisionImageProcessor",
        {"size": SQUARE, "image_grid_pinpoints": [[24, 48], [48, 24], [48, 48]]},
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_1"},
        {58: "<image>", 57: "<video>"},
        videos="LlavaOnevisionVideoProcessor",
    ),
    qwen("qwen2_vl", "Qwen2VLProcessor"),
    qwen("qwen2_5_vl", "Qwen2_5_VLProcessor"),
    qwen("qwen3_vl", "Qwen3VLProcessor"),
    qwen("qwen3_5", "Qwen3VLProcessor", patch_size=3, merge_size=3),
    qwen("qwen3_vl_moe", "Qwen3VLProcessor"),
    qwen("qwen3_5_moe", "Qwen3VLProcessor"),
    Real(
        "gemma3",
        "Gemma3Processor",
        "Gemma3ImageProcessor",
        {"size": SQUARE},
        {"image_seq_length": 4},
        {54: "<start_of_image>", 55: "<end_of_image>", 58: "<image_soft_token>"},
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        place="<start_of_image>",
    ),
    Real("paligemma", "PaliGemmaProcessor", "SiglipImageProcessor", {"size": SQUARE, "image_seq_length": 16}),
    idefics("idefics3", "Idefics3Processor"),
    idefics("smolvlm", "SmolVLMProcessor", "SmolVLMVideoProcessor"),
    Real(
        "internvl",
        "InternVLProcessor",
        "GotOcr2ImageProcessor",
        {"size": SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 4},
        {"image_seq_length": 4},
        {54: "<img>", 55: "</img>", 58: "<IMG_CONTEXT>", 57: "<video>"},
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        place="<IMG_CONTEXT>\n",
        videos="InternVLVideoProcessor",
    ),
    Real(
        "mistral3",
        "PixtralProcessor",
        "PixtralImageProcessor",
        {"size": {"longest_edge": 36}, "patch_size": 6},
        {"patch_size": 6, "spatial_merge_size": 2},
        {44: "[IMG_BREAK]", 45: "[IMG_END]", 58: "[IMG]"},
        place="[IMG]",
    ),
]


def save(real: Real, folder: Path) -> Any:
    """Writes the checkpoint of a model and its processor, with one of videos if the family has one; returns the model."""
    model = reference(real.case)
    model.save_pretrained(folder)
    words = tokenizer(real)
    words.chat_template = ("[BOS]" if real.bos else "") + TEMPLATE.format(image=real.place)
    words.save_pretrained(folder)
    images = getattr(transformers, real.images + "Pil")(**real.sizes).to_dict()
    videos = {"video_processor": {"video_processor_type": real.videos}} if real.videos else {}
    described = {"processor_class": real.processor, "image_processor": images, **videos, **real.more}
    (folder / "processor_config.json").write_text(json.dumps(described))
    return model
