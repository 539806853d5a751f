"""Generation: a model continues its prompt one token at a time, under whatever hooks are open."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm import tqdm

from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.hooks import HookPoint, NamesFilter, is_listening
from hooked_lm.hooks.generation_step import GenerationStep, run_generation, set_current
from hooked_lm.models.checks import check_length, check_stream, first_bidirectional, real_of
from hooked_lm.models.generation.sampling import check_sampling, next_tokens, sample_logits
from hooked_lm.models.stack import checked_ids

Output = str | list[str] | Tensor
Input = str | Sequence[str] | Int[Tensor, "*batch pos"] | Float[Tensor, "batch pos d_model"]


def generate(
    model: Any,
    input: Input = "",
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
    seed: int | torch.Generator | None = None,
    return_cache: bool = False,
    names_filter: NamesFilter = None,
) -> Any:
    """Continue a prompt by at most `max_new_tokens` tokens; returns the prompt with its continuation.

    Prompts of unequal length go together: a list of strings, or ids with an `attention_mask`. Each row continues as it
    would alone; padding stands on the left of the result, wherever it was before. Hooks that are open run throughout:
    they see the prompt first, then single tokens (without the key/value cache, everything each time); `hook.step` and
    `hook.positions` tell them which. No gradients.

    Args:
        input: text, a list of texts, token ids [batch, pos] or [pos], or token embeddings [batch, pos, d_model].
        stop_at_eos: end a row at `eos_token_id` (one id or several; the checkpoint's if None, or the tokenizer's). While
            others go on, a finished row is filled with the first of these ids.
        do_sample: draw tokens as `sample_logits` does with `top_k`, `top_p`, `temperature`, `freq_penalty`; otherwise take
            the likeliest, after the penalty.
        use_past_kv_cache: read each token once. Otherwise, and always where a layer's attention is bidirectional, everything
            is read again for each token.
        prepend_bos, padding_side: how text becomes tokens; on which side ids without a mask are padded.
        return_type: "str", "tokens", "embeds" (token embeddings), or "input": what was given. Text is without special
            tokens. Of a prompt of embeddings, "str" and "tokens" return the continuation alone.
        verbose: show a progress bar.
        attention_mask: [batch, pos], 1 for real tokens and 0 for padding.
        seed: a number, or a generator, to draw from; torch's global generator if None.
        return_cache: return also an ActivationCache of all tokens of the result, at the sites of `names_filter`.

    Raises ValueError before anything runs for options that make no sense, and for a prompt that with `max_new_tokens`
    more would exceed the model's n_ctx; in the step, naming it and the row, for logits that are NaN or infinite.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> model.generate("The capital of France is", max_new_tokens=1, do_sample=False, verbose=False)
    'The capital of France is Paris'
    """
    convert = _converter(model, input, return_type)
    record = _Record(model, names_filter) if return_cache else None
    sequence, steps = _start(
        model, input, max_new_tokens, record, stop_at_eos, eos_token_id, do_sample, top_k, top_p, temperature,
        freq_penalty, use_past_kv_cache, prepend_bos, padding_side, attention_mask, seed,
    )  # fmt: skip

    def whole() -> Output:
        for _ in tqdm(steps, "generating", max_new_tokens, disable=not verbose):
            pass
        return convert(sequence)

    result = run_generation(whole, model.hooks(record.hooks) if record else None)
    return (result, record.cache()) if record else result


def generate_stream(
    model: Any,
    input: Input = "",
    max_new_tokens: int = 10,
    max_tokens_per_yield: int = 25,
    return_type: str = "input",
    verbose: bool = True,
    **options: Any,
) -> Iterator[Output]:
    """The same piece by piece, while it is generated: the first piece begins with the prompt.

    A piece comes after every `max_tokens_per_yield` new tokens, and at the end. All pieces together are what `generate`
    returns. `options` are the other arguments of `generate`, except `return_cache`.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> for piece in model.generate_stream("The capital of France is", 1, do_sample=False, verbose=False):
    ...     print(piece)
    The capital of France is Paris
    """
    if no_option := {"return_cache", "names_filter"} & options.keys():
        raise TypeError(
            f"generate_stream keeps no cache, so it has no {min(no_option)}: use generate(return_cache=True)"
        )
    if max_tokens_per_yield < 1:
        raise ValueError(f"max_tokens_per_yield is a number of tokens, at least 1, got {max_tokens_per_yield}")
    convert = _converter(model, input, return_type)
    sequence, steps = _start(model, input, max_new_tokens, None, **options)
    bar = tqdm(steps, "generating", max_new_tokens, disable=not verbose)
    return _pieces(sequence, iter(bar), max_tokens_per_yield, convert)


def _start(
    model: Any,
    input: Input,
    max_new_tokens: int,
    record: "_Record | None",
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
    seed: int | torch.Generator | None = None,
) -> tuple["_Sequence", Iterator[None]]:
    """Check everything; returns the prompt, and the steps that lengthen it by a token each."""
    check_sampling(top_k, top_p, temperature)
    sequence = _prompt(model, input, prepend_bos, padding_side, attention_mask)
    total, n_ctx = len(sequence) + max_new_tokens, model.cfg.n_ctx
    if max_new_tokens < 0 or total > n_ctx:
        raise ValueError(
            f"a prompt of {len(sequence)} tokens and max_new_tokens={max_new_tokens} do not fit the model's n_ctx of "
            f"{n_ctx}; max_new_tokens may be 0 to {max(0, n_ctx - len(sequence))}"
        )
    choose = partial(
        sample_logits,
        top_k=top_k,
        top_p=top_p,
        temperature=temperature if do_sample else 0.0,
        freq_penalty=freq_penalty,
        generator=_generator(seed, model.device),
    )
    reads_once = use_past_kv_cache and first_bidirectional(model.blocks) is None
    cache = KeyValueCache(model.cfg.n_layers, room=total) if reads_once else None
    reader = _Reader(model, sequence, cache, record)
    return sequence, _steps(reader, max_new_tokens, choose, _stop_ids(model, eos_token_id) if stop_at_eos else [])


def _steps(reader: "_Reader", n: int, choose: Callable[..., Tensor], stop: list[int]) -> Iterator[None]:
    """Lengthen the sequence by a token a step, until all rows have stopped or there are `n` new ones."""
    sequence = reader.sequence
    ends = torch.tensor(stop, dtype=torch.long, device=sequence.real.device)
    finished = torch.zeros_like(sequence.real[:, 0])
    for step in range(n):
        seen = {"tokens": sequence.tokens, "real": sequence.real_tokens}
        new = next_tokens(partial(choose, **seen), reader.next_logits(), finished, step)
        if stop:
            new = torch.where(finished, ends[0], new)
            finished |= torch.isin(new, ends)
        sequence.append(new[:, None])
        yield
        if stop and finished.all():
            break
    if reader.record:
        reader.next_logits()


class _Sequence:
    """Prompt and continuation: ids [batch, pos], after the embeddings of a prompt given so, and what is no padding."""

    def __init__(self, tokens: Tensor, embeds: Tensor | None, real: Tensor) -> None:
        self.tokens, self.embeds, self.real = tokens, embeds, real

    def __len__(self) -> int:
        return self.real.shape[1]

    @property
    def real_tokens(self) -> Bool[Tensor, "batch pos"]:
        """Which of the ids are no padding."""
        return self.real[:, len(self) - self.tokens.shape[1] :]

    def append(self, new: Int[Tensor, "batch new"]) -> None:
        self.tokens = torch.cat([self.tokens, new], 1)
        self.real = torch.cat([self.real, torch.ones_like(new, dtype=torch.bool)], 1)

    def all_embeds(self, model: Any) -> Float[Tensor, "batch pos d_model"]:
        """The embeddings of everything, positions left out."""
        embeds = model.embed(self.tokens)
        return embeds if self.embeds is None else torch.cat([self.embeds, embeds], 1)


class _Reader:
    """Shows the model what it has not read yet of a growing sequence; without a cache, everything again."""

    def __init__(self, model: Any, sequence: _Sequence, cache: KeyValueCache | None, record: "_Record | None") -> None:
        self.model, self.sequence, self.cache, self.record = model, sequence, cache, record
        self.steps = itertools.count()

    def next_logits(self) -> Float[Tensor, "batch d_vocab"]:
        """The logits of the token that comes next."""
        model, sequence, cache = self.model, self.sequence, self.cache
        n_new = len(sequence) - (cache.length if cache is not None else 0)
        points = [point for point in model.unembed.modules() if isinstance(point, HookPoint)]
        options = {
            "attention_mask": sequence.real.long(),
            "past_kv_cache": cache,
            "logits_to_keep": None if is_listening(*points) else 1,
        }
        set_current(GenerationStep(next(self.steps), sequence.real, n_new, sequence))
        if n_new <= sequence.tokens.shape[1]:
            logits = model(sequence.tokens[:, -n_new:], **options)
        else:
            resid, pos_embed = model.get_residual(sequence.all_embeds(model), attention_mask=sequence.real)
            logits = model(resid, start_at_layer=0, shortformer_pos_embed=pos_embed, **options)
        if self.record:
            self.record.keep(len(sequence))
        return logits[:, -1]


class _Record:
    """What was seen at every token of a sequence, from the first time that the token was read.

    Where a layer is bidirectional that changes with each new token, and the last time is kept.
    """

    def __init__(self, model: Any, names_filter: NamesFilter) -> None:
        self.model = model
        self.seen, self.hooks, _ = model.get_caching_hooks(names_filter)
        self.pieces: dict[str, list[Tensor]] = {}  # in the order in which the sites were reached
        self.keeps_last = first_bidirectional(model.blocks) is not None
        self.length = 0

    def keep(self, length: int) -> None:
        """Keep what the last run left of the positions that are new, of `length` in all."""
        if self.keeps_last:
            self.pieces, self.length = {}, 0
        n_new, self.length = length - self.length, length
        for name, value in self.seen.items():
            new = value.narrow(self._axis(name, "pos", "query_pos"), -n_new, n_new)
            self.pieces.setdefault(name, []).append(new if new.shape == value.shape else new.clone())
        self.seen.clear()

    def cache(self) -> Any:
        """Everything, put together along the positions."""
        return self.model.make_cache({name: self._joined(name) for name in self.pieces}, True)

    def _joined(self, name: str) -> Tensor:
        pieces = self.pieces[name]
        if "key_pos" in self.model.hook_dict[name].dims:  # a key that was not there yet: never attended to
            never = float("-inf") if name.endswith("hook_attn_scores") else 0.0
            pieces = [F.pad(piece, (0, self.length - piece.shape[-1]), value=never) for piece in pieces]
        return torch.cat(pieces, self._axis(name, "pos", "query_pos"))

    def _axis(self, name: str, *kinds: str) -> int:
        dims = self.model.hook_dict[name].dims
        for axis, dim in enumerate(dims):
            if dim in kinds:
                return axis
        raise ValueError(f"'{name}' has no position axis, so steps cannot be put together; its axes are {dims}")


# ---- what goes in, what comes out ----------------------------------------------------------------------------------


def _prompt(
    model: Any, input: Input, prepend_bos: bool | None, padding_side: str | None, attention_mask: Tensor | None
) -> _Sequence:
    """Any input as a sequence with its padding, as little as there may be, on the left."""
    tokens: Tensor
    if isinstance(input, Tensor) and input.is_floating_point():
        check_stream(input, model.cfg.d_model)
        check_length(input, 0, model.cfg.n_ctx)
        embeds = input.to(model.device)
        tokens, shape = torch.empty(len(embeds), 0, dtype=torch.long, device=model.device), embeds.shape[:2]
    else:
        given = attention_mask
        tokens, attention_mask = model._tokens_and_mask(input, prepend_bos, padding_side, given)
        if given is None and isinstance(input, Tensor):
            attention_mask = model.tokens.attention_mask(tokens, prepend_bos, padding_side)
        tokens, embeds, shape = checked_ids(tokens, model.cfg.d_vocab), None, tokens.shape
    if 0 in shape:
        raise ValueError(f"the prompt is empty: its shape is {tuple(shape)}; give at least one token")
    if attention_mask is None:
        return _Sequence(tokens, embeds, torch.ones(shape, dtype=torch.bool, device=model.device))
    if attention_mask.shape != shape:
        raise ValueError(f"attention_mask is {tuple(attention_mask.shape)}, and the prompt is {tuple(shape)}")
    real = real_of(attention_mask).to(model.device)
    if not real.any(1).all():
        raise ValueError(f"row {int(real.any(1).int().argmin())} of the prompt is nothing but padding")
    order = real.int().argsort(dim=1, stable=True)[:, -int(real.sum(1).max()) :]
    if embeds is None:
        return _Sequence(tokens.gather(1, order), None, real.gather(1, order))
    return _Sequence(tokens, embeds.take_along_dim(order[..., None], 1), real.gather(1, order))


def _stop_ids(model: Any, eos_token_id: int | Sequence[int] | None) -> list[int]:
    known = (eos_token_id, model.cfg.eos_token_id, getattr(model.tokenizer, "eos_token_id", None))
    eos = next((token for token in known if token is not None), None)
    if eos is None:
        raise ValueError(
            "no end-of-sequence token is known, as the model has no tokenizer with one: give eos_token_id=..., or "
            "stop_at_eos=False"
        )
    ends, d_vocab = [eos] if isinstance(eos, int) else list(eos), model.cfg.d_vocab
    wrong = [end for end in ends if eos_token_id is not None and not 0 <= end < d_vocab]
    if wrong:
        raise ValueError(f"eos_token_id {wrong[0]} is out of range: d_vocab is {d_vocab}, so 0 to {d_vocab - 1}")
    return ends


def _generator(seed: int | torch.Generator | None, device: torch.device) -> torch.Generator | None:
    return torch.Generator(device).manual_seed(seed) if isinstance(seed, int) else seed


def _converter(model: Any, input: Input, return_type: str) -> Callable[[_Sequence], Output]:
    """From a sequence to what the caller wants to have."""
    is_text = not isinstance(input, Tensor)
    if return_type == "input" and isinstance(input, Tensor):
        return_type = "embeds" if input.is_floating_point() else "tokens"
    elif return_type == "input":
        return_type = "str"
    if return_type == "tokens":
        return lambda sequence: sequence.tokens
    if return_type == "embeds":
        return lambda sequence: sequence.all_embeds(model)
    if return_type != "str":
        raise ValueError(f"return_type must be 'input', 'str', 'tokens' or 'embeds', got {return_type!r}")
    tokenizer = model.tokens.need_tokenizer()

    def text(sequence: _Sequence) -> str | list[str]:
        texts = [tokenizer.decode(row, skip_special_tokens=True) for row in sequence.tokens]
        return texts[0] if len(texts) == 1 and (isinstance(input, str) or not is_text) else texts

    return text


def _pieces(
    sequence: _Sequence, steps: Iterator[None], size: int, convert: Callable[[_Sequence], Output]
) -> Iterator[Output]:
    """What every `size` steps added to the converted sequence, and what is left at the end."""

    def some_steps() -> tuple[int, Any]:
        return sum(1 for _ in itertools.islice(steps, size)), convert(sequence)

    sent: Any = None
    while (made := run_generation(some_steps))[0] == size:
        now = _complete(made[1])
        yield _added(now, sent)
        sent = now
    rest = _added(made[1], sent)
    if sent is None or (rest.numel() if isinstance(rest, Tensor) else any(rest)):
        yield rest


def _added(now: Any, before: Any) -> Any:
    """What stands after `before`."""
    if before is None:
        return now
    if isinstance(now, list):
        return [text[len(start) :] for text, start in zip(now, before, strict=True)]
    return now[len(before) :] if isinstance(now, str) else now[:, before.shape[1] :]


def _complete(output: Any) -> Any:
    """The output without a character at its end of which there are only the first bytes yet."""
    if isinstance(output, list):
        return [_complete(text) for text in output]
    return output.rstrip("\ufffd") if isinstance(output, str) else output
