"""GTE (mGTE: Zhang et al. 2024, arXiv:2407.19669): BERT with rotary positions and gated MLPs."""

from dataclasses import replace

from hooked_lm.components.mlp import GatedMLP
from hooked_lm.families._shared import bert_like, classic
from hooked_lm.families._shared.bert_like import NO_EFFECT, ROBERTA
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.encoders import jina_embeddings_v3
from hooked_lm.families.encoders.nomic_bert import IGNORED
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "gte."
RENAMED = {r"^new\.": "gte."}  # in the first checkpoints
HEADS = replace(
    ROBERTA, mlm_norm="lm_head.norm", bias="lm_head.decoder.bias", untied_bias="lm_head.decoder.bias", text_dense=None
)


def config(hf: HFConfig) -> EncoderConfig:
    tree = jina_embeddings_v3.config(hf)
    mlp = GatedMLP.Config(hf.hidden_size, hf.intermediate_size, hf.hidden_act, out_bias=True)
    blocks = tuple(replace(block, mlp=mlp) for block in tree.blocks)
    return replace(tree, blocks=blocks, **bert_like.heads(hf, HEADS))


def rows(tree: EncoderConfig) -> list[Row]:
    source, mlp = "gte.encoder.layer.{l}.", "blocks.{l}.mlp."
    return [
        *bert_like.embedding_rows("gte.embeddings."),
        *classic.stacked_attention(source + "attention.qkv_proj"),
        *classic.out_of_attention(source + "attention.o_proj"),
        *classic.norm(source + "attn_ln", "blocks.{l}.ln1"),
        Row(source + "mlp.up_gate_proj.weight", mlp + "W_{x}", "(x f) m -> m f", x=["in", "gate"]),
        *classic.out_of_mlp(source + "mlp.down_proj"),
        *classic.norm(source + "mlp_ln", "blocks.{l}.ln2"),
        *bert_like.head_rows(tree, HEADS, PREFIX),
    ]
