"""Language models whose rotary positions have several axes, for images and videos (Qwen2-VL, arXiv:2409.12191)."""

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
