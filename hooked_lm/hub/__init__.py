"""Models from checkpoints, and checkpoints from models. The only importer of transformers, and only when called.

`load` reads a checkpoint in the format of transformers or of TransformerLens, `save_pretrained` and `to_hf` write one.
A checkpoint's family is found by its `model_type` and by nothing else, so a fine-tuned model loads under whatever name it
has. `hooked_lm.pretrained` has the classes that users load.
"""

from hooked_lm.families import supported
from hooked_lm.hub.compare import verify
from hooked_lm.hub.export import save_pretrained, to_hf
from hooked_lm.hub.files import named_tokenizer
from hooked_lm.hub.load import load
from hooked_lm.hub.names import short_names

__all__ = ["load", "named_tokenizer", "save_pretrained", "short_names", "supported", "to_hf", "verify"]
