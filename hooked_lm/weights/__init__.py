"""Checkpoints as data: names and tensors, without a model library.

`Row` states how one weight of theirs becomes one of ours, `load` and `export` apply rows to a whole model
in either direction, `open_checkpoint` maps a checkpoint's files. Works on any `nn.Module`.
"""

from hooked_lm.weights.loading import compact, compact_model, export, load, plan_export, slots
from hooked_lm.weights.rows import Row, expand, unprefixed
from hooked_lm.weights.shards import Checkpoint, open_checkpoint
from hooked_lm.weights.write import write_safetensors

__all__ = [
    "Checkpoint",
    "Row",
    "compact",
    "compact_model",
    "expand",
    "export",
    "load",
    "open_checkpoint",
    "plan_export",
    "slots",
    "unprefixed",
    "write_safetensors",
]
