"""Nemotron-H and Nemotron 3 (NVIDIA 2025, arXiv:2504.03624): each layer is Mamba-2, attention without positions, a squared
ReLU MLP, or a mixture of such MLPs."""

from hooked_lm.components.blocks.mixer import MixerBlock
from hooked_lm.components.blocks.one_sublayer import AttentionOnlyBlock, MLPOnlyBlock
from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.experts.router import GroupedSigmoidRouter
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.components.ssm.mamba2 import Mamba2
from hooked_lm.families._shared import classic, llama_like, moe
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders.mamba2 import mixer_rows
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

PREFIX = "backbone."
IGNORED = ("mtp.*",)  # layers for multi-token prediction, which the next-token logits do not depend on
# derived fields, initialisation, chunks of the scan, options of outputs and of equivalent implementations, and fields that
# transformers does not use: its attention has no biases and no window, `use_bias` is that of the mixers
NO_EFFECT = (
    *("expand", "chunk_size", "time_step_max", "time_step_floor", "rescale_prenorm_residual", "num_logits_to_keep"),
    *(
        "use_mamba_kernels",
        "mamba_ssm_cache_dtype",
        "moe_shared_expert_overlap",
        "num_hidden_layers",
        "n_shared_experts",
    ),
    *(
        "attention_bias",
        "sliding_window",
        "mamba_proj_bias",
        "residual_in_fp32",
        "hidden_dropout",
        "output_router_logits",
    ),
    *("num_nextn_predict_layers", "mtp_*", "hybrid_override_pattern"),
)


def config(hf: HFConfig) -> DecoderConfig:
    hf.require(moe_latent_size=None, tie_word_embeddings=False)
    if tuple(hf.time_step_limit) != (0.0, float("inf")):
        raise ValueError(f"time_step_limit={hf.time_step_limit} is not supported: transformers limits by time_step_min")
    norm = RMSNorm.Config(hf.hidden_size, hf.layer_norm_epsilon)
    blocks = {
        "linear_attention": MixerBlock.Config(mixer=_mixer(hf), ln1=norm),
        "full_attention": AttentionOnlyBlock.Config(attn=llama_like.attention(hf, rotary=None), ln1=norm),
        "mlp": MLPOnlyBlock.Config(mlp=_mlp(hf, hf.intermediate_size), ln2=norm),
        "moe": MLPOnlyBlock.Config(mlp=_experts(hf), ln2=norm),
    }
    if unknown := set(hf.layers_block_type) - set(blocks):
        raise ValueError(f"layers_block_type {sorted(unknown)} are not supported; {', '.join(blocks)} are")
    return llama_like.around(hf, [blocks[kind] for kind in hf.layers_block_type], norm)


def _mixer(hf: HFConfig) -> Mamba2.Config:
    return Mamba2.Config(
        d_model=hf.hidden_size,
        n_heads=hf.mamba_num_heads,
        d_head=hf.mamba_head_dim,
        d_state=hf.ssm_state_size,
        n_groups=hf.n_groups,
        conv_width=hf.conv_kernel,
        act_fn=hf.mamba_hidden_act,
        bias=hf.use_bias,
        conv_bias=hf.use_conv_bias,
        dt_limit=(hf.time_step_min, float("inf")),
        eps=hf.layer_norm_epsilon,
    )


def _mlp(hf: HFConfig, d_mlp: int, bias: bool | None = None) -> MLP.Config:
    return MLP.Config(hf.hidden_size, d_mlp, hf.mlp_hidden_act, hf.mlp_bias if bias is None else bias)


def _experts(hf: HFConfig) -> MoE.Config:
    router = GroupedSigmoidRouter(hf.n_group, hf.topk_group, hf.norm_topk_prob, hf.routed_scaling_factor)
    expert = _mlp(hf, hf.moe_intermediate_size, bias=False)
    shared = _mlp(hf, hf.moe_shared_expert_intermediate_size)
    return MoE.Config(expert, hf.n_routed_experts, hf.num_experts_per_tok, router, shared=shared)


def rows(tree: DecoderConfig) -> list[Row]:
    source, mlp = "backbone.layers.{l}.", "blocks.{l}.mlp."
    mixers = [
        mixer for mixer in (getattr(block, "mixer", None) for block in tree.blocks) if isinstance(mixer, Mamba2.Config)
    ]
    experts, e = source + "mixer.experts.{e}.", moe.n_experts(tree)
    return [
        Row("backbone.embeddings.weight", "embed.W_E"),
        Row(source + "norm.weight", "blocks.{l}.ln1.w"),
        Row(source + "norm.weight", "blocks.{l}.ln2.w"),
        *(row for mixer in mixers[:1] for row in mixer_rows(mixer, source + "mixer.")),
        *classic.attention(source + "mixer."),
        *classic.linear(source + "mixer.up_proj", mlp, "in"),
        *classic.linear(source + "mixer.down_proj", mlp, "out"),
        Row(source + "mixer.gate.weight", mlp + "W_router", "e m -> m e"),
        Row(source + "mixer.gate.e_score_correction_bias", mlp + "b_choice"),
        Row(experts + "up_proj.weight", mlp + "experts.{e}.W_in", "f m -> m f", e=e),
        Row(experts + "down_proj.weight", mlp + "experts.{e}.W_out", "m f -> f m", e=e),
        *classic.linear(source + "mixer.shared_experts.up_proj", mlp + "shared.", "in"),
        *classic.linear(source + "mixer.shared_experts.down_proj", mlp + "shared.", "out"),
        Row("backbone.norm_f.weight", "ln_final.w"),
        *classic.head("lm_head", tree, "backbone.embeddings.weight"),
    ]
