"""Generation with an encoder-decoder: encodes the source once and generates the target one token at a time."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.components.stack_context import EncoderDecoderCache
from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.generation_step import run_generation
from hooked_lm.models.checks import checked_global_mask, first_bidirectional
from hooked_lm.models.generation.loop import (
    Reader,
    TokenSequence,
    check_in_vocab,
    check_room,
    converter,
    end_ids,
    sampler,
    steps,
)
from hooked_lm.models.text.encoder_decoder import DecoderInput
from hooked_lm.progress import progress_bar


def generate(
    model: HookedRootModule,
    input: str | Sequence[str] | Int[Tensor, "*batch pos"] = "",
    one_zero_attention_mask: Tensor | None = None,
    max_new_tokens: int = 10,
    stop_at_eos: bool = True,
    eos_token_id: int | Sequence[int] | None = None,
    do_sample: bool = True,
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float = 1.0,
    freq_penalty: float = 0.0,
    use_past_kv_cache: bool = True,
    return_type: str = "input",
    verbose: bool = True,
    *,
    attention_mask: Tensor | None = None,
    global_attention_mask: Tensor | None = None,
    decoder_input: DecoderInput | None = None,
    forced_bos_token_id: int | None = None,
    suppress_tokens: Sequence[int] | None = None,
    seed: int | torch.Generator | None = None,
) -> Any:
    """Generates at most `max_new_tokens` target tokens for a source; returns the target (ids include its start token).

    Sources of different lengths form a batch, in which each row is as it would be alone. Active hooks run at every step,
    on the encoder and the first tokens of the decoder, then on single tokens of the decoder (without the cache, on
    everything each time); `hook.step` and `hook.positions` identify the step and its positions in the decoder. No gradients.

    Args:
        input: text, a list of texts, or token ids [batch, pos] or [pos].
        one_zero_attention_mask, attention_mask: synonyms: 1 for real tokens of the source, 0 for padding.
        global_attention_mask: 1 for tokens of the source that have global attention; see the forward pass.
        stop_at_eos: end a row at `eos_token_id` (one id or several; the model's if None). A finished row is filled with the
            model's pad token while others continue.
        do_sample: draw tokens as `sample_logits` does with `top_k`, `top_p`, `temperature`, `freq_penalty`; otherwise take
            the most likely, after the penalty.
        use_past_kv_cache: process each token once. Otherwise, and always if the self-attention of a decoder layer is
            bidirectional, everything is processed again for each token.
        return_type: "str", "tokens", or "input": the type of the input. Text has no special tokens.
        verbose: show a progress bar after two seconds.
        decoder_input: the beginning of the target, in unpadded rows; the model's start token if None.
        forced_bos_token_id: the first token after the start token (the target language in many-to-many translation); None
            means the model's, if any. Not forced after a `decoder_input`.
        suppress_tokens: tokens that are never generated; the model's if None.
        seed: an int, or a generator to draw from; torch's global generator if None.

    Raises ValueError, before anything runs, for invalid options and for a target that would exceed n_ctx; during
    generation, with step and row, for logits that are NaN or infinite.
    """
    draw = sampler(model.device, do_sample, top_k, top_p, temperature, freq_penalty, seed)
    if one_zero_attention_mask is not None and attention_mask is not None:
        raise ValueError("one_zero_attention_mask and attention_mask are synonyms: give one of them")
    convert = converter(model, input, return_type, ("str", "tokens"))
    source, mask = model._source_tokens(
        input, attention_mask if one_zero_attention_mask is None else one_zero_attention_mask
    )
    target, target_mask = model._target_tokens(decoder_input, None, len(source), end=False)
    if len(target) != len(source) or (target_mask is not None and not target_mask.bool().all()):
        raise ValueError("decoder_input must have as many rows as the source, of equal length")
    check_room(target.shape[1], max_new_tokens, model.room(model.tree.decoder))
    ends = end_ids(model, eos_token_id) if stop_at_eos else []
    forced = model.cfg.forced_bos_token_id if forced_bos_token_id is None else forced_bos_token_id
    check_in_vocab(model, "forced_bos_token_id", [] if forced is None else [forced])
    banned = list(model.cfg.suppress_tokens if suppress_tokens is None else suppress_tokens)
    check_in_vocab(model, "suppress_tokens", banned)

    def choose(logits: Tensor, tokens: Tensor, real: Tensor) -> Tensor:
        if decoder_input is None and forced is not None and tokens.shape[1] == 1:
            return torch.full_like(tokens[:, 0], forced)
        without = logits.index_fill(1, torch.tensor(banned, device=logits.device).long(), float("-inf"))
        return draw(without, tokens=tokens, real=real)

    reads_once = use_past_kv_cache and first_bidirectional(model.decoder) is None
    cache = EncoderDecoderCache(model.cfg.n_decoder_layers) if reads_once else None
    masks = {"attention_mask": mask, "global_attention_mask": checked_global_mask(model, global_attention_mask, source)}
    reader = _TargetReader(model, TokenSequence(target), cache, source, masks)

    def whole() -> Any:
        lengthen = steps(reader, max_new_tokens, choose, ends, fill=model.pad_id())
        for _ in progress_bar("generating", max_new_tokens, None if verbose else False, steps=lengthen):
            pass
        return convert(reader.sequence)

    return run_generation(whole)


class _TargetReader(Reader):
    """Runs an encoder-decoder on its source (once, if there is a cache) and its target."""

    cache: EncoderDecoderCache | None

    def __init__(
        self,
        model: HookedRootModule,
        target: TokenSequence,
        cache: EncoderDecoderCache | None,
        source: Tensor,
        masks: dict[str, Tensor | None],
    ) -> None:
        super().__init__(model, target, cache)
        self.source, self.masks = source, masks

    def read(self, n_new: int, options: dict[str, Any]) -> Float[Tensor, "batch pos d_vocab"]:
        """The model's logits at the last `n_new` positions of the target, or only at the last one."""
        new = self.sequence.tokens[:, -n_new:]
        if self.cache is not None and self.cache.source is not None:
            return self.model(None, new, **options)
        return self.model(self.source, new, **self.masks, **options)
