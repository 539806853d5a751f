"""Write docs/sites.md: every hook point of a decoder, read off two models. Run by `make docs`; a test keeps it fresh."""

from pathlib import Path

from hooked_lm.models.config import HookedTransformerConfig
from hooked_lm.models.decoder import ON_DEMAND_FLAGS, HookedTransformer

MEANING = {
    "hook_tokens": "token ids",
    "hook_embed": "what the token embedding adds to the stream",
    "hook_pos_embed": "what the position embedding adds; only where positions are learned",
    "hook_resid_pre": "the stream before the block",
    "hook_attn_in": "the stream, one copy a head, before the norm",
    "hook_q_input": "the stream, one copy a head, before the norm, for queries",
    "hook_k_input": "the same for keys",
    "hook_v_input": "the same for values",
    "hook_scale": "the norm's divisor",
    "hook_normalized": "the normalised value, before weight and bias",
    "hook_q": "queries, before their norm and rotary",
    "hook_k": "keys, before their norm and rotary",
    "hook_v": "values",
    "hook_rot_q": "queries after rotary; only with rotary positions",
    "hook_rot_k": "keys after rotary; only with rotary positions",
    "hook_attn_scores": "scores after scale, soft cap and mask; masked ones are minus infinity",
    "hook_pattern": "the scores after softmax",
    "hook_z": "values mixed by the pattern",
    "hook_result": "each head's output, without the output bias",
    "hook_attn_out": "exactly what attention adds to the stream",
    "hook_resid_mid": "the stream between attention and MLP; absent in parallel and attention-only blocks",
    "hook_mlp_in": "the stream before the MLP's norm",
    "hook_in": "what the module receives",
    "hook_pre": "before the activation; of a gated MLP, the gate's",
    "hook_pre_linear": "the other branch of a gated MLP",
    "hook_post": "what W_out reads: the activation; of a gated MLP, the product",
    "hook_out": "what the module gives; at the unembedding, the logits before any soft cap",
    "hook_mlp_out": "exactly what the MLP adds to the stream",
    "hook_resid_post": "the stream after the block",
}

HEAD = """# Sites

Every hook point of a decoder, in order of computation; `{i}` is a layer. Sites *on demand* are not in a cache without a
filter; naming them in a filter or a hook computes them. Words for axes: `kv_head` is `head` unless heads share keys and
values; `query_pos` and `key_pos` are `pos`.

Short names: `cache["z", 5]`, `cache["resid_post", -1]`, `cache["scale", 4, "ln1"]`, `cache["k6"]`.

| site | shape | meaning |
|---|---|---|
"""


def models() -> list[HookedTransformer]:
    """A model with learned positions, and one with rotary positions, gates, query/key norms and post-norms."""
    sizes = {"n_layers": 1, "d_model": 8, "n_heads": 2, "n_ctx": 4, "d_vocab": 5}
    modern = {"gated_mlp": True, "use_qk_norm": True, "normalization_type": "RMS", "act_fn": "silu"}
    positions = {"positional_embedding_type": "rotary", "use_normalization_before_and_after": True}
    configs = [{**sizes, "act_fn": "gelu"}, {**sizes, **modern, **positions}]
    return [HookedTransformer(HookedTransformerConfig(**config)) for config in configs]


def rows() -> list[str]:
    """A table row per site: the modern model's, with what only the classic one has put where it belongs."""
    classic, modern = (model.hook_dict for model in models())
    points = {**{name: classic[name] for name in ("hook_tokens", "hook_embed", "hook_pos_embed")}, **modern}
    lines = []
    for name, point in points.items():
        leaf = name.rpartition(".")[2]
        shape = " ".join(point.dims) + (", on demand" if point.on_demand else "")
        flag = f" (`cfg.{ON_DEMAND_FLAGS[leaf]}`)" if leaf in ON_DEMAND_FLAGS and point.on_demand else ""
        lines.append(f"| `{name.replace('blocks.0', 'blocks.{i}')}` | {shape}{flag} | {MEANING[leaf]} |")
    return lines


def page() -> str:
    """The page as it should be."""
    return HEAD + "\n".join(rows()) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("sites.md").write_text(page())
