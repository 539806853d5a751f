"""Functions that compute the value of a flat name from parts of a tree, for values that are not simply a field."""

from math import isclose
from typing import Any

from hooked_lm.components.activations import activation_name
from hooked_lm.components.attention.multihead import AbstractAttention
from hooked_lm.components.blocks.mixer import MixerPart
from hooked_lm.components.embeddings.pos_embed import PosEmbed
from hooked_lm.components.experts.moe import ClampedGatedMLP, MoE
from hooked_lm.components.grouped import GroupedMLP
from hooked_lm.components.mlp import MLP, GatedMLP, MLPConfig
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import NormConfig
from hooked_lm.components.norms.scales import NoNorm
from hooked_lm.components.vision.patch_embed import BucketPosEmbed, ImagePosEmbed
from hooked_lm.models.config.row import ABSENT, found
from hooked_lm.models.config.tree import (
    DecoderConfig,
    DualEncoderConfig,
    EncoderConfig,
    EncoderDecoderConfig,
    VisionConfig,
)

Tree = DecoderConfig | EncoderConfig | EncoderDecoderConfig | VisionConfig | DualEncoderConfig
AnyMLPConfig = MLPConfig | ClampedGatedMLP.Config | MoE.Config
RELATIVE = "relative_positional_bias"


def position_type(tree: Tree) -> str:
    """The kind of position embedding."""
    if hasattr(tree, "encoder"):
        has_bias = tree.encoder.rel_pos_bias or found(tree, "encoder.blocks.*.attn.position_bias[RelativeBias]")
        return RELATIVE if has_bias else "standard"
    if getattr(tree, "rel_pos_bias", None) is not None or getattr(tree, "rel_embed", None) is not None:
        return RELATIVE
    if found(tree, "blocks.*.attn.rotary.dim"):
        return "rotary"
    if found(tree, "blocks.*.attn.position_bias[Alibi]"):
        return "alibi"
    pos_embed = next(iter(found(tree, "pos_embed") + found(tree, "embed.pos_embed")))
    if isinstance(pos_embed, (PosEmbed.Config, ImagePosEmbed.Config, BucketPosEmbed.Config)):
        return "shortformer" if getattr(tree, "shortformer", False) else "standard"
    return "none" if pos_embed is None else "sinusoidal"


def norm_type(norm: NormConfig | None) -> str | None:
    """The kind of a norm: "LN" or "RMS", followed by "Pre" if it has no weights; None for one that does not normalise."""
    if norm is None or isinstance(norm, NoNorm.Config):
        return None
    return ("LN" if isinstance(norm, LayerNorm.Config) else "RMS") + ("" if norm.weight else "Pre")


def is_tied(tree: DecoderConfig | EncoderConfig | EncoderDecoderConfig) -> bool:
    """Whether the unembedding is the whole token embedding, transposed."""
    if tree.unembed is None:
        return False
    embed = getattr(tree, "decoder_embed", None) or tree.embed
    return bool(tree.unembed.tied and embed.d_vocab == tree.unembed.d_vocab)


def image_size(tree: VisionConfig) -> int | None:
    """The height of images in pixels; None if a tower reads images of any size."""
    return None if tree.pos_embed is None else int(tree.pos_embed.rows * tree.embed.patch_size)


# ---- attention -------------------------------------------------------------------------------------------------------


def scale_of(attn: AbstractAttention.Config) -> float:
    """The factor that attention scores are multiplied by; 1 / sqrt(d_head) by default."""
    return float(attn.d_head**-0.5 if attn.scale is None else attn.scale)


def scales_by_layer(blocks: tuple[object, ...]) -> bool:
    """Whether the scores of layer n are also divided by n + 1."""
    scales = [scale_of(attn) for attn in found(blocks, "*.attn")]
    divided = [isclose(scale * (layer + 1), scales[0]) for layer, scale in enumerate(scales)]
    return len(blocks) == len(scales) > 1 and all(divided)


def layer_types(blocks: tuple[object, ...]) -> list[str] | None:
    """For each layer "local" or "global"; None if no layer is local, or some layer has no attention."""
    windows = found(blocks, "*.attn.window")
    has_windows = any(windows) and len(windows) == len(blocks)
    return ["local" if window else "global" for window in windows] if has_windows else None


def rotary_base(attns: list[Any]) -> Any:
    """The rotary base of layers without a window, or of layers with one if all have one; ABSENT without rotary."""
    local, full = _rotaries(attns)
    rotary = full or local
    return ABSENT if rotary is None else float(rotary.theta)


def rotary_base_local(attns: list[Any]) -> float | None:
    """The rotary base of layers with a window if it differs from that of the others; else None."""
    local, full = _rotaries(attns)
    return float(local.theta) if local and full and local.theta != full.theta else None


def stretches_full_only(attns: list[Any]) -> bool:
    """Whether only layers without a window use YaRN, while all layers have the same base."""
    local, full = _rotaries(attns)
    if local is None or full is None:
        return False
    is_yarn = type(full.scaling).__name__ == "YarnScaling"
    return is_yarn and local.scaling is None and bool(local.theta == full.theta)


def _rotaries(attns: list[Any]) -> tuple[Any, Any]:
    """The rotary embeddings of the first layer with a window and of the first without one; None if there is none."""
    local = [attn.rotary for attn in attns if attn.rotary is not None and attn.window]
    full = [attn.rotary for attn in attns if attn.rotary is not None and not attn.window]
    return next(iter(local), None), next(iter(full), None)


# ---- MLPs ------------------------------------------------------------------------------------------------------------


def one_mlp(mlp: AnyMLPConfig) -> Any:
    """The MLP itself, or an expert if it is a mixture."""
    return mlp.expert if isinstance(mlp, MoE.Config) else mlp


def act_fn(mlp: AnyMLPConfig) -> str:
    """The name of the activation; it ends in `_ln` if a norm follows it."""
    one = one_mlp(mlp)
    of_its_own = isinstance(one, MLP.Config) or (isinstance(one, GatedMLP.Config) and one.act_fn == "solu")
    has_norm = of_its_own and one.mid_norm is not None
    return activation_name(one.act_fn) + ("_ln" if has_norm else "")


def is_gated(mlp: AnyMLPConfig) -> bool:
    """Whether the activation is multiplied by a second projection."""
    return isinstance(one_mlp(mlp), (GatedMLP.Config, ClampedGatedMLP.Config))


# ---- weights ---------------------------------------------------------------------------------------------------------


def n_params(tree: Tree) -> int:
    """The number of matrix entries in the blocks, without biases, norms and embeddings; shared weights count once."""
    sets = getattr(tree, "shares", None) or range(len(tree.blocks))
    once = dict(zip(sets, tree.blocks, strict=True)).values()
    shared = {block.shared_set: block.n_shared_weights for block in once if hasattr(block, "n_shared_weights")}
    return sum(map(_of_block, once)) + sum(shared.values())


def _of_block(block: object) -> int:
    if hasattr(block, "n_weights"):
        return int(block.n_weights)
    n = block.mixer.n_weights if isinstance(block, MixerPart.Config) else 0
    for attn in (getattr(block, "attn", None), getattr(block, "cross_attn", None)):
        if attn is not None:
            dense = 2 * attn.d_model * attn.d_head * (attn.n_heads + getattr(attn, "n_kv", attn.n_heads))
            n += getattr(attn, "n_weights", dense)
    return n + getattr(block, "n_further_weights", 0) + (_of_mlp(block.mlp) if hasattr(block, "mlp") else 0)


def _of_mlp(mlp: AnyMLPConfig) -> int:
    if isinstance(mlp, MoE.Config):
        shared = 0 if mlp.shared is None else _of_mlp(mlp.shared) + mlp.shared_gate * mlp.d_model
        return int(mlp.n_experts * (mlp.d_model + _of_mlp(mlp.expert)) + shared)
    if isinstance(mlp, GroupedMLP.Config):
        return mlp.d_model * mlp.d_mlp // mlp.n_groups_in + mlp.d_model * mlp.d_mlp // mlp.n_groups_out
    return int((2 if isinstance(mlp, MLP.Config) else 3) * mlp.d_model * mlp.d_mlp)


def n_params_from_sizes(
    n_layers: int,
    d_model: int,
    n_heads: int,
    d_head: int,
    n_key_value_heads: int | None,
    d_mlp: int | None,
    gated_mlp: bool,
) -> int:
    """`n_params` of a decoder with equal layers, from its sizes."""
    attention = 2 * d_model * d_head * (n_heads + (n_key_value_heads or n_heads))
    return n_layers * (attention + (3 if gated_mlp else 2) * d_model * (d_mlp or 0))
