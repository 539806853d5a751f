"""Shared code for mixtures of experts: a decoder with a separate MLP config per layer, and the tensor names."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hooked_lm.components.attention.latent import LatentAttention
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import MLPPart, PreNormBlock
from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.experts.router import GroupedSigmoidRouter, Router
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.norms.norm import NormConfig
from hooked_lm.families._shared import classic, llama_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

AttentionConfig = Attention.Config | LatentAttention.Config
MLPConfig = MoE.Config | GatedMLP.Config

# for training only: the loss that balances the experts' loads
NO_EFFECT = ("output_router_logits", "router_aux_loss_coef")


def experts(
    hf: HFConfig,
    n_experts: int,
    router: Router,
    d_mlp: int | None = None,
    n_shared: int | None = None,
    shared_bias: bool = False,
) -> MoE.Config:
    """A mixture of gated MLPs; each token uses `num_experts_per_tok` of them, and `n_shared` shared ones, which are one MLP."""
    expert = GatedMLP.Config(hf.hidden_size, d_mlp or hf.intermediate_size, hf.hidden_act)
    shared = replace(expert, d_mlp=expert.d_mlp * n_shared, bias=shared_bias) if n_shared else None
    return MoE.Config(
        expert, n_experts, 1 if hf.num_experts_per_tok is None else hf.num_experts_per_tok, router, shared=shared
    )


def deepseek_experts(hf: HFConfig, n_experts: int, n_shared: int | None) -> MoE.Config:
    """Small experts and shared ones with DeepSeek-V3's router, from the usual config fields."""
    router = GroupedSigmoidRouter(hf.n_group, hf.topk_group, hf.norm_topk_prob, hf.routed_scaling_factor)
    return experts(hf, n_experts, router, hf.moe_intermediate_size, n_shared)


def some_sparse(
    hf: HFConfig, sparse: MoE.Config, is_sparse: Callable[[int], bool], bias: bool = False
) -> list[MLPConfig]:
    """The MLP of each layer: `sparse` if `is_sparse(layer)`, else one gated MLP."""
    dense = llama_like.gated_mlp(hf, bias)
    return [sparse if is_sparse(layer) else dense for layer in range(hf.num_hidden_layers)]


def every_nth(hf: HFConfig) -> Callable[[int], bool]:
    """A test for sparse layers: every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`."""
    step, dense = hf.decoder_sparse_step, hf.mlp_only_layers
    return lambda layer: layer not in dense and (layer + 1) % step == 0


def from_layer(first: int) -> Callable[[int], bool]:
    """A test for sparse layers: all but the `first` ones."""
    return lambda layer: layer >= first


def of_sparse_type(hf: HFConfig) -> Callable[[int], bool]:
    """A test for sparse layers: those of type "sparse" in `mlp_layer_types`; the others must be "dense"."""
    types = hf.mlp_layer_types
    if unknown := set(types) - {"dense", "sparse"}:
        raise ValueError(f"mlp_layer_types {sorted(unknown)} are not supported; dense and sparse are")
    return lambda layer: types[layer] == "sparse"


def decoder(
    hf: HFConfig,
    attn: AttentionConfig | Sequence[AttentionConfig],
    mlps: Sequence[MLPConfig],
    norm: NormConfig | None = None,
    **unembed: Any,
) -> DecoderConfig:
    """The decoder with each layer's MLP, and one attention for all layers or one per layer.

    `unembed` are further arguments of `llama_like.around`.
    """
    norm = norm or llama_like.rms_norm(hf)
    attns = attn if isinstance(attn, Sequence) else [attn] * len(mlps)
    blocks = [
        PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm) for attn, mlp in zip(attns, mlps, strict=True)
    ]
    return llama_like.around(hf, blocks, norm, **unembed)


def n_experts(tree: DecoderConfig) -> int:
    """The largest number of experts in a layer; 0 if all layers are dense."""
    mlps = [block.mlp for block in tree.blocks if isinstance(block, MLPPart.Config)]
    return max((mlp.n_experts for mlp in mlps if isinstance(mlp, MoE.Config)), default=0)


def sparse_rows(
    tree: DecoderConfig,
    part: str = "mlp",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    shared: str = "shared_experts",
    router: str = "gate",
    correction: str = "gate.e_score_correction_bias",
) -> list[Row]:
    """Rows of the router, the experts and the shared expert.

    `part` is the checkpoint's name of the mixture; `names`, `shared`, `router` and `correction` are those of an expert's
    weights, the shared expert, the router and the correction of its choice.
    """
    source, target = f"model.layers.{{l}}.{part}.", "blocks.{l}.mlp."
    gate, up, down = (f"{source}experts.{{e}}.{name}.weight" for name in names)
    expert, e = target + "experts.{e}.", n_experts(tree)
    return [
        Row(f"{source}{router}.weight", target + "W_router", "e m -> m e"),
        Row(source + correction, target + "b_choice"),
        Row(gate, expert + "W_gate", "f m -> m f", e=e),
        Row(up, expert + "W_in", "f m -> m f", e=e),
        Row(down, expert + "W_out", "m f -> f m", e=e),
        *classic.gated_mlp(f"{source}{shared}.", target + "shared."),
    ]


def rows(tree: DecoderConfig) -> list[Row]:
    """Rows of every weight that a decoder with dense and sparse layers can have, with the most common tensor names."""
    return [*llama_like.rows(tree), *sparse_rows(tree)]
