"""Encoder-decoders of other kinds: one softmax over own keys and the encoder's, streams that predict several tokens."""

from typing import Any

from torch import Tensor, nn
from transformers.models.prophetnet import modeling_prophetnet

from tests.families._case import Case
from tests.families._composite import SIGLIP
from tests.families.encoder_decoders import GEMMA, without_pad_in_decoder

ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 60.0},
    "full_attention": {"rope_type": "default", "rope_theta": 500.0},
}
TEXT: dict[str, Any] = {**GEMMA, "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": ROPES}
SPECIAL = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 3}


def t5gemma2(name: str, encoder: dict[str, Any], decoder: dict[str, Any], eoi: int = 7, **fields: Any) -> Case:
    """Encoder and decoder have configs of their own; that of the encoder has a tower of images."""
    side = {"text_config": {**TEXT, **encoder}, "vision_config": SIGLIP, "eoi_token_index": eoi}
    parts = {"encoder": {**side, "mm_tokens_per_image": 4}, "decoder": {**TEXT, **decoder}}
    fields = {**SPECIAL, "image_token_index": 8, **parts, **fields}
    return Case("t5gemma2", name, fields, auto="AutoModelForSeq2SeqLM", adjust=without_pad_in_decoder)


PREDICTING = modeling_prophetnet.ProphetNetNgramSelfAttention
AS_IT_IS = PREDICTING.get_predict_relative_pos_embeddings


def in_order(self: Any, streams: Tensor, scores: Tensor, positions: Tensor, buckets: Tensor | None) -> Tensor:
    """The bias of predicting streams, of the position, the stream and the head that it is of.

    `get_predict_relative_pos_embeddings` in modeling_prophetnet.py gathers from rows in the order of batch, position, stream and
    head by an index in that of stream, batch, head and position. They agree for single tokens only, as with a cache.
    """
    if buckets is None:
        return AS_IT_IS(self, streams, scores, positions, buckets)
    values = self.relative_pos_embeddings(streams.transpose(1, 2))
    values = values.unflatten(-1, (self.num_buckets, self.num_attn_heads)).permute(0, 1, 4, 2, 3)
    return values.gather(-1, buckets[:, None, None].long().expand(*values.shape[:3], -1, -1))


def corrected(model: nn.Module) -> None:
    """With the bias in order, and never a pad token as the likeliest."""
    PREDICTING.get_predict_relative_pos_embeddings = in_order
    model.prophetnet.word_embeddings.weight[0] = 0.0
    model.lm_head.weight[0] = 0.0


PROPHET = {
    "vocab_size": 61,
    "hidden_size": 32,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 40,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 8,
    "num_buckets": 8,
    "relative_max_distance": 13,
    **SPECIAL,
}


def prophetnet(name: str, **fields: Any) -> Case:
    return Case("prophetnet", name, {**PROPHET, **fields}, auto="AutoModelForSeq2SeqLM", adjust=corrected)


# fmt: off
CASES: list[Case] = [
    t5gemma2("even-windows", {"sliding_window": 4}, {}),
    t5gemma2("one-kv-biased-untied", {"attention_bias": True, "num_key_value_heads": 1, "hidden_activation": "silu"},
             {"attention_bias": True, "num_attention_heads": 2, "final_logit_softcapping": None, "rms_norm_eps": 0.3},
             eoi=60, tie_word_embeddings=False),
    prophetnet("two-streams"),
    prophetnet("three-streams-untied-relu", ngram=3, tie_word_embeddings=False, activation_function="relu"),
    prophetnet("one-stream-many-buckets", ngram=1, num_decoder_layers=1, num_buckets=32, relative_max_distance=128),
]
# fmt: on
