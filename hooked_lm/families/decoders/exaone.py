"""EXAONE 3.0 and 3.5 (LG AI Research 2024, arXiv:2408.03541): LLaMA, in files with names of tensors like those of GPT-2."""

from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families.decoders.llama import config

__all__ = ["IGNORED", "PREFIX", "RENAMED", "config", "rows"]

# names in files -> names of transformers (conversion_mapping.py, "exaone")
RENAMED = {
    r"^transformer\.wte\.": "model.embed_tokens.",
    r"^transformer\.h\.": "model.layers.",
    r"^transformer\.ln_f\.": "model.norm.",
    r"\.attn\.attention\.": ".self_attn.",
    r"\.self_attn\.out_proj\.": ".self_attn.o_proj.",
    r"\.ln_1\.": ".input_layernorm.",
    r"\.ln_2\.": ".post_attention_layernorm.",
    r"\.mlp\.c_fc_0\.": ".mlp.gate_proj.",
    r"\.mlp\.c_fc_1\.": ".mlp.up_proj.",
    r"\.mlp\.c_proj\.": ".mlp.down_proj.",
}
