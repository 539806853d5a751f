"""The classes of TransformerLens for components: for `isinstance`, for subclasses, and for construction from a flat config.

TransformerLens has a class where hooked_lm has an option in a config: `LayerNormPre` is a LayerNorm without weights,
`GroupedQueryAttention` an Attention whose heads share keys. So each name defines `is_one`, the predicate for `isinstance`, and
`plan`, which returns the class of hooked_lm and its arguments for a flat config. Calling the name builds that module. A
user's subclass is a subclass of the class of hooked_lm, with an `__init__` that takes the flat config.
"""

from abc import ABCMeta
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hooked_lm.models.config import build
from hooked_lm.models.config.flat import HookedEncoderConfig, HookedTransformerConfig

Flat = HookedTransformerConfig | dict[str, Any]
Plan = tuple[Any, ...]  # a class of hooked_lm, and its arguments


class PublicName(ABCMeta):
    """The metaclass of names: calling one builds a module of hooked_lm, and `isinstance` calls `is_one`.

    Subclasses that users define are ordinary classes.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) if "is_one" not in cls.__dict__ else cls._make(*args, **kwargs)

    def _make(cls, cfg: Flat, *args: Any, **kwargs: Any) -> Any:
        kind, *parts = cls.plan(cfg, *args, **kwargs)  # type: ignore[attr-defined]
        return super().__call__(cfg, *args, **kwargs) if kind is cls else to_dtype(kind(*parts), cfg)

    def __instancecheck__(cls, module: Any) -> bool:
        return super().__instancecheck__(module) or ("is_one" in cls.__dict__ and cls.__dict__["is_one"](module))


class Part(nn.Module):
    """The base of subclasses, whose `__init__` takes a flat config instead of a nested one."""

    plan: Callable[..., Plan]  # the class of hooked_lm for a flat config, and its arguments

    def __init__(self, cfg: Flat, *args: Any, **kwargs: Any) -> None:
        kind, *parts = self.plan(cfg, *args, **kwargs)
        if not isinstance(self, kind):
            raise ValueError(f"this config describes a {kind.__name__}, and {type(self).__name__} is no subclass of it")
        super().__init__(*parts)
        to_dtype(self, cfg)


def to_dtype(module: nn.Module, cfg: Flat) -> nn.Module:
    """The module, converted to the config's dtype."""
    dtype = cfg.get("dtype", torch.float32) if isinstance(cfg, dict) else cfg.dtype
    return module.to(dtype=getattr(torch, str(dtype).removeprefix("torch.")))


def flat(cfg: Flat, **changes: Any) -> SimpleNamespace:
    """The fields of a flat config or a dict, with changes.

    A dict may contain fields that a whole model would refuse, such as `window_size` without `use_local_attn`.
    """
    whole = {"use_local_attn": False, **cfg} if isinstance(cfg, dict) else cfg
    return SimpleNamespace(**{**vars(HookedTransformerConfig.unwrap(whole)), **changes})


def block_of(cfg: Flat, layer: int = 0, **changes: Any) -> Any:
    """The config of a block for a flat config, also for one of a checkpoint."""
    names = flat(cfg, **changes)
    if not 0 <= layer < max(names.n_layers, 1):
        raise ValueError(f"no layer {layer}: the config has {names.n_layers}")
    names.n_layers = layer + 1
    return build.decoder(names).blocks[layer]


def encoder_tree(cfg: Flat) -> Any:
    """The config tree of an encoder for a flat config."""
    return HookedEncoderConfig.unwrap(cfg).tree
