"""Loads checkpoints in the format of transformers, of TransformerLens, or of this library."""

import os
from collections.abc import Callable
from typing import Any

from hooked_lm.hub.hf_checkpoint import from_model, from_source
from hooked_lm.hub.hf_load import load_hf
from hooked_lm.hub.model_classes import model_class
from hooked_lm.hub.options import Options, Tree
from hooked_lm.hub.own import find_own, load_own
from hooked_lm.hub.source import TOKENIZER_FILES, WEIGHT_FILES, find
from hooked_lm.hub.tl_checkpoint import find_tl, load_tl


def load(model_name: str | os.PathLike[str], options: Options, class_of: Callable[[Tree], Any] = model_class) -> Any:
    """Returns the model of a checkpoint with unchanged weights. `class_of` maps a tree to a model class."""
    if options.hf_model is not None:
        source = find(model_name, TOKENIZER_FILES, **options.download)
        return load_hf(from_model(source, options), class_of)
    source = find(model_name, WEIGHT_FILES, **options.download)
    if (own := find_own(source, options)) is not None:
        return load_own(own, class_of)
    if (tl_checkpoint := find_tl(source, options)) is not None:
        return load_tl(tl_checkpoint, class_of)
    return load_hf(from_source(source, options), class_of)
