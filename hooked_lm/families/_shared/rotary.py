"""Translates a checkpoint's `rope_parameters` into a Rotary config."""

import math
from collections.abc import Callable
from typing import Any

from hooked_lm.components.attention.position_scale import PositionScale
from hooked_lm.components.embeddings.rotary import Rotary, Scaling
from hooked_lm.components.embeddings.rotary_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    YarnScaling,
)
from hooked_lm.families._shared.reader import HFConfig

# How pairs are divided among the coordinates of an image, which are equal for text.
SECTIONS = ("mrope_section", "mrope_interleaved")


def rotary(
    hf: HFConfig, d_head: int, layer_type: str | None = None, adjacent_pairs: bool = False, partial: bool = False
) -> Rotary:
    """The rotary embedding that `rope_parameters` describes; `layer_type` selects the entry if there is one per layer type.

    `partial` allows architectures to rotate only part of a head. Raises ValueError for an unknown `rope_type`, for parameters
    that the type does not have, and for a partial rotation that is not allowed.
    """
    given = {name: value for name, value in parameters(hf, layer_type).items() if value is not None}
    for name in ("type", *SECTIONS):
        given.pop(name, None)
    kind = given.pop("rope_type", "default")
    if kind not in SCALINGS:
        raise ValueError(f"rope_type {kind!r} is not supported; supported are {', '.join(SCALINGS)}")
    if not partial and kind != "proportional" and given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor={given['partial_rotary_factor']}: this architecture turns whole heads")
    dim = d_head if kind == "proportional" else int(d_head * given.pop("partial_rotary_factor", 1.0))
    theta = float(given.pop("rope_theta", 10000.0))
    scaling = SCALINGS[kind](given, hf.max_position_embeddings)
    if given:
        raise ValueError(f"rope_parameters of type {kind!r} have unknown fields: {given}")
    return Rotary(dim, theta, adjacent_pairs, scaling=scaling)


def position_scaled(hf: HFConfig) -> tuple[HFConfig, PositionScale]:
    """The config without the factor of late queries that `rope_parameters` has, and this factor; ValueError without one."""
    given = dict(hf.rope_parameters)
    given.pop("max_position_embeddings", None)  # repeats that of the config
    weight, length = given.pop("llama_4_scaling_beta", None), given.get("original_max_position_embeddings")
    if weight is None or length is None:
        raise ValueError("rope_parameters need llama_4_scaling_beta and original_max_position_embeddings")
    if given.get("rope_type", "default") in ("default", "linear", "dynamic"):  # they do not read it
        del given["original_max_position_embeddings"]
    return hf.changed(rope_parameters=given), PositionScale(float(weight), length)


def n_ctx(hf: HFConfig, layer_type: str | None = None) -> int:
    """The longest prompt, in tokens: dynamic scaling multiplies `max_position_embeddings` by its factor."""
    given = parameters(hf, layer_type) if layer_type or hf.get("rope_parameters") else {}  # none without rotary
    by_type = [part for part in given.values() if isinstance(part, dict)] or [given]
    factors = [part["factor"] for part in by_type if part.get("rope_type") == "dynamic"]
    return int(hf.max_position_embeddings * min(factors, default=1))


def parameters(hf: HFConfig, layer_type: str | None = None) -> dict[str, Any]:
    """`rope_parameters`, or those of a type of layers. Raises ValueError for what transformers does not read there."""
    if layer_type is None:
        return dict(hf.rope_parameters)
    given = dict(hf.rope_parameters[layer_type])
    # `_compute_yarn_parameters` (modeling_rope_utils.py) looks for it beside the types of layers
    HFConfig(given, {}).ignored_by_transformers(truncate=True)
    return given


def _default(given: dict[str, Any], n_ctx: int) -> Scaling | None:
    return None


def _linear(given: dict[str, Any], n_ctx: int) -> Scaling | None:
    return LinearScaling(given.pop("factor"))


def _dynamic(given: dict[str, Any], n_ctx: int) -> Scaling | None:
    return DynamicScaling(given.pop("factor"), n_ctx)


def _llama3(given: dict[str, Any], n_ctx: int) -> Scaling | None:
    return Llama3Scaling(
        given.pop("factor"),
        given.pop("low_freq_factor"),
        given.pop("high_freq_factor"),
        given.pop("original_max_position_embeddings"),
    )


def _yarn(given: dict[str, Any], n_ctx: int) -> Scaling | None:
    trained = given.pop("original_max_position_embeddings")
    return YarnScaling(
        factor=given.pop("factor", n_ctx / trained),
        trained_n_ctx=trained,
        beta_fast=given.pop("beta_fast", None) or 32.0,
        beta_slow=given.pop("beta_slow", None) or 1.0,
        attention_factor=given.pop("attention_factor", None),
        mscale=given.pop("mscale", None),
        mscale_all_dim=given.pop("mscale_all_dim", None),
        truncate=given.pop("truncate", True),
    )


def _longrope(given: dict[str, Any], n_ctx: int) -> Scaling | None:
    trained = given.pop("original_max_position_embeddings")
    stretch = given.pop("factor", n_ctx / trained)
    temperature = math.sqrt(1 + math.log(stretch) / math.log(trained)) if stretch > 1 else 1.0
    return LongRopeScaling(
        short_factor=tuple(given.pop("short_factor")),
        long_factor=tuple(given.pop("long_factor")),
        trained_n_ctx=trained,
        attention_factor=given.pop("attention_factor", temperature),
    )


def _proportional(given: dict[str, Any], n_ctx: int) -> Scaling | None:
    return ProportionalScaling(given.pop("partial_rotary_factor", 1.0), given.pop("factor", 1.0))


SCALINGS: dict[str, Callable[[dict[str, Any], int], Scaling | None]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}
