"""Shared code for BART-like models: layer norms, biases in all linear layers and on the logits, and the tensor names."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from hooked_lm.components.attention.cross import CrossAttention
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.cross import PostNormCrossBlock, PreNormCrossBlock
from hooked_lm.components.blocks.post_norm import PostNormBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.embeddings.pos_embed import PosEmbedConfig
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.seq2seq import GENERATION
from hooked_lm.models.config.tree import EncoderDecoderConfig, SideBlockConfig, StackConfig
from hooked_lm.weights import Row, expand

PREFIX = "model."
IGNORED = ("*.version",)
# training options, and old flags without effect
NO_EFFECT = (
    *GENERATION,
    *("init_std", "*_layerdrop", "replacing_rate", "save_step", "student_*", "num_hidden_layers"),
    *("normalize_before", "normalize_embedding", "add_final_layer_norm", "add_bias_logits", "extra_pos_embeddings"),
    *("static_position_embeddings", "do_blenderbot_90_layernorm", "extra_layer_norm", "layernorm_variant"),
)


def encoder_decoder(
    hf: HFConfig,
    pos_embed: PosEmbedConfig,
    pre_norm: bool,
    embed_norm: bool = False,
    d_target_vocab: int | None = None,
    logits_bias: bool = True,
    attn_bias: bool = True,
) -> EncoderDecoderConfig:
    """The config tree. With `pre_norm` encoder and decoder each end in a norm; `attn_bias` is whether attention has biases.

    `d_target_vocab` is the vocabulary size of a decoder whose embedding is separate from the encoder's.
    """
    norm = LayerNorm.Config(hf.d_model)
    ln_embed, ln_final = norm if embed_norm else None, norm if pre_norm else None

    def stack(blocks: tuple[SideBlockConfig, ...]) -> StackConfig:
        return StackConfig(blocks, pos_embed=pos_embed, ln_embed=ln_embed, ln_final=ln_final)

    embed = Embed.Config(hf.vocab_size, hf.d_model, scale=hf.d_model**0.5 if hf.scale_embedding else 1.0)
    decoder_embed = None if d_target_vocab is None else replace(embed, d_vocab=d_target_vocab)
    tied = hf.tie_word_embeddings
    return EncoderDecoderConfig(
        n_ctx=hf.max_position_embeddings,
        embed=embed,
        encoder=stack((encoder_block(hf, norm, pre_norm, attn_bias),) * hf.encoder_layers),
        decoder=stack((decoder_block(hf, norm, pre_norm, attn_bias),) * hf.decoder_layers),
        unembed=Unembed.Config(hf.d_model, d_target_vocab or hf.vocab_size, bias=logits_bias, tied=tied),
        decoder_embed=decoder_embed if tied or decoder_embed is not None else embed,
        spare_embed=embed if not tied and decoder_embed is None else None,
    )


def encoder_block(
    hf: HFConfig, norm: LayerNorm.Config, pre_norm: bool, attn_bias: bool
) -> PreNormBlock.Config | PostNormBlock.Config:
    """An encoder layer."""
    n_heads, kind = hf.encoder_attention_heads, PreNormBlock if pre_norm else PostNormBlock
    mlp = MLP.Config(hf.d_model, hf.encoder_ffn_dim, hf.activation_function)
    return kind.Config(attn=attention(hf, n_heads, attn_bias, causal=False), ln1=norm, mlp=mlp, ln2=norm)


def decoder_block(
    hf: HFConfig, norm: LayerNorm.Config, pre_norm: bool, attn_bias: bool
) -> PreNormCrossBlock.Config | PostNormCrossBlock.Config:
    """A decoder layer."""
    n_heads, kind = hf.decoder_attention_heads, PreNormCrossBlock if pre_norm else PostNormCrossBlock
    cross = CrossAttention.Config(hf.d_model, n_heads, hf.d_model // n_heads, qkv_bias=attn_bias, out_bias=attn_bias)
    mlp = MLP.Config(hf.d_model, hf.decoder_ffn_dim, hf.activation_function)
    attn = attention(hf, n_heads, attn_bias, causal=True)
    return kind.Config(attn=attn, ln1=norm, cross_attn=cross, ln2=norm, mlp=mlp, ln3=norm)


def attention(hf: HFConfig, n_heads: int, bias: bool, causal: bool) -> Attention.Config:
    """Self-attention of the encoder or the decoder."""
    return Attention.Config(hf.d_model, n_heads, hf.d_model // n_heads, qkv_bias=bias, out_bias=bias, causal=causal)


def adjusted_to_tensors(tree: EncoderDecoderConfig, tensors: Mapping[str, Tensor]) -> EncoderDecoderConfig:
    """The tree with a bias on the logits only if the tensors include one; old checkpoints may lack it."""
    return replace(tree, unembed=replace(tree.unembed, bias="final_logits_bias" in tensors))


def outer_rows(
    tree: EncoderDecoderConfig, prefix: str = PREFIX, final_norm: str = "layer_norm", head: str = "lm_head"
) -> list[Row]:
    """Rows of the embeddings, the norms outside the layers and the unembedding.

    Files may repeat a shared embedding for the encoder and for the decoder.
    """
    shared, sides = prefix + "shared.weight", ("encoder", "decoder")
    if tree.decoder_embed is None:
        embeds = [Row(shared, "embed.W_E")]
        embeds += [Row(f"{prefix}{side}.embed_tokens.weight", f"{side}.embed.W_E", tied=shared) for side in sides]
        tied_to = shared
    else:
        tied_to = prefix + "decoder.embed_tokens.weight"
        embeds = [
            Row(prefix + "encoder.embed_tokens.weight", "embed.W_E"),
            Row(tied_to, "decoder_embed.W_E"),
            Row(shared, "spare_embed.W_E"),
        ]
    norms = {"embed_ln": "layernorm_embedding", "token_ln": "layernorm_embedding", "final_ln": final_norm}
    return [
        *embeds,
        *(
            row
            for side in sides
            for target, source in norms.items()
            for row in classic.norm(f"{prefix}{side}.{source}", f"{side}_{target}")
        ),
        *classic.positions(prefix + "encoder.embed_positions.weight", "pos_embed", tree.encoder.pos_embed),
        *classic.positions(prefix + "decoder.embed_positions.weight", "decoder_pos_embed", tree.decoder.pos_embed),
        classic.head(head, tree, tied_to)[0],
        Row("final_logits_bias", "unembed.b_U", "1 v -> v"),
    ]


def layer_rows(side: str, names: dict[str, str], n_layers: int, prefix: str = PREFIX) -> list[Row]:
    """Rows of the encoder's or decoder's layers; `names` maps HF names of attentions and norms to names of the model."""
    source, target = f"{prefix}{side}.layers.{{i}}.", f"{side}.{{i}}."
    found = [*classic.into_mlp(source + "fc1", target + "mlp."), *classic.out_of_mlp(source + "fc2", target + "mlp.")]
    for source_name, target_name in names.items():
        if target_name.startswith("ln"):
            found += classic.norm(source + source_name, target + target_name)
        else:
            found += classic.attention(f"{source}{source_name}.", f"{target}{target_name}.", "out_proj")
    return expand(found, i=n_layers)


ENCODER_NAMES = {"self_attn": "attn", "self_attn_layer_norm": "ln1", "final_layer_norm": "ln2"}
DECODER_NAMES = {
    "self_attn": "attn",
    "self_attn_layer_norm": "ln1",
    "encoder_attn": "cross_attn",
    "encoder_attn_layer_norm": "ln2",
    "final_layer_norm": "ln3",
}


def rows(tree: EncoderDecoderConfig, head: str = "lm_head") -> list[Row]:
    """Rows of every weight that such a model can have; rows of weights that a model lacks are skipped when loading."""
    n_encoder = len(tree.encoder.blocks)
    return [*outer_rows(tree, head=head), *layer_rows("encoder", ENCODER_NAMES, n_encoder), *decoder_rows(tree)]


def decoder_rows(tree: EncoderDecoderConfig, prefix: str = PREFIX) -> list[Row]:
    """Rows of the decoder's layers."""
    return layer_rows("decoder", DECODER_NAMES, len(tree.decoder.blocks), prefix)


def nested_rows(
    tree: EncoderDecoderConfig,
    inner: str,
    suffixes: dict[str, str],
    prefix: str = PREFIX,
    final_norm: str = "layer_norm",
) -> list[Row]:
    """The same for an encoder whose attention has its input projections in a module `inner`.

    `suffixes` maps those of HF's names to those of ours, as "_global" in `query_global`; empty without further weights.
    """
    source, target = f"{prefix}encoder.layers.{{i}}.self_attn.", "encoder.{i}.attn."
    attn = classic.out_of_attention(source + "output", target)
    for theirs, ours in suffixes.items():
        for name, x in {"query": "Q", "key": "K", "value": "V"}.items():
            attn += classic.heads_in(f"{source}{inner}.{name}{theirs}", x + ours, target)
    n_encoder, others = len(tree.encoder.blocks), {x: y for x, y in ENCODER_NAMES.items() if y != "attn"}
    return [
        *outer_rows(tree, prefix, final_norm),
        *expand(attn, i=n_encoder),
        *layer_rows("encoder", others, n_encoder, prefix),
        *decoder_rows(tree, prefix),
    ]
