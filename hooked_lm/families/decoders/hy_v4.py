"""Hy4 (Tencent 2026, huggingface.co/tencent/Hy4-preview): hyper-connections (Zhu et al. 2024, arXiv:2409.19606) between several
residual streams; GLM-5's sparse attention with a gate and sinks; DeepSeek-V3's experts, with bounded branches."""

from dataclasses import replace

from hooked_lm.components.attention.gated import GatedSharedIndexAttention, GatedSparseLatentAttention
from hooked_lm.components.attention.sparse_latent import SharedIndexAttention, SparseLatentAttention
from hooked_lm.components.blocks.hyper import GatedRMSNorm, HyperBlock, HyperConnection, StreamGate
from hooked_lm.components.bounded_mlp import BoundedGatedMLP
from hooked_lm.components.experts.moe import MoE
from hooked_lm.families._shared import classic, deepseek, llama_like, moe
from hooked_lm.families._shared.llama_like import PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

IGNORED = (*llama_like.IGNORED, "model.mtp_layers.*")  # for multi-token prediction
NO_EFFECT = (*deepseek.NO_EFFECT_OF_SPARSE, "learnable_sink_init")
# To the names that transformers writes: those of its modules, and those before its renaming, which moves `hc_pre` and gives the
# name of the attention's gate to the MLPs' gates too (conversion_mapping.py, "hy_v4").
RENAMED = {
    r"\.sinks$": ".learnable_sink_param",
    r"\.gate_proj\.": ".linear_gate.",
    r"\.attn_hc\.(fn|base|scale)$": r".hc_pre.hc_attn_layer.hc_\1",
    r"\.ffn_hc\.(fn|base|scale)$": r".hc_pre.hc_mlp_layer.hc_\1",
    r"(\d)\.hc_(attn|mlp)_layer\.(?:hc_pre\.)?hc_": r"\1.hc_pre.hc_\2_layer.hc_",
    r"^(model\.)?hc_head\.(?:hc_pre\.)?(?:hc_head|hc)_(fn|base|scale)$": r"\1hc_pre.hc_head.hc_head_\2",
}


def config(hf: HFConfig) -> DecoderConfig:
    return decoder(hf, adjacent_pairs=False)


def decoder(hf: HFConfig, adjacent_pairs: bool) -> DecoderConfig:
    """The decoder; `adjacent_pairs` says which features of a head rotary turns together."""
    norm, (d_model, n_streams, eps) = llama_like.rms_norm(hf), (hf.hidden_size, hf.hc_mult, hf.hc_eps)
    if hf.swiglu_limit <= 0:
        raise ValueError(f"swiglu_limit={hf.swiglu_limit} is not supported: transformers bounds by it nevertheless")
    read = StreamGate.Config(d_model, n_streams, hf.rms_norm_eps, eps)
    hc = HyperConnection.Config(read, replace(read, magnitude=hf.hc_magnitude))
    blocks = [
        HyperBlock.Config(attn=_attention(hf, attn), ln1=norm, mlp=_mlp(hf, mlp), ln2=norm, hc=hc)
        for attn, mlp in zip(deepseek.sharing_indices(hf, adjacent_pairs), deepseek.mlps(hf), strict=True)
    ]
    ln_final = GatedRMSNorm.Config(d_model, hf.rms_norm_eps, n_streams=n_streams, gate_eps=eps)
    return llama_like.around(hf, [replace(blocks[0], first=True), *blocks[1:]], ln_final)


def _attention(
    hf: HFConfig, attn: SparseLatentAttention.Config | SharedIndexAttention.Config
) -> GatedSparseLatentAttention.Config | GatedSharedIndexAttention.Config:
    if isinstance(attn, SharedIndexAttention.Config):
        return GatedSharedIndexAttention.Config(**vars(attn), sinks=True)
    indexer = replace(attn.indexer, rotary_last=True, eps=hf.rms_norm_eps)
    return GatedSparseLatentAttention.Config(**{**vars(attn), "indexer": indexer}, sinks=True)


def _mlp(hf: HFConfig, mlp: moe.MLPConfig) -> moe.MLPConfig:
    if not isinstance(mlp, MoE.Config):
        return mlp
    expert = BoundedGatedMLP.Config(
        hf.hidden_size, mlp.expert.d_mlp, "silu", limit=hf.swiglu_limit, before_act=True
    )  # whatever `hidden_act` is
    return replace(mlp, expert=expert)


def rows(tree: DecoderConfig) -> list[Row]:
    source, target, e = "model.layers.{l}.", "blocks.{l}.", moe.n_experts(tree)
    n = tree.blocks[0].hc.read.n_streams
    both, one = {"read": n, "write": n}, {"read": 1, "write": 1}
    of_mlp = {"linear_gate": "gate", "up_proj": "in", "down_proj": "out"}
    connections = {"hc_pre.hc_attn_layer.hc_": "attn_hc.{x}.", "hc_pre.hc_mlp_layer.hc_": "mlp_hc.{x}."}
    head = "model.hc_pre.hc_head.hc_head_"
    return [
        *(row for row in deepseek.rows(tree) if not row.target.startswith(target + "mlp.")),
        Row(source + "self_attn.linear_gate.weight", target + "attn.W_gate", "(n h) m -> n m h"),
        Row(source + "self_attn.learnable_sink_param", target + "attn.sinks"),
        *(
            row
            for x, y in connections.items()
            for row in (
                Row(source + x + "fn", target + y + "W", "x (s m) -> s m x", x=both),
                Row(source + x + "base", target + y + "b", "x -> x", x=both),
                Row(source + x + "scale", target + y + "scale", "x -> x", x=one),
            )
        ),
        Row(head + "fn", "ln_final.gate.W", "x (s m) -> s m x"),
        Row(head + "base", "ln_final.gate.b"),
        Row(head + "scale", "ln_final.gate.scale"),
        *(row for x, y in of_mlp.items() for row in classic.linear(f"{source}mlp.{x}", target + "mlp.", y)),
        *(
            row
            for x, y in of_mlp.items()
            for row in classic.linear(f"{source}mlp.shared_experts.{x}", target + "mlp.shared.", y)
        ),
        Row(source + "mlp.gate.weight", target + "mlp.W_router", "e m -> m e"),
        Row(source + "mlp.gate.e_score_correction_bias", target + "mlp.b_choice"),
        Row(
            source + "mlp.experts.gate_up_proj",
            target + "mlp.experts.{e}.W_{x}",
            "e (x f) m -> m f",
            e=e,
            x=["gate", "in"],
        ),
        Row(source + "mlp.experts.down_proj", target + "mlp.experts.{e}.W_out", "e m f -> f m", e=e),
    ]
