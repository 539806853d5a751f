"""ZAYA1 (Anthony et al. 2025, arXiv:2511.17127): compressed convolutional attention, a router that reads that of the layer before
and may skip the experts, and scales and shifts of the stream, which is in fp32."""

from dataclasses import replace

from hooked_lm.components.experts.router import CorrectedSoftmaxRouter
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.components.norms.scales import ShiftedScale
from hooked_lm.families._shared import classic, llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import rotary
from hooked_lm.families.decoders.zaya import identities as identities
from hooked_lm.families.decoders.zaya.convolutional import ConvolutionalAttention, HeadScaleNorm
from hooked_lm.families.decoders.zaya.router_state import RouterStateBlock, RouterStateMoE
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = ("output_router_logits",)
UNIT_EPS = 1e-30  # lengths are bounded from below by the rounding of the dtype in transformers, which only a zero vector reaches


def config(hf: HFConfig) -> DecoderConfig:
    d_head, affine = llama_like.head_dim(hf), ShiftedScale.Config(hf.hidden_size)
    plain = llama_like.attention(
        hf,
        rotary=None,
        qkv_bias=hf.attention_bias,
        out_bias=hf.attention_bias,
        qk_norm=RMSNorm.Config(d_head, UNIT_EPS, weight=False),
        k_norm=HeadScaleNorm.Config(d_head, UNIT_EPS, n_heads=hf.num_key_value_heads),
    )
    attn = ConvolutionalAttention.Config(**vars(plain), conv_width=hf.cca_time0, head_conv_width=hf.cca_time1)
    windows = {"hybrid": None, "hybrid_sliding": hf.sliding_window}
    if unknown := set(hf.layer_types) - set(windows):
        raise ValueError(f"layer_types {sorted(unknown)} are not supported; {' and '.join(windows)} are")
    kinds = {
        kind: replace(attn, window=windows[kind], rotary=rotary(hf, d_head, kind, partial=True))
        for kind in dict.fromkeys(hf.layer_types)
    }
    experts = moe.experts(hf, hf.num_experts, CorrectedSoftmaxRouter(renormalize=False), hf.moe_intermediate_size)
    mlp = RouterStateMoE.Config(**vars(experts), d_router=hf.router_hidden_size, eps=hf.rms_norm_eps)
    norm = llama_like.rms_norm(hf)
    blocks = [
        RouterStateBlock.Config(
            attn=kinds[kind],
            ln1=norm,
            ln1_post=affine,
            mlp=replace(mlp, reads_previous=layer > 0),
            ln2=norm,
            ln2_post=affine,
            stream_bias=True,
        )
        for layer, kind in enumerate(hf.layer_types[: hf.num_hidden_layers])
    ]
    tree = llama_like.around(hf, blocks, norm, bias=hf.lm_head_bias)
    return replace(tree, embed=replace(tree.embed, norm=affine))


def rows(tree: DecoderConfig) -> list[Row]:
    source, target, attn = "model.layers.{l}.", "blocks.{l}.", tree.blocks[0].attn
    project, conv = source + "self_attn.qkv_proj.", target + "attn.conv_{x}."
    heads = {"q": attn.n_heads, "k": attn.n_kv}
    channels = {name: n * attn.d_head for name, n in heads.items()}
    gate, mlp, experts = source + "mlp.gate.", target + "mlp.", source + "mlp.experts."
    expert, e = mlp + "experts.{e}.", moe.n_experts(tree)
    return [
        *llama_like.outer_rows(tree),
        Row("model.input_hidden_states_scale", "embed.ln.w"),
        Row("model.input_hidden_states_bias", "embed.ln.b"),
        *llama_like.norm_rows(),
        *(row for x in "qk" for row in classic.heads_in(f"{project}{x}_proj", x.upper())),
        *(
            row
            for x in ("current", "delayed")
            for row in classic.linear(f"{project}v_proj_{x}", target + "attn.", f"V_{x}")
        ),
        Row(project + "conv_qk_depthwise.weight", conv + "channels.W_conv", "x 1 t -> t x", x=channels),
        Row(project + "conv_qk_depthwise.bias", conv + "channels.b_conv", "x -> x", x=channels),
        Row(project + "conv_qk_grouped.weight", conv + "W_head", "(x o) h t -> x t h o", x=heads),
        Row(project + "conv_qk_grouped.bias", conv + "b_head", "(x h) -> x h", x=heads),
        Row(source + "self_attn.qk_norm.temp", target + "attn.k_norm.w", "n -> n 1"),
        *classic.out_of_attention(source + "self_attn.o_proj"),
        *classic.linear(gate + "down_proj", mlp, "down"),
        Row(gate + "router_states_scale", mlp + "w_prev"),
        Row(gate + "router_mlp.norm.weight", mlp + "router_ln.w"),
        *classic.linear(gate + "router_mlp.fc1", mlp, "1"),
        *classic.linear(gate + "router_mlp.fc2", mlp, "2"),
        *classic.linear(gate + "router_mlp.out_proj", mlp, "router"),
        Row(gate + "balancing_biases", mlp + "b_choice"),
        Row(experts + "gate_up_proj", expert + "W_{x}", "e (x f) m -> m f", e=e, x=["gate", "in"]),
        Row(experts + "down_proj", expert + "W_out", "e m f -> f m", e=e),
        *_residual("attention", "attn", "ln1_post"),
        *_residual("mlp", "mlp", "ln2_post"),
    ]


def _residual(theirs: str, ours: str, post: str) -> list[Row]:
    """Rows of the scales and shifts of the stream and of what a sublayer adds to it."""
    source, target = f"model.layers.{{l}}.post_{theirs}_residual_scale.", "blocks.{l}."
    return [
        Row(source + "hidden_states_scale", f"{target}{post}.w"),
        Row(source + "hidden_states_bias", f"{target}{post}.b"),
        Row(source + "residual_scale", f"{target}w_{ours}"),
        Row(source + "residual_bias", f"{target}b_{ours}"),
    ]
