"""JetMoE (Shen et al. 2024, arXiv:2404.07413): experts in attention as well, each with queries and an output of its own."""

from dataclasses import replace

from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.experts.router import TopKRouter
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import rotary
from hooked_lm.families.decoders.granitemoe import sparse_rows
from hooked_lm.families.decoders.jetmoe import identities as identities
from hooked_lm.families.decoders.jetmoe.routed import RoutedAttention
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# the number of heads that attend to a token follows from others; the loss that balances loads
NO_EFFECT = ("num_attention_heads", "output_router_logits", "aux_loss_coef")


def config(hf: HFConfig) -> DecoderConfig:
    # JetMoeDecoderLayer in transformers' modeling_jetmoe.py leaves the norms of blocks at their default eps
    norm = RMSNorm.Config(hf.hidden_size, 1e-6)
    n_experts, top_k, router = hf.num_local_experts, hf.num_experts_per_tok, TopKRouter()
    attn = RoutedAttention.Config(
        d_model=hf.hidden_size,
        n_heads=hf.num_key_value_heads * n_experts,
        d_head=hf.kv_channels,
        n_key_value_heads=hf.num_key_value_heads,
        out_bias=True,
        rotary=rotary(hf, hf.kv_channels),
        n_experts=n_experts,
        top_k=top_k,
        router=router,
    )
    expert = GatedMLP.Config(hf.hidden_size, hf.intermediate_size, hf.activation_function)
    mlp = MoE.Config(expert, n_experts, top_k, router, out_bias=True)
    block = PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm)
    return llama_like.around(hf, [block] * hf.num_hidden_layers, replace(norm, eps=hf.rms_norm_eps))


def rows(tree: DecoderConfig) -> list[Row]:
    source, target = "model.layers.{l}.self_attention.", "blocks.{l}.attn."
    attn = tree.blocks[0].attn
    assert isinstance(attn, RoutedAttention.Config)
    return [
        *llama_like.outer_rows(tree),
        *llama_like.norm_rows(),
        Row(
            source + "experts.input_linear.weight",
            target + "W_Q",
            "e (kv h) m -> (kv e) m h",
            e=attn.n_experts,
            kv=attn.n_kv,
        ),
        Row(source + "kv_proj.weight", target + "W_{x}", "(x n h) m -> n m h", x="KV", n=attn.n_kv),
        Row(
            source + "experts.output_linear.weight",
            target + "W_O",
            "e m (kv h) -> (kv e) h m",
            e=attn.n_experts,
            kv=attn.n_kv,
        ),
        Row(source + "experts.bias", target + "b_O"),
        Row(source + "experts.router.layer.weight", target + "W_router", "e m -> m e"),
        *sparse_rows(tree, "model.layers.{l}.mlp."),
        Row("model.layers.{l}.mlp.bias", "blocks.{l}.mlp.b_out"),
    ]
