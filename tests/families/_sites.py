"""Which sites a model must have, and of which shapes, told from its config alone: one function for each kind of component.

The tests hold a model to this list, so it is written from what is promised to users and not from the components' code.
"""

from dataclasses import replace
from functools import singledispatch
from typing import Any

from hooked_lm.components.attention.cross import CrossAttention
from hooked_lm.components.attention.differential import DifferentialAttention
from hooked_lm.components.attention.gated import (
    GatedAttention,
    GatedLatentAttention,
    GatedSharedIndexAttention,
    GatedSparseLatentAttention,
)
from hooked_lm.components.attention.global_tokens import WindowAttention
from hooked_lm.components.attention.latent import LatentAttention
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.attention.relative_bias import RelativeBias
from hooked_lm.components.attention.sparse_latent import SharedIndexAttention, SparseLatentAttention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.cross import PostNormCrossBlock, PreNormCrossBlock
from hooked_lm.components.blocks.deep_norm import DeepNormBlock, DeepNormMixerBlock
from hooked_lm.components.blocks.hyper import HyperBlock, HyperConnection
from hooked_lm.components.blocks.mixer import MixerBlock, MixerMLPBlock
from hooked_lm.components.blocks.one_sublayer import AttentionOnlyBlock, MLPOnlyBlock
from hooked_lm.components.blocks.parallel import ParallelBlock, SharedNormBlock
from hooked_lm.components.blocks.per_layer import PerLayerBlock, PerLayerEmbed, PerLayerGate
from hooked_lm.components.blocks.post_norm import NormedResidualBlock, PostNormBlock
from hooked_lm.components.blocks.weighted import WeightedResidualBlock
from hooked_lm.components.embeddings.transformed_unembed import TransformedUnembed
from hooked_lm.components.experts.moe import ClampedGatedMLP, MoE
from hooked_lm.components.mlp import MLP, GatedMLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.components.norms.scales import NoNorm
from hooked_lm.components.ssm.delta_net import GatedDeltaNet
from hooked_lm.components.ssm.lightning import LightningAttention
from hooked_lm.components.ssm.mamba import Mamba
from hooked_lm.components.ssm.mamba2 import Mamba2
from hooked_lm.components.ssm.rg_lru import RGLRU
from hooked_lm.components.streams import MergedRMSNorm
from hooked_lm.families.decoders.axk2.gated_norm import LowRankGatedNorm
from hooked_lm.families.decoders.deepseek_v4.compressed import CompressedAttention
from hooked_lm.families.decoders.deepseek_v4.hash_moe import HashHyperBlock, RepeatedIds
from hooked_lm.families.decoders.deepseek_v4.tied_kv import TiedKVAttention
from hooked_lm.families.decoders.doge.value_mask import ValueMaskedAttention
from hooked_lm.families.decoders.falcon_h1.hybrid import HybridBlock
from hooked_lm.families.decoders.gemma3n_text.altup import AltUp, AltUpBlock, Laurel
from hooked_lm.families.decoders.gemma4_text.normed_moe import NormedMoE
from hooked_lm.families.decoders.gemma4_text.shared_kv import SharedKVAttention
from hooked_lm.families.decoders.jetmoe.routed import RoutedAttention
from hooked_lm.families.decoders.kimi_linear.kimi_delta import KimiDeltaAttention
from hooked_lm.families.decoders.lfm2.short_conv import ShortConv
from hooked_lm.families.decoders.longcat_flash.shortcut import ShortcutEnd, ShortcutStart
from hooked_lm.families.decoders.mimo_v2_flash.value_width import ValueWidthAttention
from hooked_lm.families.decoders.rwkv.channel_mix import ChannelMix
from hooked_lm.families.decoders.rwkv.wkv import WKV
from hooked_lm.families.decoders.xlstm.mlstm import MLSTM
from hooked_lm.families.decoders.zamba.mamba_heads import MambaHeads
from hooked_lm.families.decoders.zamba.shared import RepeatedEmbed, SharedBlock
from hooked_lm.families.decoders.zaya.convolutional import ConvolutionalAttention
from hooked_lm.families.decoders.zaya.router_state import RouterStateMoE
from hooked_lm.families.encoder_decoders.longt5.transient_global import TransientGlobalAttention, TransientGlobalBias
from hooked_lm.families.encoder_decoders.pegasus_x.block_local import KINDS, BlockLocalAttention
from hooked_lm.families.encoder_decoders.pegasus_x.global_stream import GlobalStreamBlock
from hooked_lm.families.encoder_decoders.prophetnet.attention import MainAttention, PredictingAttention
from hooked_lm.families.encoder_decoders.prophetnet.block import NgramBlock, NgramEmbed
from hooked_lm.families.encoder_decoders.t5gemma2.merged import MergedBlock
from hooked_lm.families.encoders.fnet.fourier import FourierMixer
from hooked_lm.models.config.tree import DecoderConfig, EncoderDecoderConfig

Sites = dict[str, str]  # name -> words for its axes

STREAM, HIDDEN = "batch pos d_model", "batch pos d_mlp"
QUERY, KEY = "batch pos head d_head", "batch pos kv_head d_head"
GLOBAL_HEADS = "batch global_token head d_head"
INNER = "batch pos d_inner"


def below(part: str, sites: Sites) -> Sites:
    """The sites of a part under its name."""
    return {f"{part}.{name}": words for name, words in sites.items()}


def norm(cfg: Any, words: str = STREAM) -> Sites:
    """The divisor and the normalised value, of a norm that there is."""
    if cfg is None or isinstance(cfg, NoNorm.Config):
        return {}
    assert isinstance(cfg, (LayerNorm.Config, RMSNorm.Config)), f"which sites has {cfg}?"
    axes = words.split()
    n_axes = 2 if getattr(cfg, "joint", False) else 1
    sites = {"hook_scale": " ".join([*axes[:-n_axes], *["1"] * n_axes]), "hook_normalized": words}
    sites |= {"hook_gate": words} if isinstance(cfg, LowRankGatedNorm.Config) else {}
    return sites | {"hook_in": words} if isinstance(cfg, MergedRMSNorm.Config) else sites


@singledispatch
def sites_of(cfg: Any) -> Sites:
    """The sites of what this config builds, by their names below it."""
    raise TypeError(f"which sites has a {type(cfg).__qualname__}? It needs a function of its own here")


@sites_of.register
def _(cfg: Attention.Config) -> Sites:
    sites = {"hook_q": QUERY, "hook_k": KEY, "hook_v": KEY, "hook_z": QUERY, "hook_result": "batch pos head d_model"}
    sites |= dict.fromkeys(("hook_attn_scores", "hook_pattern"), "batch head query_pos key_pos")
    if cfg.rotary is not None:
        sites |= {"hook_rot_q": QUERY, "hook_rot_k": KEY}
    if cfg.qk_norm is not None:
        sites |= below("q_norm", norm(cfg.qk_norm, QUERY)) | below("k_norm", norm(cfg.k_norm or cfg.qk_norm, KEY))
    return sites | below("v_norm", norm(cfg.v_norm, KEY)) | below("z_norm", norm(cfg.z_norm, QUERY))


@sites_of.register
def _(cfg: GatedAttention.Config) -> Sites:
    gate = QUERY.replace("d_head", "1") if cfg.gate_per_head else QUERY
    return sites_of.dispatch(Attention.Config)(cfg) | {"hook_gate": gate}


@sites_of.register
def _(cfg: WindowAttention.Config) -> Sites:
    of_global = {"hook_q_global": QUERY, "hook_k_global": KEY, "hook_v_global": KEY}
    return sites_of.dispatch(Attention.Config)(cfg) | of_global


@sites_of.register
def _(cfg: BlockLocalAttention.Config) -> Sites:
    names = ("q_global", "k_global", "v_global", "z_global")
    sites = sites_of.dispatch(Attention.Config)(cfg) | {f"hook_{name}": GLOBAL_HEADS for name in names}
    maps = {f"hook_{name}{kind}": axes for name in ("attn_scores", "pattern") for kind, axes in KINDS.items()}
    return sites | {name: f"batch head {' '.join(axes)}" for name, axes in maps.items()}


@sites_of.register
def _(cfg: ValueWidthAttention.Config) -> Sites:
    values = {"hook_v": KEY.replace("d_head", "d_value"), "hook_z": QUERY.replace("d_head", "d_value")}
    return sites_of.dispatch(Attention.Config)(cfg) | values


@sites_of.register
def _(cfg: ConvolutionalAttention.Config) -> Sites:
    return {"hook_q_proj": QUERY, "hook_k_proj": KEY} | sites_of.dispatch(Attention.Config)(cfg)


@sites_of.register
def _(cfg: DifferentialAttention.Config) -> Sites:
    wide = QUERY.replace("d_head", "d_value")
    sites = sites_of.dispatch(Attention.Config)(replace(cfg, z_norm=None)) | {"hook_z": wide}
    return sites | {"z_norm.hook_scale": "batch pos head 1", "z_norm.hook_normalized": wide}


@sites_of.register
def _(cfg: ValueMaskedAttention.Config) -> Sites:
    return sites_of.dispatch(Attention.Config)(cfg) | {"hook_key_bias": "batch key_pos kv_head"}


@sites_of.register
def _(cfg: TransientGlobalAttention.Config) -> Sites:
    sites = {"hook_block_sum": "batch block d_model"} | below(
        "global_norm", norm(cfg.global_norm, "batch block d_model")
    )
    sites |= dict.fromkeys(("hook_k_global", "hook_v_global"), "batch block kv_head d_head")
    sites |= dict.fromkeys(("hook_attn_scores_global", "hook_pattern_global"), "batch head query_pos block")
    return sites_of.dispatch(Attention.Config)(cfg) | sites


@sites_of.register
def _(cfg: TransientGlobalBias.Config) -> Sites:
    return {"hook_bias": "batch head query_pos key_pos", "hook_bias_global": "batch head query_pos block"}


@sites_of.register
def _(cfg: RoutedAttention.Config) -> Sites:
    sites = {"hook_router_logits": "batch pos expert", "hook_expert_weights": "batch pos top_k"}
    return sites_of.dispatch(Attention.Config)(cfg) | sites | {"hook_expert_indices": "batch pos top_k"}


@sites_of.register
def _(cfg: SharedKVAttention.Config) -> Sites:
    lent = "batch key_pos kv_head d_head"
    sites = {"hook_q": QUERY, "hook_rot_q": QUERY, "hook_rot_k": lent, "hook_v": lent, "hook_z": QUERY}
    sites |= dict.fromkeys(("hook_attn_scores", "hook_pattern"), "batch head query_pos key_pos")
    return sites | {"hook_result": "batch pos head d_model"} | below("q_norm", norm(cfg.qk_norm, QUERY))


@sites_of.register
def _(cfg: GatedSparseLatentAttention.Config) -> Sites:
    gate = f"batch pos head {1 if cfg.gate_per_head else 'd_value'}"
    return sites_of.dispatch(SparseLatentAttention.Config)(cfg) | {"hook_gate": gate}


@sites_of.register
def _(cfg: GatedLatentAttention.Config) -> Sites:
    gate = f"batch pos head {1 if cfg.gate_per_head else 'd_value'}"
    return sites_of.dispatch(LatentAttention.Config)(cfg) | {"hook_gate": gate}


@sites_of.register
def _(cfg: LatentAttention.Config) -> Sites:
    rotated = () if cfg.rotary is None else ("hook_rot_q", "hook_rot_k")
    sites = dict.fromkeys(("hook_q", "hook_k", *rotated), QUERY)
    sites |= dict.fromkeys(("hook_v", "hook_z"), "batch pos head d_value")
    sites |= dict.fromkeys(("hook_attn_scores", "hook_pattern"), "batch head query_pos key_pos")
    latent = "batch pos d_kv_latent"
    sites |= {"hook_result": "batch pos head d_model", "hook_kv_latent": latent}
    sites |= {"kv_norm.hook_scale": "batch pos 1", "kv_norm.hook_normalized": latent}
    if cfg.d_q_latent is not None:
        latent = "batch pos d_q_latent"
        sites |= {"hook_q_latent": latent, "q_norm.hook_scale": "batch pos 1", "q_norm.hook_normalized": latent}
    if cfg.kr_norm:
        sites |= dict.fromkeys(("hook_kr", "kr_norm.hook_normalized"), "batch pos d_shared")
        sites |= {"kr_norm.hook_scale": "batch pos 1"}
    return sites


@sites_of.register
def _(cfg: SparseLatentAttention.Config) -> Sites:
    index = dict.fromkeys(("hook_index_q", "hook_index_rot_q"), "batch pos index_head d_index")
    index |= dict.fromkeys(("hook_index_k", "hook_index_rot_k", "k_norm.hook_normalized"), "batch pos d_index")
    index |= {"k_norm.hook_scale": "batch pos 1", "hook_index_weights": "batch pos index_head"}
    index |= dict.fromkeys(("hook_index_scores", "hook_index_mask"), "batch query_pos key_pos")
    return sites_of.dispatch(LatentAttention.Config)(cfg) | below("indexer", index)


@sites_of.register
def _(cfg: SharedIndexAttention.Config) -> Sites:
    return sites_of.dispatch(LatentAttention.Config)(cfg) | {"hook_index_mask": "batch query_pos key_pos"}


@sites_of.register
def _(cfg: GatedSharedIndexAttention.Config) -> Sites:
    return sites_of.dispatch(SharedIndexAttention.Config)(cfg) | {"hook_gate": "batch pos head d_value"}


@sites_of.register
def _(cfg: TiedKVAttention.Config) -> Sites:
    latent = "batch pos d_q_latent"
    sites = dict.fromkeys(("hook_q", "hook_rot_q", "hook_rot_z", "hook_z", "q_head_norm.hook_normalized"), QUERY)
    sites |= dict.fromkeys(("hook_k", "hook_rot_k", "hook_v", "k_norm.hook_normalized"), KEY)
    sites |= {"k_norm.hook_scale": KEY.replace("d_head", "1"), "q_head_norm.hook_scale": QUERY.replace("d_head", "1")}
    sites |= {"hook_q_latent": latent, "q_norm.hook_scale": "batch pos 1", "q_norm.hook_normalized": latent}
    sites |= dict.fromkeys(("hook_attn_scores", "hook_pattern"), "batch head query_pos key_pos")
    return sites | {"hook_o_latent": "batch pos group d_o_latent", "hook_result": "batch pos head d_model"}


def pooled(width: str) -> Sites:
    """What tokens add to pooled keys, and these keys."""
    sites = dict.fromkeys(("to_pool.hook_pool_k", "to_pool.hook_pool_gate"), f"batch pos series {width}")
    blocks = ("pool.hook_pooled_k", "pool.norm.hook_normalized", "pool.hook_rot_pooled_k")
    return sites | dict.fromkeys(blocks, f"batch block {width}") | {"pool.norm.hook_scale": "batch block 1"}


@sites_of.register
def _(cfg: CompressedAttention.Config) -> Sites:
    sites = sites_of.dispatch(TiedKVAttention.Config)(cfg) | pooled("d_head") | {"hook_pooled_v": "batch block d_head"}
    sites |= dict.fromkeys(("hook_pooled_scores", "hook_pooled_pattern"), "batch head query_pos block")
    if cfg.indexer is None:
        return sites
    index = dict.fromkeys(("hook_index_q", "hook_index_rot_q"), "batch pos index_head d_index") | pooled("d_index")
    index |= dict.fromkeys(("hook_index_scores", "hook_index_mask"), "batch query_pos block")
    return sites | below("indexer", index | {"hook_index_weights": "batch pos index_head"})


@sites_of.register
def _(cfg: MLP.Config) -> Sites:
    sites = {"hook_in": STREAM, "hook_pre": HIDDEN, "hook_post": HIDDEN, "hook_out": STREAM}
    return sites if cfg.mid_norm is None else sites | {"hook_mid": HIDDEN} | below("ln", norm(cfg.mid_norm, HIDDEN))


@sites_of.register
def _(cfg: GatedMLP.Config) -> Sites:
    sites = {"hook_in": STREAM, "hook_pre": HIDDEN, "hook_pre_linear": HIDDEN, "hook_post": HIDDEN, "hook_out": STREAM}
    return sites if cfg.mid_norm is None else sites | {"hook_mid": HIDDEN} | below("ln", norm(cfg.mid_norm, HIDDEN))


@sites_of.register
def _(cfg: Mamba.Config) -> Sites:
    sites = {"hook_in": STREAM} | dict.fromkeys(("hook_x", "hook_gate", "hook_conv", "hook_dt", "hook_y"), INNER)
    sites |= dict.fromkeys(("hook_B", "hook_C"), "batch pos d_state")
    sites |= below("dt_norm", norm(cfg.dt_norm, "batch pos dt_rank"))
    for name in ("B_norm", "C_norm"):
        sites |= below(name, norm(cfg.state_norm, "batch pos d_state"))
    return sites | {"hook_state": f"{INNER} d_state", "hook_out": STREAM}


@sites_of.register
def _(cfg: Mamba2.Config) -> Sites:
    heads = "batch pos ssm_head d_ssm_head"
    sites = {"hook_in": STREAM, "hook_dt": "batch pos ssm_head", "hook_y": heads, "hook_state": f"{heads} d_state"}
    sites |= dict.fromkeys(("hook_x", "hook_gate", "hook_conv"), INNER)
    sites |= dict.fromkeys(("hook_B", "hook_C"), "batch pos group d_state")
    if cfg.norm:
        sites |= {"norm.hook_scale": "batch pos group 1", "norm.hook_normalized": "batch pos group d_group"}
    return sites | {"hook_out": STREAM}


@sites_of.register
def _(cfg: RGLRU.Config) -> Sites:
    inner = ("x", "gate", "conv", "r", "i", "a", "state", "y")
    return {"hook_in": STREAM} | {f"hook_{name}": INNER for name in inner} | {"hook_out": STREAM}


@sites_of.register
def _(cfg: ShortConv.Config) -> Sites:
    sites = {"hook_in": STREAM} | {f"hook_{name}": INNER for name in ("x", "gate", "B", "y")}
    return sites | {"hook_state": f"{INNER} tap", "hook_out": STREAM}


@sites_of.register
def _(cfg: MLSTM.Config) -> Sites:
    heads = "batch pos ssm_head"
    sites = {"hook_in": STREAM, "hook_i": heads, "hook_f": heads, "norm.hook_scale": f"{heads} 1", "hook_out": STREAM}
    sites |= dict.fromkeys(("hook_q", "hook_k"), f"{heads} d_state") | {"hook_state": f"{heads} columns d_state"}
    return sites | dict.fromkeys(("hook_v", "hook_z", "hook_gate", "norm.hook_normalized"), f"{heads} d_ssm_head")


@sites_of.register
def _(cfg: WKV.Config) -> Sites:
    sites = {"hook_in": STREAM, "hook_prev": STREAM} | {f"hook_{name}": INNER for name in ("k", "v", "r", "y")}
    return sites | {"hook_state": f"{INNER} 2", "hook_out": STREAM}


@sites_of.register
def _(cfg: ChannelMix.Config) -> Sites:
    sites = {f"hook_{name}": STREAM for name in ("in", "prev", "gate", "out")}
    return sites | {"hook_pre": HIDDEN, "hook_post": HIDDEN}


@sites_of.register
def _(cfg: GatedDeltaNet.Config) -> Sites:
    heads, groups = "batch pos ssm_head d_ssm_head", "batch pos group d_state"
    sites = {"hook_in": STREAM} | dict.fromkeys(("hook_q", "hook_k", "hook_conv_q", "hook_conv_k"), groups)
    sites |= dict.fromkeys(("hook_v", "hook_conv_v", "hook_z", "hook_gate", "norm.hook_normalized"), heads)
    sites |= dict.fromkeys(("hook_g", "hook_beta"), "batch pos ssm_head")
    return sites | {"hook_state": f"{heads} d_state", "norm.hook_scale": "batch pos ssm_head 1", "hook_out": STREAM}


@sites_of.register
def _(cfg: KimiDeltaAttention.Config) -> Sites:
    return sites_of.dispatch(GatedDeltaNet.Config)(cfg) | {"hook_g": "batch pos ssm_head d_state"}


@sites_of.register
def _(cfg: LightningAttention.Config) -> Sites:
    heads = "batch pos ssm_head d_ssm_head"
    sites = dict.fromkeys(("hook_q", "hook_k"), "batch pos ssm_head d_state") | dict.fromkeys(
        ("hook_v", "hook_z"), heads
    )
    sites |= {"hook_in": STREAM, "hook_gate": INNER, "hook_state": f"{heads} d_state", "hook_out": STREAM}
    return sites | {"norm.hook_scale": "batch pos 1", "norm.hook_normalized": INNER}


@sites_of.register
def _(cfg: FourierMixer.Config) -> Sites:
    return {"hook_in": STREAM, "hook_out": STREAM}


@sites_of.register
def _(cfg: MixerBlock.Config) -> Sites:
    sites = dict.fromkeys(("hook_resid_pre", "hook_mixer_in", "hook_mixer_out", "hook_resid_post"), STREAM)
    sites |= below("ln1", norm(cfg.ln1)) | below("ln1_post", norm(cfg.ln1_post))
    return sites | below("mixer", sites_of(cfg.mixer))


@sites_of.register
def _(cfg: ClampedGatedMLP.Config) -> Sites:
    return {"hook_in": STREAM, "hook_pre": HIDDEN, "hook_pre_linear": HIDDEN, "hook_post": HIDDEN, "hook_out": STREAM}


@sites_of.register
def _(cfg: MoE.Config) -> Sites:
    sites = {"hook_in": STREAM, "hook_router_logits": "batch pos expert", "hook_out": STREAM}
    sites |= dict.fromkeys(("hook_expert_weights", "hook_expert_indices"), "batch pos top_k")
    one = {name: words.replace("batch pos", "routed") for name, words in sites_of(cfg.expert).items()}
    for e in range(cfg.n_experts):
        sites |= below(f"experts.{e}", one | {"hook_routed_positions": "routed 2"})
    if cfg.shared is not None:
        sites |= below("shared", sites_of(cfg.shared))
    return sites | ({"hook_shared_gate": "batch pos 1"} if cfg.shared_gate else {})


@sites_of.register
def _(cfg: NormedMoE.Config) -> Sites:
    names = ("ln_router", "ln_experts", "ln_experts_post", "ln_shared", "ln_shared_post")
    norms = [below(name, norm(cfg.norm)) for name in names]
    return {name: words for part in (sites_of.dispatch(MoE.Config)(cfg), *norms) for name, words in part.items()}


@sites_of.register
def _(cfg: RouterStateMoE.Config) -> Sites:
    states = dict.fromkeys(("hook_prev_state",) * cfg.reads_previous + ("hook_router_state",), "batch pos d_router")
    norm_sites = {"router_ln.hook_scale": "batch pos 1", "router_ln.hook_normalized": "batch pos d_router"}
    return sites_of.dispatch(MoE.Config)(cfg) | states | norm_sites


@sites_of.register
def _(cfg: MambaHeads.Config) -> Sites:
    sites = sites_of.dispatch(Mamba.Config)(cfg)
    return sites | dict.fromkeys(("hook_B", "hook_C"), "batch pos ssm_head d_state")


@sites_of.register
def _(cfg: RepeatedEmbed.Config) -> Sites:
    return {"hook_out": "batch pos layer d_model"}


@sites_of.register
def _(cfg: PerLayerEmbed.Config) -> Sites:
    given = "batch pos layer d_per_layer"
    return {"hook_out": given} | below("norm", norm(cfg.norm, given))


@sites_of.register
def _(cfg: SharedBlock.Config) -> Sites:
    stream = ("hook_resid_pre", "hook_mixer_in", "hook_per_layer_in", "hook_attn_mixed", "hook_transformed")
    sites = dict.fromkeys((*stream, "hook_shared_out", "hook_mixer_out", "hook_resid_post"), STREAM)
    sites |= below("ln1", norm(cfg.ln1, "batch pos d_wide")) | below("attn", sites_of(cfg.attn))
    sites |= below("ln2", norm(cfg.ln2)) | below("mlp", sites_of(cfg.mlp)) | below("ln3", norm(cfg.ln3))
    return sites | below("mixer", sites_of(cfg.mixer))


@sites_of.register
def _(cfg: HybridBlock.Config) -> Sites:
    return sites_of.dispatch(PreNormBlock.Config)(cfg) | sites_of.dispatch(MixerBlock.Config)(cfg)


@sites_of.register
def _(cfg: MixerMLPBlock.Config) -> Sites:
    sites = sites_of.dispatch(MixerBlock.Config)(cfg) | dict.fromkeys(("hook_resid_mid", "hook_mlp_in"), STREAM)
    sites |= {"hook_mlp_out": STREAM} | below("ln2", norm(cfg.ln2)) | below("ln2_post", norm(cfg.ln2_post))
    return sites | below("mlp", sites_of(cfg.mlp))


@sites_of.register
def _(cfg: MLPOnlyBlock.Config) -> Sites:
    sites = dict.fromkeys(("hook_resid_pre", "hook_mlp_in", "hook_mlp_out", "hook_resid_post"), STREAM)
    return sites | below("ln2", norm(cfg.ln2)) | below("ln2_post", norm(cfg.ln2_post)) | below("mlp", sites_of(cfg.mlp))


@sites_of.register
def attention_half(cfg: AttentionOnlyBlock.Config) -> Sites:
    """The stream around attention, its copies per head, and what attention adds."""
    sites = dict.fromkeys(("hook_resid_pre", "hook_resid_post", "hook_attn_out"), STREAM)
    sites |= dict.fromkeys(("hook_attn_in", "hook_q_input"), "batch pos head d_model")
    if not isinstance(cfg.attn, SharedKVAttention.Config):
        sites |= dict.fromkeys(("hook_k_input", "hook_v_input"), "batch pos kv_head d_model")
    sites |= below("ln1", norm(cfg.ln1)) | below("ln1_post", norm(cfg.ln1_post))
    return sites | below("attn", sites_of(cfg.attn))


@sites_of.register
def _(cfg: ParallelBlock.Config) -> Sites:
    sites = attention_half(cfg) | {"hook_mlp_in": STREAM, "hook_mlp_out": STREAM}
    return sites | below("ln2", norm(cfg.ln2)) | below("ln2_post", norm(cfg.ln2_post)) | below("mlp", sites_of(cfg.mlp))


@sites_of.register
def _(cfg: SharedNormBlock.Config) -> Sites:
    assert cfg.ln2 is None, "both halves read through ln1"
    return sites_of.dispatch(ParallelBlock.Config)(cfg)


@sites_of.register(PreNormBlock.Config)
@sites_of.register(NormedResidualBlock.Config)
@sites_of.register(WeightedResidualBlock.Config)
def _(cfg: PreNormBlock.Config) -> Sites:
    return sites_of.dispatch(ParallelBlock.Config)(cfg) | {"hook_resid_mid": STREAM}


@sites_of.register
def _(cfg: GlobalStreamBlock.Config) -> Sites:
    stream = "batch global_token d_model"
    names = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
    sites = sites_of.dispatch(PreNormBlock.Config)(cfg) | {f"hook_global_{name}": stream for name in names}
    sites |= dict.fromkeys(("hook_global_mlp_pre", "hook_global_mlp_post"), "batch global_token d_mlp")
    return sites | below("ln1_global", norm(cfg.ln1_global, stream))


@sites_of.register
def _(cfg: ShortcutStart.Config) -> Sites:
    return sites_of.dispatch(PreNormBlock.Config)(cfg) | below("shortcut", sites_of(cfg.shortcut))


@sites_of.register
def _(cfg: ShortcutEnd.Config) -> Sites:
    return sites_of.dispatch(PreNormBlock.Config)(cfg) | {"hook_shortcut_out": STREAM}


@sites_of.register
def _(cfg: PerLayerBlock.Config) -> Sites:
    sites = sites_of.dispatch(PreNormBlock.Config)(cfg)
    if cfg.per_layer is None:
        return sites
    given = dict.fromkeys(("hook_per_layer_in", "per_layer.hook_pre", "per_layer.hook_post"), "batch pos d_per_layer")
    stream = dict.fromkeys(("hook_per_layer_resid", "hook_per_layer_out"), STREAM)
    return sites | given | stream | below("per_layer_post", norm(cfg.per_layer_post))


@sites_of.register
def _(cfg: AltUpBlock.Config) -> Sites:
    streams = ("hook_streams_pre", "hook_predicted", "hook_corrected", "hook_streams_post")
    sites = sites_of.dispatch(PreNormBlock.Config)(cfg) | dict.fromkeys(streams, "batch pos stream d_model")
    sites |= {"hook_predict_coefs": "batch pos stream source_stream", "hook_correct_coefs": "batch pos stream"}
    stream = ("hook_activated", "hook_laurel_out", "hook_per_layer_resid", "hook_per_layer_out")
    sites |= dict.fromkeys(stream, STREAM)
    sites |= {"laurel.hook_pre": "batch pos rank"} | below("laurel.norm", norm(cfg.laurel.norm))
    given = dict.fromkeys(("hook_per_layer_in", "per_layer.hook_pre", "per_layer.hook_post"), "batch pos d_per_layer")
    return sites | given | below("per_layer_post", norm(cfg.per_layer_post))


@sites_of.register
def _(cfg: HyperBlock.Config) -> Sites:
    sites = sites_of.dispatch(PreNormBlock.Config)(cfg)
    sites |= {f"hook_streams_{place}": "batch pos stream d_model" for place in ("pre", "mid", "post")}
    connection = {"hook_read": "batch pos stream", "hook_write": "batch pos stream", "hook_out": STREAM}
    connection |= {} if cfg.hc.mix is None else {"hook_mix": "batch pos from_stream stream"}
    return sites | below("attn_hc", connection) | below("mlp_hc", connection)


@sites_of.register
def _(cfg: HashHyperBlock.Config) -> Sites:
    return sites_of.dispatch(HyperBlock.Config)(cfg) | {"hook_per_layer_in": "batch pos 1"}


@sites_of.register
def _(cfg: RepeatedIds.Config) -> Sites:
    return {"hook_out": "batch pos layer 1"}


@sites_of.register(PostNormBlock.Config)
@sites_of.register(DeepNormBlock.Config)
def _(cfg: PostNormBlock.Config) -> Sites:
    in_stream = ("hook_resid_mid", "hook_normalized_resid_mid", "hook_normalized_resid_post")
    return sites_of.dispatch(ParallelBlock.Config)(cfg) | dict.fromkeys(in_stream, STREAM)


@sites_of.register
def _(cfg: DeepNormMixerBlock.Config) -> Sites:
    sites = sites_of.dispatch(MixerMLPBlock.Config)(cfg)  # type: ignore[arg-type]
    return sites | dict.fromkeys(("hook_normalized_resid_mid", "hook_normalized_resid_post"), STREAM)


@sites_of.register
def _(cfg: DecoderConfig) -> Sites:
    sites = {"hook_tokens": "batch pos", "hook_embed": STREAM} | below("ln_final", norm(cfg.ln_final))
    sites |= below("embed.ln", norm(cfg.embed.norm))
    if cfg.pos_embed is not None:
        sites |= {"hook_pos_embed": STREAM}
    if cfg.per_layer is not None:
        sites |= below("per_layer", sites_of(cfg.per_layer))
    sites |= {"unembed.hook_in": STREAM, "unembed.hook_out": "batch pos d_vocab"}
    if isinstance(cfg.unembed, TransformedUnembed.Config):
        transform = {"hook_pre": STREAM, "hook_post": STREAM} | below("ln", norm(cfg.unembed.transform.norm))
        sites |= below("unembed.transform", transform)
    for layer, block in enumerate(cfg.blocks):
        sites |= below(f"blocks.{layer}", sites_of(block))
    return sites


@sites_of.register
def _(cfg: RelativeBias.Config) -> Sites:
    return {"hook_bias": "batch head query_pos key_pos"}


@sites_of.register
def _(cfg: CrossAttention.Config) -> Sites:
    sites = {"hook_q": QUERY, "hook_z": QUERY, "hook_result": "batch pos head d_model"}
    sites |= dict.fromkeys(("hook_k", "hook_v"), "batch key_pos kv_head d_head")
    return sites | dict.fromkeys(("hook_attn_scores", "hook_pattern"), "batch head query_pos key_pos")


@sites_of.register
def _(cfg: MergedBlock.Config) -> Sites:
    of_cross_attn = sites_of.dispatch(CrossAttention.Config)(cfg)  # those of queries and results are attention's
    of_source = {name: words for name, words in of_cross_attn.items() if name not in ("hook_q", "hook_result")}
    return sites_of.dispatch(PreNormBlock.Config)(cfg) | below("cross_attn", of_source)


@sites_of.register
def _(cfg: PreNormCrossBlock.Config) -> Sites:
    names = ("resid_mid", "cross_attn_in", "cross_attn_out", "resid_mid_cross", "mlp_in", "mlp_out")
    sites = attention_half(cfg) | {f"hook_{name}": STREAM for name in names}  # type: ignore[arg-type]
    for name in ("ln2", "ln2_post", "ln3", "ln3_post"):
        sites |= below(name, norm(getattr(cfg, name)))
    return sites | below("cross_attn", sites_of(cfg.cross_attn)) | below("mlp", sites_of(cfg.mlp))


@sites_of.register
def _(cfg: PostNormCrossBlock.Config) -> Sites:
    in_stream = {f"hook_normalized_{name}": STREAM for name in ("resid_mid", "resid_mid_cross", "resid_post")}
    return sites_of.dispatch(PreNormCrossBlock.Config)(cfg) | in_stream


@sites_of.register
def _(cfg: MainAttention.Config) -> Sites:
    sites = {"hook_q": QUERY, "hook_k": KEY, "hook_v": KEY, "hook_z": QUERY, "hook_result": "batch pos head d_model"}
    sites |= dict.fromkeys(("hook_attn_scores", "hook_pattern"), "batch head query_pos key_pos")
    return sites | {"hook_bucket_bias": "batch pos head bucket"}


@sites_of.register
def _(cfg: PredictingAttention.Config) -> Sites:
    own = dict.fromkeys(("hook_attn_scores_own", "hook_pattern_own"), "batch head query_pos 1")
    return sites_of.dispatch(MainAttention.Config)(cfg) | own


@sites_of.register
def _(cfg: NgramBlock.Config) -> Sites:
    sites = dict.fromkeys(("hook_streams_pre", "hook_streams_post"), "batch pos stream d_model")
    for stream in range(cfg.n_predicting):
        sites |= below(f"predicting.{stream}", sites_of(cfg.predicting(stream)))
    return sites | sites_of.dispatch(PostNormCrossBlock.Config)(cfg)


@sites_of.register
def _(cfg: EncoderDecoderConfig) -> Sites:
    sites = {"unembed.hook_in": STREAM, "unembed.hook_out": "batch pos d_vocab", "hook_encoder_out": STREAM}
    sites |= {} if cfg.global_tokens is None else {"global_tokens.hook_mask": "batch pos"}
    for name, side, before in (("encoder", cfg.encoder, "hook"), ("decoder", cfg.decoder, "hook_decoder")):
        sites |= {f"{before}_tokens": "batch pos", f"{before}_embed": STREAM}
        sites |= {} if side.pos_embed is None else {f"{before}_pos_embed": STREAM}
        sites |= below(f"{name}_token_ln", norm(side.ln_tokens))
        sites |= below(f"{name}_embed_ln", norm(side.ln_embed)) | below(f"{name}_final_ln", norm(side.ln_final))
        if side.rel_pos_bias is not None:
            sites |= below(f"{name}_rel_pos_bias", sites_of(side.rel_pos_bias))
        for layer, block in enumerate(side.blocks):
            sites |= below(f"{name}.{layer}", sites_of(block))
            if isinstance(block.attn.position_bias, RelativeBias.Config):
                sites |= below(f"{name}.{layer}.attn.position_bias", sites_of(block.attn.position_bias))
    return sites if cfg.ngram_embed is None else sites | {"ngram_embed.hook_out": "batch pos stream d_model"}


@singledispatch
def sizes_of(cfg: Any) -> dict[str, int]:
    """How long the axes are that only parts of this kind have."""
    return {}


@sizes_of.register
def _(cfg: Attention.Config) -> dict[str, int]:
    return {"head": cfg.n_heads, "kv_head": cfg.n_kv, "d_head": cfg.d_head}


@sizes_of.register
def _(cfg: ValueWidthAttention.Config) -> dict[str, int]:
    return {"head": cfg.n_heads, "kv_head": cfg.n_kv, "d_head": cfg.d_head, "d_value": cfg.d_value}


@sizes_of.register
def _(cfg: DifferentialAttention.Config) -> dict[str, int]:
    return sizes_of.dispatch(Attention.Config)(cfg) | {"d_value": 2 * cfg.d_head}


@sizes_of.register
def _(cfg: MainAttention.Config) -> dict[str, int]:
    return {"head": cfg.n_heads, "kv_head": cfg.n_heads, "d_head": cfg.d_head, "bucket": cfg.buckets.n_buckets}


@sizes_of.register
def _(cfg: NgramEmbed.Config) -> dict[str, int]:
    return {"stream": cfg.n_predicting}


@sizes_of.register
def _(cfg: NgramBlock.Config) -> dict[str, int]:
    return {"stream": 1 + cfg.n_predicting}


@sizes_of.register
def _(cfg: RoutedAttention.Config) -> dict[str, int]:
    return sizes_of.dispatch(Attention.Config)(cfg) | {"expert": cfg.n_experts, "top_k": cfg.top_k}


@sizes_of.register
def _(cfg: SharedKVAttention.Config) -> dict[str, int]:
    return {"head": cfg.n_heads, "kv_head": cfg.n_kv, "d_head": cfg.d_head}


@sizes_of.register
def _(cfg: LatentAttention.Config) -> dict[str, int]:
    latents = {"d_kv_latent": cfg.d_kv_latent, "d_q_latent": cfg.d_q_latent or 0}
    return latents | {
        "d_shared": cfg.n_shared,
        "head": cfg.n_heads,
        "kv_head": cfg.n_heads,
        "d_head": cfg.d_head,
        "d_value": cfg.d_value,
    }


@sizes_of.register
def _(cfg: SparseLatentAttention.Config) -> dict[str, int]:
    index = {"index_head": cfg.indexer.n_heads, "d_index": cfg.indexer.d_head}
    return sizes_of.dispatch(LatentAttention.Config)(cfg) | index


@sizes_of.register
def _(cfg: TiedKVAttention.Config) -> dict[str, int]:
    heads = {"head": cfg.n_heads, "kv_head": 1, "d_head": cfg.d_head, "group": cfg.n_groups}
    return heads | {"d_q_latent": cfg.d_q_latent, "d_o_latent": cfg.d_o_latent}


@sizes_of.register
def _(cfg: CompressedAttention.Config) -> dict[str, int]:
    axes = sizes_of.dispatch(TiedKVAttention.Config)(cfg) | {"series": cfg.pool.n_series, "rate": cfg.pool.rate}
    index = cfg.indexer
    return axes if index is None else axes | {"index_head": index.n_heads, "d_index": index.d_head}


@sizes_of.register(MLP.Config)
@sizes_of.register(GatedMLP.Config)
def _(cfg: Any) -> dict[str, int]:
    return {"d_mlp": cfg.d_mlp}


@sizes_of.register
def _(cfg: MoE.Config) -> dict[str, int]:
    return {"d_mlp": cfg.expert.d_mlp, "expert": cfg.n_choices, "top_k": cfg.top_k, "2": 2}


@sizes_of.register
def _(cfg: RouterStateMoE.Config) -> dict[str, int]:
    return sizes_of.dispatch(MoE.Config)(cfg) | {"d_router": cfg.d_router}


@sizes_of.register
def _(cfg: PerLayerEmbed.Config) -> dict[str, int]:
    return {"layer": cfg.n_layers, "d_per_layer": cfg.d_per_layer}


@sizes_of.register
def _(cfg: AltUp.Config) -> dict[str, int]:
    return dict.fromkeys(("stream", "source_stream"), cfg.n_streams)


@sizes_of.register
def _(cfg: HyperConnection.Config) -> dict[str, int]:
    return dict.fromkeys(("stream", "from_stream"), cfg.read.n_streams)


@sizes_of.register
def _(cfg: Laurel.Config) -> dict[str, int]:
    return {"rank": cfg.rank}


@sizes_of.register
def _(cfg: PerLayerGate.Config) -> dict[str, int]:
    return {"d_per_layer": cfg.d_per_layer}


@sizes_of.register
def _(cfg: Mamba.Config) -> dict[str, int]:
    return {"d_inner": cfg.d_inner, "d_state": cfg.d_state, "dt_rank": cfg.dt_rank}


@sizes_of.register
def _(cfg: MambaHeads.Config) -> dict[str, int]:
    return sizes_of.dispatch(Mamba.Config)(cfg) | {"ssm_head": cfg.n_heads}


@sizes_of.register(RepeatedIds.Config)
@sizes_of.register(RepeatedEmbed.Config)
def _(cfg: Any) -> dict[str, int]:
    return {"layer": cfg.n_layers}


@sizes_of.register
def _(cfg: SharedBlock.Config) -> dict[str, int]:
    return {"d_wide": cfg.attn.d_model}


@sizes_of.register
def _(cfg: Mamba2.Config) -> dict[str, int]:
    heads = {"ssm_head": cfg.n_heads, "d_ssm_head": cfg.d_head, "d_inner": cfg.n_heads * cfg.d_head}
    return heads | {"group": cfg.n_groups, "d_group": heads["d_inner"] // cfg.n_groups, "d_state": cfg.d_state}


@sizes_of.register
def _(cfg: GatedDeltaNet.Config) -> dict[str, int]:
    heads = {"ssm_head": cfg.n_heads, "d_ssm_head": cfg.d_head}
    return heads | {"group": cfg.n_groups, "d_state": cfg.d_state}


@sizes_of.register
def _(cfg: LightningAttention.Config) -> dict[str, int]:
    return {"ssm_head": cfg.n_heads, "d_ssm_head": cfg.d_head, "d_state": cfg.d_head, "d_inner": cfg.d_inner}


@sizes_of.register
def _(cfg: RGLRU.Config) -> dict[str, int]:
    return {"d_inner": cfg.d_inner}


@sizes_of.register
def _(cfg: MLSTM.Config) -> dict[str, int]:
    return {"ssm_head": cfg.n_heads, "d_ssm_head": cfg.d_head, "columns": cfg.d_head + 1, "d_state": cfg.d_state}


@sizes_of.register
def _(cfg: WKV.Config) -> dict[str, int]:
    return {"d_inner": cfg.d_inner, "2": 2}


@sizes_of.register
def _(cfg: ChannelMix.Config) -> dict[str, int]:
    return {"d_mlp": cfg.d_mlp}


@sizes_of.register
def _(cfg: ShortConv.Config) -> dict[str, int]:
    return {"d_inner": cfg.d_inner, "tap": cfg.conv_width}


def sizes(tree: DecoderConfig, site: str, batch: int, pos: int) -> dict[str, int]:
    """How long each axis of a site is in a run of this size."""
    axes = {"batch": batch, "pos": pos, "query_pos": pos, "key_pos": pos, "1": 1}
    axes |= {"d_model": tree.embed.d_model, "d_vocab": tree.unembed.d_vocab} | sizes_of(tree.per_layer)
    if site.startswith("blocks."):
        block = tree.blocks[int(site.split(".")[1])]
        axes |= sizes_of(block)
        for part in ("attn", "mixer", "mlp", "per_layer", "altup", "laurel", "hc"):
            axes |= sizes_of(getattr(block, part, None))
        if "rate" in axes:
            axes["block"] = pos // axes["rate"]
        if ".shortcut." in site:
            axes |= sizes_of(block.shortcut)
        if ".mlp.shared." in site:
            axes |= sizes_of(block.mlp.shared)
    return axes
