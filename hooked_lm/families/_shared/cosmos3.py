"""Shared code for the language models of Cosmos 3: their files have the names of diffusers, and a generator of images."""

# names in files -> names of transformers
RENAMED = {
    r"\.self_attn\.to_([qkv])\.": r".self_attn.\1_proj.",
    r"\.self_attn\.to_out\.": ".self_attn.o_proj.",
    r"\.self_attn\.norm_([qk])\.": r".self_attn.\1_norm.",
}
# the generator's weights in the layers of the language model
IGNORED = ("*moe_gen*", "*.add_?_proj.*", "*.to_add_out.*", "*.norm_added_?.*", "*.k_norm_und_for_gen.*")
