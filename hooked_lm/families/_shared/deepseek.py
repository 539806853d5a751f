"""Shared code for DeepSeek models: latent attention, and the tensor names."""

from dataclasses import replace

from hooked_lm.components.attention.indexer import Indexer
from hooked_lm.components.attention.latent import LatentAttention
from hooked_lm.components.attention.sparse_latent import SharedIndexAttention, SparseLatentAttention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.embeddings.rotary_scaling import YarnScaling
from hooked_lm.families._shared import classic, llama_like, moe
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import rotary
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

# `head_dim` and `qk_head_dim` follow from the sizes of the two parts of a head.
NO_EFFECT = (*moe.NO_EFFECT, "head_dim", "qk_head_dim")
# `mlp_layer_types` repeats the first; the second names the kind of cache; MLPs have no biases; the last are for training.
NO_EFFECT_OF_SPARSE = (
    *(*NO_EFFECT, "first_k_dense_replace", "layer_types", "mlp_bias"),
    *("num_mtp_layers", "num_nextn_predict_layers"),
)


def attention(hf: HFConfig, adjacent_pairs: bool) -> LatentAttention.Config:
    """The attention of a layer. YaRN's temperature is part of the scale of the scores."""
    turning = rotary(hf, hf.qk_rope_head_dim, adjacent_pairs=adjacent_pairs)
    attn = replace(without_rotary(hf), rotary=turning, d_shared=None)
    if isinstance(turning.scaling, YarnScaling) and turning.scaling.mscale_all_dim:
        return replace(attn, scale=attn.d_head**-0.5 * turning.scaling.temperature(turning.scaling.mscale_all_dim) ** 2)
    return attn


def without_rotary(hf: HFConfig) -> LatentAttention.Config:
    """The same without rotary: all features of queries and keys stay as they are."""
    hf.require(num_key_value_heads=hf.num_attention_heads)  # transformers would repeat the keys of all heads
    return LatentAttention.Config(
        d_model=hf.hidden_size,
        n_heads=hf.num_attention_heads,
        d_nope=hf.qk_nope_head_dim,
        d_value=hf.v_head_dim,
        d_kv_latent=hf.kv_lora_rank,
        d_q_latent=hf.q_lora_rank,
        rotary=None,
        d_shared=hf.qk_rope_head_dim,
        down_bias=hf.attention_bias,
        out_bias=hf.attention_bias,
    )


def indexer(hf: HFConfig, adjacent_pairs: bool) -> Indexer.Config:
    """The indexer of a layer."""
    turning = rotary(hf, hf.qk_rope_head_dim, adjacent_pairs=adjacent_pairs)
    sizes = (hf.hidden_size, hf.q_lora_rank, hf.index_n_heads, hf.index_head_dim, hf.index_topk)
    return Indexer.Config(*sizes, rotary=turning)


def sparse_attention(hf: HFConfig, index_pairs: bool) -> SparseLatentAttention.Config:
    """The attention of a layer with an indexer, whose rotary turns adjacent pairs if `index_pairs`."""
    attn = attention(hf, adjacent_pairs=True)
    return SparseLatentAttention.Config(**vars(attn), indexer=indexer(hf, index_pairs))


def sharing_indices(
    hf: HFConfig, adjacent_pairs: bool = True
) -> list[SparseLatentAttention.Config | SharedIndexAttention.Config]:
    """The attention of each layer: with an indexer, or with the choice of the last layer before that has one."""
    plain = vars(attention(hf, adjacent_pairs))
    own = SparseLatentAttention.Config(**plain, indexer=indexer(hf, adjacent_pairs))
    types = list(hf.indexer_types)
    if (unknown := set(types) - {"full", "shared"}) or types[0] != "full":
        raise ValueError(f"indexer_types {sorted(unknown) or types} are not supported; full, then full and shared are")
    sources = [max(i for i in range(layer + 1) if types[i] == "full") for layer in range(len(types))]
    return [
        own if source == layer else SharedIndexAttention.Config(**plain, index_source_layer=source)
        for layer, source in enumerate(sources)
    ]


def mlps(hf: HFConfig) -> list[moe.MLPConfig]:
    """The MLP of each layer, DeepSeek-V3's experts where `mlp_layer_types` says so."""
    experts = moe.deepseek_experts(hf, hf.n_routed_experts, hf.n_shared_experts)
    return moe.some_sparse(hf, experts, moe.of_sparse_type(hf))


def dense_block(hf: HFConfig, adjacent_pairs: bool, mlp_bias: bool = False) -> PreNormBlock.Config:
    """A layer with latent attention and one MLP."""
    norm, mlp = llama_like.rms_norm(hf), llama_like.gated_mlp(hf, mlp_bias)
    return PreNormBlock.Config(attn=attention(hf, adjacent_pairs), ln1=norm, mlp=mlp, ln2=norm)


def rows(tree: DecoderConfig) -> list[Row]:
    """Rows of every weight that such a decoder can have."""
    return [
        *llama_like.outer_rows(tree),
        *llama_like.norm_rows(),
        *attention_rows(tree.blocks[0].attn),
        *llama_like.mlp_rows(),
        *moe.sparse_rows(tree),
    ]


def attention_rows(
    attn: LatentAttention.Config, source: str = "model.layers.{l}.self_attn.", out: str = "o_proj"
) -> list[Row]:
    """Rows of the attention's projections, biases and norms."""
    target = "blocks.{l}.attn."
    down = {"DKV": attn.d_kv_latent, "KR": attn.n_shared}
    up = {"UK": attn.d_nope, "UV": attn.d_value}
    return [
        Row(source + "q_proj.weight", target + "W_Q", "(n h) m -> n m h"),
        Row(source + "q_a_proj.weight", target + "W_DQ", "d m -> m d"),
        Row(source + "q_a_proj.bias", target + "b_DQ"),
        Row(source + "q_a_layernorm.weight", target + "q_norm.w"),
        Row(source + "q_b_proj.weight", target + "W_UQ", "(n h) d -> n d h"),
        Row(source + "kv_a_proj_with_mqa.weight", target + "W_{x}", "x m -> m x", x=down),
        Row(source + "kv_a_proj_with_mqa.bias", target + "b_{x}", "x -> x", x=down),
        Row(source + "kv_a_layernorm.weight", target + "kv_norm.w"),
        Row(source + "kv_b_proj.weight", target + "W_{x}", "(n x) d -> n d x", x=up, n=attn.n_heads),
        Row(source + "indexer.wq_b.weight", target + "indexer.W_Q", "(n h) d -> n d h"),
        Row(source + "indexer.wk.weight", target + "indexer.W_K", "h m -> m h"),
        Row(source + "indexer.weights_proj.weight", target + "indexer.W_weights", "n m -> m n"),
        *classic.norm(source + "indexer.k_norm", target + "indexer.k_norm"),
        *classic.out_of_attention(source + out),
    ]
