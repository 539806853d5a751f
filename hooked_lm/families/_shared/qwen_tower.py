"""The vision towers of Qwen, whose patches have rotary positions in two directions, the merger after them, and Qwen2-VL."""

from typing import Any

from hooked_lm.components.embeddings.axis_rotary import AxialRotary
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import NormConfig, RMSNorm
from hooked_lm.components.vision.flat_patches import FlatPatches
from hooked_lm.components.vision.image_rules import AxisPositions
from hooked_lm.components.vision.image_text import ImageText
from hooked_lm.components.vision.merger import PatchMerger
from hooked_lm.components.vision.patch_embed import PatchEmbed
from hooked_lm.families._shared import classic, mrope, vision_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import VisionConfig, VisionLanguageConfig
from hooked_lm.weights import Row

LAYER, PART = "blocks.{v}.", "blocks.{v}."
N_CTX = 2**16  # as many patches as the processor makes of the largest image; the positions have no end
VISUAL = "visual."
IMAGE_TEXT = ImageText("<|image_pad|>", start="<|vision_start|>", end="<|vision_end|>")
IGNORED = ("*.rotary_emb.inv_freq", "*.rotary_pos_emb.inv_freq")
RENAMED = {r"^model\.visual\.": VISUAL, r"^model\.language_model\.": "model."}


def checked(hf: HFConfig) -> HFConfig:
    """The config, without the fields of published ones that transformers does not read; their values are checked."""
    hf.ignored_by_transformers(in_chans=hf.in_channels, spatial_patch_size=hf.patch_size)
    return hf


def patch_embed(hf: HFConfig, d_model: int, bias: bool = False) -> PatchEmbed.Config:
    """The embedding of patches of several frames."""
    size, n_frames = (vision_like.square(getattr(hf, name), name) for name in ("patch_size", "temporal_patch_size"))
    return PatchEmbed.Config(d_model, size, hf.in_channels, bias, n_frames=n_frames)


def pixels(hf: HFConfig) -> FlatPatches:
    """How images are given."""
    return FlatPatches(hf.spatial_merge_size)


def rotary(hf: HFConfig, d_head: int, alternating: bool = False) -> AxialRotary:
    """The rotary embedding of rows and columns. Raises ValueError for another kind."""
    rope = {"rope_type": "axial", "rope_theta": 10000.0, **(hf.rope_parameters or {})}
    if rope["rope_type"] != "axial" or len(rope) > 2:
        raise ValueError(
            f"rope_parameters={rope} of a vision tower: only rope_theta with rope_type 'axial' is supported"
        )
    return AxialRotary(d_head, float(rope["rope_theta"]), alternating=alternating)


def merger(vision: VisionConfig, d_model: int, norm: NormConfig) -> PatchMerger.Config:
    """The merger after a tower."""
    assert isinstance(vision.pixels, FlatPatches), "what `pixels` gives"
    return PatchMerger.Config(vision.embed.d_model, d_model, norm, vision.pixels.merge)


def with_text(hf: HFConfig, norm: type[LayerNorm.Config] | type[RMSNorm.Config], d_model: int) -> VisionLanguageConfig:
    """The tower, a merger to width `d_model` with a norm of this kind, and the language model with positions on three axes."""
    sides = vision_like.both_sides(hf)
    sides["blocks"] = mrope.with_axes(sides["blocks"], hf.text_config["rope_parameters"], (16, 24, 24))
    vision = sides["vision"]
    tree = VisionLanguageConfig(
        **sides,
        projector=merger(vision, d_model, norm(vision.embed.d_model, 1e-6)),
        image_token=hf.image_token_id,
        rules=(AxisPositions(),),
        image_text=IMAGE_TEXT,
    )
    vision_like.read_repeated(hf)
    return tree


# ---- rows ------------------------------------------------------------------------------------------------------------


def rows_with_text(tree: VisionLanguageConfig) -> list[Row]:
    """The rows of the tower, the merger and the language model."""
    towers = vision_like.tower_rows(tree, VISUAL)
    return [*towers, *merger_rows(), *vision_like.language_rows(tree, "model.", "")]


def rows(tree: VisionConfig, of_mlp: list[Row]) -> list[Row]:
    """The rows of a tower, with its merger if it is alone; those of its MLPs are given."""
    embed = tree.embed
    sizes: dict[str, Any] = {"c": embed.n_channels, "t": embed.n_frames, "a": embed.patch_size, "b": embed.patch_size}
    of_layer = [
        *classic.norm(LAYER + "norm1", PART + "ln1"),
        *classic.stacked_attention(LAYER + "attn.qkv", PART + "attn."),
        *classic.out_of_attention(LAYER + "attn.proj", PART + "attn."),
        *classic.norm(LAYER + "norm2", PART + "ln2"),
        *of_mlp,
    ]
    return [
        Row("patch_embed.proj.weight", "embed.W_E", "m c t a b -> (c t a b) m", **sizes),
        Row("patch_embed.proj.bias", "embed.b_E"),
        *vision_like.of_layers(of_layer, tree),
        *(merger_rows("merger.", "merger.") if tree.merger is not None else []),
    ]


def merger_rows(source: str = VISUAL + "merger.", target: str = "projector.") -> list[Row]:
    """The rows of the merger."""
    return [
        *classic.norm(source + "ln_q", target + "ln"),
        *classic.linear(source + "mlp.0", target, "in"),
        *classic.linear(source + "mlp.2", target, "out"),
    ]
