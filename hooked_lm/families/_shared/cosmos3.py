"""Shared code for the language models of Cosmos 3: their files have the names of diffusers, and a generator of images."""

from hooked_lm.families._shared.reader import HFConfig

# names in files -> names of transformers
RENAMED = {
    r"\.self_attn\.to_([qkv])\.": r".self_attn.\1_proj.",
    r"\.self_attn\.to_out\.": ".self_attn.o_proj.",
    r"\.self_attn\.norm_([qk])\.": r".self_attn.\1_norm.",
}


def text_names(_: HFConfig) -> dict[str, str | None]:
    """The generator's weights are in the layers of the language model."""
    return dict.fromkeys(("moe_gen", r"\.add_\w_proj", r"\.to_add_out", r"\.norm_added_\w", r"\.k_norm_und_for_gen"))
