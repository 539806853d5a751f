"""Rows for families with layer norms and plain MLPs; the tensor names are arguments."""

from hooked_lm.components.blocks.block import AttentionPart
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row


def norm(source: str, target: str) -> list[Row]:
    """A norm with weight and bias."""
    return [Row(source + ".weight", target + ".w"), Row(source + ".bias", target + ".b")]


def into_mlp(source: str) -> list[Row]:
    """The input projection of an MLP."""
    return [Row(source + ".weight", "blocks.{l}.mlp.W_in", "f m -> m f"), Row(source + ".bias", "blocks.{l}.mlp.b_in")]


def out_of_mlp(source: str) -> list[Row]:
    """The output projection of an MLP."""
    return [
        Row(source + ".weight", "blocks.{l}.mlp.W_out", "m f -> f m"),
        Row(source + ".bias", "blocks.{l}.mlp.b_out"),
    ]


def into_attention(q: str, k: str, v: str) -> list[Row]:
    """Three linear layers for queries, keys and values."""
    rows = []
    for source, x in ((q, "Q"), (k, "K"), (v, "V")):
        rows += [
            Row(source + ".weight", f"blocks.{{l}}.attn.W_{x}", "(n h) m -> n m h"),
            Row(source + ".bias", f"blocks.{{l}}.attn.b_{x}", "(n h) -> n h"),
        ]
    return rows


def fused_by_group(source: str, tree: DecoderConfig) -> list[Row]:
    """One fused linear layer: for each key/value head, its query heads, its key and its value."""
    block = tree.blocks[0]
    assert isinstance(block, AttentionPart.Config)
    n_kv = block.attn.n_kv
    parts = {"Q": block.attn.n_heads // n_kv, "K": 1, "V": 1}
    return [
        Row(source + ".weight", "blocks.{l}.attn.W_{g}", "(kv g h) m -> (kv g) m h", kv=n_kv, g=parts),
        Row(source + ".bias", "blocks.{l}.attn.b_{g}", "(kv g h) -> (kv g) h", kv=n_kv, g=parts),
    ]


def out_of_attention(source: str) -> list[Row]:
    """The output projection of attention."""
    return [
        Row(source + ".weight", "blocks.{l}.attn.W_O", "m (n h) -> n h m"),
        Row(source + ".bias", "blocks.{l}.attn.b_O"),
    ]


def fairseq_layer(source: str) -> list[Row]:
    """A layer with fairseq's tensor names (OPT, XGLM, BioGPT)."""
    target, attn = "blocks.{l}.", source + "self_attn."
    return [
        *norm(source + "self_attn_layer_norm", target + "ln1"),
        *into_attention(attn + "q_proj", attn + "k_proj", attn + "v_proj"),
        *out_of_attention(attn + "out_proj"),
        *norm(source + "final_layer_norm", target + "ln2"),
        *into_mlp(source + "fc1"),
        *out_of_mlp(source + "fc2"),
    ]


def head(source: str, tree: DecoderConfig, tied_to: str) -> list[Row]:
    """The unembedding, which may be tied to the embedding `tied_to`."""
    tied = tied_to if tree.unembed.tied else None
    return [Row(source + ".weight", "unembed.W_U", "v m -> m v", tied=tied), Row(source + ".bias", "unembed.b_U")]
