"""Tiny models and random transcoders."""

from typing import Any

import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.components.blocks.wiring import has_part
from hooked_lm.interventions.dictionaries import (
    BatchTopK,
    CrossLayerTranscoder,
    JumpReLU,
    LayerTranscoders,
    TopK,
    Transcoder,
    TranscoderSet,
)

SIZES = {"n_layers": 3, "d_model": 16, "n_ctx": 12, "d_head": 4, "n_heads": 4, "d_mlp": 24, "d_vocab": 30, "seed": 0}
PLAIN = {"act_fn": "gelu_new", "normalization_type": "LN"}
GATED = {
    "act_fn": "silu", "normalization_type": "RMS", "gated_mlp": True, "final_rms": True, "n_key_value_heads": 2,
    "positional_embedding_type": "rotary",
}  # fmt: skip
UNNORMED = {"act_fn": "gelu_new", "normalization_type": None}
MODELS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "gated": GATED,
    "parallel": {**PLAIN, "parallel_attn_mlp": True},
    "capped": {**GATED, "use_normalization_before_and_after": True, "attn_scores_soft_cap": 20.0, "output_logits_soft_cap": 5.0},
}  # fmt: skip
TOKENS = torch.tensor([[1, 7, 23, 5, 12, 11, 29]])


def tiny(kind: str = "plain") -> HookedTransformer:
    """A model with random weights of order one, biases and norms too."""
    model = HookedTransformer({**SIZES, **(UNNORMED if kind == "unnormed" else MODELS[kind])})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(0.3 * noise) if weight.ndim == 1 else weight.copy_(0.3 * noise)
    return model


def transcoders(
    model: HookedTransformer, kind: str = "skip", d_sae: int = 20, site: str = "hook_mlp_in"
) -> LayerTranscoders:
    """Random transcoders of all layers with an MLP: "plain", "skip", "across", "topk", "batchtopk" or "jumprelu"."""
    common = {"d_in": model.cfg.d_model, "d_sae": d_sae, "subtract_b_dec": False, "skip_connection": kind == "skip"}
    classes: dict[str, Any] = {"topk": TopK, "batchtopk": BatchTopK, "jumprelu": JumpReLU}
    more = {"k": 5} if kind in ("topk", "batchtopk") else {}
    layers = [layer for layer, block in enumerate(model.blocks) if has_part(block, "mlp")]
    configs = [
        classes.get(kind, Transcoder).Config(
            hook_point=f"blocks.{layer}.{site}", hook_point_out=f"blocks.{layer}.hook_mlp_out", **common, **more
        )
        for layer in layers
    ]
    of = CrossLayerTranscoder if kind == "across" else TranscoderSet
    made = LayerTranscoders.Config(tuple(configs), across=of is CrossLayerTranscoder).build()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            scale = 0.1 if "threshold" in name else 0.3
            weight.copy_(scale * torch.randn(weight.shape, generator=generator))
    return made.eval()


def run(model: HookedTransformer, tokens: Tensor = TOKENS) -> Any:
    """The values of all sites, those on demand too."""
    return model.run_with_cache(tokens, names_filter=["hook_*", "blocks.*"])[1]
