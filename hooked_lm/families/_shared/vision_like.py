"""Parts that vision towers share, and the two sides of vision-language models."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from hooked_lm.components.activations import Activation
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.mlp import MLP, MLPConfig
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.vision.heads import ProbePooler
from hooked_lm.components.vision.patch_embed import ImagePosEmbed, PatchEmbed
from hooked_lm.families import VISION_ENCODERS, family
from hooked_lm.families._shared import classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig, TextTowerConfig, VisionConfig, VisionLanguageConfig
from hooked_lm.weights import Row, expand

ATTENTION, MLP_PART = "blocks.{v}.attn.", "blocks.{v}.mlp."
Block = PreNormBlock.Config
TOWER = "vision."  # in front of the parameters of a vision-language model's tower


def square(size: int | Sequence[int], what: str) -> int:
    """A size that is a number, or the same number twice. Raises ValueError for another."""
    sizes = {size} if isinstance(size, int) else set(size)
    if len(sizes) > 1:
        raise ValueError(f"{what}={size!r} is not supported: height and width must be equal")
    return int(next(iter(sizes)))


def image_size(size: int | Sequence[int]) -> tuple[int, int]:
    """The height and width of images."""
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


def positions(hf: HFConfig, patch_size: int, **more: Any) -> ImagePosEmbed.Config:
    """Learned positions for the image size of a config."""
    height, width = image_size(hf.image_size)
    return ImagePosEmbed.Config(height // patch_size, width // patch_size, hf.hidden_size, **more)


def patch_embed(hf: HFConfig, **more: Any) -> PatchEmbed.Config:
    """The embedding of square patches."""
    sizes = {"patch_size": square(hf.patch_size, "patch_size"), "n_channels": hf.num_channels}
    return PatchEmbed.Config(hf.hidden_size, **sizes, image_size=image_size(hf.image_size), **more)


def block(
    hf: HFConfig,
    act_fn: Activation,
    eps: float,
    qkv_bias: bool = True,
    mlp: MLPConfig | None = None,
    causal: bool = False,
) -> Block:
    """A block of a ViT: attention, by default in both directions, and an MLP, by default a plain one, each after a layer norm."""
    d_model, norm = hf.hidden_size, LayerNorm.Config(hf.hidden_size, eps)
    n_heads = hf.num_attention_heads
    attn = Attention.Config(d_model, n_heads, d_model // n_heads, qkv_bias=qkv_bias, out_bias=True, causal=causal)
    mlp = MLP.Config(d_model, hf.intermediate_size, act_fn) if mlp is None else mlp
    return PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm)


# ---- rows ------------------------------------------------------------------------------------------------------------


def patch_rows(source: str, embed: PatchEmbed.Config) -> list[Row]:
    """The convolution that reads patches, as a matrix."""
    c, a = embed.n_channels, embed.patch_size
    weight = Row(source + ".weight", "embed.W_E", "m c a b -> (c a b) m", c=c, a=a, b=a)
    return [weight, Row(source + ".bias", "embed.b_E")]


def clip_layer(source: str) -> list[Row]:
    """A layer with the tensor names of CLIP's and SigLIP's towers."""
    return [
        *classic.norm(source + "layer_norm1", "blocks.{v}.ln1"),
        *classic.attention(source + "self_attn.", ATTENTION, out="out_proj"),
        *classic.norm(source + "layer_norm2", "blocks.{v}.ln2"),
        *classic.into_mlp(source + "mlp.fc1", MLP_PART),
        *classic.out_of_mlp(source + "mlp.fc2", MLP_PART),
    ]


def of_layers(rows: Iterable[Row], tree: VisionConfig | TextTowerConfig) -> list[Row]:
    """The rows for each layer of a tower, by the placeholder `{v}`."""
    return expand(list(rows), v=list(range(len(tree.blocks))))


# ---- vision-language models ------------------------------------------------------------------------------------------


def language(hf: HFConfig, **fields: Any) -> DecoderConfig:
    """The decoder of a composite, from its `text_config`."""
    text_type = hf.text_config["model_type"]
    module = family(text_type)
    part = hf.part("text_config", getattr(module, "NO_EFFECT", ()))
    tied = bool(hf.get("tie_word_embeddings", False) or part.get("tie_word_embeddings", False))
    tree = module.config(part.changed(tie_word_embeddings=tied, **fields))
    if not isinstance(tree, DecoderConfig):
        raise ValueError(f"the language model is a {text_type}, which is no decoder")
    return tree


def tower(hf: HFConfig) -> VisionConfig:
    """The vision tower of a composite, from its `vision_config`, without heads but for a pooler with weights, which is unused."""
    module = family(hf.vision_config["model_type"], *VISION_ENCODERS.values())
    tree: VisionConfig = module.config(hf.part("vision_config", getattr(module, "NO_EFFECT", ())))
    pooler = tree.pooler if isinstance(tree.pooler, ProbePooler.Config) else None
    return replace(tree, pooler=pooler, projection=None, classifier=None, merger=None)


def both_sides(hf: HFConfig, **fields: Any) -> dict[str, Any]:
    """The fields of a `VisionLanguageConfig` that are those of its two sides; `fields` replace some of the text config."""
    types = {"text_type": hf.text_config["model_type"], "vision_type": hf.vision_config["model_type"]}
    return {**vars(language(hf, **fields)), **types, "vision": tower(hf)}


def read_repeated(hf: HFConfig) -> None:
    """Reads the fields of a whole that repeat those of its `text_config`, as older versions of transformers wrote them.

    Call it when all else is read. Raises ValueError where they differ: `text_config` counts.
    """
    text = hf.text_config
    quiet = (
        *getattr(family(text["model_type"]), "NO_EFFECT", ()),
        *([] if hf.get("use_sliding_window") else ["sliding_window"]),
    )
    for field in hf.unread():
        if field == "rope_parameters":
            own, of_text = ({**rope, "rope_type": None, "type": None} for rope in (hf.rope_parameters, text[field]))
            hf.changed(rope_parameters=own).ignored_by_transformers(rope_parameters=of_text)
        elif any(fnmatchcase(field, glob) for glob in quiet):
            hf.get(field)
        elif field in text:
            hf.ignored_by_transformers(**{field: text[field]})


def features_read(hf: HFConfig, vision: VisionConfig) -> tuple[tuple[int, ...], bool]:
    """After how many blocks a projector reads the stream of the tower, and whether it reads class tokens.

    Raises ValueError for a selection that leaves out a class token which the tower lacks.
    """
    strategy, given = hf.vision_feature_select_strategy, hf.vision_feature_layer
    if strategy not in ("default", "full"):
        raise ValueError(f"vision_feature_select_strategy={strategy!r}: known are 'default' and 'full'")
    if strategy == "default" and not vision.embed.n_class_tokens:
        raise ValueError(
            "vision_feature_select_strategy='default' leaves out a class token, which the tower lacks; 'full' reads all patches"
        )
    n_layers = len(vision.blocks)
    layers = [given] if isinstance(given, int) else given
    return tuple(layer % (n_layers + 1) for layer in layers), strategy == "full"


def language_rows(tree: VisionLanguageConfig, model: str, head: str) -> list[Row]:
    """The rows of the decoder, whose tensors have the prefix `model`, and `head` in front of the name of the unembedding."""
    module = family(tree.text_type)

    def named(source: str) -> str:
        inside = source.startswith(module.PREFIX)
        return model + source.removeprefix(module.PREFIX) if inside else head + source

    return [row.between(named(row.source), row.target, row.tied and named(row.tied)) for row in module.rows(tree)]


def tower_rows(tree: VisionLanguageConfig, prefix: str) -> list[Row]:
    """The rows of the tower, whose tensors have this prefix."""
    module = family(tree.vision_type, *VISION_ENCODERS.values())
    rows = module.rows(tree.vision)
    return [row.between(prefix + row.source.removeprefix(module.PREFIX), TOWER + row.target, None) for row in rows]
