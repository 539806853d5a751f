"""Kimi Linear (Kimi Team 2025, arXiv:2510.26692): Kimi Delta Attention in three of four layers, latent attention without
positions in the others, and DeepSeek-V3's experts."""

from hooked_lm.components.attention.latent import LatentAttention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.mixer import MixerMLPBlock
from hooked_lm.families._shared import classic, deepseek, delta_net, llama_like, moe
from hooked_lm.families._shared.delta_net import LAYER, MIXER
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders.kimi_linear.kimi_delta import KimiDeltaAttention
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

# transformers names the MLPs of dense layers so when it saves them, and reads both names
RENAMED = {r"\.block_sparse_moe\.(?=(gate|up|down)_proj\.)": ".mlp."}
# `linear_attn_config`, `first_k_dense_replace` and `use_grouped_topk` repeat other fields
NO_EFFECT = (*deepseek.NO_EFFECT, "linear_attn_config", "first_k_dense_replace", "use_grouped_topk", "rope_theta")
# names of fields in the file and their usual ones
FIELDS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
}
NAMES = {"q": "Q", "k": "K", "v": "V", "b": "beta"}
FACTORS = {"f_a": "g_down", "f_b": "g_up", "g_a": "gate_down", "g_b": "gate_up"}


def config(hf: HFConfig) -> DecoderConfig:
    hf.require(mla_use_nope=True, moe_router_activation_func="sigmoid", moe_layer_freq=1, num_nextn_predict_layers=0)
    hf = with_usual_names(hf)
    mixer = delta_attention(hf, hf.linear_num_heads, hf.linear_head_dim, rank=hf.linear_head_dim)
    return decoder(hf, mixer, deepseek.without_rotary(hf))


def with_usual_names(hf: HFConfig) -> HFConfig:
    """The config with fields of the usual names."""
    return hf.changed(**{usual: hf.get(name) for name, usual in FIELDS.items()})


def delta_attention(
    hf: HFConfig, n_heads: int, d_head: int, rank: int | None = None, lower_bound: float | None = None
) -> KimiDeltaAttention.Config:
    """The mixer of a layer."""
    return KimiDeltaAttention.Config(
        d_model=hf.hidden_size,
        n_heads=n_heads,
        d_head=d_head,
        n_groups=n_heads,
        d_state=d_head,
        conv_width=hf.linear_conv_kernel_dim,
        act_fn=hf.hidden_act,
        eps=hf.rms_norm_eps,
        rank=rank,
        lower_bound=lower_bound,
    )


def decoder(hf: HFConfig, mixer: KimiDeltaAttention.Config, attn: LatentAttention.Config) -> DecoderConfig:
    """The decoder with this mixer or attention, and dense or sparse MLPs, by the types of its layers."""
    hf.ignored_by_transformers(tie_word_embeddings=False)
    norm, experts = llama_like.rms_norm(hf), moe.deepseek_experts(hf, hf.num_experts, hf.num_shared_experts)
    mlps = moe.some_sparse(hf, experts, moe.of_sparse_type(hf))
    blocks = [
        PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm)
        if attends
        else MixerMLPBlock.Config(mixer=mixer, ln1=norm, mlp=mlp, ln2=norm)
        for attends, mlp in zip(delta_net.attending(hf), mlps, strict=True)
    ]
    return llama_like.around(hf, blocks, norm)


def rows(tree: DecoderConfig) -> list[Row]:
    source = LAYER + "self_attn."
    return [
        *llama_like.outer_rows(tree),
        *llama_like.norm_rows(),
        *attention_rows(tree, source),
        *delta_rows(source, NAMES | FACTORS),
        Row(source + "A_log", MIXER + "A_log", "1 1 n 1 -> n"),
        *llama_like.mlp_rows(),
        *moe.sparse_rows(tree, part="block_sparse_moe", names=("w1", "w3", "w2")),
    ]


def attention_rows(tree: DecoderConfig, source: str, out: str = "o_proj") -> list[Row]:
    """Rows of the attention of all layers that have it."""
    found = [block.attn for block in tree.blocks if isinstance(block, PreNormBlock.Config)]
    attentions = [attn for attn in found if isinstance(attn, LatentAttention.Config)]
    return [row for attn in attentions[:1] for row in deepseek.attention_rows(attn, source, out)]


def delta_rows(source: str, names: dict[str, str], out: str = "o_proj") -> list[Row]:
    """Rows of a mixer, without those of the rates; `names` are those of the projections of its input."""
    linear = [classic.linear(f"{source}{x}_proj", MIXER, y) for x, y in names.items()]
    return [
        *(row for rows in linear for row in rows),
        *(Row(f"{source}{x}_conv1d.weight", f"{MIXER}conv_{x}.W_conv", "x 1 k -> k x") for x in "qkv"),
        Row(source + "dt_bias", MIXER + "dt_bias", "(n d) -> n d"),
        Row(source + "o_norm.weight", MIXER + "norm.w"),
        *classic.linear(source + out, MIXER, "out"),
    ]
