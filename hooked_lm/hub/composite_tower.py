"""The vision towers of composite checkpoints, alone.

One rule finds the tower of any composite: its config is the innermost `vision_config`, and the position of the embedding of
patches among the tensor names shows the prefix of its tensors. All else is left out: text, projectors, mergers. A projection into
the space of texts, as in a checkpoint of the tower alone, is kept.
"""

import copy
import fnmatch
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

from torch import Tensor

from hooked_lm.components.vision.heads import ClassToken
from hooked_lm.families import VISION_ENCODERS, family
from hooked_lm.hub.composite import CompositePart, left_out_module, united
from hooked_lm.hub.renamed import present_name
from hooked_lm.models.config.read import Tree
from hooked_lm.models.config.tree import VisionConfig, VisionLanguageConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WithTower = VisionConfig | VisionLanguageConfig
PARTS = ("thinker_config", "vision_config")


def vision_config(config: "PreTrainedConfig") -> "PreTrainedConfig | None":
    """A copy of the config of a composite's vision tower; None for any other config."""
    inner = config
    while (
        deeper := next((part for name in PARTS if (part := getattr(inner, name, None)) is not None), None)
    ) is not None:
        inner = deeper
    if inner is config:
        return None
    found = copy.deepcopy(inner)
    if "projection_dim" in type(found)().to_dict() and hasattr(config, "projection_dim"):  # CLIP: that of the tensors
        found.projection_dim = config.projection_dim
    return found


def tower_family(config: "PreTrainedConfig", vision: "PreTrainedConfig") -> ModuleType:
    """The family of a composite's vision tower. Raises ValueError if there is none."""
    try:
        return family(vision.model_type, *VISION_ENCODERS.values())
    except ValueError as error:
        raise ValueError(f"the vision tower of this {config.model_type} cannot be loaded: {error}") from error


def tower(tensors: Mapping[str, Tensor], module: ModuleType, tree: Tree) -> CompositePart:
    """The tensors of the vision tower among those of a composite.

    Raises ValueError if there is no embedding of patches or more than one, and for tensors of the tower that no row reads.
    """
    rows = module.rows(tree)
    inside = {row.source.removeprefix(module.PREFIX) for row in rows if row.source.startswith(module.PREFIX)}
    beside = {row.source for row in rows if not row.source.startswith(module.PREFIX)}
    roots = {source.split(".")[0] for source in inside}
    embedding = next(row.source for row in rows if row.target == "embed.W_E")
    prefix = _prefix(tensors, embedding.removeprefix(module.PREFIX))
    outer = prefix.removesuffix(module.PREFIX)
    names, unread, left_out = dict[str, str](), list[str](), Counter[str]()
    for name in tensors:
        rest = present_name(name.removeprefix(prefix), getattr(module, "RENAMED", {}))
        root = rest.split(".")[0]
        if name.removeprefix(outer) in beside:
            names[name.removeprefix(outer)] = name
        elif not name.startswith(prefix) or root not in roots:
            left_out[prefix + root if prefix and name.startswith(prefix) else left_out_module(name)] += 1
        elif rest in inside or any(fnmatch.fnmatchcase(rest, glob) for glob in module.IGNORED):
            names[module.PREFIX + rest] = name
        else:
            unread.append(name)
    if unread:
        more = f" and {len(unread) - 4} more" if len(unread) > 4 else ""
        kind = module.__name__.rpartition(".")[2]
        raise ValueError(f"the vision tower has tensors that a {kind} has not: {', '.join(unread[:4])}{more}")
    return CompositePart(tensors, names, united(left_out))


def adjusted_to_tensors(tree: WithTower, module: ModuleType, tensors: Mapping[str, Tensor]) -> WithTower:
    """The tree without a pooler whose weights the composite lacks: what reads patches needs none."""
    vision = tree if isinstance(tree, VisionConfig) else tree.vision
    weights = {row.source for row in module.rows(tree) if row.target.removeprefix("vision.").startswith("pooler.")}
    if not weights or weights & tensors.keys() or isinstance(vision.pooler, ClassToken.Config):
        return tree
    without = replace(vision, pooler=None)
    return without if isinstance(tree, VisionConfig) else replace(tree, vision=without)


def _prefix(tensors: Mapping[str, Tensor], embedding: str) -> str:
    """The prefix of the names of the tower. Raises ValueError unless one tensor has the name of its embedding."""
    found = [name for name in tensors if name == embedding or name.endswith(f".{embedding}")]
    if len(found) != 1:
        which = ", ".join(found) or f"the first tensors are {', '.join(sorted(tensors)[:3])}"
        raise ValueError(
            f"{len(found)} tensors have the name of a vision tower's embedding of patches, which ends in {embedding!r}: {which}"
        )
    return found[0].removesuffix(embedding)
