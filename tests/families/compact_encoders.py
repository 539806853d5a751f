"""Encoders that save weights by other mechanisms: convolving heads, grouped maps, a narrow stream."""

from typing import Any

from torch import nn

from tests.families._case import Case
from tests.families.encoders import NARROW, THREE_LABELS, bert

MOBILE: dict[str, Any] = {**NARROW, "intra_bottleneck_size": 24, "num_feedforward_networks": 3}


def calm(model: nn.Module) -> None:
    """Sublayers that add little, since no norm bounds the stream."""
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and "output." in name:
            weight.mul_(0.4)


def mobile(name: str, of: str = "MaskedLM", **fields: Any) -> Case:
    return bert(name, of, "mobilebert", calm, **{**MOBILE, **fields})


# fmt: off
CASES: list[Case] = [
    bert("masked-narrow-grouped", family="convbert", **NARROW, conv_kernel_size=5, num_groups=2),
    bert("texts-wide-grouped-silu", "SequenceClassification", "convbert", embedding_size=48, head_ratio=1,
         conv_kernel_size=7, num_groups=4, hidden_act="silu", **THREE_LABELS),
    bert("masked", family="squeezebert", embedding_size=32),
    bert("masked-many-groups-untied-relu", family="squeezebert", embedding_size=32, q_groups=8, k_groups=2, v_groups=1,
         post_attention_groups=4, intermediate_groups=2, output_groups=8, hidden_act="relu", tie_word_embeddings=False),
    mobile("masked-narrow"),
    mobile("pretraining-layer-norm-all-narrow-untied", "PreTraining", num_feedforward_networks=1,
           use_bottleneck_attention=True, normalization_type="layer_norm", tie_word_embeddings=False,
           hidden_act="relu"),
    mobile("texts-wide-layer-norm", "SequenceClassification", use_bottleneck=False, normalization_type="layer_norm",
           **THREE_LABELS),
    mobile("masked-narrow-layer-norm-no-trigram", normalization_type="layer_norm", trigram_input=False),
    mobile("bare-no-bottleneck-of-queries", "", intra_bottleneck_size=32, key_query_shared_bottleneck=False),
]
# fmt: on
