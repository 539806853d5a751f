"""DBRX (Databricks 2024, huggingface.co/databricks/dbrx-base): many experts, layer norms without biases, clipped queries,
keys and values."""

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.experts.router import SoftmaxRouter
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import classic, moe
from hooked_lm.families._shared.llama_like import IGNORED
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import rotary
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREFIX = "transformer."
NO_EFFECT = (*moe.NO_EFFECT, "num_key_value_heads")  # repeats a field of `attn_config`
NO_EFFECT_OF_PARTS = ("moe_jitter_eps", "moe_loss_weight", "hidden_size", "num_key_value_heads")


def config(hf: HFConfig) -> DecoderConfig:
    attention, experts = HFConfig(hf.attn_config, {}), HFConfig(hf.ffn_config, {})
    d_head, norm = hf.d_model // hf.n_heads, LayerNorm.Config(hf.d_model, 1e-5, bias=False)
    rope = {"rope_parameters": _rope_parameters(hf, attention), "max_position_embeddings": hf.max_seq_len}
    attn = Attention.Config(
        d_model=hf.d_model,
        n_heads=hf.n_heads,
        d_head=d_head,
        n_key_value_heads=attention.kv_n_heads,
        rotary=rotary(HFConfig(rope, {}), d_head),
        clip=attention.clip_qkv,
    )
    experts.require(moe_normalize_expert_weights=1)
    expert = GatedMLP.Config(hf.d_model, experts.ffn_hidden_size, experts.ffn_act_fn.get("name", "silu"))
    router = SoftmaxRouter(renormalize=experts.moe_normalize_expert_weights is not None)
    mlp = MoE.Config(expert, experts.moe_num_experts, experts.moe_top_k, router)
    if unread := attention.unread(NO_EFFECT_OF_PARTS) | experts.unread(NO_EFFECT_OF_PARTS):
        raise ValueError(f"fields of attn_config and ffn_config that are not supported: {unread}")
    return DecoderConfig(
        n_ctx=hf.max_seq_len,
        embed=Embed.Config(hf.vocab_size, hf.d_model),
        blocks=(PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm),) * hf.n_layers,
        ln_final=norm,
        unembed=Unembed.Config(hf.d_model, hf.vocab_size, tied=hf.tie_word_embeddings),
    )


def _rope_parameters(hf: HFConfig, attention: HFConfig) -> dict[str, object]:
    """`rope_parameters` with the base in `attn_config`, where published checkpoints have it.

    transformers 5.23 (`DbrxConfig` in configuration_dbrx.py) does not copy it and uses 10,000.
    """
    given, theta = hf.rope_parameters, attention.get("rope_theta")
    if theta is not None and given.get("rope_theta") not in (10000.0, theta):
        raise ValueError(
            f"rope_theta={theta} of attn_config differs from that of rope_parameters, {given['rope_theta']}"
        )
    return given if theta is None else given | {"rope_theta": theta}


def rows(tree: DecoderConfig) -> list[Row]:
    source, target, e = "transformer.blocks.{l}.", "blocks.{l}.", moe.n_experts(tree)
    block = tree.blocks[0]
    assert isinstance(block, PreNormBlock.Config)
    parts = {"Q": block.attn.n_heads, "K": block.attn.n_kv, "V": block.attn.n_kv}
    attn, experts, expert = source + "norm_attn_norm.", source + "ffn.experts.mlp.", target + "mlp.experts.{e}.W_"
    return [
        Row("transformer.wte.weight", "embed.W_E"),
        *classic.norm(attn + "norm_1", target + "ln1"),
        Row(attn + "attn.Wqkv.weight", target + "attn.W_{x}", "(x h) m -> x m h", x=parts, h=block.attn.d_head),
        *classic.out_of_attention(attn + "attn.out_proj"),
        *classic.norm(attn + "norm_2", target + "ln2"),
        Row(source + "ffn.router.layer.weight", target + "mlp.W_router", "e m -> m e"),
        Row(experts + "w1", expert + "gate", "(e f) m -> m f", e=e),
        Row(experts + "v1", expert + "in", "(e f) m -> m f", e=e),
        Row(experts + "w2", expert + "out", "(e f) m -> f m", e=e),
        *classic.norm("transformer.norm_f", "ln_final"),
        *classic.head("lm_head", tree, "transformer.wte.weight"),
    ]
