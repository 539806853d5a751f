"""The text model of Qwen3.5 with experts (Qwen Team 2026): a mixture in every layer, with a gated shared expert.

Files have the experts of a layer one by one, or in one tensor (layout 1).
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from hooked_lm.families._shared import delta_net, moe, mrope
from hooked_lm.families._shared.delta_net import IGNORED, PREPENDS_BOS
from hooked_lm.families._shared.llama_like import PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import qwen2_moe, qwen3_5_text, qwen3_vl_moe_text
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "PREPENDS_BOS", "adjusted_to_tensors", "config", "rows"]

NO_EFFECT = (*moe.NO_EFFECT, *delta_net.NO_EFFECT)


def config(hf: HFConfig) -> DecoderConfig:
    hf = mrope.on_text(hf)
    return delta_net.decoder(hf, [qwen2_moe.gated_experts(hf, renormalize=True)] * hf.num_hidden_layers)


def adjusted_to_tensors(tree: DecoderConfig, tensors: Mapping[str, Tensor]) -> DecoderConfig:
    """The tree with the layout of the experts."""
    return replace(tree, layout=int(any(name.endswith(qwen3_vl_moe_text.INTO) for name in tensors)))


def rows(tree: DecoderConfig) -> list[Row]:
    sparse = qwen2_moe.sparse_rows(tree)
    if tree.layout:
        sparse = [row for row in sparse if ".experts." not in row.source] + qwen3_vl_moe_text.expert_rows(tree)
    return [*delta_net.rows(tree), *qwen3_5_text.mixer_rows(tree), *sparse]
