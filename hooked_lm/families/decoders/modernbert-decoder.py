"""ModernBERT's decoders (Weller et al. 2025, Ettin, arXiv:2507.11412): ModernBERT with causal attention, and with its transform
between the final norm and the unembedding."""

from dataclasses import replace

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.embeddings.embed import Embed
from hooked_lm.components.embeddings.transformed_unembed import TransformedUnembed
from hooked_lm.components.heads import MLMHead
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import bert_like, classic, llama_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import n_ctx, rotary
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

PREFIX = "model."
IGNORED = ("*.rotary_emb.*inv_freq",)
# old names for `layer_types` and `rope_parameters`, training options, choices of implementation
NO_EFFECT = (
    *("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta", "local_attention", "layer_norm_eps"),
    *("sparse_prediction", "sparse_pred_ignore_index", "initializer_cutoff_factor", "gradient_checkpointing"),
    *("deterministic_flash_attn", "reference_compile", "repad_logits_with_grad", "position_embedding_type"),
)


def config(hf: HFConfig) -> DecoderConfig:
    d_model, bias = hf.hidden_size, hf.attention_bias
    norm = LayerNorm.Config(d_model, hf.norm_eps, bias=hf.norm_bias)
    attn = Attention.Config(
        d_model, hf.num_attention_heads, d_model // hf.num_attention_heads, qkv_bias=bias, out_bias=bias
    )
    block = PreNormBlock.Config(
        attn=attn,
        ln1=norm,
        mlp=GatedMLP.Config(d_model, hf.intermediate_size, hf.hidden_activation, hf.mlp_bias),
        ln2=norm,
    )
    rotaries = {kind: rotary(hf, attn.d_head, kind) for kind in dict.fromkeys(hf.layer_types)}
    by_layer = enumerate(zip(hf.layer_types, llama_like.windows(hf), strict=True))
    transform = MLMHead.Config(d_model, d_model, hf.classifier_activation, norm, hf.classifier_bias)
    return DecoderConfig(
        n_ctx=n_ctx(hf),
        embed=Embed.Config(hf.vocab_size, d_model, norm=norm),
        blocks=tuple(
            # the input of the first layer is already normalised
            replace(block, attn=replace(attn, rotary=rotaries[kind], window=window), ln1=norm if layer else None)
            for layer, (kind, window) in by_layer
        ),
        ln_final=norm,
        unembed=TransformedUnembed.Config(
            d_model, hf.vocab_size, bias=hf.decoder_bias, tied=hf.tie_word_embeddings, transform=transform
        ),
    )


def rows(tree: DecoderConfig) -> list[Row]:
    source, target = "model.layers.{l}.", "blocks.{l}."
    embedding = "model.embeddings.tok_embeddings.weight"
    return [
        Row(embedding, "embed.W_E"),
        *classic.norm("model.embeddings.norm", "embed.ln"),
        *classic.norm(source + "attn_norm", target + "ln1"),
        *classic.attention(source + "attn.", out="Wo"),
        *classic.norm(source + "mlp_norm", target + "ln2"),
        Row(source + "mlp.Wi.weight", target + "mlp.W_{x}", "(x f) m -> m f", x=["gate", "in"]),
        Row(source + "mlp.Wi.bias", target + "mlp.b_{x}", "(x f) -> f", x=["gate", "in"]),
        *classic.out_of_mlp(source + "mlp.Wo"),
        *classic.norm("model.final_norm", "ln_final"),
        *bert_like.linear("lm_head.dense", "unembed.transform"),
        *classic.norm("lm_head.norm", "unembed.transform.ln"),
        *classic.head("decoder", tree, embedding),
    ]
