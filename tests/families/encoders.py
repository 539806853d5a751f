"""Encoders: for each family a model for masked tokens and the bare model, and between them every kind of head."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.families._case import GROUPED, SIZES, YARN, Case

BERT: dict[str, Any] = {**SIZES, "pad_token_id": 0, "layer_norm_eps": 0.02, "hidden_act": "gelu"}
ROBERTA: dict[str, Any] = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
NARROW = {"embedding_size": 16}
ALBERT: dict[str, Any] = {"embedding_size": 16, "num_hidden_layers": 3, "hidden_act": "gelu_new"}
REMBERT: dict[str, Any] = {"input_embedding_size": 16, "output_embedding_size": 40}
DISTILBERT: dict[str, Any] = {
    "vocab_size": 61,
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
XLM: dict[str, Any] = {
    "vocab_size": 61,
    "emb_dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": 40,
    "layer_norm_eps": 0.02,
}
MODERN: dict[str, Any] = {
    "num_hidden_layers": 3,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "norm_eps": 0.02,
    "local_attention": 6,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 900.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
ESM: dict[str, Any] = {"pad_token_id": 1, "mask_token_id": 32, "eos_token_id": 2, "position_embedding_type": "rotary"}
LEARNED: dict[str, Any] = {"position_embedding_type": "absolute", "emb_layer_norm_before": True}
DEBERTA: dict[str, Any] = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "max_relative_positions": 6,
}
C2P: dict[str, Any] = {"pos_att_type": ["c2p"]}
P2C: dict[str, Any] = {"pos_att_type": ["p2c"], "max_relative_positions": -1}
V3: dict[str, Any] = {
    "position_buckets": 8,
    "max_relative_positions": 20,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
}
FULL = {"attention_type": "original_full"}
LANGUAGES: dict[str, Any] = {"languages": ["en_XX", "de_DE", "sw_KE"], "default_language": "de_DE"}
ONE_LANGUAGE = {"default_language": "en_XX"}
NARROW_ADAPTER = {"adapter_reduction_factor": 4, "ln_before_adapter": False}
ROC: dict[str, Any] = {
    "shape_vocab_size": 23,
    "shape_embed_dim": 12,
    "pronunciation_vocab_size": 19,
    "pronunciation_embed_dim": 20,
}
THREE_LABELS = {"num_labels": 3}


def lively(model: nn.Module) -> None:
    """Scores of order one, where few numbers make them."""
    model.discriminator_predictions.dense_prediction.weight.mul_(4.0)


def with_sines(model: nn.Module) -> None:
    """The table of sines that RoFormer's files hold."""
    table = model.base_model.encoder.embed_positions
    table.weight.copy_(table.create_weight())


def bert(name: str, of: str = "MaskedLM", family: str = "bert", adjust: Any = None, **fields: Any) -> Case:
    """`of` is the end of the transformers class."""
    return Case(family, name, {**BERT, **fields}, auto=CLASSES.get(of, f"AutoModelFor{of}"), adjust=adjust)


def half_precision(model: nn.Module) -> None:
    """Fourier transforms in half precision, which PyTorch has not, so that `fourier_transform` in modeling_fnet.py fails."""

    def transform(x: Tensor) -> SimpleNamespace:
        wide = x if x.dtype == torch.float64 else x.float()
        return SimpleNamespace(real=torch.fft.fftn(wide, dim=(1, 2)).real.to(x.dtype))

    for module in model.modules():
        if hasattr(module, "fourier_transform"):
            module.fourier_transform = transform


def fnet(name: str, of: str = "MaskedLM", **fields: Any) -> Case:
    no_heads = {key: value for key, value in BERT.items() if key != "num_attention_heads"}
    return Case("fnet", name, {**no_heads, **fields}, auto=CLASSES.get(of, f"AutoModelFor{of}"), adjust=half_precision)


def distilbert(name: str, of: str = "MaskedLM", **fields: Any) -> Case:
    return Case("distilbert", name, {**DISTILBERT, **fields}, auto=CLASSES.get(of, f"AutoModelFor{of}"))


def modern(name: str, of: str = "MaskedLM", **fields: Any) -> Case:
    return Case("modernbert", name, {**SIZES, **MODERN, **fields}, auto=CLASSES.get(of, f"AutoModelFor{of}"))


def esm(name: str, of: str = "MaskedLM", **fields: Any) -> Case:
    sizes = {**SIZES, "layer_norm_eps": 0.02, **ESM}
    return Case("esm", name, {**sizes, **fields}, auto=CLASSES.get(of, f"AutoModelFor{of}"))


def nomic(name: str, of: str = "MaskedLM", **fields: Any) -> Case:
    return bert(name, of, "nomic_bert", **{"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, **fields})


def euro(name: str, of: str = "MaskedLM", **fields: Any) -> Case:
    sizes = {**SIZES, **GROUPED, "pad_token_id": 0, "mask_token_id": 3, **fields}
    return Case("eurobert", name, sizes, auto=CLASSES.get(of, f"AutoModelFor{of}"))


def jina(name: str, of: str = "MaskedLM", family: str = "jina_embeddings_v3", **fields: Any) -> Case:
    return bert(
        name, of, family, **{**ROBERTA, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, **fields}
    )


def esmc(name: str, of: str = "MaskedLM", **fields: Any) -> Case:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}
    sizes = {**SIZES, **ROBERTA, "mask_token_id": 32, **rope, **fields}
    return Case("esmc", name, sizes, auto=CLASSES.get(of, f"AutoModelFor{of}"))


def xlm(name: str, of: str = "MaskedLM", family: str = "xlm", **fields: Any) -> Case:
    return Case(family, name, {**XLM, **fields}, auto=CLASSES.get(of, f"AutoModelFor{of}"))


def ultra(name: str, of: str = "MaskedLM", **fields: Any) -> Case:
    rope = {"rope_parameters": MODERN["rope_parameters"]}
    special = {"pad_token_id": 0, "num_hidden_layers": 3, "sliding_window": 3, "prediction_head_size": 20}
    sizes = {**SIZES, **GROUPED, **special, **rope, **fields}
    return Case("ultrabert", name, sizes, auto=CLASSES.get(of, f"AutoModelFor{of}"))


def deberta(name: str, of: str = "MaskedLM", **fields: Any) -> Case:
    return bert(name, of, "deberta-v2", **{**DEBERTA, **fields})


CLASSES = {"": "AutoModel"}

# fmt: off
CASES: list[Case] = [
    bert("masked"),
    bert("pretraining", "PreTraining"),
    bert("bare", "", type_vocab_size=3),
    bert("next-sentence", "NextSentencePrediction"),
    bert("texts", "SequenceClassification", **THREE_LABELS),
    bert("tokens", "TokenClassification", **THREE_LABELS),
    bert("spans", "QuestionAnswering"),
    bert("masked", family="roberta", **ROBERTA),
    bert("bare-pad-elsewhere", "", "roberta", **{**ROBERTA, "pad_token_id": 3}),
    bert("masked", family="xlm-roberta", **ROBERTA),
    bert("masked-untied-one-type", family="camembert", **ROBERTA, type_vocab_size=1, tie_word_embeddings=False),
    bert("masked-untied-relu", family="data2vec-text", **ROBERTA, hidden_act="relu", tie_word_embeddings=False),
    bert("masked", family="roberta-prelayernorm", **ROBERTA),
    bert("bare-two-types-relu", "", "xlm-roberta-xl", **ROBERTA, type_vocab_size=2, hidden_act="relu"),
    bert("pretraining-untied-relu", "PreTraining", "megatron-bert", hidden_act="relu", tie_word_embeddings=False),
    bert("masked-tasks", family="ernie", use_task_id=True, task_type_vocab_size=5),
    bert("masked", family="layoutlm", max_2d_position_embeddings=30),
    fnet("masked"),
    bert("masked", family="tapas", type_vocab_sizes=[3, 4, 4, 2, 5], max_position_embeddings=20),
    bert("bare-text-positions", "", "tapas", type_vocab_sizes=[2, 4, 3], reset_position_index_per_cell=False),
    bert("masked", family="roc_bert", **ROC),
    bert("bare-no-shapes", "", "roc_bert", **ROC, enable_shape=False, hidden_act="relu"),
    bert("tokens-no-sounds", "TokenClassification", "roc_bert", **ROC, enable_pronunciation=False),
    bert("masked-narrow-in-wide-out", family="rembert", **REMBERT),
    nomic("masked"),
    nomic("bare-relu", "", hidden_act="relu", num_attention_heads=8),
    euro("texts-late", "SequenceClassification", **THREE_LABELS),
    bert("masked", family="roformer", adjust=with_sines),
    bert("spans-wide", "QuestionAnswering", "roformer", with_sines, embedding_size=48),
    bert("masked-sparse", family="big_bird", block_size=2, num_random_blocks=1, hidden_act="gelu_new"),
    bert("bare-sparse-unbiased", "", "big_bird", block_size=1, num_random_blocks=2, use_bias=False),
    bert("pretraining-scaled-untied", "PreTraining", "big_bird", **FULL, rescale_embeddings=True,
         tie_word_embeddings=False),
    bert("texts-relu", "SequenceClassification", "big_bird", **FULL, hidden_act="relu", **THREE_LABELS),
    bert("masked-windows", family="longformer", **ROBERTA, attention_window=[4, 8]),
    bert("texts", "SequenceClassification", "longformer", **ROBERTA, attention_window=4, **THREE_LABELS),
    bert("masked", family="xmod", **ROBERTA, **LANGUAGES),
    bert("masked-own-norm-added", family="xmod", **ROBERTA, **LANGUAGES, adapter_layer_norm=True,
         ln_before_adapter=False),
    bert("bare-no-norm-relu", "", "xmod", **ROBERTA, **ONE_LANGUAGE, hidden_act="relu", adapter_reuse_layer_norm=False),
    bert("texts-narrow", "SequenceClassification", "xmod", **ROBERTA, **LANGUAGES, **NARROW_ADAPTER, **THREE_LABELS),
    jina("masked-untied-relu-yarn", tie_word_embeddings=False, hidden_act="relu", **YARN),
    jina("masked", family="gte"),
    esmc("masked"),
    xlm("masked-untied-relu", tie_word_embeddings=False, gelu_activation=False, n_heads=8),
    xlm("tokens-several-languages", "TokenClassification", n_langs=3, use_lang_emb=False, **THREE_LABELS),
    xlm("masked-untied-relu", family="flaubert", tie_word_embeddings=False, gelu_activation=False),
    ultra("masked"),
    distilbert("masked"),
    distilbert("masked-untied-relu-sines", activation="relu", tie_word_embeddings=False, sinusoidal_pos_embds=True),
    distilbert("bare", ""),
    bert("masked-narrow", family="electra", **NARROW),
    bert("replaced-narrow", "PreTraining", "electra", lively, **NARROW),
    bert("texts-narrow", "SequenceClassification", "electra", **NARROW, **THREE_LABELS),
    bert("masked-narrow", family="albert", **ALBERT),
    bert("masked-group-of-two", family="albert", **{**ALBERT, "num_hidden_layers": 2, "inner_group_num": 2}),
    bert("pretraining-two-groups", "PreTraining", "albert", **{**ALBERT, "num_hidden_groups": 2}, **THREE_LABELS),
    bert("masked", family="mpnet", **ROBERTA),
    modern("masked"),
    modern("texts-mean", "SequenceClassification", classifier_pooling="mean", **THREE_LABELS),
    modern("texts-first", "SequenceClassification", classifier_bias=True, **THREE_LABELS),
    modern("spans", "QuestionAnswering"),
    esm("masked-rotary"),
    esm("masked-learned-normed-untied", **LEARNED, tie_word_embeddings=False),
    esm("masked-token-dropout", token_dropout=True),
    bert("masked-untied-c2p-types", family="deberta", **{**DEBERTA, **C2P}, type_vocab_size=2,
         tie_word_embeddings=False),
    bert("masked-new-head-p2c-longest", family="deberta", **{**DEBERTA, **P2C}, legacy=False),
    bert("unembedded", "CausalLM", "bert-generation"),
    deberta("masked"),
    deberta("masked-shared-buckets-normed", **V3),
    deberta("masked-new-head-conv", **{**V3, "legacy": False}, conv_kernel_size=3, conv_act="gelu"),
    deberta("bare-conv-groups", "", **V3, conv_kernel_size=3, conv_groups=2),
]
# fmt: on
