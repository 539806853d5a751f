"""Rows of the common parts of a model; the tensor names are arguments.

A linear layer or norm without bias has the same rows: rows of weights that a model lacks are skipped when loading.
"""

from hooked_lm.components.blocks.block import AttentionPart
from hooked_lm.components.embeddings.pos_embed import PosEmbed
from hooked_lm.models.config.tree import DecoderConfig, EncoderConfig, EncoderDecoderConfig
from hooked_lm.weights import Row

ATTENTION, MLP = "blocks.{l}.attn.", "blocks.{l}.mlp."


def norm(source: str, target: str) -> list[Row]:
    """A norm with weight and bias."""
    return [Row(source + ".weight", target + ".w"), Row(source + ".bias", target + ".b")]


def positions(source: str, target: str, cfg: object) -> list[Row]:
    """The table of learned positions, whose first rows may be those of no position."""
    if not isinstance(cfg, PosEmbed.Config) or not cfg.offset:
        return [Row(source, target + ".W_pos")]
    offset, n_rows = cfg.offset, cfg.offset + cfg.n_ctx
    parts = {"before": slice(0, offset), "W_pos": slice(offset, n_rows)}
    return [Row(source, f"{target}.{name}", "p m -> p m", take={"p": part}, p=n_rows) for name, part in parts.items()]


def linear(source: str, target: str, name: str) -> list[Row]:
    """A linear layer that becomes `W_name` and `b_name` of the module `target`."""
    weight = Row(source + ".weight", f"{target}W_{name}", "o m -> m o")
    return [weight, Row(source + ".bias", f"{target}b_{name}")]


def into_mlp(source: str, target: str = MLP) -> list[Row]:
    """The input projection of an MLP."""
    return linear(source, target, "in")


def out_of_mlp(source: str, target: str = MLP) -> list[Row]:
    """The output projection of an MLP."""
    return linear(source, target, "out")


def gated_mlp(source: str, target: str = MLP) -> list[Row]:
    """A gated MLP with the layers gate_proj, up_proj and down_proj."""
    names = {"gate": "gate", "up": "in", "down": "out"}
    return [row for x, y in names.items() for row in linear(f"{source}{x}_proj", target, y)]


def heads_in(source: str, name: str, target: str = ATTENTION) -> list[Row]:
    """A linear layer from the stream to all heads, such as the one that computes their queries."""
    return [
        Row(source + ".weight", f"{target}W_{name}", "(n h) m -> n m h"),
        Row(source + ".bias", f"{target}b_{name}", "(n h) -> n h"),
    ]


def into_attention(q: str, k: str, v: str, target: str = ATTENTION) -> list[Row]:
    """Three linear layers for queries, keys and values."""
    return [row for name, source in {"Q": q, "K": k, "V": v}.items() for row in heads_in(source, name, target)]


def stacked_attention(source: str, target: str = ATTENTION) -> list[Row]:
    """One fused linear layer: all queries, then all keys, then all values."""
    return [
        Row(source + ".weight", target + "W_{qkv}", "(qkv n h) m -> n m h", qkv="QKV"),
        Row(source + ".bias", target + "b_{qkv}", "(qkv n h) -> n h", qkv="QKV"),
    ]


def out_of_attention(source: str, target: str = ATTENTION) -> list[Row]:
    """The output projection of attention."""
    weight = Row(source + ".weight", target + "W_O", "m (n h) -> n h m")
    return [weight, Row(source + ".bias", target + "b_O")]


def attention(source: str, target: str = ATTENTION, out: str = "o_proj") -> list[Row]:
    """Attention with the layers q_proj, k_proj and v_proj, and the output projection `out`."""
    q, k, v = (f"{source}{x}_proj" for x in "qkv")
    return [*into_attention(q, k, v, target), *out_of_attention(source + out, target)]


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


def fairseq_layer(source: str) -> list[Row]:
    """A layer with fairseq's tensor names (OPT, XGLM, BioGPT)."""
    return [
        *norm(source + "self_attn_layer_norm", "blocks.{l}.ln1"),
        *attention(source + "self_attn.", out="out_proj"),
        *norm(source + "final_layer_norm", "blocks.{l}.ln2"),
        *into_mlp(source + "fc1"),
        *out_of_mlp(source + "fc2"),
    ]


def head(source: str, tree: DecoderConfig | EncoderConfig | EncoderDecoderConfig, tied_to: str) -> list[Row]:
    """The unembedding, which may be tied to the embedding `tied_to`."""
    tied = tied_to if tree.unembed is not None and tree.unembed.tied else None
    return [Row(source + ".weight", "unembed.W_U", "v m -> m v", tied=tied), Row(source + ".bias", "unembed.b_U")]
