"""The names that TransformerBridge has for sites of vision towers and projectors."""

import re
from collections.abc import Collection, Iterator

from hooked_lm.models.aliases import block_aliases

# In a block a tower has the aliases of a block of a decoder, other names of its parts, and other meanings of names.
PARTS = {"ln2.": "norm2.", "attn.o.": "attn.proj.", "mlp.in.": "mlp.linear_fc1.", "mlp.out.": "mlp.linear_fc2."}
MEANINGS = {"hook_mlp_in": "mlp.hook_in"}
BLOCK_PREFIXES = ("blocks.{}.", "encoder_layers.{}.")
# (whether the tower has a norm before its blocks, whether it has one after them; None: either; aliases outside of blocks).
# A tower with the first is CLIP's, whose last norm reads the class token alone in transformers.
FIRST, LAST = "blocks.0.hook_resid_pre", "blocks.{last}.hook_resid_post"
TOWER: list[tuple[bool | None, bool | None, list[tuple[str, str]]]] = [
    (
        True,
        None,
        [
            *((f"pre_layernorm.{site}", f"ln_pre.{site}") for site in ("hook_scale", "hook_normalized")),
            ("pre_layernorm.hook_out", FIRST),
            ("hook_out", LAST),
            ("hook_vision_out", LAST),
        ],
    ),
    (
        False,
        True,
        [
            ("embeddings.hook_out", FIRST),
            ("hook_vision_embed", FIRST),
            ("post_layernorm.hook_in", LAST),
            *((f"post_layernorm.{site}", f"ln_final.{site}") for site in ("hook_scale", "hook_normalized")),
        ],
    ),
    (
        False,
        False,
        [
            ("patch_embed.hook_out", "hook_patch_embed"),
            ("hook_vision_embed", "hook_patch_embed"),
            ("hook_out", LAST),
            ("hook_vision_out", LAST),
        ],
    ),
]
NORMALIZED_OUT = ("hook_out", "hook_vision_out", "post_layernorm.hook_out")  # what a projector may read
# our name in a projector -> its aliases
PROJECTOR = {"hook_in": ("hook_vision_proj_in",), "hook_out": ("hook_vision_proj_out", "hook_projected")}
# (names of TransformerBridge without a site here, our sites that show the value); a group is the block.
ATTENTION_IN = r"(?:hook_attn_in|ln1\.hook_out|norm1\.hook_out|attn\.(?:hook_in|(?:qkv|q|k|v)\.hook_in))"
BLOCK_OF = r"(?:blocks|encoder_layers)(\.\d+\.)"
ABSENT = [
    (BLOCK_OF + r"attn\.qkv\.hook_out", "vision.blocks{0}attn.hook_q, hook_k and hook_v"),
    (BLOCK_OF + ATTENTION_IN, "vision.blocks{0}ln1.hook_normalized, before the weights of the norm"),
    (BLOCK_OF + r"mlp\.(?:in|gate)\.hook_in", "vision.blocks{0}mlp.hook_in, which both projections read"),
    (BLOCK_OF + r"(?:ln1|norm1)\.hook_in", "vision.blocks{0}hook_resid_pre, which the stream reads too"),
    (r"(?:embeddings\.hook_out|hook_vision_embed|pre_layernorm\.hook_in|pos_embed\.hook_(?:in|out))",
     "vision.hook_patch_embed and vision.hook_pos_embed"),
    (r"(?:post_layernorm\.hook_\w+|hook_out|hook_vision_out)", "vision.ln_final.hook_normalized and projector.hook_in"),
    (r"(?:(?:embeddings|patch_embed)\.)?hook_in", "vision.hook_patch_embed; pixels are an argument of the run"),
]  # fmt: skip


def aliases(
    names: Collection[str], n_layers: int, scaled: Collection[int] = (), reads_output: bool = False
) -> dict[str, str]:
    """Alias -> our name, for the sites of a model with a tower of `n_layers` and a projector.

    `scaled` are the layers that multiply the outputs of their sublayers before adding them to the stream; with `reads_output`
    the projector reads the normalised output of the tower, all of it.
    """
    inside = {part: [n.removeprefix(part) for n in names if n.startswith(part)] for part in ("vision.", "projector.")}
    tower = _of_tower(set(inside["vision."]), n_layers, scaled)
    found = {f"vision_encoder.{alias}": f"vision.{name}" for alias, name in tower.items()}
    if reads_output and "ln_final.hook_scale" in inside["vision."]:
        found |= {f"vision_encoder.{alias}": "projector.hook_in" for alias in NORMALIZED_OUT}
    for name in inside["projector."]:
        found |= {f"vision_projector.{alias}": f"projector.{name}" for alias in (name, *PROJECTOR.get(name, ()))}
        if name.startswith("deepstack."):
            found[f"vision_encoder.deepstack_mergers.{name.removeprefix('deepstack.')}"] = f"projector.{name}"
    return found


def _of_tower(names: set[str], n_layers: int, scaled: Collection[int]) -> dict[str, str]:
    """Alias -> our name, both without a prefix, for the sites of a tower; our own names are aliases too."""
    found = dict[str, str]()
    has = ("ln_pre.hook_scale" in names, "ln_final.hook_scale" in names)
    outside = [rows for *wanted, rows in TOWER if all(w in (None, h) for w, h in zip(wanted, has, strict=True))]
    for alias, name in (row for rows in outside for row in rows):
        found.setdefault(alias, name.format(last=n_layers - 1))
    for layer in range(n_layers):
        for alias, name in _of_block(names, f"blocks.{layer}.", layer in scaled):
            for prefix in BLOCK_PREFIXES:
                found.setdefault(prefix.format(layer) + alias, name)
    outside_blocks = (name for name in names if not name.startswith("blocks."))
    return {name: name for name in outside_blocks} | {alias: name for alias, name in found.items() if name in names}


def _of_block(names: set[str], block: str, scaled: bool) -> Iterator[tuple[str, str]]:
    """The aliases of the sites of a block, without its prefix, and their full names."""
    own = [name.removeprefix(block) for name in names if name.startswith(block)]
    same = [(name, name) for name in own if refusal(f"vision_encoder.{block}{name}") is None]
    for alias, name in [*MEANINGS.items(), *block_aliases(names, block, scaled), *same]:
        if block + name in names:
            yield alias, block + name
            yield from (
                (new + alias.removeprefix(old), block + name) for old, new in PARTS.items() if alias.startswith(old)
            )


def refusal(name: str) -> str | None:
    """Why a name of TransformerBridge is of no site; None for other names.

    >>> refusal("vision_encoder.blocks.3.attn.qkv.hook_out")
    "'vision_encoder.blocks.3.attn.qkv.hook_out' is no site here: see vision.blocks.3.attn.hook_q, hook_k and hook_v"
    """
    for pattern, ours in ABSENT:
        if match := re.fullmatch(r"vision_encoder\." + pattern, name):
            return f"{name!r} is no site here: see {ours.format(*match.groups())}"
    return None
