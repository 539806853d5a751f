"""Resolves short names of sites to full names."""

import re
from operator import index
from types import NoneType
from typing import Any, SupportsIndex

from hooked_lm.errors import ArgumentError

ATTENTION = {"q", "k", "v", "z", "rot_q", "rot_k", "attn_scores", "pattern", "result"}
MLP = {"pre", "pre_linear", "mid", "post", "router_logits", "expert_weights", "expert_indices"}
MIXER = {"x", "gate", "conv", "dt", "B", "C", "r", "i", "a", "state", "y"}
MIXER |= {"conv_q", "conv_k", "conv_v", "g", "beta"}  # q, k, v and z are those of attention
NORM = {"scale", "normalized"}
SUBLAYERS = {"a": "attn", "attention": "attn", "m": "mlp", "b": "", "block": "", "blocks": ""}
SYNONYMS = {
    "attn": "pattern",
    "attn_logits": "attn_scores",
    "query": "q",
    "key": "k",
    "value": "v",
    "mlp_pre": "pre",
    "mlp_mid": "mid",
    "mlp_post": "post",
    "lm.layer.pre": "resid_pre",
    "lm.layer.post": "resid_post",
    "lm.attn.pre": "attn_in",
    "lm.attn.out": "attn_out",
    "lm.mlp.out": "mlp_out",
}
BY_HEAD = ("pattern", "attn_scores", "attn", "attn_logits")  # [batch, head, ...]
PACKED = re.compile(r"([a-z_]+)(\d+)([a-z]?.*)")  # "scale4ln1"


def get_act_name(name: str, layer: int | str | None = None, layer_type: str | None = None) -> str:
    """The full name of a site from a short one, as in `cache["z", 5]`.

    `layer_type` is "a"/"attn", "m"/"mlp", "b"/"block" or a norm's name. A short name may hold everything: "k6",
    "scale4ln1". A full name comes back unchanged.

    >>> (
    ...     get_act_name("pre", 2),
    ...     get_act_name("k6"),
    ...     get_act_name("scale4ln1"),
    ...     get_act_name("normalized"),
    ... )
    ('blocks.2.mlp.hook_pre', 'blocks.6.attn.hook_k', 'blocks.4.ln1.hook_scale', 'ln_final.hook_normalized')
    """
    name = SYNONYMS.get(name, name)
    if name.startswith("blocks.") and layer is not None:
        if name.split(".")[1] != str(layer):
            raise ValueError(f"'{name}' includes its layer, but layer {layer} was also given")
        return name
    if "hook_" in name:
        return name if layer is None else f"blocks.{layer}.{name}"
    if packed := PACKED.fullmatch(name):
        name, layer, layer_type = packed[1], packed[2], packed[3] or layer_type
        name = SYNONYMS.get(name, name)
    if name in ATTENTION:
        part = "attn"
    elif name in MLP:
        part = "mlp"
    elif name in MIXER:
        part = "mixer"
    elif name in NORM and layer is None:
        part = "ln_final"
    else:
        part = SUBLAYERS.get(layer_type or "", layer_type or "")
    block = "" if layer is None else f"blocks.{layer}."
    return f"{block}{part}{'.' if part else ''}hook_{name}"


def site_name(site: object, n_layers: int, stack: str = "") -> str:
    """The full name of a short name or a tuple (name, layer[, sublayer]); negative layers count from the end.

    `stack` is that of an encoder-decoder. Raises IndexError for a layer that the model does not have, KeyError for a third part
    that is not the sublayer of that name, such as a head.
    """
    parts: list[Any] = list(site) if isinstance(site, tuple) else [site]
    if len(parts) > 3 or (len(parts) == 3 and not isinstance(parts[2], (str, NoneType))):
        key, before = f"{stack}{'.' * bool(stack)}{parts[0]}", ":" if parts[0] in BY_HEAD else ":, :"
        raise KeyError(
            f"a site is (name, layer) or (name, layer, sublayer), as in ('scale', 1, 'ln1'), got {(key, *parts[1:])}; a head or "
            f"a position is an index of the value: cache[{key!r}, {parts[1]}][{before}, {parts[-1]}], or heads={parts[-1]} of "
            "a hook"
        )
    if len(parts) > 1 and isinstance(parts[1], SupportsIndex):
        parts[1] = checked_index(index(parts[1]), n_layers, f"{stack} layer".strip())
    gradient = isinstance(parts[0], str) and parts[0].endswith("_grad") and len(parts) > 1
    if gradient:
        parts[0] = parts[0].removesuffix("_grad")
    name, packed = get_act_name(*parts), PACKED.fullmatch(parts[0]) if len(parts) == 1 else None
    bare, given = (packed.group(1, 2), packed[3]) if packed else (parts[:2], parts[2] if len(parts) == 3 else None)
    full = stack + name.removeprefix("blocks") if stack else name
    if given and name.split(".")[-2:-1] != [SUBLAYERS.get(given, given)] and name == get_act_name(*bare):
        raise KeyError(f"{bare[0]!r} of a layer is {full!r}, which is not in {given!r}: leave out the third part")
    return full + ("_grad" if gradient else "")


def side_site_name(site: object, n_layers: dict[str, int]) -> str:
    """The full name of a site given as ("decoder.z", layer) or ("decoder.z", layer, "cross_attn"); full names unchanged.

    `n_layers` by side. Negative layers count from the end; IndexError if out of range.

    >>> side_site_name(("decoder.z", -1, "cross_attn"), {"encoder": 2, "decoder": 3})
    'decoder.2.cross_attn.hook_z'
    >>> side_site_name(("encoder.resid_post", 0), {"encoder": 2, "decoder": 3})
    'encoder.0.hook_resid_post'
    """
    if not isinstance(site, tuple):
        return str(site)
    name, layer, *sublayer = site
    side, _, short = name.partition(".")
    if side not in n_layers or not short:
        raise KeyError(f"a short name begins with its side, as in ('decoder.z', 0), got {site!r}")
    if sublayer == ["cross_attn"]:
        return f"{side}.{checked_index(index(layer), n_layers[side], f'{side} layer')}.cross_attn.hook_{short}"
    return site_name((short, layer, *sublayer), n_layers[side], side)


def checked_index(index: int, length: int, what: str, owner: str = "the model") -> int:
    """The non-negative form of an index; IndexError with the valid range."""
    if not -length <= index < length:
        valid = f"{length}, so {-length} to {length - 1}" if length else "none"
        raise ArgumentError(f"{what} {index} is out of range: {owner} has {valid}")
    return index % length
