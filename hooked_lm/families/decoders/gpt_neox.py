"""GPT-NeoX (Black et al. 2022, arXiv:2204.06745) and Pythia (Biderman et al. 2023, arXiv:2304.01373)."""

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.parallel import ParallelBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import n_ctx, rotary
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

PREFIX = "gpt_neox."
PREPENDS_BOS = False
IGNORED = ("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq")


def config(hf: HFConfig) -> DecoderConfig:
    d_head = hf.hidden_size // hf.num_attention_heads
    norm = LayerNorm.Config(hf.hidden_size, hf.layer_norm_eps)
    attn = Attention.Config(
        d_model=hf.hidden_size,
        n_heads=hf.num_attention_heads,
        d_head=d_head,
        qkv_bias=hf.attention_bias,
        out_bias=hf.attention_bias,
        rotary=rotary(hf, d_head, partial=True),
    )
    mlp = MLP.Config(hf.hidden_size, hf.intermediate_size, hf.hidden_act)
    block = ParallelBlock if hf.use_parallel_residual else PreNormBlock
    return DecoderConfig(
        n_ctx=n_ctx(hf),
        embed=Embed.Config(hf.vocab_size, hf.hidden_size),
        blocks=(block.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm),) * hf.num_hidden_layers,
        ln_final=norm,
        unembed=Unembed.Config(hf.hidden_size, hf.vocab_size, tied=hf.tie_word_embeddings),
    )


def rows(tree: DecoderConfig) -> list[Row]:
    source, target = "gpt_neox.layers.{l}.", "blocks.{l}."
    return [
        Row("gpt_neox.embed_in.weight", "embed.W_E"),
        *classic.norm(source + "input_layernorm", target + "ln1"),
        *classic.fused_by_group(source + "attention.query_key_value", tree),
        *classic.out_of_attention(source + "attention.dense"),
        *classic.norm(source + "post_attention_layernorm", target + "ln2"),
        *classic.into_mlp(source + "mlp.dense_h_to_4h"),
        *classic.out_of_mlp(source + "mlp.dense_4h_to_h"),
        *classic.norm("gpt_neox.final_layer_norm", "ln_final"),
        *classic.head("embed_out", tree, "gpt_neox.embed_in.weight"),
    ]
