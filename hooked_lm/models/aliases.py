"""Aliases: the names that other libraries have for our sites."""

import re
from collections.abc import Collection, Iterable

__all__ = ["aliases", "same_value", "side_aliases"]

# (alias, our name); the first row whose site the model has applies. An alias has the same value, and an edit there has the
# same effect; so a site that feeds only one reader of a value (a norm's input, one projection's input) has none.
MODEL_ALIASES = [
    ("embed.hook_in", "hook_tokens"),
    ("embed.hook_out", "embed.hook_embed"),  # encoders
    ("embed.hook_out", "hook_embed"),
    ("hook_embed", "hook_full_embed"),
    ("pos_embed.hook_out", "embed.hook_pos_embed"),
    ("pos_embed.hook_out", "hook_pos_embed"),
    ("hook_pos_embed", "embed.hook_pos_embed"),
    ("token_type_embed.hook_out", "embed.hook_token_type_embed"),
    ("embed_ln.hook_scale", "embed.ln.hook_scale"),
    ("embed_ln.hook_normalized", "embed.ln.hook_normalized"),
    ("embed_ln.hook_out", "hook_full_embed"),
    ("mlm_head.hook_out", "mlm_head.hook_pre"),
    ("ln_final.hook_in", "mlm_head.hook_post"),
    ("ln_final.hook_scale", "mlm_head.ln.hook_scale"),
    ("ln_final.hook_normalized", "mlm_head.ln.hook_normalized"),
    ("ln_final.hook_out", "unembed.hook_in"),
    ("hook_unembed", "unembed.hook_out"),
]
LAST_ALIASES = [("mlm_head.hook_in", "hook_normalized_resid_post"), ("ln_final.hook_in", "hook_resid_post")]
BLOCK_ALIASES = [
    ("hook_in", "hook_resid_pre"),
    ("hook_out", "hook_normalized_resid_post"),  # post-norm blocks
    ("hook_out", "hook_resid_post"),
    ("attn.hook_attn_in", "hook_attn_in"),
    ("attn.hook_q_input", "hook_q_input"),
    ("attn.hook_k_input", "hook_k_input"),
    ("attn.hook_v_input", "hook_v_input"),
    ("attn.q.hook_out", "attn.hook_q"),
    ("attn.k.hook_out", "attn.hook_k"),
    ("attn.v.hook_out", "attn.hook_v"),
    ("attn.o.hook_in", "attn.hook_z"),
    ("mlp.in.hook_out", "mlp.hook_pre_linear"),  # gated
    ("mlp.in.hook_out", "mlp.hook_pre"),
    ("mlp.gate.hook_out", "mlp.hook_router_logits"),
    ("mlp.gate.hook_expert_indices", "mlp.hook_expert_indices"),
    ("mlp.out.hook_in", "mlp.hook_post"),
    ("mlp.out.hook_out", "mlp.hook_out"),
    ("ln2_post.hook_in", "mlp.hook_out"),
    ("norm.hook_scale", "ln1.hook_scale"),
    ("norm.hook_normalized", "ln1.hook_normalized"),
    ("norm.hook_out", "mixer.hook_in"),
    ("mixer.in_proj.hook_in", "mixer.hook_in"),
    ("mixer.out_proj.hook_out", "mixer.hook_out"),
]
# Aliases of some blocks: (sites that the block must have, sites that it must not have, aliases).
BLOCK_ALIASES_WHERE: list[tuple[set[str], set[str], list[tuple[str, str]]]] = [
    ({"mlp.hook_pre_linear"}, set(), [("mlp.gate.hook_out", "mlp.hook_pre")]),
    ({"mlp.hook_pre"}, {"mlp.hook_pre_linear"}, [("mlp.in.hook_in", "mlp.hook_in")]),
    (
        {"hook_normalized_resid_mid"},
        set(),
        [
            ("ln1.hook_in", "hook_resid_mid"),
            ("ln1.hook_out", "hook_normalized_resid_mid"),
            ("attn.hook_out", "hook_normalized_resid_mid"),
            ("attn.o.hook_out", "hook_attn_out"),
            ("ln2.hook_in", "hook_resid_post"),
            ("ln2.hook_out", "hook_normalized_resid_post"),
        ],
    ),
    (
        {"ln2.hook_scale"},
        {"hook_normalized_resid_mid", "hook_normalized_resid_post"},
        [("ln2.hook_in", "hook_resid_mid"), ("ln2.hook_out", "mlp.hook_in")],
    ),
]
# Aliases of blocks that add the output of their last projection or norm to the stream unscaled.
ADDED_ALIASES: list[tuple[set[str], set[str], list[tuple[str, str]]]] = [
    (
        set(),
        {"ln1_post.hook_scale", "hook_normalized_resid_mid"},
        [("attn.hook_out", "hook_attn_out"), ("attn.o.hook_out", "hook_attn_out")],
    ),
    (set(), {"ln2_post.hook_scale"}, [("mlp.hook_out", "hook_mlp_out")]),
    ({"ln1_post.hook_scale"}, set(), [("ln1_post.hook_out", "hook_attn_out")]),
    ({"ln2_post.hook_scale"}, set(), [("ln2_post.hook_out", "hook_mlp_out")]),
]


def aliases(names: Iterable[str], n_layers: int, scaled: Collection[int] = ()) -> dict[str, str]:
    """Returns alias -> our name, for the sites of a model.

    `scaled`: the layers that multiply the outputs of their sublayers before adding them to the stream.

    >>> aliases(["hook_embed", "blocks.0.attn.hook_z"], 1)
    {'embed.hook_out': 'hook_embed', 'blocks.0.attn.o.hook_in': 'blocks.0.attn.hook_z'}
    """
    names = set(names)
    rows = list(MODEL_ALIASES)
    for i in range(n_layers):
        block = f"blocks.{i}."
        rows += [(block + alias, block + site) for alias, site in block_aliases(names, block, i in scaled)]
        rows.append((f"lm.{block}attn.hook_pattern", f"{block}attn.hook_pattern"))
    rows += [(alias, f"blocks.{n_layers - 1}.{site}") for alias, site in LAST_ALIASES]
    return _existing(rows, names)


def side_aliases(names: Iterable[str], n_layers: dict[str, int]) -> dict[str, str]:
    """The aliases of an encoder-decoder with `n_layers` on each side, such as "encoder_blocks.0.hook_in"."""
    names = set(names)
    rows = [
        ("embed.hook_in", "hook_tokens"),
        ("embed.hook_out", "hook_embed"),
        ("encoder_ln_final.hook_out", "hook_encoder_out"),
    ]
    for side, n in n_layers.items():
        for i in range(n):
            rows += _side_block(names, side, i)
        rows.append((f"{side}_ln_final.hook_in", f"{side}.{n - 1}.hook_resid_post"))
        rows += [(f"{side}_ln_final.{site}", f"{side}_final_ln.{site}") for site in ("hook_scale", "hook_normalized")]
    rows.append(("decoder_ln_final.hook_out", "unembed.hook_in"))
    return _existing(rows, names)


def _side_block(names: set[str], side: str, i: int) -> list[tuple[str, str]]:
    """The rows of one block: our sites under the other library's block prefix, and aliases of its parts."""
    block, alias_block = f"{side}.{i}.", f"{side}_blocks.{i}."
    own = [name.removeprefix(block) for name in names if name.startswith(block)]
    rows = [(name, name) for name in sorted(own)] + block_aliases(names, block, scaled=False)
    if side == "decoder":
        rows = [
            (alias.replace("attn.", "self_attn.", 1) if alias.startswith("attn.") else alias, site)
            for alias, site in rows
        ]
        rows = [row for row in rows if not row[0].startswith("ln2.hook_") or row[1].startswith("ln2.")]
        cross = [(f"cross_attn.{p}.hook_out", f"cross_attn.hook_{p}") for p in "qkv"]
        rows += [
            *cross,
            ("cross_attn.o.hook_in", "cross_attn.hook_z"),
            ("cross_attn.o.hook_out", "hook_cross_attn_out"),
        ]
        rows += [("cross_attn.hook_out", "hook_cross_attn_out"), ("hook_resid_mid2", "hook_resid_mid_cross")]
        rows += [
            ("ln2.hook_in", "hook_resid_mid"),
            ("ln3.hook_in", "hook_resid_mid_cross"),
            ("ln3.hook_out", "mlp.hook_in"),
        ]
    return [(alias_block + alias, block + site) for alias, site in rows]


def block_aliases(names: set[str], block: str, scaled: bool) -> list[tuple[str, str]]:
    """The rows that apply to the block with prefix `block`, as names without the prefix."""
    rows = list(BLOCK_ALIASES)
    for has, has_not, some in [*BLOCK_ALIASES_WHERE, *([] if scaled else ADDED_ALIASES)]:
        if {block + site for site in has} <= names and not {block + site for site in has_not} & names:
            rows += some
    return rows


def same_value(site: str, names: Collection[str], scaled: bool = False) -> str:
    """Returns the site with the same value as a site inside a block, or the site itself if there is none.

    `scaled`: whether the block multiplies the outputs of its sublayers before adding them to the stream.

    >>> same_value(
    ...     "blocks.2.mlp.hook_out", ["blocks.2.mlp.hook_out", "blocks.2.hook_mlp_out"]
    ... )
    'blocks.2.hook_mlp_out'
    """
    block = re.match(r".*?\.\d+\.", site)
    if block is None:
        return site
    rows = block_aliases(set(names), block[0], scaled)
    found = [block[0] + name for alias, name in rows if block[0] + alias == site]
    return next((name for name in found if name in names), site)


def _existing(rows: Iterable[tuple[str, str]], names: set[str]) -> dict[str, str]:
    """Alias -> name of the rows whose site exists; the first row of an alias applies, and no alias hides a site."""
    found: dict[str, str] = {}
    for alias, name in rows:
        if name in names and alias not in names:
            found.setdefault(alias, name)
    return found
