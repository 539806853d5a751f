"""GPT-Neo (Black et al. 2021, doi:10.5281/zenodo.5297715): layers of local attention between global ones, scores unscaled."""

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
IGNORED = ("*.attention.bias", "*.attention.masked_bias")
NO_EFFECT = ("attention_types",)  # `attention_layers` lists the same per layer


def config(hf: HFConfig) -> DecoderConfig:
    d_head, windows = hf.hidden_size // hf.num_heads, {"global": None, "local": hf.window_size}
    attns = [
        Attention.Config(hf.hidden_size, hf.num_heads, d_head, scale=1.0, out_bias=True, window=windows[kind])
        for kind in hf.attention_layers[: hf.num_layers]
    ]
    norm = LayerNorm.Config(hf.hidden_size, hf.layer_norm_epsilon)
    mlp = MLP.Config(hf.hidden_size, hf.intermediate_size or 4 * hf.hidden_size, hf.activation_function)
    return DecoderConfig(
        n_ctx=hf.max_position_embeddings,
        embed=Embed.Config(hf.vocab_size, hf.hidden_size),
        pos_embed=PosEmbed.Config(hf.max_position_embeddings, hf.hidden_size),
        blocks=tuple(PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm) for attn in attns),
        ln_final=norm,
        unembed=Unembed.Config(hf.hidden_size, hf.vocab_size, tied=hf.tie_word_embeddings),
    )


def rows(tree: DecoderConfig) -> list[Row]:
    source, target = "transformer.h.{l}.", "blocks.{l}."
    return [
        Row("transformer.wte.weight", "embed.W_E"),
        Row("transformer.wpe.weight", "pos_embed.W_pos"),
        *classic.norm(source + "ln_1", target + "ln1"),
        *classic.attention(source + "attn.attention.", out="out_proj"),
        *classic.norm(source + "ln_2", target + "ln2"),
        *classic.into_mlp(source + "mlp.c_fc"),
        *classic.out_of_mlp(source + "mlp.c_proj"),
        *classic.norm("transformer.ln_f", "ln_final"),
        *classic.head("lm_head", tree, "transformer.wte.weight"),
    ]
