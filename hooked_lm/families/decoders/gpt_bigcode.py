"""GPT-BigCode, the architecture of SantaCoder and StarCoder (Ben Allal et al. 2023, arXiv:2301.03988; Li et al. 2023,
arXiv:2305.06161): GPT-2 in which all heads may share one key and one value."""

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.embeddings.pos_embed import PosEmbed
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

PREFIX = "transformer."
IGNORED = ("*.attn.bias", "*.attn.masked_bias")
NO_EFFECT = (
    *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),  # rounding only
    "num_key_value_heads",  # repeats `multi_query`
    *("inference_runner", "max_batch_size", "pad_key_length", "pre_allocate_kv_cache", "validate_runner_input"),
)


def config(hf: HFConfig) -> DecoderConfig:
    d_head = hf.n_embd // hf.n_head
    attn = Attention.Config(
        hf.n_embd,
        hf.n_head,
        d_head,
        n_key_value_heads=1 if hf.multi_query else hf.n_head,
        scale=d_head**-0.5 if hf.scale_attn_weights else 1.0,
        qkv_bias=True,
        out_bias=True,
    )
    norm = LayerNorm.Config(hf.n_embd, hf.layer_norm_epsilon)
    mlp = MLP.Config(hf.n_embd, hf.n_inner or 4 * hf.n_embd, hf.activation_function)
    return DecoderConfig(
        n_ctx=hf.n_positions,
        embed=Embed.Config(hf.vocab_size, hf.n_embd),
        pos_embed=PosEmbed.Config(hf.n_positions, hf.n_embd),
        blocks=(PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm),) * hf.n_layer,
        ln_final=norm,
        unembed=Unembed.Config(hf.n_embd, hf.vocab_size, tied=hf.tie_word_embeddings),
    )


def rows(tree: DecoderConfig) -> list[Row]:
    source, target = "transformer.h.{l}.", "blocks.{l}."
    return [
        Row("transformer.wte.weight", "embed.W_E"),
        Row("transformer.wpe.weight", "pos_embed.W_pos"),
        *classic.norm(source + "ln_1", target + "ln1"),
        *classic.fused_by_group(source + "attn.c_attn", tree),
        *classic.out_of_attention(source + "attn.c_proj"),
        *classic.norm(source + "ln_2", target + "ln2"),
        *classic.into_mlp(source + "mlp.c_fc"),
        *classic.out_of_mlp(source + "mlp.c_proj"),
        *classic.norm("transformer.ln_f", "ln_final"),
        *classic.head("lm_head", tree, "transformer.wte.weight"),
    ]
