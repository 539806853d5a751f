"""Models from checkpoints, and checkpoints from models. The only importer of transformers, and only when called.

A hub id becomes a directory first; everything after that reads the directory. The family of a checkpoint is found by
its `model_type` and by nothing else, so a fine-tuned model loads under whatever name it has.
"""

from hooked_lm.families import supported
from hooked_lm.hub.compare import verify
from hooked_lm.hub.export import save_pretrained, to_hf
from hooked_lm.hub.load import from_pretrained, from_pretrained_no_processing
from hooked_lm.hub.source import named_tokenizer, short_names

__all__ = [
    "from_pretrained",
    "from_pretrained_no_processing",
    "named_tokenizer",
    "save_pretrained",
    "short_names",
    "supported",
    "to_hf",
    "verify",
]
