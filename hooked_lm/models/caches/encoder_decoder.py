"""The cache of an encoder-decoder's run, and the short names of its sites."""

from operator import index
from typing import Any

from torch import Tensor

from hooked_lm.hooks import Cache
from hooked_lm.models.names import checked_index, get_act_name


def site_name(site: Any, n_layers: dict[str, int]) -> str:
    """The full name of a site given as ("decoder.z", layer) or ("decoder.z", layer, "cross_attn"), else as it is.

    `n_layers` is that of either side. Negative layers count from the end; IndexError for one that there is not.

    >>> site_name(("decoder.z", -1, "cross_attn"), {"encoder": 2, "decoder": 3})
    'decoder.2.cross_attn.hook_z'
    >>> site_name(("encoder.resid_post", 0), {"encoder": 2, "decoder": 3})
    'encoder.0.hook_resid_post'
    """
    if not isinstance(site, tuple):
        return str(site)
    name, layer, *sublayer = site
    side, _, short = name.partition(".")
    if side not in n_layers or not short:
        raise KeyError(f"a short name begins with its side, as in ('decoder.z', 0), got {site!r}")
    layer = checked_index(index(layer), n_layers[side], f"{side} layer")
    if sublayer == ["cross_attn"]:
        return f"{side}.{layer}.cross_attn.hook_{short}"
    return side + get_act_name(short, layer, *sublayer).removeprefix("blocks")


class EncoderDecoderActivations(Cache):
    """Name -> tensor of one run, with short names: `cache["decoder.z", -1]`, `cache["decoder.pattern", 0, "cross_attn"]`."""

    def __init__(self, cache_dict: dict[str, Tensor], model: Any, has_batch_dim: bool = True) -> None:
        super().__init__(cache_dict, has_batch_dim)
        self.model = model

    def _with(self, cache_dict: dict[str, Tensor], has_batch_dim: bool | None = None) -> "EncoderDecoderActivations":
        has_batch_dim = self.has_batch_dim if has_batch_dim is None else has_batch_dim
        return EncoderDecoderActivations(cache_dict, self.model, has_batch_dim)

    def dims_of(self, site: str) -> tuple[str, ...]:
        """The names of the axes at a site, batch included; empty for what the model has no such site for."""
        points = self.model.hook_dict
        return points[site].dims if site in points else ()

    def full_name(self, key: Any) -> str:
        """The name that a short one or another library's name means; "_grad" may follow any of them."""
        if not isinstance(key, tuple):
            first, bare = str(key), str(key).removesuffix("_grad")
            name = self.model.aliases.get(bare, bare)
        else:
            first, bare = key[0], key[0].removesuffix("_grad")
            name = self.model.site_name((bare, *key[1:]))
        ending = first[len(bare) :]
        if name + ending not in self.cache_dict and (same := self.model.same_value(name) + ending) in self.cache_dict:
            return same
        return name + ending
