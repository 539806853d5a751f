"""The parts of a model under their public names: for `isinstance`, for subclasses, and built from a whole model's flat config.

Where ours say in their configs what they are, the public names say it by their class: `LayerNormPre` is a LayerNorm without
weights, `GroupedQueryAttention` an Attention whose heads share keys. So a name here is a question, `is_one`, that `isinstance`
asks of any module, and a plan: which class of ours, with which nested config, the flat config describes. Calling the name makes
just that module. A subclass of somebody's is a subclass of ours, whose `__init__` takes the flat config.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hooked_lm.models.config import build
from hooked_lm.models.config.flat import HookedEncoderConfig, HookedTransformerConfig

Flat = HookedTransformerConfig | dict[str, Any]
Plan = tuple[Any, ...]  # a class of ours, and what it is built from


class PublicName(type):
    """A class that is only a name: calling it makes a module of ours, and such modules are its instances.

    For a subclass of somebody's neither holds: it is an ordinary class.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) if "is_one" not in cls.__dict__ else cls._make(*args, **kwargs)

    def _make(cls, cfg: Flat, *args: Any, **kwargs: Any) -> Any:
        kind, *parts = cls.plan(cfg, *args, **kwargs)  # type: ignore[attr-defined]
        return super().__call__(cfg, *args, **kwargs) if kind is cls else placed(kind(*parts), cfg)

    def __instancecheck__(cls, module: Any) -> bool:
        return super().__instancecheck__(module) or ("is_one" in cls.__dict__ and cls.__dict__["is_one"](module))


class Part(nn.Module):
    """What a name's subclasses begin with: the flat config instead of the nested one."""

    plan: Callable[..., Plan]  # which class of ours a flat config describes here, and what that is built from

    def __init__(self, cfg: Flat, *args: Any, **kwargs: Any) -> None:
        kind, *parts = self.plan(cfg, *args, **kwargs)
        if not isinstance(self, kind):
            raise ValueError(f"a {type(self).__name__} cannot be the {kind.__name__} that this config describes")
        super().__init__(*parts)
        placed(self, cfg)


def placed(module: nn.Module, cfg: Flat) -> nn.Module:
    """A new module with weights of the config's dtype."""
    dtype = cfg.get("dtype", torch.float32) if isinstance(cfg, dict) else cfg.dtype
    return module.to(dtype=getattr(torch, str(dtype).removeprefix("torch.")))


def flat(cfg: Flat, **changes: Any) -> SimpleNamespace:
    """The flat names of a config or a dict, some of them changed.

    A dict may hold what a part needs and a whole model would not, such as `window_size` without `use_local_attn`.
    """
    whole = {"use_local_attn": False, **cfg} if isinstance(cfg, dict) else cfg
    return SimpleNamespace(**{**vars(HookedTransformerConfig.unwrap(whole)), **changes})


def block_of(cfg: Flat, layer: int = 0, **changes: Any) -> Any:
    """The config of a layer as flat names describe it, whatever checkpoint they came from."""
    names = flat(cfg, **changes)
    if not 0 <= layer < max(names.n_layers, 1):
        raise ValueError(f"no layer {layer}: the config has {names.n_layers}")
    names.n_layers = layer + 1
    return build.decoder(names).blocks[layer]


def encoder_tree(cfg: Flat) -> Any:
    """The encoder that flat names describe."""
    return HookedEncoderConfig.unwrap(cfg).tree
