"""Checkpoints as names and tensors, without a model library. Works on any `nn.Module`.

A `Row` says which tensor of a checkpoint is which parameter of the model, and in which shape. `load` fills a model by rows,
`export` writes it back, `open_checkpoint` maps the files of a checkpoint.
"""

from hooked_lm.weights.exporting import export, plan_export
from hooked_lm.weights.loading import load
from hooked_lm.weights.parameters import compact, compact_model, slots
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
