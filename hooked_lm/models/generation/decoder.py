"""Generation with a decoder: continues a prompt one token at a time, with the active hooks."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.hooks import HookedRootModule, NamesFilter
from hooked_lm.hooks.generation_step import run_generation
from hooked_lm.models.checks import check_length, check_rows, check_stream, first_bidirectional, real_of
from hooked_lm.models.generation.loop import Reader, TokenSequence, check_room, converter, end_ids, sampler, steps
from hooked_lm.models.text.chat import Chat, GrowingLabels
from hooked_lm.models.vision.inputs import ImageTensors, TowerInputs, VisionInputs
from hooked_lm.progress import progress_bar

Output = str | list[str] | Tensor
Input = str | Sequence[str] | Int[Tensor, "*batch pos"] | Float[Tensor, "batch pos d_model"] | VisionInputs | Chat


def generate(
    model: HookedRootModule,
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
    """Continues a prompt by at most `max_new_tokens` tokens; returns the prompt with its continuation.

    Prompts of different lengths form a batch: a list of strings, or ids with an `attention_mask`. Each row continues as
    it would alone; the result is padded on the left. Active hooks run at every step, on the whole prompt first and then
    on single tokens (without the key/value cache, on the whole sequence each time); `hook.step` and `hook.positions`
    identify the step and its positions. No gradients.

    Args:
        input: text, a list of texts, token ids [batch, pos] or [pos], or token embeddings [batch, pos, d_model]; for a model
            that reads images also `VisionInputs`.
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
        seed: an int, or a generator to draw from; torch's global generator if None.
        return_cache: also return an ActivationCache of all tokens of the result, at the sites of `names_filter`.

    Raises ValueError, before anything runs, for invalid options and for a prompt that exceeds the model's n_ctx together
    with `max_new_tokens`; during generation, with step and row, for logits that are NaN or infinite.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> model.generate(
    ...     "The capital of France is", max_new_tokens=1, do_sample=False, verbose=False
    ... )
    'The capital of France is Paris'
    """
    convert = converter(model, _text_of(input), return_type, ("str", "tokens", "embeds"))
    record = _Record(model, names_filter) if return_cache else None
    sequence, lengthen = _start(
        model, input, max_new_tokens, record, stop_at_eos, eos_token_id, do_sample, top_k, top_p, temperature,
        freq_penalty, use_past_kv_cache, prepend_bos, padding_side, attention_mask, seed,
    )  # fmt: skip

    def whole() -> Output:
        for _ in progress_bar("generating", max_new_tokens, None if verbose else False, steps=lengthen):
            pass
        return convert(sequence)

    result = run_generation(whole, model.hooks(record.hooks) if record else None)
    return (result, record.cache()) if record else result


def generate_stream(
    model: HookedRootModule,
    input: Input = "",
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
    convert = converter(model, _text_of(input), return_type, ("str", "tokens", "embeds"))
    sequence, lengthen = _start(model, input, max_new_tokens, None, **options)
    bar = progress_bar("generating", max_new_tokens, None if verbose else False, steps=lengthen)
    return _pieces(sequence, iter(bar), max_tokens_per_yield, convert)


def _start(
    model: HookedRootModule,
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
) -> tuple[TokenSequence, Iterator[None]]:
    """Checks all arguments; returns the prompt, and the steps that append one token each."""
    choose = sampler(model.device, do_sample, top_k, top_p, temperature, freq_penalty, seed)
    sequence = _prompt(model, input, prepend_bos, padding_side, attention_mask)
    check_room(len(sequence), max_new_tokens, model.cfg.longest_input)
    ends = end_ids(model, eos_token_id) if stop_at_eos else []
    reads_once = use_past_kv_cache and first_bidirectional(model.blocks) is None
    cache = KeyValueCache(model.cfg.n_layers, room=len(sequence) + max_new_tokens) if reads_once else None
    reader = _PromptReader(model, sequence, cache, record)
    return sequence, _recorded(reader, steps(reader, max_new_tokens, choose, ends, fill=next(iter(ends), 0)))


def _recorded(reader: "_PromptReader", steps: Iterator[None]) -> Iterator[None]:
    """The steps, and if activations are recorded one more forward pass for the last token."""
    yield from steps
    if reader.record:
        reader.next_logits()


class _PromptReader(Reader):
    """Runs a decoder on its prompt and then on its continuation."""

    def __init__(
        self, model: HookedRootModule, sequence: TokenSequence, cache: KeyValueCache | None, record: "_Record | None"
    ) -> None:
        super().__init__(model, sequence, cache)
        self.record = record

    def read(self, n_new: int, options: dict[str, Any]) -> Float[Tensor, "batch pos d_vocab"]:
        """The model's logits at the last `n_new` positions, or only at the last one."""
        model, sequence = self.model, self.sequence
        options["attention_mask"] = sequence.real.long()
        if n_new <= sequence.tokens.shape[1]:
            logits = model(sequence.last(n_new), **options)
        else:
            resid, pos_embed = model.get_residual(sequence.all_embeds(model), attention_mask=sequence.real)
            logits = model(resid, start_at_layer=0, shortformer_pos_embed=pos_embed, **options)
        if self.record:
            self.record.keep(len(sequence))
        return logits


class _Record:
    """The activations of every token of a sequence, from the forward pass that first processed the token.

    If a layer is bidirectional, those of the last forward pass, as each new token changes them. Sites of images are stored
    once, from the forward pass that read them.
    """

    def __init__(self, model: HookedRootModule, names_filter: NamesFilter) -> None:
        self.model = model
        self.seen, self.hooks, _ = model.get_caching_hooks(names_filter)
        self.pieces: dict[str, list[Tensor]] = {}  # in the order in which the sites were reached
        self.keeps_last = first_bidirectional(model.blocks) is not None
        self.length = 0

    def keep(self, length: int) -> None:
        """Stores the activations of the new positions, after a forward pass that reached `length` positions."""
        if self.keeps_last:
            self.pieces, self.length = {}, 0
        n_new, self.length = length - self.length, length
        for name, value in self.seen.items():
            if not self.model.hook_dict[name].grows:
                self.pieces[name] = [value]
                continue
            new = value.narrow(self._axis(name, "pos", "query_pos"), -n_new, n_new)
            self.pieces.setdefault(name, []).append(new if new.shape == value.shape else new.clone())
        self.seen.clear()

    def cache(self) -> Any:
        """A cache of all activations, concatenated along the positions."""
        return self.model.make_cache({name: self._joined(name) for name in self.pieces}, True)

    def _joined(self, name: str) -> Tensor:
        pieces = self.pieces[name]
        if len(pieces) == 1:
            return pieces[0]
        if self.model.hook_dict[name].dims[-1] in ("key_pos", "block"):  # keys of later tokens are not attended to
            masked = float("-inf") if name.endswith("_scores") else 0.0
            pieces = [F.pad(piece, (0, pieces[-1].shape[-1] - piece.shape[-1]), value=masked) for piece in pieces]
        return torch.cat(pieces, self._axis(name, "pos", "query_pos"))

    def _axis(self, name: str, *kinds: str) -> int:
        dims = self.model.hook_dict[name].dims
        for axis, dim in enumerate(dims):
            if dim in kinds:
                return axis
        raise ValueError(f"'{name}' has no position axis, so steps cannot be concatenated; its axes are {dims}")


# ---- input and output ----------------------------------------------------------------------------------------------


def _prompt(
    model: HookedRootModule,
    input: Input,
    prepend_bos: bool | None,
    padding_side: str | None,
    attention_mask: Tensor | None,
) -> TokenSequence:
    """Any input as a sequence with minimal padding, on the left."""
    if isinstance(input, Chat):
        sequence = _prompt(model, input.tokens, None, None, input.attention_mask)
        sequence.labels = GrowingLabels(input, model.tokenizer)
        return sequence
    tokens: Tensor
    images: ImageTensors | TowerInputs = {}
    is_image: Tensor | None = None
    is_suffix: Tensor | None = None
    if isinstance(input, VisionInputs):
        attention_mask = input.attention_mask if attention_mask is None else attention_mask
        images, is_image, is_suffix, input = input.images, input.is_image, input.is_suffix, input.tokens
    if isinstance(input, Tensor) and input.is_floating_point():
        check_stream(input, model.cfg.d_model)
        check_length(input, 0, model.cfg.longest_input)
        embeds = input.to(model.device)
        tokens, shape = torch.empty(len(embeds), 0, dtype=torch.long, device=model.device), embeds.shape[:2]
    else:
        given = attention_mask
        tokens, attention_mask = model._tokens_and_mask(input, prepend_bos, padding_side, given)
        if given is None and isinstance(input, Tensor):
            attention_mask = model.tokens.attention_mask(tokens, prepend_bos, padding_side)
        tokens, embeds, shape = model.checked_tokens(tokens), None, tokens.shape
        is_image = model.images_among(tokens) if is_image is None else is_image.to(tokens.device)
    if 0 in shape:
        raise ValueError(f"the prompt is empty: its shape is {tuple(shape)}; give at least one token")
    if attention_mask is None:
        all_real = torch.ones(shape, dtype=torch.bool, device=model.device)
        return TokenSequence(tokens, all_real, embeds, images, is_image, is_suffix)
    if attention_mask.shape != shape:
        raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)}, but the prompt {tuple(shape)}")
    real = real_of(attention_mask).to(model.device)
    check_rows(real)
    order = real.int().argsort(dim=1, stable=True)[:, -int(real.sum(1).max()) :]
    if embeds is not None:
        return TokenSequence(tokens, real.gather(1, order), embeds.take_along_dim(order[..., None], 1))
    is_image, is_suffix = (x if x is None else x.to(order.device).gather(1, order) for x in (is_image, is_suffix))
    return TokenSequence(tokens.gather(1, order), real.gather(1, order), None, images, is_image, is_suffix)


def _text_of(input: Input) -> Any:
    """The input without its images."""
    return input.tokens if isinstance(input, VisionInputs | Chat) else input


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
