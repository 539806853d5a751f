"""Writes prompts with images: by the processor of a checkpoint, or by a tokenizer with pixels that are ready."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hooked_lm.models.vision.inputs import VisionInputs

PLACEHOLDER = "<image>"


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

    An image is where "<image>", or the model's own token of images, is in the text; it is written as often as the image has
    tokens. Tokens around images, such as those of its beginning and end, are part of the text.

    Args:
        prompts: text, a list of texts, chat messages (dicts with "role" and "content"), a list of such chats, token ids, or a
            prompt in parts: a list of texts and of pixels [channel, height, width].
        images: the images of all prompts. Pictures, such as those of pillow or integer tensors, need the processor of the
            checkpoint (`model.processor`). Floating-point tensors [image, channel, height, width], a list of images, or a
            dict of tensors under the names that the processor gives them, are pixels that are ready: scaled and normalised.
        padding_side: on which side shorter prompts are padded.
        prepend_bos: whether text begins with a BOS token; the model's default if None. The processor decides for itself.
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
    if not _is_chat(prompts):
        prompts, images = _in_one(prompts, images)
    elif images is None:
        images = _of_chat(prompts) or None
    ready = _ready(images)
    if model.processor is not None and not isinstance(prompts, Tensor) and (ready is None or images is None):
        return _by_processor(model, prompts, images, padding_side, options)
    if ready is None:
        raise ValueError(
            f"pictures are read by the checkpoint's processor, and {_why_none(model)}; give pixels that are ready: "
            "floating-point tensors [image, channel, height, width]"
        )
    if options:
        raise TypeError(f"{', '.join(options)}: arguments of a processor, and {_why_none(model)}")
    if _is_chat(prompts):
        prompts, prepend_bos = _by_template(model, prompts), False
    rows = _rows(model, prompts, prepend_bos)
    return _expanded(model, rows, ready, padding_side)


# ---- by the processor ------------------------------------------------------------------------------------------------


def _by_processor(model: Any, prompts: Any, images: Any, padding_side: str, options: dict[str, Any]) -> VisionInputs:
    given = {"return_tensors": "pt", "padding": True, "padding_side": padding_side, **options}
    if _is_chat(prompts):
        prompts = model.processor.apply_chat_template(prompts, tokenize=False, add_generation_prompt=True)
    texts = [prompts] if isinstance(prompts, str) else prompts
    return model.inputs(model.processor(text=texts, **({} if images is None else {"images": images}), **given))


def _why_none(model: Any) -> str:
    return model.why_no_processor or "this model has none"


# ---- by a tokenizer --------------------------------------------------------------------------------------------------


def _rows(model: Any, prompts: Any, prepend_bos: bool | None) -> list[list[int]]:
    """The token ids of each prompt, in which one token of images may represent a whole image."""
    if isinstance(prompts, Tensor):
        return (prompts if prompts.ndim == 2 else prompts[None]).tolist()
    if not isinstance(prompts, str) and all(isinstance(each, int) for each in prompts):
        return [list(prompts)]
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    return [each if isinstance(each, list) else _ids(model, each, prepend_bos) for each in texts]


def _ids(model: Any, text: str, prepend_bos: bool | None) -> list[int]:
    """The ids of a text with one token of images for each image."""
    tokenizer, image = model.tokens.need_tokenizer(), model.tree.image_token
    own = tokenizer.convert_ids_to_tokens(image) if image < len(tokenizer) else None
    if own is not None and tokenizer.encode(own, add_special_tokens=False) == [image]:
        return list(model.to_tokens(text.replace(PLACEHOLDER, own), prepend_bos, truncate=False)[0].tolist())
    pieces = text.split(PLACEHOLDER)
    ids = [model.to_tokens(pieces[0], prepend_bos, truncate=False)[0].tolist()]
    ids += [tokenizer.encode(piece, add_special_tokens=False) for piece in pieces[1:]]
    return [token for i, piece in enumerate(ids) for token in ([image] if i else []) + piece]


def _expanded(model: Any, rows: list[list[int]], images: dict[str, Tensor], padding_side: str) -> VisionInputs:
    """The prompts with as many tokens for each image as it needs, padded to one length."""
    image = model.tree.image_token
    n_tokens = model.image_layout(images).n_tokens if images else []
    n_places = sum(row.count(image) for row in rows)
    if n_places == len(n_tokens):
        counts = iter(n_tokens)
        rows = [[t for token in row for t in [token] * (next(counts) if token == image else 1)] for row in rows]
    elif n_places != sum(n_tokens):  # unless they are written already
        raise ValueError(f"the prompts have {n_places} places for images, but there are {len(n_tokens)} images")
    longest = max(map(len, rows))
    pad = getattr(model.tokenizer, "pad_token_id", None) or 0
    padded, masks = [], []
    for row in rows:
        padding, ones = [pad] * (longest - len(row)), [1] * len(row)
        left = padding_side == "left"
        padded.append([*padding, *row] if left else [*row, *padding])
        masks.append([*[0] * len(padding), *ones] if left else [*ones, *[0] * len(padding)])
    return VisionInputs(torch.tensor(padded), images, torch.tensor(masks))


def _by_template(model: Any, chats: Any) -> Any:
    """The text of chats."""
    tokenizer = model.tokens.need_tokenizer() if model.processor is None else model.processor
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"chat messages need the checkpoint's processor, or a tokenizer with a chat template, and {_why_none(model)}; give "
            "text"
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
    return [part["image"] for part in parts if part.get("type") == "image" and "image" in part]


def _in_one(prompts: Any, images: Any) -> tuple[Any, Any]:
    """Prompts in parts as texts and images."""
    if not isinstance(prompts, (list, tuple)):
        return prompts, images
    if any(isinstance(part, Tensor) for part in prompts):
        prompts = [prompts]
    if not any(isinstance(prompt, (list, tuple)) and any(isinstance(p, str) for p in prompt) for prompt in prompts):
        return prompts, images
    if images is not None:
        raise ValueError("a prompt in parts has its images among them: leave images out")
    rows = [[prompt] if isinstance(prompt, str) else prompt for prompt in prompts]
    texts = ["".join(part if isinstance(part, str) else PLACEHOLDER for part in row) for row in rows]
    return texts, [part for row in rows for part in row if not isinstance(part, str)] or None


def _ready(images: Any) -> dict[str, Tensor] | None:
    """Pixels that need no processor, under the names of arguments; None for pictures."""
    if images is None:
        return {}
    if isinstance(images, Mapping):
        return dict(images)
    if isinstance(images, Tensor):
        return {"pixel_values": images if images.ndim > 3 else images[None]} if images.is_floating_point() else None
    flat: Sequence[Any] = [each for row in images for each in (row if isinstance(row, (list, tuple)) else [row])]
    if not all(isinstance(each, Tensor) and each.is_floating_point() for each in flat):
        return None
    if len(sizes := {tuple(each.shape) for each in flat}) > 1:
        raise ValueError(f"images of different sizes, {sorted(sizes)}: give the tensors of a processor, as a dict")
    return {"pixel_values": torch.stack(list(flat))} if flat else {}
