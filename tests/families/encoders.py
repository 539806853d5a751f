"""Encoders: for each family a model for masked tokens and the bare model, and between them every kind of head."""

from typing import Any

import torch
from torch import nn

from tests.families._case import SIZES, Case

BERT: dict[str, Any] = {**SIZES, "pad_token_id": 0, "layer_norm_eps": 0.02, "hidden_act": "gelu"}
THREE_LABELS = {"num_labels": 3}


def lively(model: nn.Module) -> None:
    """Logits of order one, though what is tied is drawn small and norms stand before it."""
    head = model.get_output_embeddings()
    if head is not None:
        head.weight.mul_(1.5)


def bert(name: str, of: str = "MaskedLM", family: str = "bert", **fields: Any) -> Case:
    """`of` is the end of the transformers class."""
    return Case(family, name, {**BERT, **fields}, auto=CLASSES.get(of, f"AutoModelFor{of}"))


CLASSES = {"": "AutoModel"}

CASES: list[Case] = [
    bert("masked"),
    bert("masked-untied-relu", hidden_act="relu", tie_word_embeddings=False, num_attention_heads=8),
    bert("pretraining", "PreTraining"),
    bert("bare", "", type_vocab_size=3),
    bert("next-sentence", "NextSentencePrediction"),
    bert("texts", "SequenceClassification", **THREE_LABELS),
    bert("tokens", "TokenClassification", **THREE_LABELS),
    bert("spans", "QuestionAnswering"),
]
