"""Loads models from checkpoints and writes them. The only package that imports transformers, inside functions only.

`load` reads a checkpoint in the format of transformers, TransformerLens or this library; `save_pretrained` and `to_hf` write the
first, `save` the last. Only the
`model_type` of the config determines the family, so fine-tuned models load under any name. `hooked_lm.pretrained` has the
user-facing classes.
"""

from hooked_lm.families import supported
from hooked_lm.hub.compare import verify
from hooked_lm.hub.export import save_pretrained, to_hf
from hooked_lm.hub.load import checked_name, load
from hooked_lm.hub.lora import LoRA, adapter_scope
from hooked_lm.hub.names import short_names
from hooked_lm.hub.native import save
from hooked_lm.hub.source import named_tokenizer
from hooked_lm.keywords import answer_keywords

__all__ = [
    "LoRA",
    "adapter_scope",
    "checked_name",
    "load",
    "named_tokenizer",
    "save",
    "save_pretrained",
    "short_names",
    "supported",
    "to_hf",
    "verify",
]

answer_keywords(__name__)
