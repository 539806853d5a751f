"""Layers that share weights: one set of parameters, with hook points and cache entries for each layer."""

from collections.abc import Hashable, Iterator, Mapping

import torch
from torch import Tensor

from hooked_lm.hooks import HookedRootModule


def shared_parts(model: HookedRootModule) -> Iterator[tuple[str, str]]:
    """(a part of a block, the part of an earlier block whose weights it shares), by their names in the model.

    An encoder's `shares` are of whole blocks. A block names the parts within it that share weights (`shared_within`).
    """
    first: dict[Hashable, str] = {}
    sets = getattr(model.cfg.tree, "shares", None) or ()
    for layer, block in enumerate(getattr(model, "blocks", ())):
        parts: Mapping[str, Hashable] = {"": sets[layer]} if sets else {}
        if (shared_set := getattr(getattr(block, "cfg", None), "shared_set", None)) is not None:
            parts = dict.fromkeys(block.shared_parts, shared_set)
        for part, shared_set in parts.items():
            name = f"blocks.{layer}.{part}".rstrip(".")
            source = first.setdefault((part, shared_set), name)
            if source != name:
                yield name, source
    for name, block in model.named_modules():
        for part, source in getattr(block, "shared_within", ()):
            yield f"{name}.{part}", f"{name}.{source}"


def share_weights(model: HookedRootModule) -> None:
    """Gives parts that share weights one set of parameters; hook points stay separate."""
    for name, source in shared_parts(model):
        shared = dict(model.get_submodule(source).named_modules())
        for part, own in model.get_submodule(name).named_modules():
            if own._parameters and getattr(own, "shares_weights", True):
                own._parameters = shared[part]._parameters  # one dictionary, so replacing a weight replaces it for all


def check_shared(model: HookedRootModule, state_dict: Mapping[str, Tensor]) -> None:
    """Raises ValueError for different values of a weight that layers share."""
    for part, origin in shared_parts(model):
        shared = dict(model.get_submodule(origin).named_parameters())
        for leaf in (leaf for leaf, own in model.get_submodule(part).named_parameters() if own is shared[leaf]):
            name, source = f"{part}.{leaf}", f"{origin}.{leaf}"
            if name in state_dict and source in state_dict and not torch.equal(state_dict[name], state_dict[source]):
                raise ValueError(f"'{name}' differs from '{source}', but these layers share their weights")
