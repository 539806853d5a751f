"""BLOOM (BigScience Workshop 2022, arXiv:2211.05100): attention with linear biases, normalised embeddings."""

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.attention.position_bias import Alibi
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.post_norm import NormedResidualBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

PREFIX = "transformer."
PREPENDS_BOS = False
IGNORED = ()
NO_EFFECT = (
    *("slow_but_exact", "attention_softmax_in_fp32"),  # rounding only
    *("bias_dropout_fusion", "masked_softmax_fusion", "skip_bias_add*", "offset_alibi"),  # for training
    "n_embed",  # an old name of hidden_size
)

TRAINED_N_CTX = 2048  # for all model sizes; ALiBi itself sets no limit


def config(hf: HFConfig) -> DecoderConfig:
    attn = Attention.Config(
        hf.hidden_size,
        hf.n_head,
        hf.hidden_size // hf.n_head,
        qkv_bias=True,
        out_bias=True,
        position_bias=Alibi(hf.n_head),
    )
    norm = LayerNorm.Config(hf.hidden_size, hf.layer_norm_epsilon)
    mlp = MLP.Config(hf.hidden_size, 4 * hf.hidden_size, "gelu_new")
    kind = NormedResidualBlock if hf.apply_residual_connection_post_layernorm else PreNormBlock
    return DecoderConfig(
        n_ctx=hf.get("seq_length") or TRAINED_N_CTX,
        embed=Embed.Config(hf.vocab_size, hf.hidden_size, norm=norm),
        blocks=(kind.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm),) * hf.n_layer,
        ln_final=norm,
        unembed=Unembed.Config(hf.hidden_size, hf.vocab_size, tied=hf.tie_word_embeddings),
    )


def rows(tree: DecoderConfig) -> list[Row]:
    source, target = "transformer.h.{l}.", "blocks.{l}."
    return [
        Row("transformer.word_embeddings.weight", "embed.W_E"),
        *classic.norm("transformer.word_embeddings_layernorm", "embed.ln"),
        *classic.norm(source + "input_layernorm", target + "ln1"),
        *classic.fused_by_group(source + "self_attention.query_key_value", tree),
        *classic.out_of_attention(source + "self_attention.dense"),
        *classic.norm(source + "post_attention_layernorm", target + "ln2"),
        *classic.into_mlp(source + "mlp.dense_h_to_4h"),
        *classic.out_of_mlp(source + "mlp.dense_4h_to_h"),
        *classic.norm("transformer.ln_f", "ln_final"),
        *classic.head("lm_head", tree, "transformer.word_embeddings.weight"),
    ]
