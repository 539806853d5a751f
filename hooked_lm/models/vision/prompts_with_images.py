"""Writes prompts with images: by the processor of a checkpoint, or by a tokenizer with pixels that are ready."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from hooked_lm.components.vision.image_text import PLACEHOLDER, ImageText
from hooked_lm.models.text.tokens import padded
from hooked_lm.models.vision.inputs import VisionInputs

Row = str | list[int]  # a prompt: text or token ids
ImageSize = tuple[int, int]  # the numbers of tokens and of their columns


def prepare(
    model: Any,
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
        images: the images of all prompts. Pictures, such as those of pillow or arrays of integers, need the processor of the
            checkpoint (`model.processor`). Floating-point tensors [image, channel, height, width], or a list of tensors
            [channel, height, width], are pixels that are ready: scaled and normalised. So is a dict of tensors under the names
            that the processor gives them.
        padding_side: on which side shorter prompts are padded.
        prepend_bos: whether text begins with a BOS token, where no processor reads it; by default as its tokenizer has it.
        options: further arguments of the processor.

    Raises ValueError if the numbers of images and of their places differ, and for pictures and chats without a processor.

    >>> import torch
    >>> from hooked_lm import HookedVisionLanguage
    >>> tower = dict(n_layers=1, d_model=16, n_heads=2, image_size=8, patch_size=4, act_fn="gelu")
    >>> cfg = dict(n_layers=1, d_model=16, n_heads=2, n_ctx=16, d_vocab=10, act_fn="gelu", vision=tower, image_token=9)
    >>> model = HookedVisionLanguage(cfg)
    >>> model.prepare(torch.tensor([1, 9, 2]), torch.zeros(1, 3, 8, 8)).tokens
    tensor([[1, 9, 9, 9, 9, 2]])
    """
    is_chat = _is_chat(prompts)
    if is_chat:
        images = _of_chat(prompts) if images is None else images
        prompts, prepend_bos = _by_template(model, prompts), False
    else:
        prompts, images = _in_one(prompts, images)
    rows, found = _rows(prompts), _listed(images)
    are_pictures = not isinstance(found, dict) and _are_pictures(found)
    if model.processor is None and (are_pictures or options):
        _refuse(model, options)
    if model.processor is not None and (are_pictures or not found) and all(isinstance(row, str) for row in rows):
        inputs = _by_processor(model, rows, found, is_chat, {"padding_side": padding_side, **options})
        if inputs is not None:
            return inputs
    if are_pictures:
        made = model.processor.image_processor(found, return_tensors="pt")
        found = {name: made[name] for name in model.image_arguments if name in made}
    return _by_tokenizer(model, rows, found, padding_side, prepend_bos)


# ---- by the processor ------------------------------------------------------------------------------------------------


def _by_processor(
    model: Any, texts: list[Any], pictures: Any, is_chat: bool, options: dict[str, Any]
) -> VisionInputs | None:
    """Prompts as the processor writes them; None if it has no way to write a prompt without images."""
    processor, text = model.processor, model.tree.image_text
    token = getattr(processor, "image_token", None) or PLACEHOLDER
    texts = [each.replace(PLACEHOLDER, f"{text.start}{token}{text.end}") for each in texts]
    counts = [each.count(token) for each in texts]
    if sum(counts) != len(pictures):
        raise ValueError(_unlike(sum(counts), len(pictures)))
    if text.bos_after_images and 0 in counts:
        return None
    given = {"return_tensors": "pt", "padding": True, **options}
    if is_chat and (bos := getattr(model.tokenizer, "bos_token", None)) and texts[0].startswith(bos):
        given.setdefault("add_special_tokens", False)
    left = iter(pictures)
    images = {"images": [[next(left) for _ in range(n)] for n in counts]} if pictures else {}
    return model.inputs(processor(text=texts, **images, **given))


def _refuse(model: Any, options: Mapping[str, Any]) -> None:
    why = model.why_no_processor or "this model has none"
    if options:
        raise TypeError(f"{', '.join(options)}: arguments of a processor, and {why}")
    raise ValueError(
        f"pictures are read by the checkpoint's processor, and {why}; give pixels that are ready: floating-point tensors "
        "[image, channel, height, width]"
    )


def _unlike(n_places: int, n_images: int) -> str:
    return f"the prompts have {n_places} places for images, but there are {n_images} images"


# ---- by a tokenizer --------------------------------------------------------------------------------------------------


def _by_tokenizer(
    model: Any, rows: list[Row], images: Any, padding_side: str, prepend_bos: bool | None
) -> VisionInputs:
    """The prompts with as many tokens for each image as it needs, padded to one length."""
    writer = Writer(model, rows)
    counts = [writer.n_places(row) for row in rows]
    if not isinstance(images, dict):
        pixels = model.tree.vision.pixels
        per_prompt = counts if sum(counts) == len(images) else None
        images = pixels.from_images(model.tree.vision.embed, images, per_prompt) if images else {}
    sizes = image_sizes(model, images)
    if sum(counts) == len(sizes):
        left = iter(sizes)
        rows = [writer.expanded(row, left) for row in rows]
    elif writer.n_tokens != sum(n_tokens for n_tokens, _ in sizes):  # unless they are written already
        raise ValueError(_unlike(sum(counts), len(sizes)))
    tokens, mask = padded([writer.ids(row, prepend_bos) for row in rows], writer.pad_id, padding_side)
    return VisionInputs(tokens, images, mask)


def image_sizes(model: Any, images: Mapping[str, Any]) -> list[ImageSize]:
    """The number of tokens of each image, and that of columns."""
    layout = model.image_layout(images) if images else None
    if layout is None:
        return []
    return list(zip(layout.n_tokens, (layout.cells[..., 1].amax(1) + 1).tolist(), strict=True))


class Writer:
    """Writes the images of prompts, in texts with the tokenizer's token of images, or one that stands for it."""

    def __init__(self, model: Any, rows: Sequence[Row]) -> None:
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
        counts = (row.count(self.own) if isinstance(row, str) else row.count(self.image) for row in rows)
        self.n_tokens = sum(counts)

    @property
    def pad_id(self) -> int:
        """The id of padding."""
        return getattr(self.model.tokenizer, "pad_token_id", None) or 0

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


def _by_template(model: Any, chats: Any) -> Any:
    """The text of chats."""
    tokenizer = model.tokens.need_tokenizer() if model.processor is None else model.processor
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "chat messages need the checkpoint's processor, or a tokenizer with a chat template, and "
            f"{model.why_no_processor or 'this model has none'}; give text"
        )
    return tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)


# ---- what was given --------------------------------------------------------------------------------------------------


def _is_chat(prompts: Any) -> bool:
    """Whether these are messages, or a list of chats."""
    first = prompts[0] if isinstance(prompts, (list, tuple)) and prompts else None
    return isinstance(first, Mapping) or (isinstance(first, list) and bool(first) and isinstance(first[0], Mapping))


def _of_chat(chats: Any) -> list[Any]:
    """The images in the messages, in their order."""
    messages = chats if isinstance(chats[0], Mapping) else [message for chat in chats for message in chat]
    parts = [part for m in messages if not isinstance(m["content"], str) for part in m["content"]]
    keys = ("image", "url", "path", "base64")
    return [part[key] for part in parts if part.get("type") == "image" for key in keys if key in part]


def _rows(prompts: Any) -> list[Row]:
    """Texts or token ids as one list."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Tensor):
        return list((prompts if prompts.ndim == 2 else prompts[None]).tolist())
    return [list(prompts)] if all(isinstance(each, int) for each in prompts) else list(prompts)


def _in_one(prompts: Any, images: Any) -> tuple[Any, Any]:
    """Prompts in parts as texts and images."""
    if not isinstance(prompts, (list, tuple)):
        return prompts, images
    if any(not isinstance(part, (str, int, list, tuple)) for part in prompts):
        prompts = [prompts]
    if not any(isinstance(prompt, (list, tuple)) and any(isinstance(p, str) for p in prompt) for prompt in prompts):
        return prompts, images
    if images is not None:
        raise ValueError("a prompt in parts has its images among them: leave images out")
    rows = [[prompt] if isinstance(prompt, str) else prompt for prompt in prompts]
    texts = ["".join(part if isinstance(part, str) else PLACEHOLDER for part in row) for row in rows]
    return texts, [part for row in rows for part in row if not isinstance(part, str)] or None


def _listed(images: Any) -> Any:
    """Images one by one in a list, or tensors under the names of arguments."""
    if images is None or isinstance(images, Mapping):
        return [] if images is None else dict(images)
    if isinstance(images, (list, tuple)):
        return [each for group in images for each in _listed(group)]
    n_axes = getattr(images, "ndim", 3)
    if isinstance(images, Tensor) and images.is_floating_point() and n_axes not in (3, 4):
        return {"pixel_values": images}  # as the processor of the family gives them
    return list(images) if n_axes == 4 else [images]


def _are_pictures(images: Sequence[Any]) -> bool:
    """Whether a processor must read some of these images."""
    return not all(isinstance(each, Tensor) and each.is_floating_point() for each in images)
