"""GPT-NeoX Japanese (ABEJA 2022): GPT-NeoX with sequential sublayers and one linear bias, in the last layer's attention."""

from dataclasses import replace

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import n_ctx, rotary
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

PREFIX = "gpt_neox_japanese."
IGNORED = ("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq")


def config(hf: HFConfig) -> DecoderConfig:
    d_head = hf.hidden_size // hf.num_attention_heads
    attn = Attention.Config(hf.hidden_size, hf.num_attention_heads, d_head, rotary=rotary(hf, d_head, partial=True))
    norm = LayerNorm.Config(hf.hidden_size, hf.layer_norm_eps)
    mlp = MLP.Config(hf.hidden_size, int(hf.hidden_size * hf.intermediate_multiple_size), hf.hidden_act, bias=False)
    block = PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm)
    last = replace(block, attn=replace(attn, out_bias=True))
    return DecoderConfig(
        n_ctx=n_ctx(hf),
        embed=Embed.Config(hf.vocab_size, hf.hidden_size),
        blocks=(block,) * (hf.num_hidden_layers - 1) + (last,),
        ln_final=norm,
        unembed=Unembed.Config(hf.hidden_size, hf.vocab_size, tied=hf.tie_word_embeddings),
    )


def rows(tree: DecoderConfig) -> list[Row]:
    source, target = "gpt_neox_japanese.layers.{l}.", "blocks.{l}."
    return [
        Row("gpt_neox_japanese.embed_in.weight", "embed.W_E"),
        *classic.norm(source + "input_layernorm", target + "ln1"),
        *classic.fused_by_group(source + "attention.query_key_value", tree),
        Row(source + "attention.dense.weight", target + "attn.W_O", "m (n h) -> n h m"),
        Row(source + "attention.dense_bias", target + "attn.b_O"),
        *classic.norm(source + "post_attention_layernorm", target + "ln2"),
        *classic.into_mlp(source + "mlp.dense_h_to_4h"),
        *classic.out_of_mlp(source + "mlp.dense_4h_to_h"),
        *classic.norm("gpt_neox_japanese.final_layer_norm", "ln_final"),
        *classic.head("embed_out", tree, "gpt_neox_japanese.embed_in.weight"),
    ]
