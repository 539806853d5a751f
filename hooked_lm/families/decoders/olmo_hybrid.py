"""OLMo Hybrid (Olmo Team 2026): OLMo 3 with Gated DeltaNet in three of four layers, and norms before these layers' sublayers."""

from collections.abc import Mapping
from itertools import accumulate

from hooked_lm.components.blocks.mixer import MixerMLPBlock
from hooked_lm.components.ssm.delta_net import GatedDeltaNet
from hooked_lm.families._shared import classic, delta_net, llama_like
from hooked_lm.families._shared.delta_net import LAYER, MIXER
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import rotary
from hooked_lm.families.decoders import olmo2
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "cuts", "rows"]

NO_EFFECT = ("linear_a_log_*", "linear_dt_*")  # initialisation
# in layers with attention; transformers reads both names, and writes the second in all layers
RENAMED = {r"\.post_attention_layernorm\.": ".feedforward_layer_norm."}


def config(hf: HFConfig) -> DecoderConfig:
    norm, mlp = llama_like.rms_norm(hf), llama_like.gated_mlp(hf)
    # the eps of the norm before the gate is fixed
    mixer = delta_net.mixer(hf, eps=1e-5, max_beta=2.0 if hf.linear_allow_neg_eigval else 1.0)
    mixing = MixerMLPBlock.Config(mixer=mixer, ln1=norm, mlp=mlp, ln2=norm)
    has_rotary = (hf.rope_parameters or {}).get("rope_theta") is not None
    attending = olmo2.block(hf, rotary=rotary(hf, llama_like.head_dim(hf)) if has_rotary else None)
    return llama_like.around(hf, [attending if attends else mixing for attends in delta_net.attending(hf)], norm)


def cuts(tree: DecoderConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[tuple[str, ...], range]]:
    """Convolutions whose files have thirds of all their rows, as transformers writes them: their parts, and the rows of each.

    Published files have those of queries, keys and values, which are not equally many if keys and values differ in width.
    """
    found = dict[str, tuple[tuple[str, ...], range]]()
    for layer, block in enumerate(tree.blocks):
        mixer = block.mixer if isinstance(block, MixerMLPBlock.Config) else None
        parts = tuple(f"model.layers.{layer}.linear_attn.{x}_conv1d.weight" for x in "qkv")
        if not isinstance(mixer, GatedDeltaNet.Config) or any(name not in shapes for name in parts):
            continue
        ends = list(accumulate((mixer.widths[x] for x in "QKV"), initial=0))
        own, held = [range(*ends[i : i + 2]) for i in range(3)], [shapes[name][0] for name in parts]
        third = -(-ends[-1] // 3)
        if held != [len(rows) for rows in own] and held == [third, third, ends[-1] - 2 * third]:
            found |= {name: (parts, rows) for name, rows in zip(parts, own, strict=True)}
    return found


def rows(tree: DecoderConfig) -> list[Row]:
    source = LAYER + "linear_attn."
    names = {"q": "Q", "k": "K", "v": "V", "a": "g", "b": "beta", "g": "gate", "o": "out"}
    return [
        *llama_like.outer_rows(tree),
        *olmo2.attention_rows(),
        *llama_like.mlp_rows(),
        Row(LAYER + "attention_layer_norm.weight", "blocks.{l}.ln1.w"),
        Row(LAYER + "feedforward_layer_norm.weight", "blocks.{l}.ln2.w"),
        Row(LAYER + "feedforward_layer_norm.weight", "blocks.{l}.ln1_post.w"),
        Row(LAYER + "post_feedforward_layernorm.weight", "blocks.{l}.ln2_post.w"),
        *(row for x, y in names.items() for row in classic.linear(f"{source}{x}_proj", MIXER, y)),
        *(Row(f"{source}{x}_conv1d.weight", f"{MIXER}conv_{x}.W_conv", "x 1 k -> k x") for x in "qkv"),
        Row(source + "A_log", MIXER + "A_log"),
        Row(source + "dt_bias", MIXER + "dt_bias"),
        Row(source + "o_norm.weight", MIXER + "norm.w"),
    ]
