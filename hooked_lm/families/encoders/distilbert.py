"""DistilBERT (Sanh et al. 2019, arXiv:1910.01108): BERT with half the layers, without token types."""

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.post_norm import PostNormBlock
from hooked_lm.components.embeddings.embed import Embed
from hooked_lm.components.embeddings.encoder_embed import EncoderEmbed
from hooked_lm.components.embeddings.pos_embed import PosEmbed
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import bert_like, classic
from hooked_lm.families._shared.bert_like import IGNORED, RENAMED, Names
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "distilbert."
NO_EFFECT = (*bert_like.NO_EFFECT, "sinusoidal_pos_embds", "tie_weights_")  # positions are always in the file
EPS = 1e-12  # of all norms
HEADS = Names(
    mlm="vocab_transform",
    mlm_norm="vocab_layer_norm",
    decoder="vocab_projector",
    bias="vocab_projector.bias",
    untied_bias="vocab_projector.bias",
    text_dense="pre_classifier",
    text_out="classifier",
)


def config(hf: HFConfig) -> EncoderConfig:
    d_model, n_ctx, norm = hf.dim, hf.max_position_embeddings, LayerNorm.Config(hf.dim, EPS)
    attn = Attention.Config(d_model, hf.n_heads, d_model // hf.n_heads, qkv_bias=True, out_bias=True, causal=False)
    mlp = MLP.Config(d_model, hf.hidden_dim, hf.activation)
    embed, positions = Embed.Config(hf.vocab_size, d_model), PosEmbed.Config(n_ctx, d_model)
    return EncoderConfig(
        n_ctx=n_ctx,
        embed=EncoderEmbed.Config(embed, positions, norm=norm),
        blocks=(PostNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm),) * hf.n_layers,
        **bert_like.heads(hf, HEADS, norm, mlm=hf.activation, text="relu"),
    )


def rows(tree: EncoderConfig) -> list[Row]:
    source = "distilbert.transformer.layer.{l}."
    attn = source + "attention."
    return [
        *bert_like.embedding_rows("distilbert.embeddings."),
        *classic.into_attention(attn + "q_lin", attn + "k_lin", attn + "v_lin"),
        *classic.out_of_attention(attn + "out_lin"),
        *classic.norm(source + "sa_layer_norm", "blocks.{l}.ln1"),
        *classic.into_mlp(source + "ffn.lin1"),
        *classic.out_of_mlp(source + "ffn.lin2"),
        *classic.norm(source + "output_layer_norm", "blocks.{l}.ln2"),
        *bert_like.head_rows(tree, HEADS, PREFIX),
    ]
