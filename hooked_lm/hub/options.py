"""What the options of `from_pretrained` mean; what cannot be honoured is refused."""

import fnmatch
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hooked_lm.components.embed import PosEmbed
from hooked_lm.families._short_names import CHECKPOINTS
from hooked_lm.hub.model_classes import Tree
from hooked_lm.hub.source import hub_id
from hooked_lm.models.config.encoder import EncoderConfig
from hooked_lm.models.config.encoder_decoder import EncoderDecoderConfig
from hooked_lm.models.config.tree import DecoderConfig


def one_device(device: Any, device_map: Any, n_devices: int, move_to_device: bool) -> torch.device:
    if n_devices != 1:
        raise ValueError(f"n_devices={n_devices}: a model lives on one device; leave n_devices out")
    if isinstance(device_map, Mapping) and len(set(device_map.values())) == 1:
        device_map = next(iter(device_map.values()))
    if device_map is not None:
        if device is not None or isinstance(device_map, Mapping) or device_map in ("auto", "balanced", "sequential"):
            raise ValueError(f"device_map={device_map!r}: a model lives on one device; name it with device=")
        device = device_map
    if not move_to_device:
        return torch.device("cpu")
    return torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")


def real_dtype(dtype: torch.dtype | str, tensors: Mapping[str, Tensor]) -> torch.dtype:
    if dtype == "auto":
        return next((t.dtype for t in tensors.values() if t.is_floating_point()), torch.float32)
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype={dtype!r} is not a floating point type; e.g. 'float32', torch.bfloat16 or 'auto'")
    return found


def published_steps(model_name: str) -> tuple[str, tuple[int, ...]]:
    """The name of the revision of a step, and the steps that were saved; ValueError if none are known."""
    for glob, run in CHECKPOINTS.items():
        if fnmatch.fnmatchcase(hub_id(model_name), glob):
            return run
    raise ValueError(
        f"no checkpoints of {model_name!r} are known; known are those of {', '.join(CHECKPOINTS)}. "
        "revision= names any revision of a repository"
    )


def checkpoint_step(
    model_name: str, index: int | None, value: int | None, revision: str | None
) -> tuple[int | None, str | None]:
    """The training step that `checkpoint_index` or `checkpoint_value` means, and the revision that holds it."""
    if index is None and value is None:
        return None, revision
    if (index is not None) + (value is not None) + (revision is not None) > 1:
        raise ValueError("give one of checkpoint_index, checkpoint_value and revision, not two of them")
    pattern, steps = published_steps(model_name)
    if index is not None:
        if not -len(steps) <= index < len(steps):
            raise IndexError(f"checkpoint_index {index} is out of range: there are {len(steps)}")
        value = steps[index]
    assert value is not None
    if value not in steps:
        near = sorted(steps, key=lambda step: abs(step - value))[:2]
        raise ValueError(f"no checkpoint at step {value}; the nearest are {near}")
    return value, pattern.format(value)


def _is_rotary(block: Any) -> bool:
    return getattr(getattr(block, "attn", None), "rotary", None) is not None


def with_limits(tree: Tree, first_n_layers: int | None, n_ctx: int | None) -> Tree:
    """A tree of fewer layers (a decoder's), or for prompts of another length."""
    if first_n_layers is not None:
        if not isinstance(tree, DecoderConfig):
            raise ValueError("first_n_layers is for decoders only")
        if not 1 <= first_n_layers <= len(tree.blocks):
            raise ValueError(f"first_n_layers={first_n_layers}: the checkpoint has {len(tree.blocks)} layers")
        tree = replace(tree, blocks=tree.blocks[:first_n_layers])
    if n_ctx is not None:
        if isinstance(tree, EncoderDecoderConfig):
            raise ValueError("n_ctx is for decoders and encoders, not for encoder-decoders")
        positions = tree.embed.pos_embed if isinstance(tree, EncoderConfig) else tree.pos_embed
        learned = positions.n_ctx if isinstance(positions, PosEmbed.Config) else None
        if n_ctx < 1 or (learned is not None and n_ctx > learned):
            rows = f" and embeddings for {learned} positions" if learned is not None else ""
            raise ValueError(f"n_ctx={n_ctx}: the checkpoint has n_ctx {tree.n_ctx}{rows}")
        if n_ctx > tree.n_ctx and any(_is_rotary(block) for block in tree.blocks):
            warnings.warn(
                f"n_ctx={n_ctx}: the checkpoint has n_ctx {tree.n_ctx}, and predictions at later positions, which it was "
                "not trained on, may be poor",
                stacklevel=2,
            )
        tree = replace(tree, n_ctx=n_ctx)
    return tree
