"""TAPAS (Herzig et al. 2020, arXiv:2004.02349): BERT for tables.

`token_type_ids` [batch, pos, kind] are the column and the row of a token, in which positions start again, its rank, and more.
"""

from dataclasses import replace

from hooked_lm.components.embeddings.encoder_embed import EncoderEmbed, TableEncoderEmbed
from hooked_lm.components.embeddings.extra_embed import TableEmbed, sizes
from hooked_lm.families._shared import bert_like
from hooked_lm.families._shared.bert_like import IGNORED, RENAMED
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.encoders import bert
from hooked_lm.families.encoders.bert import HEADS
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "tapas."
# training, and the head that selects cells
NO_EFFECT = (
    *bert_like.NO_EFFECT,
    *(
        "positive_label_weight",
        "*aggregation*",
        "use_answer_as_supervision",
        "answer_loss_*",
        "use_normalized_answer_loss",
    ),
    *("huber_loss_delta", "temperature", "use_gumbel_*", "average_*", "cell_selection_preference", "max_num_*"),
    *("select_one_column", "allow_empty_column_selection", "init_cell_*", "disable_per_token_loss"),
)


def config(hf: HFConfig) -> EncoderConfig:
    if hf.holds("output_weights"):
        raise ValueError("a head that selects cells is not supported; load the model without it")
    tree = bert.config(hf.changed(type_vocab_size=0))
    kinds = TableEmbed.Config("token_type_ids", hf.hidden_size, tuple(hf.type_vocab_sizes))
    kind = TableEncoderEmbed if hf.reset_position_index_per_cell else EncoderEmbed
    return replace(tree, embed=kind.Config(**{**vars(tree.embed), "extra": kinds}))


def rows(tree: EncoderConfig) -> list[Row]:
    assert isinstance(tree.embed.extra, TableEmbed.Config)
    source, kinds = PREFIX + "embeddings.token_type_embeddings_", range(len(sizes(tree.embed.extra)))
    tables = [Row(f"{source}{i}.weight", f"embed.extra.W_kinds.{i}") for i in kinds]
    return [*bert_like.rows(tree, HEADS, PREFIX), *tables]
