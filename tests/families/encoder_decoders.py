"""Encoder-decoders."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.models.fsmt import modeling_fsmt

from tests.families._case import LLAMA3, SIZES, Case

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


def without_pad_in_projection(model: nn.Module) -> None:
    """The same, of a decoder that ends in its unembedding; and positions are sines.

    `fill_with_neg_inf` in modeling_fsmt.py fails in double precision, which it fills in as if it were single.
    """
    modeling_fsmt.fill_with_neg_inf = lambda t: torch.full_like(t, torch.finfo(t.dtype).min)
    for side in (model.model.encoder, model.model.decoder):
        table = side.embed_positions
        table.weight.copy_(table.get_embedding(*table.weight.shape, PAD))
        table.weight.requires_grad_(False)
    model.model.decoder.output_projection.weight[PAD] = 0.0


def without_pad_in_decoder(model: nn.Module) -> None:
    """The same, of a decoder with an embedding of its own."""
    model.model.decoder.embed_tokens.weight[0].zero_()
    model.lm_head.out_proj.weight[0].zero_()


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
GEMMA: dict[str, Any] = {
    **{name: value for name, value in SIZES.items() if name not in ("pad_token_id", "eos_token_id")},
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 0.02,
    "pad_token_id": 0,
    "sliding_window": 3,
    "query_pre_attn_scalar": 5,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
UNCAPPED = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True}
SWITCH = {**T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 3}
MANY_BUCKETS = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
SHALLOW = {"encoder_layers": 2, "decoder_layers": 1}
GLOBAL = {"encoder_attention_type": "transient-global"}
ONE_BY_ONE = {"num_layers": 2, "num_decoder_layers": 1}


def t5(family: str, name: str, adjust: Any = large, **fields: Any) -> Case:
    return Case(family, name, {**T5, **fields}, auto="AutoModelForSeq2SeqLM", adjust=adjust)


def bart(family: str, name: str, base: dict[str, Any], adjust: Any = with_bias, **fields: Any) -> Case:
    return Case(family, name, {**base, **fields}, auto="AutoModelForSeq2SeqLM", adjust=adjust)


def led(name: str, **fields: Any) -> Case:
    """Encoder and decoder have positions of their own."""
    lengths = {"max_encoder_position_embeddings": 40, "max_decoder_position_embeddings": 30}
    base = {name: value for name, value in BART.items() if name != "max_position_embeddings"}
    return bart("led", name, {**base, **lengths, **SHALLOW}, **fields)


def fsmt(name: str, **fields: Any) -> Case:
    """Untied, with a vocabulary on either side."""
    base = {name: value for name, value in {**UNTIED, **SHALLOW}.items() if name != "vocab_size"}
    vocabularies = {
        "src_vocab_size": 61,
        "tgt_vocab_size": 61,
        "use_cache": False,
    }  # with it, transformers sees later tokens
    return bart("fsmt", name, {**base, **vocabularies}, without_pad_in_projection, **fields)


def t5gemma(name: str, encoder: dict[str, Any], decoder: dict[str, Any], **fields: Any) -> Case:
    """Encoder and decoder have configs of their own."""
    parts = {"encoder": {**GEMMA, **encoder}, "decoder": {**GEMMA, **decoder}}
    special = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 3, "vocab_size": 61}
    fields = {**special, **parts, **fields}
    return Case("t5gemma", name, fields, auto="AutoModelForSeq2SeqLM", adjust=without_pad_in_decoder)


# fmt: off
CASES: list[Case] = [
    t5("t5", "relu-scaled"),
    t5("t5", "gated-unscaled",        moderate, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    t5("t5", "gated-silu-few-layers", feed_forward_proj="gated-silu", **ONE_BY_ONE),
    t5("mt5", "gated", moderate),
    t5("longt5", "relu-scaled",      local_radius=2),
    t5("longt5", "global",           local_radius=2, global_block_size=2, **GLOBAL),
    t5("longt5", "global-one-block", **ONE_BY_ONE, **MANY_BUCKETS, local_radius=1, global_block_size=8, **GLOBAL),
    t5("umt5", "gated"),
    Case("switch_transformers", "some-layers", SWITCH, auto="AutoModelForSeq2SeqLM", adjust=sharp),
    Case("switch_transformers", "every-layer-router-bias", {**SWITCH, "num_sparse_encoder_layers": 3,
         "num_sparse_decoder_layers": 2, "router_bias": True}, auto="AutoModelForSeq2SeqLM", adjust=sharp),
    Case("switch_transformers", "untied-room-for-all", {**SWITCH, "tie_word_embeddings": False, "expert_capacity": 64,
         "dense_act_fn": "gelu"}, auto="AutoModelForSeq2SeqLM", adjust=sharp),
    t5gemma("narrow-decoder", {}, {"hidden_size": 24, "intermediate_size": 40}),
    t5gemma("one-kv-biased-uncapped-untied", {**UNCAPPED, "num_key_value_heads": 1}, {**UNCAPPED,
        "hidden_activation": "silu", "num_attention_heads": 2}, tie_word_embeddings=False),
    t5gemma("all-local-or-none-llama3", {**LLAMA3, "layer_types": ["sliding_attention"] * 2, "sliding_window": 5},
        {**LLAMA3, "layer_types": ["full_attention"] * 2, "vocab_size": 53, "rms_norm_eps": 0.3}),
    bart("bart", "plain",       BART),
    bart("bart", "scaled-relu", SCALED, activation_function="relu"),
    bart("plbart", "unscaled-relu", BART, scale_embedding=False, activation_function="relu"),
    bart("mvp", "scaled-relu", SCALED, activation_function="relu"),
    bart("mbart", "plain", BART),
    bart("pegasus", "plain", BART),
    bart("pegasus_x", "staggered", BART, without_pad, block_size=4, num_global_tokens=3),
    bart("pegasus_x", "unscaled-relu-one-global", {**UNTIED, **SHALLOW}, without_pad, block_size=5, num_global_tokens=1,
         stagger_local_blocks=False, scale_embedding=False, activation_function="relu"),
    bart("marian", "plain",        BART, with_sines),
    bart("marian", "scaled-swish", SCALED, with_sines, activation_function="swish"),
    bart("marian", "own-vocabularies", SCALED, with_sines, share_encoder_decoder_embeddings=False,
         decoder_vocab_size=53),
    replace(bart("bigbird_pegasus", "untied-relu-part-of-a-block", {**UNTIED, **SHALLOW}, block_size=3,
        num_random_blocks=1, activation_function="relu"), n_prompt=23),
    led("windows", attention_window=[4, 8]),
    led("one-window-relu-long-target", attention_window=4, activation_function="relu",
        max_decoder_position_embeddings=50),
    fsmt("scaled-own-vocabularies", tgt_vocab_size=53),
    bart("blenderbot", "plain", BART),
    bart("blenderbot-small", "plain", BART),
    bart("m2m_100", "scaled", SCALED, without_pad),
]
# fmt: on
