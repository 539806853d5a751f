"""Untrained twins of models: the same config, and random weights."""

from weakref import WeakKeyDictionary

import torch
from torch import nn

from hooked_lm.models.base import BaseModel
from hooked_lm.models.dry_run import dry_run_now

MOST_PARAMETERS = 10_000_000  # of a model whose twin is small, and kept
Twins = dict[tuple[int, torch.dtype, torch.device], BaseModel]

_twins: "WeakKeyDictionary[BaseModel, Twins]" = WeakKeyDictionary()


def has_small_twin(model: nn.Module) -> bool:
    """Whether a module is a model of this package with at most ten million parameters."""
    return isinstance(model, BaseModel) and sum(weight.numel() for weight in model.parameters()) <= MOST_PARAMETERS


def twin_of(model: nn.Module, seed: int = 0) -> BaseModel:
    """The untrained twin of a model; that of a small one is made once. Raises TypeError for another module.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> twin_of(model) is twin_of(model), twin_of(model) is twin_of(model, seed=1)
    (True, False)
    """
    if not isinstance(model, BaseModel):
        raise TypeError(f"an untrained twin is that of a model of this package, got a {type(model).__name__}")
    if not has_small_twin(model):
        return model.untrained(seed)
    weight = next(model.parameters())
    key, made = (seed, weight.dtype, weight.device), {} if dry_run_now() else _twins.setdefault(model, {})
    if key not in made:
        made[key] = model.untrained(seed).eval()
    return made[key]
