"""Gemma 3n (Google DeepMind 2025, ai.google.dev/gemma/docs/gemma-3n; AltUp, arXiv:2301.13310; LAuReL, arXiv:2411.07501): a
layer reads and writes one of several residual streams; MLPs differ in width, and in some few neurons are active; otherwise
as Gemma 4."""

from dataclasses import replace

from hooked_lm.components.activations import GaussianTopK
from hooked_lm.components.blocks.per_layer import PerLayerBlock, PerLayerEmbed
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.streams import MergedRMSNorm, SplitStreams
from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import gemma4_text
from hooked_lm.families.decoders.gemma3n_text import identities as identities
from hooked_lm.families.decoders.gemma3n_text.altup import AltUp, AltUpBlock, Laurel
from hooked_lm.families.decoders.gemma4_text import IGNORED
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = ("altup_coef_clip",)  # in training only


def config(hf: HFConfig) -> DecoderConfig:
    hf.ignored_by_transformers(use_bidirectional_attention=False)  # but for the window that it saves
    n_streams, widths = hf.altup_num_inputs, hf.intermediate_size
    as_gemma4 = hf.changed(
        intermediate_size=0,
        **dict.fromkeys(("enable_moe_block", "attention_k_eq_v", "use_double_wide_mlp"), False),
        **dict.fromkeys(("use_bidirectional_attention", "num_experts", "top_k_experts", "moe_intermediate_size")),
    )
    tree = gemma4_text.config(as_gemma4)
    assert isinstance(tree.per_layer, PerLayerEmbed.Config)  # all of Gemma 3n have it
    blocks = [
        _block(hf, block, width, sparsity)
        for block, width, sparsity in zip(tree.blocks, widths, hf.activation_sparsity_pattern, strict=True)
    ]
    blocks[0] = replace(blocks[0], split=SplitStreams.Config(hf.hidden_size, n_streams))
    ln_final = MergedRMSNorm.Config(hf.hidden_size, hf.rms_norm_eps, n_streams=n_streams)
    return replace(tree, blocks=tuple(blocks), ln_final=ln_final, per_layer=replace(tree.per_layer, spare_row=0))


def _block(hf: HFConfig, block: PerLayerBlock.Config, d_mlp: int, sparsity: float) -> AltUpBlock.Config:
    act_fn = GaussianTopK.Config(sparsity, hf.hidden_activation) if sparsity > 0 else hf.hidden_activation
    norm = llama_like.rms_norm(hf)
    assert block.per_layer is not None
    return AltUpBlock.Config(
        attn=block.attn,
        mlp=GatedMLP.Config(hf.hidden_size, d_mlp, act_fn),
        ln1=norm,
        ln1_post=norm,
        ln2=norm,
        ln2_post=norm,
        per_layer=block.per_layer,
        per_layer_post=norm,
        altup=AltUp.Config(hf.hidden_size, hf.altup_num_inputs, hf.altup_active_idx, hf.rms_norm_eps),
        laurel=Laurel.Config(hf.hidden_size, hf.laurel_rank, norm),
        scales_gate=hf.altup_correct_scale,
    )


def rows(tree: DecoderConfig) -> list[Row]:
    source, target = "model.layers.{l}.", "blocks.{l}."
    others = range(len(tree.blocks) and tree.blocks[0].altup.n_streams - 1)
    return [
        *(row for row in gemma4_text.rows(tree) if not row.target.endswith("}.scale")),
        Row("model.altup_projections.{s}.weight", "blocks.0.split.W.{s}", "n m -> m n", s=others),
        Row("model.altup_unembed_projections.{s}.weight", "ln_final.W.{s}", "n m -> m n", s=others),
        Row(source + "altup.router_norm.weight", target + "altup.w"),
        Row(source + "altup.modality_router.weight", target + "altup.W_router", "r m -> m r"),
        Row(source + "altup.prediction_coefs.weight", target + "altup.W_predict", "(t f) r -> r t f"),
        Row(source + "altup.correction_coefs.weight", target + "altup.W_correct", "t r -> r t"),
        Row(source + "altup.correct_output_scale", target + "gate_scale"),
        Row(source + "laurel.linear_left.weight", target + "laurel.W_in", "r m -> m r"),
        Row(source + "laurel.linear_right.weight", target + "laurel.W_out", "m r -> r m"),
        Row(source + "laurel.post_laurel_norm.weight", target + "laurel.norm.w"),
    ]
