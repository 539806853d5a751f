"""Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): multi-head state space models, with one mixer per block."""

from hooked_lm.components.blocks.mixer import MixerBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.components.ssm.mamba2 import Mamba2
from hooked_lm.families._shared import classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders.mamba import N_CTX, outer_rows
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

PREFIX = "backbone."
IGNORED = ()
# derived fields, initialisation, chunk size of the scan
NO_EFFECT = (
    *("expand", "intermediate_size", "time_step_[!l]*", "rescale_prenorm_residual", "chunk_size"),
    "norm_before_gate",  # transformers always gates before the norm
)


def config(hf: HFConfig) -> DecoderConfig:
    hf.ignored_by_transformers(rms_norm=True)
    norm = RMSNorm.Config(hf.hidden_size, hf.layer_norm_epsilon)
    least, most = hf.time_step_limit
    mixer = Mamba2.Config(
        d_model=hf.hidden_size,
        n_heads=hf.num_heads,
        d_head=hf.head_dim,
        d_state=hf.state_size,
        n_groups=hf.n_groups,
        conv_width=hf.conv_kernel,
        act_fn=hf.hidden_act,
        bias=hf.use_bias,
        conv_bias=hf.use_conv_bias,
        dt_limit=(least, most),
        eps=hf.layer_norm_epsilon,
    )
    block = MixerBlock.Config(mixer=mixer, ln1=norm, wide_stream=hf.residual_in_fp32)
    return DecoderConfig(
        n_ctx=N_CTX,
        embed=Embed.Config(hf.vocab_size, hf.hidden_size),
        blocks=(block,) * hf.num_hidden_layers,
        ln_final=norm,
        unembed=Unembed.Config(hf.hidden_size, hf.vocab_size, tied=hf.tie_word_embeddings),
    )


def mixer_rows(mixer: Mamba2.Config, source: str, target: str = "blocks.{l}.mixer.") -> list[Row]:
    """Rows of a layer's mixer, whose tensor names start with `source`."""
    made = {"gate": mixer.d_inner, "x": mixer.d_inner, "B": mixer.d_shared, "C": mixer.d_shared, "dt": mixer.n_heads}
    return [
        Row(source + "in_proj.weight", target + "W_{x}", "x m -> m x", x=made),
        Row(source + "in_proj.bias", target + "b_{x}", "x -> x", x=made),
        Row(source + "conv1d.weight", target + "conv.W_conv", "i 1 k -> k i"),
        Row(source + "conv1d.bias", target + "conv.b_conv"),
        Row(source + "A_log", target + "A_log"),
        Row(source + "dt_bias", target + "dt_bias"),
        Row(source + "D", target + "D"),
        Row(source + "norm.weight", target + "norm.w", "(g i) -> g i"),
        *classic.linear(source + "out_proj", target, "out"),
    ]


def rows(tree: DecoderConfig) -> list[Row]:
    return [*outer_rows(tree), *mixer_rows(tree.blocks[0].mixer, "backbone.layers.{l}.mixer.")]
