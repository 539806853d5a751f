"""Shared code for hybrids of gated attention and Gated DeltaNet: Qwen3-Next and Qwen3.5."""

from collections.abc import Sequence

from hooked_lm.components.attention.gated import GatedAttention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.mixer import MixerMLPBlock
from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.components.ssm.delta_net import GatedDeltaNet
from hooked_lm.families._shared import classic, llama_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

IGNORED = (*llama_like.IGNORED, "mtp.*")  # of the prediction of several tokens
NO_EFFECT = ("full_attention_interval", "partial_rotary_factor", "mtp_*")  # the first two repeat other fields
PREPENDS_BOS = False

LAYER, MIXER, ATTENTION = "model.layers.{l}.", "blocks.{l}.mixer.", "blocks.{l}.attn."


def attention(hf: HFConfig) -> GatedAttention.Config:
    """The attention of a layer."""
    bias, norm = hf.attention_bias, RMSNorm.Config(llama_like.head_dim(hf), hf.rms_norm_eps, offset=1.0)
    attn = llama_like.attention(hf, partial=True, qkv_bias=bias, out_bias=bias, qk_norm=norm)
    return GatedAttention.Config(**vars(attn), gate_bias=bias)


def mixer(hf: HFConfig, **options: float) -> GatedDeltaNet.Config:
    """The mixer of a layer."""
    return GatedDeltaNet.Config(
        d_model=hf.hidden_size,
        n_heads=hf.linear_num_value_heads,
        d_head=hf.linear_value_head_dim,
        n_groups=hf.linear_num_key_heads,
        d_state=hf.linear_key_head_dim,
        conv_width=hf.linear_conv_kernel_dim,
        act_fn=hf.hidden_act,
        **{"eps": hf.rms_norm_eps, **options},
    )


def decoder(hf: HFConfig, mlps: Sequence[MoE.Config | GatedMLP.Config]) -> DecoderConfig:
    """The decoder with the MLP of each layer."""
    hf.ignored_by_transformers(attn_output_gate=True, output_gate_type="swish", mamba_ssm_dtype="float32")
    norm = RMSNorm.Config(hf.hidden_size, hf.rms_norm_eps, offset=1.0)
    blocks = [
        PreNormBlock.Config(attn=attention(hf), ln1=norm, mlp=mlp, ln2=norm)
        if attends
        else MixerMLPBlock.Config(mixer=mixer(hf), ln1=norm, mlp=mlp, ln2=norm)
        for attends, mlp in zip(attending(hf), mlps, strict=True)
    ]
    return llama_like.around(hf, blocks, norm)


def attending(hf: HFConfig) -> list[bool]:
    """Whether each layer has attention. Raises ValueError for unknown `layer_types`."""
    kinds = hf.layer_types[: hf.num_hidden_layers]
    if unknown := set(kinds) - {"full_attention", "linear_attention"}:
        raise ValueError(f"layer_types {sorted(unknown)} are not supported; full_attention and linear_attention are")
    return [kind == "full_attention" for kind in kinds]


def mixers(tree: DecoderConfig) -> list[GatedDeltaNet.Config]:
    """The mixers of all layers that have one."""
    found = [block.mixer for block in tree.blocks if isinstance(block, MixerMLPBlock.Config)]
    return [mixer for mixer in found if isinstance(mixer, GatedDeltaNet.Config)]


def attention_rows() -> list[Row]:
    """Rows of attention. In the query projection each head's queries are followed by its gate."""
    source = LAYER + "self_attn."
    return [
        Row(source + "q_proj.weight", ATTENTION + "W_{x}", "(n x h) m -> n m h", x=["Q", "gate"]),
        Row(source + "q_proj.bias", ATTENTION + "b_{x}", "(n x h) -> n h", x=["Q", "gate"]),
        *classic.heads_in(source + "k_proj", "K"),
        *classic.heads_in(source + "v_proj", "V"),
        *classic.out_of_attention(source + "o_proj"),
        Row(source + "q_norm.weight", ATTENTION + "q_norm.w"),
        Row(source + "k_norm.weight", ATTENTION + "k_norm.w"),
    ]


def mixer_rows(cfg: GatedDeltaNet.Config) -> list[Row]:
    """Rows of a mixer after its input projections."""
    source, widths = LAYER + "linear_attn.", {name.lower(): cfg.widths[name] for name in "QKV"}
    return [
        Row(source + "conv1d.weight", MIXER + "conv_{x}.W_conv", "x 1 k -> k x", x=widths),
        Row(source + "A_log", MIXER + "A_log"),
        Row(source + "dt_bias", MIXER + "dt_bias"),
        Row(source + "norm.weight", MIXER + "norm.w"),
        *classic.linear(source + "out_proj", MIXER, "out"),
    ]


def rows(tree: DecoderConfig) -> list[Row]:
    """Rows of a decoder, without those of the mixers' input projections and of the MLPs."""
    return [
        *llama_like.outer_rows(tree),
        *llama_like.norm_rows(),
        *attention_rows(),
        *(row for cfg in mixers(tree)[:1] for row in mixer_rows(cfg)),
    ]
