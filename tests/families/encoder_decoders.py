"""Encoder-decoders."""

from typing import Any

import torch
from torch import nn

from tests.families._case import Case

PAD = 1  # what M2M-100 gives no position, so that it must not be drawn


def moderate(model: nn.Module) -> None:
    """Queries that are not scaled by anything in T5 get a size of which its attention is uneven but not one-hot."""
    for name, parameter in model.named_parameters():
        if name.endswith("Attention.q.weight"):
            parameter.mul_(0.3)


def large(model: nn.Module) -> None:
    """The same, and embeddings large enough that logits which are scaled by d_model ** -0.5 are of order one."""
    moderate(model)
    model.shared.weight.mul_(4.0)


def with_bias(model: nn.Module) -> None:
    """A bias on the logits, which is no parameter, and never a pad token as the likeliest."""
    bias = model.final_logits_bias
    bias.copy_(0.3 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(5)))
    bias[:, PAD] = -20.0


def with_sines(model: nn.Module) -> None:
    """The same, with the table of sines that Marian's files do not hold, and cross attention that is uneven all the same."""
    with_bias(model)
    for layer in model.model.decoder.layers:
        layer.encoder_attn.q_proj.weight.mul_(4.0)
    for side in (model.model.encoder, model.model.decoder):
        side.embed_positions.weight.copy_(side.embed_positions.create_weight())


def without_pad(model: nn.Module) -> None:
    """Never a pad token as the likeliest: its embedding is zero, as that of trained models."""
    model.model.shared.weight[PAD].zero_()
    if model.lm_head.weight is not model.model.shared.weight:
        model.lm_head.weight[PAD].zero_()


def sharp(model: nn.Module) -> None:
    """As T5, with routers that prefer some experts."""
    large(model)
    for name, parameter in model.named_parameters():
        if "router" in name:
            parameter.mul_(4.0)


T5 = {
    "vocab_size": 61,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "layer_norm_epsilon": 0.05,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
BART = {
    "vocab_size": 61,
    "d_model": 32,
    "max_position_embeddings": 40,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 8,
    "bos_token_id": 0,
    "pad_token_id": PAD,
    "eos_token_id": 2,
    "forced_eos_token_id": None,
    "decoder_start_token_id": 2,
}
SCALED: dict[str, Any] = {**BART, "scale_embedding": True}
UNTIED: dict[str, Any] = {**BART, "tie_word_embeddings": False}
SWITCH = {**T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 3}
MANY_BUCKETS = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
GATED: dict[str, Any] = {"feed_forward_proj": "gated-gelu"}
ONE_BY_ONE = {"num_layers": 2, "num_decoder_layers": 1}


def t5(family: str, name: str, adjust: Any = large, **fields: Any) -> Case:
    return Case(family, name, {**T5, **fields}, auto="AutoModelForSeq2SeqLM", adjust=adjust)


def bart(family: str, name: str, base: dict[str, Any], adjust: Any = with_bias, **fields: Any) -> Case:
    return Case(family, name, {**base, **fields}, auto="AutoModelForSeq2SeqLM", adjust=adjust)


CASES: list[Case] = [
    t5("t5", "relu-scaled"),
    t5("t5", "gated-unscaled", moderate, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    t5("t5", "wide-heads-many-buckets", d_kv=12, **MANY_BUCKETS),
    t5("t5", "gated-silu-few-layers", feed_forward_proj="gated-silu", **ONE_BY_ONE),
    t5("mt5", "gated", moderate),
    t5("mt5", "relu-wide-heads", moderate, feed_forward_proj="relu", d_kv=12),
    t5("mt5", "few-layers-many-buckets", moderate, **MANY_BUCKETS, **ONE_BY_ONE),
    t5("longt5", "relu-scaled", local_radius=2),
    t5("longt5", "gated-unscaled-wide-heads", moderate, **GATED, d_kv=12, local_radius=4, tie_word_embeddings=False),
    t5("longt5", "radius-longer-than-texts", local_radius=20, **MANY_BUCKETS, **ONE_BY_ONE),
    t5("umt5", "gated"),
    t5("umt5", "relu-wide-heads", feed_forward_proj="relu", d_kv=12),
    t5("umt5", "few-layers-many-buckets", **MANY_BUCKETS, **ONE_BY_ONE),
    Case("switch_transformers", "some-layers", SWITCH, auto="AutoModelForSeq2SeqLM", adjust=sharp),
    Case(
        "switch_transformers",
        "every-layer-router-bias",
        {**SWITCH, "num_sparse_encoder_layers": 3, "num_sparse_decoder_layers": 2, "router_bias": True},
        auto="AutoModelForSeq2SeqLM",
        adjust=sharp,
    ),
    Case(
        "switch_transformers",
        "untied-room-for-all",
        {**SWITCH, "tie_word_embeddings": False, "expert_capacity": 64, "dense_act_fn": "gelu"},
        auto="AutoModelForSeq2SeqLM",
        adjust=sharp,
    ),
    bart("bart", "plain", BART),
    bart("bart", "scaled-relu", SCALED, activation_function="relu"),
    bart("bart", "untied", UNTIED),
    bart("plbart", "scaled", SCALED),
    bart("plbart", "unscaled-relu", BART, scale_embedding=False, activation_function="relu"),
    bart("plbart", "untied-scaled", UNTIED, scale_embedding=True, decoder_layers=1),
    bart("mvp", "plain", BART),
    bart("mvp", "scaled-relu", SCALED, activation_function="relu"),
    bart("mvp", "untied", UNTIED, decoder_layers=1),
    bart("mbart", "plain", BART),
    bart("mbart", "scaled-relu", SCALED, activation_function="relu"),
    bart("mbart", "untied-scaled", UNTIED, scale_embedding=True, decoder_layers=1),
    bart("pegasus", "plain", BART),
    bart("pegasus", "scaled-relu", SCALED, activation_function="relu"),
    bart("pegasus", "untied-scaled", UNTIED, scale_embedding=True, decoder_layers=1),
    bart("marian", "plain", BART, with_sines),
    bart("marian", "scaled-swish", SCALED, with_sines, activation_function="swish"),
    bart(
        "marian", "own-vocabularies", SCALED, with_sines, share_encoder_decoder_embeddings=False, decoder_vocab_size=53
    ),
    bart("marian", "untied", UNTIED, with_sines),
    bart("blenderbot", "plain", BART),
    bart("blenderbot", "scaled-relu", SCALED, activation_function="relu"),
    bart("blenderbot", "untied-scaled", UNTIED, scale_embedding=True, decoder_layers=1),
    bart("blenderbot-small", "plain", BART),
    bart("blenderbot-small", "scaled-relu", SCALED, activation_function="relu"),
    bart("blenderbot-small", "untied-scaled", UNTIED, scale_embedding=True, decoder_layers=1),
    bart("m2m_100", "scaled", SCALED, without_pad),
    bart("m2m_100", "unscaled-gelu", BART, without_pad, scale_embedding=False, activation_function="gelu"),
    bart("m2m_100", "untied", UNTIED, without_pad, decoder_layers=1),
]
