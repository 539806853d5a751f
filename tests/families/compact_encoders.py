"""Encoders that save weights by other mechanisms: convolving heads, grouped maps, a narrow stream."""

from tests.families._case import Case
from tests.families.encoders import NARROW, THREE_LABELS, bert

CASES: list[Case] = [
    bert("masked-narrow-grouped", family="convbert", **NARROW, conv_kernel_size=5, num_groups=2),
    bert(
        "masked-one-head-untied-relu",
        family="convbert",
        embedding_size=32,
        head_ratio=8,
        conv_kernel_size=3,
        tie_word_embeddings=False,
        hidden_act="relu",
    ),
    bert(
        "texts-wide-grouped-silu",
        "SequenceClassification",
        "convbert",
        embedding_size=48,
        head_ratio=1,
        conv_kernel_size=7,
        num_groups=4,
        hidden_act="silu",
        **THREE_LABELS,
    ),
    bert("bare-wide-kernel", "", "convbert", embedding_size=32, conv_kernel_size=21, type_vocab_size=3),
    bert("masked", family="squeezebert", embedding_size=32),
    bert(
        "masked-many-groups-untied-relu",
        family="squeezebert",
        embedding_size=32,
        q_groups=8,
        k_groups=2,
        v_groups=1,
        post_attention_groups=4,
        intermediate_groups=2,
        output_groups=8,
        hidden_act="relu",
        tie_word_embeddings=False,
    ),
    bert(
        "texts-three-types",
        "SequenceClassification",
        "squeezebert",
        embedding_size=32,
        type_vocab_size=3,
        **THREE_LABELS,
    ),
    bert("tokens", "TokenClassification", "squeezebert", embedding_size=32, post_attention_groups=2, **THREE_LABELS),
]
# Models of transformers in which a token near the end reads padding, so that a row does not have the values that it has alone.
READ_PADDING = {
    "convbert": "`ConvBertSelfAttention.forward` (modeling_convbert.py) convolves without a mask",
}
