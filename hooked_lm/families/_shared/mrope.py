"""Language models whose rotary positions have several axes, for images and videos (Qwen2-VL, arXiv:2409.12191)."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from hooked_lm.components.embeddings.axis_rotary import MultimodalRotary
from hooked_lm.families._shared.reader import HFConfig

SECTIONS = ("mrope_section", "mrope_interleaved", "interleaved")  # which pairs of a head turn by which axis


def on_text(hf: HFConfig, **fields: object) -> HFConfig:
    """The config as it is on text alone, where a token has the same position on all axes: that of plain rotary positions.

    `fields` are those of a relative on text alone that this config lacks.
    """
    rope = {name: value for name, value in hf.rope_parameters.items() if name not in SECTIONS}
    if rope.get("rope_type") == "mrope":
        rope["rope_type"] = "default"
    tied = hf.get("tie_word_embeddings", False)  # the config of the whole decides
    return hf.changed(**{"rope_parameters": rope, "tie_word_embeddings": tied, **fields})


def with_axes(
    blocks: Iterable[Any], rope: Mapping[str, Any], sections: tuple[int, ...], interleaved: bool = False
) -> tuple[Any, ...]:
    """The blocks of a language model, whose rotary embeddings have the axes that `rope_parameters` say.

    `sections` are those of a config without any. Blocks without attention stay as they are.
    """
    sections = tuple(rope.get("mrope_section") or sections)

    def changed(block: Any) -> Any:
        attn = getattr(block, "attn", None)
        if attn is None or attn.rotary is None:
            return block
        turned = MultimodalRotary(**vars(attn.rotary), sections=sections, interleaved=interleaved)
        return replace(block, attn=replace(attn, rotary=turned))

    return tuple(changed(block) for block in blocks)
