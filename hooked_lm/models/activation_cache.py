"""ActivationCache: the cache of a HookedTransformer's run, and what can be read off it."""

from typing import Any

from torch import Tensor

from hooked_lm.hooks import Cache


class ActivationCache(Cache):
    """Name -> tensor of one run, with short names: `cache["z", 5]`, `cache["resid_post", -1]`, `cache["k6"]`."""

    def __init__(self, cache_dict: dict[str, Tensor], model: Any, has_batch_dim: bool = True) -> None:
        super().__init__(cache_dict, has_batch_dim)
        self.model = model

    def _with(self, cache_dict: dict[str, Tensor], has_batch_dim: bool | None = None) -> "ActivationCache":
        return ActivationCache(cache_dict, self.model, self.has_batch_dim if has_batch_dim is None else has_batch_dim)

    def full_name(self, key: Any) -> str:
        """The name that a short one, a tuple or another library's name means."""
        name = self.model.aliases.get(key, key) if isinstance(key, str) else key
        name = self.model.site_name(name)
        return self.model.aliases.get(name, name)
