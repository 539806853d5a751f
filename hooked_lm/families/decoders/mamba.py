"""Mamba (Gu and Dao 2023, arXiv:2312.00752): a selective state space model, with one mixer per block."""

from hooked_lm.components.blocks.mixer import MixerBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.components.ssm.mamba import Mamba
from hooked_lm.families._shared import classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

PREFIX = "backbone."
IGNORED = ()
# `intermediate_size` is that times the width; initialisation, choices between equivalent implementations, and duplicate fields
# of the first checkpoints
NO_EFFECT = (
    *("expand", "time_step_[!r]*", "rescale_prenorm_residual", "use_mambapy", "use_associative_scan"),
    *("d_inner", "d_model", "n_layer", "ssm_cfg", "fused_add_norm", "pad_vocab_size_multiple"),
)
N_CTX = 2**20  # the state sets no limit; training used shorter texts


def config(hf: HFConfig) -> DecoderConfig:
    hf.ignored_by_transformers(rms_norm=True)
    norm = RMSNorm.Config(hf.hidden_size, hf.layer_norm_epsilon)
    mixer = Mamba.Config(
        d_model=hf.hidden_size,
        d_inner=hf.intermediate_size,
        d_state=hf.state_size,
        dt_rank=hf.time_step_rank,
        conv_width=hf.conv_kernel,
        act_fn=hf.hidden_act,
        bias=hf.use_bias,
        conv_bias=hf.use_conv_bias,
    )
    block = MixerBlock.Config(mixer=mixer, ln1=norm, wide_stream=hf.residual_in_fp32)
    return DecoderConfig(
        n_ctx=N_CTX,
        embed=Embed.Config(hf.vocab_size, hf.hidden_size),
        blocks=(block,) * hf.num_hidden_layers,
        ln_final=norm,
        unembed=Unembed.Config(hf.hidden_size, hf.vocab_size, tied=hf.tie_word_embeddings),
    )


def outer_rows(tree: DecoderConfig) -> list[Row]:
    """Rows of the embedding, norms and unembedding of Mamba and Mamba-2."""
    return [
        Row("backbone.embeddings.weight", "embed.W_E"),
        Row("backbone.layers.{l}.norm.weight", "blocks.{l}.ln1.w"),
        Row("backbone.norm_f.weight", "ln_final.w"),
        *classic.head("lm_head", tree, "backbone.embeddings.weight"),
    ]


def mixer_rows(mixer: Mamba.Config, source: str) -> list[Row]:
    """Rows of a layer's mixer, whose tensor names start with `source`."""
    made = {"dt_down": mixer.dt_rank, "B": mixer.d_state, "C": mixer.d_state}
    target = "blocks.{l}.mixer."
    return [
        Row(source + "in_proj.weight", target + "W_{x}", "(x i) m -> m i", x=["x", "gate"]),
        Row(source + "in_proj.bias", target + "b_{x}", "(x i) -> i", x=["x", "gate"]),
        Row(source + "conv1d.weight", target + "conv.W_conv", "i 1 k -> k i"),
        Row(source + "conv1d.bias", target + "conv.b_conv"),
        Row(source + "x_proj.weight", target + "W_{x}", "x i -> i x", x=made),
        Row(source + "dt_proj.weight", target + "W_dt_up", "i r -> r i"),
        Row(source + "dt_proj.bias", target + "dt_bias"),
        Row(source + "A_log", target + "A_log"),
        Row(source + "D", target + "D"),
        *classic.linear(source + "out_proj", target, "out"),
    ]


def rows(tree: DecoderConfig) -> list[Row]:
    return [*outer_rows(tree), *mixer_rows(tree.blocks[0].mixer, "backbone.layers.{l}.mixer.")]
