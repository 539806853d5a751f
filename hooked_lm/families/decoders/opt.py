"""OPT (Zhang et al. 2022, arXiv:2205.01068): norms before sublayers; one size is post-norm, with embeddings
narrower than the stream."""

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.post_norm import PostNormBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.embeddings.factored_embed import FactoredEmbed, FactoredUnembed
from hooked_lm.components.embeddings.pos_embed import PosEmbed
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

PREFIX = "model."
IGNORED = ()
NO_EFFECT = ("layerdrop", "init_std", "prefix")

OFFSET = 2  # row of position 0 in the position embedding


def config(hf: HFConfig) -> DecoderConfig:
    d_model, d_embed, d_vocab = hf.hidden_size, hf.word_embed_proj_dim, hf.vocab_size
    affine, bias = hf.layer_norm_elementwise_affine, hf.enable_bias
    norm = LayerNorm.Config(d_model, 1e-5, weight=affine, bias=affine)
    n_heads = hf.num_attention_heads
    attn = Attention.Config(d_model, n_heads, d_model // n_heads, qkv_bias=bias, out_bias=bias)
    mlp = MLP.Config(d_model, hf.ffn_dim, hf.activation_function, bias=bias)
    block = PreNormBlock if hf.do_layer_norm_before else PostNormBlock
    has_final = hf.do_layer_norm_before and not hf.get("_remove_final_layer_norm", False)
    tied = hf.tie_word_embeddings
    embed, unembed = Embed.Config(d_vocab, d_model), Unembed.Config(d_model, d_vocab, tied=tied)
    if d_embed != d_model:
        embed = FactoredEmbed.Config(d_vocab, d_model, d_embed=d_embed)
        unembed = FactoredUnembed.Config(d_model, d_vocab, tied=tied, d_embed=d_embed)
    return DecoderConfig(
        n_ctx=hf.max_position_embeddings,
        embed=embed,
        pos_embed=PosEmbed.Config(hf.max_position_embeddings, d_model, offset=OFFSET),
        blocks=(block.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm),) * hf.num_hidden_layers,
        ln_final=norm if has_final else None,
        unembed=unembed,
    )


def rows(tree: DecoderConfig) -> list[Row]:
    table = "model.decoder.embed_tokens.weight"
    factored = isinstance(tree.embed, FactoredEmbed.Config)
    return [
        Row(table, "embed.W_E"),
        *classic.positions("model.decoder.embed_positions.weight", "pos_embed", tree.pos_embed),
        *classic.fairseq_layer("model.decoder.layers.{l}."),
        *classic.norm("model.decoder.final_layer_norm", "ln_final"),
        *(factored_rows(tree, table) if factored else classic.head("lm_head", tree, table)),
    ]


def factored_rows(tree: DecoderConfig, table: str) -> list[Row]:
    """Rows of the unembedding, and of the projections between narrow embeddings and the stream."""
    tied = table if tree.unembed.tied else None
    return [
        Row("model.decoder.project_in.weight", "embed.W_proj", "m e -> e m"),
        Row("model.decoder.project_out.weight", "unembed.W_proj", "e m -> m e"),
        Row("lm_head.weight", "unembed.W_vocab", "v e -> e v", tied=tied),
    ]
