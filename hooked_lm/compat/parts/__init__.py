"""The components of models under the class names of TransformerLens; see `name`."""

from hooked_lm.compat.parts.attention import AbstractAttention, Attention, GroupedQueryAttention, T5Attention
from hooked_lm.compat.parts.blocks import BertBlock, T5Block, TransformerBlock
from hooked_lm.compat.parts.ends import (
    BertEmbed,
    BertMLMHead,
    BertNSPHead,
    BertPooler,
    Embed,
    PosEmbed,
    TokenTypeEmbed,
    Unembed,
)
from hooked_lm.compat.parts.mlps import (
    MLP,
    ActivationFunctionFactory,
    CanBeUsedAsMLP,
    GatedMLP,
    GatedMLP4Bit,
    GptOssExpert,
    GptOssMoE,
    MLPFactory,
    MoE,
    MoEGatedMLP,
)
from hooked_lm.compat.parts.norms import LayerNorm, LayerNormPre, RMSNorm, RMSNormPre

__all__ = [
    "MLP",
    "AbstractAttention",
    "ActivationFunctionFactory",
    "Attention",
    "BertBlock",
    "BertEmbed",
    "BertMLMHead",
    "BertNSPHead",
    "BertPooler",
    "CanBeUsedAsMLP",
    "Embed",
    "GatedMLP",
    "GatedMLP4Bit",
    "GptOssExpert",
    "GptOssMoE",
    "GroupedQueryAttention",
    "LayerNorm",
    "LayerNormPre",
    "MLPFactory",
    "MoE",
    "MoEGatedMLP",
    "PosEmbed",
    "RMSNorm",
    "RMSNormPre",
    "T5Attention",
    "T5Block",
    "TokenTypeEmbed",
    "TransformerBlock",
    "Unembed",
]
