"""The language model of ERNIE 4.5 VL (Baidu 2025, "ERNIE 4.5 Technical Report"): ERNIE 4.5 with experts, beside whom are experts
for images, and rotary positions on three axes."""

from hooked_lm.families._shared import moe, mrope
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import ernie4_5_moe
from hooked_lm.families.decoders.ernie4_5_moe import IGNORED, PREFIX
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows", "text_names"]

PREPENDS_BOS = False
NO_EFFECT = moe.NO_EFFECT


def config(hf: HFConfig) -> DecoderConfig:
    d_mlp, _ = hf.moe_intermediate_size  # of the experts for text and of those for images
    text = mrope.on_text(hf, moe_intermediate_size=d_mlp)
    return ernie4_5_moe.decoder(text, moe.of_sparse_type(text), bias=False)


def text_names(hf: HFConfig) -> dict[str, str | None]:
    """The experts of a layer are numbered together, those for text first."""
    n = hf.moe_num_experts
    for_images = "|".join(str(expert) for expert in range(n, 2 * n))
    return {rf"\.mlp\.experts\.({for_images})\b": None, r"\.mlp\.gate\.weight_1$": None}


def rows(tree: DecoderConfig) -> list[Row]:
    source, target = "model.layers.{l}.mlp.", "blocks.{l}.mlp."
    own = [
        Row(source + "gate.weight", target + "W_router"),
        Row(
            source + "moe_statics.e_score_correction_bias",
            target + "b_choice",
            "k e -> e",
            take={"k": 0},
            k=2,
            partial=True,
        ),
    ]
    targets = [row.target for row in own]
    return [*(row for row in ernie4_5_moe.rows(tree) if row.target not in targets), *own]
