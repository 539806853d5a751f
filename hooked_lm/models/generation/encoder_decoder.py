"""Generation: an encoder-decoder reads its source once and writes a target one token at a time, under open hooks."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm

from hooked_lm.components.source import EncoderDecoderCache
from hooked_lm.hooks import HookPoint, is_listening
from hooked_lm.hooks.generation_step import GenerationStep, run_generation, set_current
from hooked_lm.models.checks import first_bidirectional
from hooked_lm.models.generation.sampling import check_sampling, next_tokens, sample_logits
from hooked_lm.models.text.encoder_decoder import DecoderInput

Choose = Callable[..., Tensor]


def generate(
    model: Any,
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
    decoder_input: DecoderInput | None = None,
    forced_bos_token_id: int | None = None,
    suppress_tokens: Sequence[int] | None = None,
    seed: int | torch.Generator | None = None,
) -> Any:
    """Write at most `max_new_tokens` tokens for a source; returns the target, of ids with the token it begins with.

    Sources of unequal length go together, each row as it would alone. Hooks that are open run throughout: they see the
    encoder and the first tokens of the decoder, then single tokens of the decoder (without the cache, everything each
    time; keys and values of the source are made once with it); in the decoder `hook.step` and `hook.positions` tell them
    which. No gradients.

    Args:
        input: text, a list of texts, or token ids [batch, pos] or [pos].
        one_zero_attention_mask, attention_mask: two names of one thing: 1 for real tokens of the source, 0 for padding.
        stop_at_eos: end a row at `eos_token_id` (one id or several; the model's if None). While others go on, a finished
            row is filled with the model's pad token.
        do_sample: draw tokens as `sample_logits` does with `top_k`, `top_p`, `temperature`, `freq_penalty`; otherwise take
            the likeliest, after the penalty.
        use_past_kv_cache: read each token once. Otherwise, and always where a decoder layer's self attention is
            bidirectional, everything is read again for each token.
        return_type: "str", "tokens", or "input": what was given. Text is without special tokens.
        verbose: show a progress bar.
        decoder_input: what the target begins with, in unpadded rows; the model's start token if None.
        forced_bos_token_id: the first token after the start token (the target's language in many-to-many translation); the
            model's, if it has one, if None. It is not forced after a `decoder_input`.
        suppress_tokens: what is never taken; the model's if None.
        seed: a number, or a generator, to draw from; torch's global generator if None.

    Raises ValueError before anything runs for options that make no sense, and for a target that would exceed n_ctx; in the
    step, naming it and the row, for logits that are NaN or infinite.
    """
    check_sampling(top_k, top_p, temperature)
    if one_zero_attention_mask is not None and attention_mask is not None:
        raise ValueError("one_zero_attention_mask and attention_mask are two names of one argument: give one")
    convert = _converter(model, input, return_type)
    source, mask = model._source_tokens(
        input, attention_mask if one_zero_attention_mask is None else one_zero_attention_mask
    )
    target, target_mask = model._target_tokens(decoder_input, None, len(source), end=False)
    if len(target) != len(source) or (target_mask is not None and not target_mask.bool().all()):
        raise ValueError("decoder_input must have as many rows as the source, of equal length")
    room = model.cfg.n_ctx - target.shape[1]
    if not 0 <= max_new_tokens <= room:
        raise ValueError(f"max_new_tokens={max_new_tokens}: behind {target.shape[1]} tokens it may be 0 to {room}")
    ends = _ends(model, eos_token_id) if stop_at_eos else []
    forced = model.cfg.forced_bos_token_id if forced_bos_token_id is None else forced_bos_token_id
    _check_in_vocab(model, "forced_bos_token_id", [] if forced is None else [forced])
    banned = list(model.cfg.suppress_tokens if suppress_tokens is None else suppress_tokens)
    _check_in_vocab(model, "suppress_tokens", banned)
    draw = partial(
        sample_logits,
        top_k=top_k,
        top_p=top_p,
        temperature=temperature if do_sample else 0.0,
        freq_penalty=freq_penalty,
        generator=torch.Generator(model.device).manual_seed(seed) if isinstance(seed, int) else seed,
    )

    def choose(logits: Tensor, tokens: Tensor) -> Tensor:
        if decoder_input is None and forced is not None and tokens.shape[1] == 1:
            return torch.full_like(tokens[:, 0], forced)
        return draw(
            logits.index_fill(1, torch.tensor(banned, device=logits.device).long(), float("-inf")), tokens=tokens
        )

    read = _reader(model, source, mask, use_past_kv_cache)
    return run_generation(
        lambda: convert(_continued(read, target, choose, max_new_tokens, ends, model.pad_id(), verbose))
    )


def _continued(
    read: Callable[[Tensor], Tensor], tokens: Tensor, choose: Choose, n: int, ends: list[int], pad: int, verbose: bool
) -> Int[Tensor, "batch pos"]:
    """The target, longer by a token a step, until all rows have ended or there are `n` new ones."""
    stops = torch.tensor(ends, dtype=torch.long, device=tokens.device)
    finished = torch.zeros_like(tokens[:, 0], dtype=torch.bool)
    for step in tqdm(range(n), "generating", disable=not verbose):
        new = next_tokens(partial(choose, tokens=tokens), read(tokens), finished, step)
        new = torch.where(finished, torch.full_like(new, pad), new)
        finished = finished | torch.isin(new, stops)
        tokens = torch.cat([tokens, new[:, None]], 1)
        if ends and finished.all():
            break
    return tokens


def _reader(model: Any, source: Tensor, mask: Tensor | None, use_cache: bool) -> Callable[[Tensor], Tensor]:
    """From all tokens of the target so far to the logits of the next."""
    reads_once = use_cache and first_bidirectional(model.decoder) is None
    cache = EncoderDecoderCache(model.cfg.n_decoder_layers) if reads_once else None
    points = [point for point in model.unembed.modules() if isinstance(point, HookPoint)]

    steps = itertools.count()

    def read(tokens: Tensor) -> Tensor:
        keep = None if is_listening(*points) else 1
        new = tokens if cache is None else tokens[:, cache.length :]
        set_current(GenerationStep(next(steps), torch.ones_like(tokens, dtype=torch.bool), new.shape[1], read))
        if cache is None or cache.source is None:
            logits = model(source, new, attention_mask=mask, past_kv_cache=cache, logits_to_keep=keep)
        else:
            logits = model(None, new, past_kv_cache=cache, logits_to_keep=keep)
        return logits[:, -1]

    return read


def _ends(model: Any, eos_token_id: int | Sequence[int] | None) -> list[int]:
    if eos_token_id is None:
        if not model.end_ids():
            raise ValueError("no end-of-sequence token is known: give eos_token_id=..., or stop_at_eos=False")
        return model.end_ids()
    ends = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    _check_in_vocab(model, "eos_token_id", ends)
    return ends


def _check_in_vocab(model: Any, name: str, ids: Sequence[int]) -> None:
    d_vocab = model.cfg.d_vocab_out
    if wrong := [token for token in ids if not 0 <= token < d_vocab]:
        raise ValueError(f"{name} {wrong[0]} is out of range: d_vocab is {d_vocab}, so 0 to {d_vocab - 1}")


def _converter(model: Any, input: Any, return_type: str) -> Callable[[Tensor], Any]:
    """From ids to what the caller wants to have."""
    if return_type not in ("input", "str", "tokens"):
        raise ValueError(f"return_type must be 'input', 'str' or 'tokens', got {return_type!r}")
    if return_type == "tokens" or (return_type == "input" and isinstance(input, Tensor)):
        return lambda tokens: tokens
    tokenizer = model.tokens.need_tokenizer()

    def text(tokens: Tensor) -> str | list[str]:
        texts = [tokenizer.decode(row, skip_special_tokens=True) for row in tokens]
        return texts[0] if isinstance(input, str) or (isinstance(input, Tensor) and len(texts) == 1) else texts

    return text
