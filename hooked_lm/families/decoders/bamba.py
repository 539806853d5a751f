"""Bamba (IBM, Princeton, CMU and UIUC 2024): Mamba-2 layers, attention in some of them, and a gated MLP in each."""

from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.mixer import MixerMLPBlock
from hooked_lm.components.ssm.mamba2 import Mamba2
from hooked_lm.families._shared import classic, llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders.mamba2 import mixer_rows
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "mixer", "rows"]

# derived fields, chunk sizes of the scan, and options of outputs and losses
NO_EFFECT = (
    *("mamba_expand", "mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient", "partial_rotary_factor"),
    *("attn_rotary_emb", "use_mamba_kernels"),  # unused fields of the first checkpoints
)


def config(hf: HFConfig) -> DecoderConfig:
    norm, mlp = llama_like.rms_norm(hf), llama_like.gated_mlp(hf, hf.mlp_bias)
    attn = llama_like.attention(hf, partial=True, qkv_bias=hf.attention_bias, out_bias=hf.attention_bias)
    mixing = MixerMLPBlock.Config(mixer=mixer(hf), ln1=norm, mlp=mlp, ln2=norm)
    attending = PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm)
    with_attention = hf.attn_layer_indices or ()
    return llama_like.around(
        hf, [attending if i in with_attention else mixing for i in range(hf.num_hidden_layers)], norm
    )


def mixer(hf: HFConfig) -> Mamba2.Config:
    """The mixer of a layer."""
    least, most = hf.time_step_limit
    return Mamba2.Config(
        d_model=hf.hidden_size,
        n_heads=hf.mamba_n_heads,
        d_head=hf.mamba_d_head,
        d_state=hf.mamba_d_state,
        n_groups=hf.mamba_n_groups,
        conv_width=hf.mamba_d_conv,
        act_fn=hf.hidden_act,
        bias=hf.mamba_proj_bias,
        conv_bias=hf.mamba_conv_bias,
        dt_limit=(least, most),
        eps=hf.rms_norm_eps,
    )


def rows(tree: DecoderConfig) -> list[Row]:
    layer = "model.layers.{l}."
    mixers = [block.mixer for block in tree.blocks if not isinstance(block, PreNormBlock.Config)]
    return [
        Row("model.embed_tokens.weight", "embed.W_E"),
        Row(layer + "input_layernorm.weight", "blocks.{l}.ln1.w"),
        *llama_like.attention_rows(),
        *(row for mixer in mixers[:1] for row in mixer_rows(mixer, layer + "mamba.")),
        Row(layer + "pre_ff_layernorm.weight", "blocks.{l}.ln2.w"),
        *classic.gated_mlp(layer + "feed_forward."),
        Row("model.final_layernorm.weight", "ln_final.w"),
        *classic.head("lm_head", tree, "model.embed_tokens.weight"),
    ]
