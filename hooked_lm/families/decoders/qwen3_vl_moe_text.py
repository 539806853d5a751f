"""The language model of Qwen3-VL with experts (Qwen Team 2025, arXiv:2511.21631): Qwen3-MoE with interleaved rotary positions on
three axes, and the experts of a layer in one tensor."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from hooked_lm.components.blocks.block import MLPPart
from hooked_lm.components.experts.moe import MoE
from hooked_lm.families._shared import llama_like, moe, mrope
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import qwen3_moe
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "adjusted_to_tensors", "config", "expert_rows", "rows"]

PREPENDS_BOS = False
NO_EFFECT = qwen3_moe.NO_EFFECT
INTO, OUT = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def config(hf: HFConfig) -> DecoderConfig:
    return qwen3_moe.config(mrope.on_text(hf, norm_topk_prob=True, sliding_window=None))


def adjusted_to_tensors(tree: DecoderConfig, tensors: Mapping[str, Tensor]) -> DecoderConfig:
    """The tree with the layout of the experts: 0 as published, [expert, in, out]; 1 as transformers saves them again,
    [expert, out, in]. Raises ValueError for a checkpoint with both.

    transformers (core_model_loading.py: Transpose) looks at one tensor alone, and leaves it unchanged where that cannot tell.
    """
    sparse = [block.mlp for block in tree.blocks if isinstance(block, MLPPart.Config)]
    widths = {mlp.expert.d_mlp for mlp in sparse if isinstance(mlp, MoE.Config)}
    found = set[int]()
    for d_mlp in widths:  # one of the two tensors of a layer shows the layout even where d_model is d_mlp or twice that
        for name, n_in, n_out in ((INTO, tree.embed.d_model, 2 * d_mlp), (OUT, d_mlp, tree.embed.d_model)):
            shapes = {tuple(tensors[each].shape[1:]) for each in tensors if each.endswith(name)}
            found |= {int(shape == (n_out, n_in)) for shape in shapes if n_in != n_out}
    if len(found) > 1:
        raise ValueError("the experts of some layers are [expert, in, out], and those of others [expert, out, in]")
    return replace(tree, layout=max(found, default=0))


def rows(tree: DecoderConfig) -> list[Row]:
    router = Row("model.layers.{l}.mlp.gate.weight", "blocks.{l}.mlp.W_router", "e m -> m e")
    return [*llama_like.rows(tree), router, *expert_rows(tree)]


def expert_rows(tree: DecoderConfig) -> list[Row]:
    """The experts of a layer, in one tensor of their inputs and one of their outputs."""
    source, target, e = "model.layers.{l}.", "blocks.{l}.mlp.experts.{e}.", moe.n_experts(tree)
    into, out = ("e (x f) m -> m f", "e m f -> f m") if tree.layout else ("e m (x f) -> m f", "e f m -> f m")
    return [
        Row(source + INTO, target + "W_{x}", into, e=e, x=["gate", "in"]),
        Row(source + OUT, target + "W_out", out, e=e),
    ]
