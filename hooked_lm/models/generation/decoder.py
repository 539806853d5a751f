"""Generation with a decoder: continues a prompt one token at a time, with the active hooks."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hooked_lm.hooks import HookedRootModule, NamesFilter
from hooked_lm.hooks.generation_step import run_generation
from hooked_lm.models.checks import first_bidirectional
from hooked_lm.models.generation.loop import Input, TokenSequence, check_room, converter, end_ids, sampler, steps
from hooked_lm.models.generation.reading import PromptReader, SequenceRecord, check_chunk
from hooked_lm.models.prefix import PrefixedPrompt, Prompt, as_prompt, opened, text_of
from hooked_lm.progress import progress_bar

Output = str | list[str] | Tensor


def generate(
    model: HookedRootModule,
    input: Prompt = "",
    max_new_tokens: int = 10,
    stop_at_eos: bool = True,
    eos_token_id: int | Sequence[int] | None = None,
    do_sample: bool = True,
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float = 1.0,
    freq_penalty: float = 0.0,
    use_past_kv_cache: bool = True,
    prepend_bos: bool | None = None,
    padding_side: str | None = None,
    return_type: str = "input",
    verbose: bool = True,
    *,
    attention_mask: Tensor | None = None,
    seed: int | torch.Generator | Sequence[int] | None = None,
    return_cache: bool = False,
    names_filter: NamesFilter = None,
    chunk: int | None = None,
) -> Any:
    """Continues a prompt by at most `max_new_tokens` tokens; returns the prompt with its continuation.

    Prompts of different lengths form a batch: a list of strings, or ids with an `attention_mask`. Each row continues as
    it would alone; the result is padded on the left. Active hooks run at every step, on the whole prompt first and then
    on single tokens (without the key/value cache, on the whole sequence each time); `hook.step` and `hook.positions`
    identify the step and its positions. No gradients.

    Args:
        input: text, a list of texts, token ids [batch, pos] or [pos], or token embeddings [batch, pos, d_model]; for a model
            that reads images also `VisionInputs`. After a prefix, `prefix + text` or the prefix itself (see `model.prefix`):
            only what follows it is computed.
        stop_at_eos: end a row at `eos_token_id` (one id or several; the checkpoint's if None, or the tokenizer's). A
            finished row is filled with the first of these ids while others continue.
        do_sample: draw tokens as `sample_logits` does with `top_k`, `top_p`, `temperature`, `freq_penalty`; otherwise take
            the most likely, after the penalty.
        use_past_kv_cache: process each token once. Otherwise, and always if the attention of a layer is bidirectional, the
            whole sequence is processed again for each token. With rotary angles that depend on the length (dynamic NTK and
            LongRoPE past the trained length) both differ, as in transformers: a cache keeps the keys of shorter sequences.
        prepend_bos, padding_side: how text is tokenized; on which side ids without a mask are padded.
        return_type: "str", "tokens", "embeds" (token embeddings), or "input": the type of the input. Text has no special
            tokens. For a prompt of embeddings, "str" and "tokens" return the continuation only.
        verbose: show a progress bar after two seconds.
        attention_mask: [batch, pos], 1 for real tokens and 0 for padding.
        seed: an int, an int for each row (which then does not depend on the other rows), or a generator to draw from; torch's
            global generator if None.
        return_cache: also return an ActivationCache of all tokens of the result, at the sites of `names_filter`; after a
            prefix, of those that follow it.
        chunk: read the prompt in pieces of so many tokens, which takes the memory of one; hooks run on each piece.

    Raises ValueError, before anything runs, for invalid options and for a prompt that exceeds the model's n_ctx together
    with `max_new_tokens`; during generation, with step and row, for logits that are NaN or infinite.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> model.generate(
    ...     "The capital of France is", max_new_tokens=1, do_sample=False, verbose=False
    ... )
    'The capital of France is Paris'
    """
    input = as_prompt(input)
    n_known = input.prefix.n_pos if isinstance(input, PrefixedPrompt) else 0
    convert = converter(model, text_of(input), return_type, ("str", "tokens", "embeds"))
    record = SequenceRecord(model, names_filter, length=n_known) if return_cache else None
    sequence, lengthen = started(
        model, input, max_new_tokens, record, stop_at_eos, eos_token_id, do_sample, top_k, top_p, temperature,
        freq_penalty, use_past_kv_cache, prepend_bos, padding_side, attention_mask, seed, chunk,
    )  # fmt: skip

    def whole() -> Output:
        for _ in progress_bar("generating", max_new_tokens, None if verbose else False, steps=lengthen):
            pass
        return convert(sequence)

    result = run_generation(whole, model.hooks(record.hooks) if record else None)
    return (result, record.cache()) if record else result


def generate_stream(
    model: HookedRootModule,
    input: Prompt = "",
    max_new_tokens: int = 10,
    max_tokens_per_yield: int = 25,
    return_type: str = "input",
    verbose: bool = True,
    **options: Any,
) -> Iterator[Output]:
    """Yields the result of `generate` in pieces, as it is generated; the first piece begins with the prompt.

    Yields after every `max_tokens_per_yield` new tokens, and at the end. The pieces concatenate to the result of
    `generate`. `options` are the other arguments of `generate`, except `return_cache`.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> for piece in model.generate_stream(
    ...     "The capital of France is", 1, do_sample=False, verbose=False
    ... ):
    ...     print(piece)
    The capital of France is Paris
    """
    if invalid := {"return_cache", "names_filter"} & options.keys():
        raise TypeError(f"generate_stream keeps no cache, so it has no {min(invalid)}: use generate(return_cache=True)")
    if max_tokens_per_yield < 1:
        raise ValueError(f"max_tokens_per_yield is a number of tokens, at least 1, got {max_tokens_per_yield}")
    input = as_prompt(input)
    convert = converter(model, text_of(input), return_type, ("str", "tokens", "embeds"))
    sequence, lengthen = started(model, input, max_new_tokens, None, **options)
    bar = progress_bar("generating", max_new_tokens, None if verbose else False, steps=lengthen)
    return _pieces(sequence, iter(bar), max_tokens_per_yield, convert)


def started(
    model: HookedRootModule,
    input: Input | PrefixedPrompt,
    max_new_tokens: int,
    record: SequenceRecord | None,
    stop_at_eos: bool = True,
    eos_token_id: int | Sequence[int] | None = None,
    do_sample: bool = True,
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float = 1.0,
    freq_penalty: float = 0.0,
    use_past_kv_cache: bool = True,
    prepend_bos: bool | None = None,
    padding_side: str | None = None,
    attention_mask: Tensor | None = None,
    seed: int | torch.Generator | Sequence[int] | None = None,
    chunk: int | None = None,
) -> tuple[TokenSequence, Iterator[None]]:
    """Checks all arguments; returns the prompt, and the steps that append one token each."""
    choose = sampler(model.device, do_sample, top_k, top_p, temperature, freq_penalty, seed)
    how = {"prepend_bos": prepend_bos, "padding_side": padding_side, "attention_mask": attention_mask}
    sequence, cache, known = opened(model, input, max_new_tokens, how)
    if known is not None and not use_past_kv_cache:
        raise ValueError("a prefix is the key/value cache of a prompt: omit use_past_kv_cache=False")
    reads_once = use_past_kv_cache and first_bidirectional(model.blocks) is None
    check_chunk(model, chunk, sequence, cache if use_past_kv_cache else None)
    check_room(len(sequence), max_new_tokens, model.cfg.longest_input)
    if isinstance(seed, Sequence) and len(seed) != len(sequence.real):
        raise ValueError(f"seed has {len(seed)} numbers for {len(sequence.real)} rows: give one for each row")
    ends = end_ids(model, eos_token_id) if stop_at_eos else []
    reader = PromptReader(model, sequence, cache if reads_once else None, record, chunk, known)
    return sequence, _recorded(reader, steps(reader, max_new_tokens, choose, ends, fill=next(iter(ends), 0)))


def _recorded(reader: PromptReader, steps: Iterator[None]) -> Iterator[None]:
    """The steps, and if activations are recorded one more forward pass for the last token."""
    yield from steps
    if reader.record:
        reader.next_logits()


# ---- input and output ----------------------------------------------------------------------------------------------


def _pieces(
    sequence: TokenSequence, steps: Iterator[None], size: int, convert: Callable[[TokenSequence], Output]
) -> Iterator[Output]:
    """Yields what every `size` steps append to the converted sequence, and the remainder at the end."""

    def some_steps() -> tuple[int, Any]:
        return sum(1 for _ in itertools.islice(steps, size)), convert(sequence)

    sent: Any = None
    while (result := run_generation(some_steps))[0] == size:
        output = _complete(result[1])
        yield _added(output, sent)
        sent = output
    rest = _added(result[1], sent)
    if sent is None or (rest.numel() if isinstance(rest, Tensor) else any(rest)):
        yield rest


def _added(output: Output, sent: Any) -> Any:
    """The part of an output after `sent`, which it begins with."""
    if sent is None:
        return output
    if isinstance(output, list):
        return [text[len(start) :] for text, start in zip(output, sent, strict=True)]
    return output[len(sent) :] if isinstance(output, str) else output[:, sent.shape[1] :]


def _complete(output: Output) -> Any:
    """The output without a trailing incomplete UTF-8 character."""
    if isinstance(output, list):
        return [_complete(text) for text in output]
    return output.rstrip("\ufffd") if isinstance(output, str) else output
