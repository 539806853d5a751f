"""Loads checkpoints in the format of transformers or of TransformerLens."""

from collections.abc import Callable
from typing import Any

from hooked_lm.hub.hf_checkpoint import find_hf
from hooked_lm.hub.hf_load import load_hf
from hooked_lm.hub.model_classes import model_class
from hooked_lm.hub.options import Options, Tree
from hooked_lm.hub.tl_checkpoint import find_tl
from hooked_lm.hub.tl_load import load_tl


def load(options: Options, class_of: Callable[[Tree], Any] = model_class) -> Any:
    """Returns the model of a checkpoint with unchanged weights. `class_of` maps a tree to a model class."""
    tl_checkpoint = find_tl(options) if options.hf_model is None else None
    if tl_checkpoint is not None:
        return load_tl(tl_checkpoint, class_of)
    return load_hf(find_hf(options), class_of)
