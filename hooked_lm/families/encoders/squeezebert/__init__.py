"""SqueezeBERT (Iandola et al. 2020, arXiv:2006.11316): BERT with grouped linear maps."""

from dataclasses import replace

from hooked_lm.components.grouped import GroupedMLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import bert_like, classic
from hooked_lm.families._shared.bert_like import IGNORED, NO_EFFECT, RENAMED
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.encoders.bert import HEADS
from hooked_lm.families.encoders.squeezebert import identities as identities
from hooked_lm.families.encoders.squeezebert.grouped import GroupedAttention
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "transformer."
EPS = 1e-12  # of the norms in a layer: `ConvDropoutLayerNorm` (modeling_squeezebert.py) does not pass layer_norm_eps on


def config(hf: HFConfig) -> EncoderConfig:
    bert_like.check_bidirectional(hf)
    hf.require(embedding_size=hf.hidden_size)
    d_model, n_heads = hf.hidden_size, hf.num_attention_heads
    groups = (hf.q_groups, hf.k_groups, hf.v_groups, hf.post_attention_groups)
    attn = GroupedAttention.Config(d_model, n_heads, d_model // n_heads, *groups)
    parts = {"n_groups_in": hf.intermediate_groups, "n_groups_out": hf.output_groups}
    mlp = GroupedMLP.Config(d_model, hf.intermediate_size, hf.hidden_act, **parts)
    norm = LayerNorm.Config(d_model, EPS)
    return EncoderConfig(
        n_ctx=hf.max_position_embeddings,
        embed=bert_like.embed(hf, n_types=hf.type_vocab_size),
        blocks=tuple(replace(block, ln1=norm, mlp=mlp, ln2=norm) for block in bert_like.blocks(hf, attn)),
        **bert_like.heads(hf, HEADS, mlm=hf.hidden_act),
    )


def rows(tree: EncoderConfig) -> list[Row]:
    layer, block = PREFIX + "encoder.layers.{l}.", "blocks.{l}."
    attn, mlp = tree.blocks[0].attn, tree.blocks[0].mlp
    maps = {
        "attention.query": ("attn", "Q", attn.n_groups_q),
        "attention.key": ("attn", "K", attn.n_groups_k),
        "attention.value": ("attn", "V", attn.n_groups_v),
        "post_attention.conv1d": ("attn", "O", attn.n_groups_out),
        "intermediate.conv1d": ("mlp", "in", mlp.n_groups_in),
        "output.conv1d": ("mlp", "out", mlp.n_groups_out),
    }
    found = bert_like.embedding_rows(PREFIX + "embeddings.")
    for source, (part, name, g) in maps.items():
        bias = "(n h) -> n h" if name in "QKV" else None
        found += [
            Row(f"{layer}{source}.weight", f"{block}{part}.W_{name}_groups", "(g o) i 1 -> g i o", g=g),
            Row(f"{layer}{source}.bias", f"{block}{part}.b_{name}", bias),
        ]
    found += classic.norm(layer + "post_attention.layernorm", block + "ln1")
    found += classic.norm(layer + "output.layernorm", block + "ln2")
    return [*found, *bert_like.head_rows(tree, HEADS, PREFIX)]
