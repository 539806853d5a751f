"""Qwen3-Next (Qwen Team 2025): Gated DeltaNet in three of four layers, gated attention in the others, and many small experts."""

from hooked_lm.families._shared import delta_net, llama_like, moe
from hooked_lm.families._shared.delta_net import IGNORED, LAYER, MIXER, PREPENDS_BOS
from hooked_lm.families._shared.llama_like import PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import qwen2_moe
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "PREPENDS_BOS", "config", "rows"]

NO_EFFECT = (*moe.NO_EFFECT, *delta_net.NO_EFFECT)


def config(hf: HFConfig) -> DecoderConfig:
    experts = qwen2_moe.gated_experts(hf, hf.norm_topk_prob)
    return delta_net.decoder(hf, moe.some_sparse(hf, experts, moe.every_nth(hf)))


def rows(tree: DecoderConfig) -> list[Row]:
    return [*delta_net.rows(tree), *mixer_rows(tree), *llama_like.mlp_rows(), *qwen2_moe.sparse_rows(tree)]


def mixer_rows(tree: DecoderConfig) -> list[Row]:
    """The fused input projections: the parts of each group follow each other."""
    source, found = LAYER + "linear_attn.", []
    for cfg in delta_net.mixers(tree)[:1]:
        n, each = cfg.n_groups, {name: width // cfg.n_groups for name, width in cfg.widths.items()}
        for tensor, names in (("in_proj_qkvz", ("Q", "K", "V", "gate")), ("in_proj_ba", ("beta", "g"))):
            parts = {name: each[name] for name in names}
            found.append(Row(f"{source}{tensor}.weight", MIXER + "W_{x}", "(n x) m -> m (n x)", n=n, x=parts))
    return found
