"""Jamba (Lieber et al. 2024, arXiv:2403.19887): Mamba with norms on the step, B and C, attention without positions in some
layers, and experts in some."""

from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.mixer import MixerMLPBlock
from hooked_lm.components.experts.router import SoftmaxRouter
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.components.ssm.mamba import Mamba
from hooked_lm.families._shared import classic, llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders.mamba import mixer_rows
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# choices between equivalent implementations, and the number of logits that are returned
NO_EFFECT = (*moe.NO_EFFECT, "use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep")


def config(hf: HFConfig) -> DecoderConfig:
    norm, attn = llama_like.rms_norm(hf), llama_like.attention(hf, rotary=None)
    mixer = Mamba.Config(
        d_model=hf.hidden_size,
        d_inner=hf.mamba_expand * hf.hidden_size,
        d_state=hf.mamba_d_state,
        dt_rank=hf.mamba_dt_rank,
        conv_width=hf.mamba_d_conv,
        act_fn=hf.hidden_act,
        bias=hf.mamba_proj_bias,
        conv_bias=hf.mamba_conv_bias,
        dt_norm=RMSNorm.Config(hf.mamba_dt_rank, hf.rms_norm_eps),
        state_norm=RMSNorm.Config(hf.mamba_d_state, hf.rms_norm_eps),
    )
    experts = moe.experts(hf, hf.num_experts, SoftmaxRouter())
    period, offset = hf.expert_layer_period, hf.expert_layer_offset
    mlps = moe.some_sparse(hf, experts, lambda layer: hf.num_experts > 1 and layer % period == offset)
    blocks = [
        PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm)
        if layer % hf.attn_layer_period == hf.attn_layer_offset
        else MixerMLPBlock.Config(mixer=mixer, ln1=norm, mlp=mlp, ln2=norm)
        for layer, mlp in enumerate(mlps)
    ]
    return llama_like.around(hf, blocks, norm)


def rows(tree: DecoderConfig) -> list[Row]:
    layer, target = "model.layers.{l}.", "blocks.{l}.mixer."
    mixers = [
        mixer for mixer in (getattr(block, "mixer", None) for block in tree.blocks) if isinstance(mixer, Mamba.Config)
    ]
    norms = {"dt": "dt", "b": "B", "c": "C"}
    return [
        Row("model.embed_tokens.weight", "embed.W_E"),
        Row(layer + "input_layernorm.weight", "blocks.{l}.ln1.w"),
        *classic.attention(layer + "self_attn."),
        *(row for mixer in mixers[:1] for row in mixer_rows(mixer, layer + "mamba.")),
        *(Row(f"{layer}mamba.{x}_layernorm.weight", f"{target}{y}_norm.w") for x, y in norms.items()),
        Row(layer + "pre_ff_layernorm.weight", "blocks.{l}.ln2.w"),
        *classic.gated_mlp(layer + "feed_forward."),
        *moe.sparse_rows(tree, "feed_forward", router="router"),
        Row("model.final_layernorm.weight", "ln_final.w"),
        *classic.head("lm_head", tree, "model.embed_tokens.weight"),
    ]
