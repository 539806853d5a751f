"""Qwen3.5 (Qwen Team 2026), its text model: Qwen3-Next with separate projections of the mixers and without experts."""

from hooked_lm.families._shared import delta_net, llama_like, mrope
from hooked_lm.families._shared.delta_net import IGNORED, LAYER, MIXER, NO_EFFECT, PREPENDS_BOS
from hooked_lm.families._shared.llama_like import PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "PREPENDS_BOS", "config", "mixer_rows", "rows"]


def config(hf: HFConfig) -> DecoderConfig:
    hf = mrope.on_text(hf)
    return delta_net.decoder(hf, [llama_like.gated_mlp(hf)] * hf.num_hidden_layers)


def rows(tree: DecoderConfig) -> list[Row]:
    return [*delta_net.rows(tree), *mixer_rows(tree), *llama_like.mlp_rows()]


def mixer_rows(tree: DecoderConfig) -> list[Row]:
    """The input projections: queries, keys and values are one tensor."""
    source, found = LAYER + "linear_attn.", []
    for cfg in delta_net.mixers(tree)[:1]:
        parts = {name: cfg.widths[name] for name in "QKV"}
        found += [Row(source + "in_proj_qkv.weight", MIXER + "W_{x}", "x m -> m x", x=parts)]
    names = {"z": "gate", "b": "beta", "a": "g"}
    return [*found, *(Row(f"{source}in_proj_{x}.weight", f"{MIXER}W_{y}", "o m -> m o") for x, y in names.items())]
