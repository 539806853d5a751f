"""The generation loop: in each step a `Reader` computes the next-token logits, and `choose` selects a token."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.errors import ArgumentError
from hooked_lm.hooks import HookedRootModule, HookPoint, is_listening
from hooked_lm.hooks.generation_step import GenerationStep, set_current
from hooked_lm.hooks.token_labels import Labels
from hooked_lm.models.checks import check_length, check_rows, check_stream, real_of
from hooked_lm.models.generation.sampling import check_sampling, next_tokens, sample_logits
from hooked_lm.models.text.chat import Chat, GrowingLabels
from hooked_lm.models.vision.inputs import ImageTensors, TowerInputs, VisionInputs

Input = str | Sequence[str] | Int[Tensor, "*batch pos"] | Float[Tensor, "batch pos d_model"] | VisionInputs | Chat
Choose = Callable[
    ..., Tensor
]  # (logits, tokens=..., real=...) -> next token; `real` marks the tokens that are not padding


class TokenSequence:
    """A prompt and its continuation: ids [batch, pos], preceded by any prompt embeddings; `real` is False for padding.

    `is_image` marks the tokens of the prompt that stand for `images`; None if the model reads none. Later tokens are words.
    `is_suffix` marks the tokens of the prompt that are not read in both directions, as later ones are not; None: no token.
    `growing` has the labels of the tokens, if the prompt is a conversation.
    """

    growing: GrowingLabels | None = None

    def __init__(
        self,
        tokens: Tensor,
        real: Tensor | None = None,
        embeds: Tensor | None = None,
        images: ImageTensors | TowerInputs | None = None,
        is_image: Bool[Tensor, "batch pos"] | None = None,
        is_suffix: Bool[Tensor, "batch pos"] | None = None,
    ) -> None:
        self.tokens, self.embeds, self.images = tokens, embeds, images or {}
        self.is_image, self.is_suffix = is_image, is_suffix
        self.real = torch.ones_like(tokens, dtype=torch.bool) if real is None else real

    def __len__(self) -> int:
        return self.real.shape[1]

    @property
    def real_tokens(self) -> Bool[Tensor, "batch pos"]:
        """The mask of the ids: False for padding."""
        return self.real[:, len(self) - self.tokens.shape[1] :]

    def columns(self, start: int, end: int) -> Tensor | VisionInputs:
        """The tokens of these positions as the input of a model, with the images if they include the prompt."""
        n_embeds = len(self) - self.tokens.shape[1]
        which = slice(start - n_embeds, end - n_embeds)
        tokens = self.tokens[:, which]
        if self.is_image is None:
            return tokens
        is_suffix = torch.zeros_like(self.is_image) if self.is_suffix is None else self.is_suffix
        n_new = self.tokens.shape[1] - self.is_image.shape[1]
        marks = {
            "is_image": F.pad(self.is_image, (0, n_new))[:, which],
            "is_suffix": F.pad(is_suffix, (0, n_new), value=True)[:, which],
        }
        return VisionInputs(tokens, self.images if start == 0 else {}, **marks)

    @property
    def padded_on_the_left(self) -> Int[Tensor, "batch pos"]:
        """The ids with all padding in front, also that between a prefix and the tokens after it."""
        return self.tokens.gather(1, self.real_tokens.int().argsort(dim=1, stable=True))

    @property
    def labels(self) -> Sequence[Labels] | None:
        """What the real tokens of each row are, if the prompt is a conversation."""
        return None if self.growing is None else self.growing.of(self.real_tokens, self.tokens)

    def append(self, new: Int[Tensor, "batch new"]) -> None:
        self.tokens = torch.cat([self.tokens, new], 1)
        self.real = torch.cat([self.real, torch.ones_like(new, dtype=torch.bool)], 1)

    def all_embeds(self, model: HookedRootModule) -> Float[Tensor, "batch pos d_model"]:
        """The token embeddings of prompt and continuation, without positions."""
        embeds = model.embed(self.tokens)
        return embeds if self.embeds is None else torch.cat([self.embeds, embeds], 1)


def prompt_sequence(
    model: HookedRootModule,
    input: Input,
    prepend_bos: bool | None = None,
    padding_side: str | None = None,
    attention_mask: Tensor | None = None,
) -> TokenSequence:
    """Any input as a sequence with minimal padding, on the left."""
    if isinstance(input, Chat):
        read = input.tokens if input.inputs is None else input.inputs
        sequence = prompt_sequence(model, read, attention_mask=input.attention_mask)
        sequence.growing = GrowingLabels(input, model.tokenizer)
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


class Reader(ABC):
    """Runs a model on the unprocessed tokens of a growing sequence; without a cache, on the whole sequence.

    `known` are the logits after the tokens in the cache, for a sequence that is read already.
    """

    def __init__(
        self,
        model: HookedRootModule,
        sequence: TokenSequence,
        cache: KeyValueCache | None,
        known: Float[Tensor, "batch d_vocab"] | None = None,
    ) -> None:
        self.model, self.sequence, self.cache, self.known = model, sequence, cache, known
        self.steps = itertools.count()

    def next_logits(self) -> Float[Tensor, "batch d_vocab"]:
        """The logits of the next token."""
        sequence = self.sequence
        n_new = len(sequence) - (0 if self.cache is None else self.cache.length)
        points = [point for point in self.model.unembed.modules() if isinstance(point, HookPoint)]
        keep = None if is_listening(*points) else 1
        set_current(GenerationStep(next(self.steps), sequence.real, n_new, sequence, sequence.labels))
        if n_new == 0 and self.known is not None:
            return self.known
        return self.read(n_new, {"past_kv_cache": self.cache, "logits_to_keep": keep})[:, -1]

    @abstractmethod
    def read(self, n_new: int, options: dict[str, Any]) -> Float[Tensor, "batch pos d_vocab"]:
        """The model's logits at the last `n_new` positions, or only at the last one."""


def steps(reader: Reader, n: int, choose: Choose, ends: list[int], fill: int) -> Iterator[None]:
    """Appends one token per step to the reader's sequence, until all rows have ended or there are `n` new tokens.

    A row ends at an id of `ends` and is filled with `fill` while others continue.
    """
    sequence = reader.sequence
    stops = torch.tensor(ends, dtype=torch.long, device=sequence.real.device)
    finished = torch.zeros_like(sequence.real[:, 0])
    for step in range(n):
        choose_next = partial(choose, tokens=sequence.tokens, real=sequence.real_tokens)
        new = next_tokens(choose_next, reader.next_logits(), finished, step)
        new = torch.where(finished, torch.full_like(new, fill), new)
        finished |= torch.isin(new, stops)
        sequence.append(new[:, None])
        yield
        if finished.all():
            break


def sampler(
    device: torch.device,
    do_sample: bool,
    top_k: int | None,
    top_p: float | None,
    temperature: float,
    freq_penalty: float,
    seed: int | torch.Generator | Sequence[int] | None,
) -> Choose:
    """`sample_logits` with these options; greedy unless `do_sample`. ValueError for invalid options.

    `seed` may be one for each row.
    """
    check_sampling(top_k, top_p, temperature)
    return partial(
        sample_logits,
        top_k=top_k,
        top_p=top_p,
        temperature=temperature if do_sample else 0.0,
        freq_penalty=freq_penalty,
        generator=_generator(device, seed),
    )


def _generator(
    device: torch.device, seed: int | torch.Generator | Sequence[int] | None
) -> torch.Generator | list[torch.Generator] | None:
    """What draws with a seed, or with one for each row."""
    if seed is None or isinstance(seed, torch.Generator):
        return seed
    if isinstance(seed, int):
        return torch.Generator(device).manual_seed(seed)
    return [torch.Generator().manual_seed(each) for each in seed]


def check_room(n_prompt: int, n_new: int, n_ctx: int) -> None:
    """Raises ValueError unless prompt and new tokens fit into the model's context."""
    if n_new < 0 or n_prompt + n_new > n_ctx:
        raise ValueError(
            f"a prompt of {n_prompt} tokens and max_new_tokens={n_new} do not fit the model's n_ctx of {n_ctx}; "
            f"max_new_tokens may be 0 to {max(0, n_ctx - n_prompt)}"
        )


def end_ids(model: HookedRootModule, eos_token_id: int | Sequence[int] | None) -> list[int]:
    """The ids that end a row: those given, else the checkpoint's or the tokenizer's. ValueError if there are none."""
    known = (eos_token_id, model.cfg.eos_token_id, getattr(model.tokenizer, "eos_token_id", None))
    end = next((token for token in known if token is not None), None)
    if end is None:
        raise ArgumentError("no end-of-sequence token is known: give eos_token_id=..., or stop_at_eos=False")
    ends = [end] if isinstance(end, int) else list(end)
    if eos_token_id is not None:
        check_in_vocab(model, "eos_token_id", ends)
    return ends


def check_in_vocab(model: HookedRootModule, name: str, ids: Sequence[int]) -> None:
    """Raises ValueError for ids that the model cannot generate."""
    d_vocab = model.cfg.d_vocab_out
    if wrong := [token for token in ids if not 0 <= token < d_vocab]:
        raise ValueError(f"{name} {wrong[0]} is out of range: d_vocab is {d_vocab}, so 0 to {d_vocab - 1}")


def converter(
    model: HookedRootModule, input: str | Sequence[str] | Tensor, return_type: str, kinds: Sequence[str]
) -> Callable[[TokenSequence], Any]:
    """The function that converts a sequence to `return_type`: one of `kinds`, or the type of the input."""
    if return_type not in ("input", *kinds):
        known = ", ".join(map(repr, ("input", *kinds)))
        raise ValueError(f"return_type must be one of {known}, got {return_type!r}")
    is_text = not isinstance(input, Tensor)
    if return_type == "input" and isinstance(input, Tensor):
        return_type = "embeds" if input.is_floating_point() else "tokens"
    if return_type == "tokens":
        return lambda sequence: sequence.padded_on_the_left
    if return_type == "embeds":
        return lambda sequence: sequence.all_embeds(model)
    tokenizer = model.tokens.need_tokenizer()

    def text(sequence: TokenSequence) -> str | list[str]:
        texts = [tokenizer.decode(row, skip_special_tokens=True) for row in sequence.padded_on_the_left]
        return texts[0] if len(texts) == 1 and (isinstance(input, str) or not is_text) else texts

    return text
