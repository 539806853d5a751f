"""The language model of Hy4-VL (Tencent 2026, huggingface.co/tencent/Hy4): Hy4 with rotary positions on three axes,
which turn adjacent features."""

from dataclasses import replace

from hooked_lm.families._shared import mrope
from hooked_lm.families._shared.llama_like import PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import hy_v4
from hooked_lm.families.decoders.hy_v4 import IGNORED, NO_EFFECT, RENAMED, rows
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]


def config(hf: HFConfig) -> DecoderConfig:
    tree = hy_v4.decoder(mrope.on_text(hf), adjacent_pairs=True)
    attns = [replace(block.attn, latent_eps=hf.rms_norm_eps) for block in tree.blocks]
    return replace(
        tree, blocks=tuple(replace(block, attn=attn) for block, attn in zip(tree.blocks, attns, strict=True))
    )
