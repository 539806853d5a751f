"""Falcon Mamba (Zuo et al. 2024, arXiv:2410.05355): Mamba with norms without weights on the step, B and C."""

from dataclasses import replace

from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import mamba
from hooked_lm.families.decoders.mamba import IGNORED, PREFIX, rows
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = (*mamba.NO_EFFECT, "use_falcon_mambapy")


def config(hf: HFConfig) -> DecoderConfig:
    tree = mamba.config(hf)
    block = tree.blocks[0]
    mixer = replace(
        block.mixer,
        dt_norm=RMSNorm.Config(block.mixer.dt_rank, hf.mixer_rms_eps, weight=False),
        state_norm=RMSNorm.Config(block.mixer.d_state, hf.mixer_rms_eps, weight=False),
    )
    return replace(tree, blocks=(replace(block, mixer=mixer),) * len(tree.blocks))
