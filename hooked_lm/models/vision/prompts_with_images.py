"""Writes prompts with images: by the processor of a checkpoint, or by a tokenizer with pixels that are ready."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from hooked_lm.components.vision.image_text import PLACEHOLDER, ImageText
from hooked_lm.components.vision.patches import is_ready
from hooked_lm.components.vision.pixel_format import check_images
from hooked_lm.hooks import HookedRootModule
from hooked_lm.keywords import check_keywords
from hooked_lm.models.text.tokens import padded
from hooked_lm.models.vision.given_prompts import (
    Chat,
    GivenImages,
    Row,
    chats_in,
    check_files,
    counted,
    given_images,
    images_in,
    in_one,
    rows_of,
    unlike,
    with_parts,
)
from hooked_lm.models.vision.inputs import VisionInputs

ImageSize = tuple[int, int]  # the numbers of tokens and of their columns


def prepare(
    model: HookedRootModule,
    prompts: Any,
    images: Any = None,
    *,
    padding_side: str = "left",
    prepend_bos: bool | None = None,
    **options: Any,
) -> VisionInputs:
    """Prompts with images as the input of this model.

    An image is where "<image>" is in the text, or what the family's processor calls it there. It is written as the processor
    writes it: as often as the image has tokens, with the tokens around images. In token ids it is one token of images.

    Args:
        prompts: text, a list of texts, chat messages (dicts with "role" and "content"), a list of such chats, token ids, or a
            prompt in parts: a list of texts and of images.
        images: the images of all prompts, or a list with those of each. Pictures, such as those of pillow or arrays of integers,
            need the processor of the checkpoint (`model.processor`). Floating-point tensors or arrays [image, channel, height,
            width], or a list of such [channel, height, width], are pixels that are ready: scaled and normalised. So is a dict of
            tensors under the names that the processor gives them.
        padding_side: on which side shorter prompts are padded.
        prepend_bos: whether text begins with one BOS token, or with none. By default as the checkpoint's tokenizer or processor
            has it, which need not be `cfg.default_prepend_bos`.
        options: further arguments of the processor.

    Raises ValueError if the numbers of images and of their places differ, for pictures and chats without a processor, and for
    prompts of more than `n_ctx` tokens; TypeError for prompts and images of other types.

    >>> import torch
    >>> from hooked_lm import HookedVisionLanguage
    >>> tower = dict(
    ...     n_layers=1, d_model=16, n_heads=2, image_size=8, patch_size=4, act_fn="gelu"
    ... )
    >>> cfg = dict(
    ...     n_layers=1,
    ...     d_model=16,
    ...     n_heads=2,
    ...     n_ctx=16,
    ...     d_vocab=10,
    ...     act_fn="gelu",
    ...     vision=tower,
    ...     image_token=9,
    ... )
    >>> model = HookedVisionLanguage(cfg)
    >>> model.prepare(torch.tensor([1, 9, 2]), torch.zeros(1, 3, 8, 8)).tokens
    tensor([[1, 9, 9, 9, 9, 2]])
    """
    if padding_side not in ("left", "right"):
        raise ValueError(f"padding_side must be 'left' or 'right', got {padding_side!r}")
    rows, images, is_chat = _rows_and_images(model, prompts, images)
    return written(model, rows, images, is_chat, padding_side, prepend_bos, options)


def written(
    model: HookedRootModule,
    rows: list[Row],
    images: object,
    is_chat: bool,
    padding_side: str = "left",
    prepend_bos: bool | None = None,
    of_processor: Mapping[str, Any] | None = None,
) -> VisionInputs:
    """Texts or token ids with their images as the input of a model; `is_chat`, whether a template wrote the texts."""
    options = {**(of_processor or {})}
    if prepend_bos is not None and not all(isinstance(row, str) for row in rows):
        raise TypeError("prepend_bos is for text; token ids are read as they are")
    inputs, found = None, _found(model, images, len(rows))
    are_pictures = isinstance(found, GivenImages) and found.are_pictures
    if model.processor is None and (are_pictures or options):
        _refuse(model, options)
    if isinstance(found, GivenImages) and are_pictures:
        check_files(found.images)
    check_keywords("prepare", options, _known_options(model.processor, options))
    if model.processor is not None and isinstance(found, GivenImages) and (are_pictures or not found.images):
        if all(isinstance(row, str) for row in rows):
            if model.tokenizer is not None:  # unknown words are refused
                model.tokens.ids([piece for row in rows for piece in str(row).split(PLACEHOLDER)])
            inputs = _by_processor(model, rows, found, is_chat, prepend_bos, {"padding_side": padding_side, **options})
        elif are_pictures:
            made = model.processor.image_processor(found.images, return_tensors="pt", **options)
            found, options = {name: made[name] for name in model.image_arguments if name in made}, {}
    if inputs is None:
        if options:
            raise TypeError(f"{', '.join(options)}: arguments of the processor, which these inputs do not need")
        inputs = _by_tokenizer(
            model, rows, found, padding_side, False if is_chat and prepend_bos is None else prepend_bos
        )
    _check_length(inputs.tokens.shape[1], model.cfg.n_ctx)
    return inputs


def _check_length(n_pos: int, n_ctx: int) -> None:
    """Raises ValueError for prompts that are too long."""
    if n_pos > n_ctx:
        raise ValueError(
            f"the prompts have {n_pos} tokens with their images, more than the model's n_ctx of {n_ctx}; a checkpoint that "
            "allows more is loaded with from_pretrained(..., n_ctx=...)"
        )


def _rows_and_images(model: HookedRootModule, prompts: object, images: object) -> tuple[list[Row], object, bool]:
    """Prompts as texts or token ids, their images, and whether they were chats."""
    chats = chats_in(prompts)
    if chats is None:
        prompts, images = in_one(prompts, images)
        return rows_of(prompts), images, False
    own = images_in(chats)
    if any(own) and images is not None:
        raise ValueError("the chat has its images among its messages: leave images out")
    return [_by_template(model, chat) for chat in chats], own if any(own) else images, True


def _found(model: HookedRootModule, images: object, n_prompts: int) -> GivenImages | dict[str, Tensor]:
    """Images one by one, or tensors under the names of arguments."""
    pixels, embed = model.tree.vision.pixels, model.tree.vision.embed
    if isinstance(images, Mapping):
        return pixels.ready(embed, images)
    if isinstance(images, (Tensor, np.ndarray)) and is_ready(images) and images.ndim not in (3, 4):
        return pixels.ready(embed, {"pixel_values": images})  # as the processor of the family gives them
    found = given_images(images, n_prompts)
    if not found.are_pictures:
        check_images(found.images, embed.n_channels)
    return found


# ---- by the processor ------------------------------------------------------------------------------------------------


def _by_processor(
    model: HookedRootModule,
    texts: Sequence[Any],
    given: GivenImages,
    is_chat: bool,
    prepend_bos: bool | None,
    options: dict[str, Any],
) -> VisionInputs | None:
    """Prompts as the processor writes them; None if it has no way to write a prompt without images."""
    processor, text = model.processor, model.tree.image_text
    token = getattr(processor, "image_token", None) or PLACEHOLDER
    texts = [each.replace(PLACEHOLDER, f"{text.start}{token}{text.end}") for each in texts]
    counts = [each.count(token) for each in texts]
    given.check(counts)
    if text.bos_after_images and 0 in counts:
        return None
    asked = {"return_tensors": "pt", "padding": True, **options}
    bos = getattr(model.tokenizer, "bos_token", None)
    if prepend_bos is not None:
        if text.bos_after_images:
            raise TypeError(
                "prepend_bos: the processor of this family writes BOS itself, after the images; leave it out"
            )
        texts = [_with_bos(each, bos, prepend_bos) for each in texts]
        asked.setdefault("add_special_tokens", False)
    elif is_chat and bos and texts[0].startswith(bos):
        asked.setdefault("add_special_tokens", False)
    left = iter(given.images)
    images = {"images": [[next(left) for _ in range(n)] for n in counts]} if given.images else {}
    return model.inputs(processor(text=texts, **images, **asked))


def _with_bos(text: str, bos: str | None, prepend_bos: bool) -> str:
    """The text after one BOS, or none."""
    if bos is None and prepend_bos:
        raise ValueError("prepend_bos=True: the tokenizer has no BOS token")
    while bos and text.startswith(bos):
        text = text.removeprefix(bos)
    return f"{bos}{text}" if prepend_bos else text


def _known_options(processor: Any, options: Mapping[str, Any]) -> Collection[str]:
    """The arguments of a processor; those that were given, if it does not say."""
    described = getattr(getattr(processor, "valid_processor_kwargs", None), "__annotations__", None)
    if described is None:
        return options
    parts = [getattr(processor, name, None) for name in ("tokenizer", "image_processor", "video_processor")]
    kinds = [*described.values(), *(getattr(part, "valid_kwargs", None) for part in parts)]
    return {*described, "common_kwargs"}.union(*(getattr(kind, "__annotations__", {}) for kind in kinds))


def _refuse(model: HookedRootModule, options: Mapping[str, Any]) -> None:
    why = model.why_no_processor or "this model has none"
    if options:
        raise TypeError(f"{', '.join(options)}: arguments of a processor, and {why}")
    raise ValueError(
        f"pictures are read by the checkpoint's processor, and {why}; give pixels that are ready: floating-point tensors "
        "[image, channel, height, width]"
    )


# ---- by a tokenizer --------------------------------------------------------------------------------------------------


def _by_tokenizer(
    model: HookedRootModule,
    rows: list[Row],
    given: GivenImages | dict[str, Tensor],
    padding_side: str,
    prepend_bos: bool | None,
) -> VisionInputs:
    """The prompts with as many tokens for each image as it needs, padded to one length."""
    writer = PromptWriter(model, rows)
    counts = [writer.n_places(row) for row in rows]
    if isinstance(given, GivenImages):
        pixels, per_prompt = model.tree.vision.pixels, given.counts
        if per_prompt is None and sum(counts) == len(given.images):
            per_prompt = counts
        images = pixels.from_images(model.tree.vision.embed, given.images, per_prompt) if given.images else {}
    else:
        given, images = GivenImages([]), given
    sizes = image_sizes(model, images)
    if sum(counts) == len(sizes):
        given.check_prompts(counts)
        left = iter(sizes)
        rows = [writer.expanded(row, left) for row in rows]
    else:
        _check_written(writer, rows, counts, sizes, given)
    ids = [writer.ids(row, prepend_bos) for row in rows]
    if [] in ids:
        raise ValueError(f"prompt {ids.index([])} becomes zero tokens, but a model needs at least one")
    tokens, mask = padded(ids, writer.pad_id, padding_side)
    return VisionInputs(tokens, images, mask)


def _check_written(
    writer: "PromptWriter", rows: list[Row], counts: list[int], sizes: list[ImageSize], given: GivenImages
) -> None:
    """Raises ValueError unless the prompts have all tokens of their images already."""
    if sum(map(writer.n_tokens, rows)) != sum(n_tokens for n_tokens, _ in sizes):
        given.check_prompts(counts)
        raise ValueError(unlike(sum(counts), len(sizes)))
    left = iter(sizes)
    for i, (row, n) in enumerate(zip(rows, given.counts or [], strict=False)):
        needed = sum(next(left)[0] for _ in range(n))
        if needed != writer.n_tokens(row):
            raise ValueError(
                f"prompt {i} has {counted(writer.n_tokens(row), 'image token')}, but its {counted(n, 'image')} need {needed}"
            )


def image_sizes(model: HookedRootModule, images: Mapping[str, Any]) -> list[ImageSize]:
    """The number of tokens of each image, and that of columns."""
    layout = model.image_layout(images) if images else None
    if layout is None:
        return []
    return list(zip(layout.n_tokens, (layout.cells[..., 1].amax(1) + 1).tolist(), strict=True))


class PromptWriter:
    """Writes the images of prompts, in texts with the tokenizer's token of images, or one that stands for it."""

    def __init__(self, model: HookedRootModule, rows: Sequence[Row]) -> None:
        self.model, self.image = model, model.tree.image_token
        self.text: ImageText = model.tree.image_text
        self.own = PLACEHOLDER
        self.is_known = False
        if any(isinstance(row, str) for row in rows):
            tokenizer = model.tokens.need_tokenizer()
            self.text = self.text.known_to(tokenizer)
            own = tokenizer.convert_ids_to_tokens(self.image) if self.image < len(tokenizer) else None
            if own is not None and tokenizer.encode(own, add_special_tokens=False) == [self.image]:
                self.own, self.is_known = own, True
        self.places = re.compile("|".join(map(re.escape, {PLACEHOLDER, self.text.token or self.own, self.own})))

    @property
    def pad_id(self) -> int:
        """The id of padding."""
        return getattr(self.model.tokenizer, "pad_token_id", None) or 0

    def n_tokens(self, row: Row) -> int:
        """The number of image tokens in a prompt."""
        return row.count(self.own) if isinstance(row, str) else row.count(self.image)

    def n_places(self, row: Row) -> int:
        """The number of images in a prompt."""
        return len(self.places.findall(row)) if isinstance(row, str) else row.count(self.image)

    def expanded(self, row: Row, sizes: Iterator[ImageSize]) -> Row:
        """A prompt with the tokens of its images."""
        if not isinstance(row, str):
            return [t for token in row for t in [token] * (next(sizes)[0] if token == self.image else 1)]

        def written(place: re.Match[str]) -> str:
            n_tokens, n_columns = next(sizes)
            if place[0] == self.own != (self.text.token or self.own):
                return self.own * n_tokens
            whole = self.text.written(self.own, n_tokens, n_columns)
            return f"{self.text.start}{whole}{self.text.end}" if place[0] == PLACEHOLDER else whole

        return self.places.sub(written, row)

    def ids(self, row: Row, prepend_bos: bool | None) -> list[int]:
        """The token ids of a prompt."""
        if not isinstance(row, str):
            return row
        tokenizer = self.model.tokenizer
        if self.text.bos_after_images:
            last = row.rfind(self.own) + len(self.own) if self.own in row else 0
            bos = "" if prepend_bos is False else tokenizer.bos_token or ""
            row, prepend_bos = f"{row[:last]}{bos}{row[last:]}{self.text.end_of_prompt}", False
        pieces = [row] if self.is_known else row.split(self.own)
        if prepend_bos is None:
            first = tokenizer.encode(pieces[0])
        else:
            first = self.model.to_tokens(pieces[0], prepend_bos, truncate=False)[0].tolist()
        rest = [[self.image, *tokenizer.encode(piece, add_special_tokens=False)] for piece in pieces[1:]]
        return [token for piece in [first, *rest] for token in piece]


def _by_template(model: HookedRootModule, chat: Chat) -> str:
    """The text of a chat; contents that the template does not read as text are given to it as lists."""
    tokenizer = model.tokens.need_tokenizer() if model.processor is None else model.processor
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "chat messages need the checkpoint's processor, or a tokenizer with a chat template, and "
            f"{model.why_no_processor or 'this model has none'}; give text"
        )
    for messages in (chat, with_parts(chat)):
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        lost = [m["content"] for m in chat if isinstance(m["content"], str) and m["content"].strip() not in text]
        if not lost:
            return text
    raise ValueError(f"the chat template leaves out the message {lost[0]!r}")
