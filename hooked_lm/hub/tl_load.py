"""Builds a model from a TransformerLens checkpoint."""

from collections.abc import Callable
from typing import Any

from hooked_lm.hub.options import Tree
from hooked_lm.hub.tl_checkpoint import TLCheckpoint
from hooked_lm.hub.tl_weights import in_public_names
from hooked_lm.models.weights.state import load_state


def load_tl(checkpoint: TLCheckpoint, class_of: Callable[[Tree], Any]) -> Any:
    """Returns the model of a checkpoint with unchanged weights. `class_of` maps a tree to a model class."""
    step = checkpoint.step()
    tensors = checkpoint.tensors(step)
    cfg = checkpoint.flat_config(tensors, step)
    assert cfg.tree is not None
    model_class, whole = class_of(cfg.tree), checkpoint.whole_config()
    beyond = tuple(f"blocks.{layer}." for layer in range(cfg.n_layers, whole.n_layers))
    weights = in_public_names(tensors, whole)
    given = checkpoint.options.tokenizer
    model = model_class(cfg, tokenizer=checkpoint.tokenizer() if given is None else given)
    load_state(model, {name: weight for name, weight in weights.items() if not name.startswith(beyond)})
    return model
