"""Prompts and images as they are given to `prepare`: texts, token ids, chats, parts; pictures, and pixels that are ready."""

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hooked_lm.components.vision.image_text import PLACEHOLDER
from hooked_lm.components.vision.patches import READY, described, is_ready, ready_pixels
from hooked_lm.models.vision.inputs import VisionInputs

SHORTEST_PICTURE = 64  # characters, in base64: of a GIF of one pixel
Row = str | list[int]  # a prompt: text or token ids
Chat = Sequence[Mapping[str, Any]]


# ---- prompts ---------------------------------------------------------------------------------------------------------


def rows_of(prompts: object) -> list[Row]:
    """Texts or token ids as one list. Raises TypeError for anything else, ValueError if there are none."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (Tensor, np.ndarray)):
        ids = torch.as_tensor(prompts)
        if ids.is_floating_point() or ids.ndim not in (1, 2):
            raise TypeError(f"prompts: got {described(prompts)}; token ids are integers [batch, pos] or [pos]")
        return list((ids if ids.ndim == 2 else ids[None]).tolist())
    if not isinstance(prompts, (list, tuple)):
        raise TypeError(
            f"prompts: got {described(prompts)}; prompts are texts, token ids, chat messages, or lists of texts and images"
        )
    if not prompts:
        raise ValueError("there are no prompts: the list is empty")
    return [list(prompts)] if all(map(_is_id, prompts)) else [_row(i, each) for i, each in enumerate(prompts)]


def _row(number: int, prompt: object) -> Row:
    """One prompt."""
    if isinstance(prompt, str):
        return prompt
    ids = prompt.tolist() if isinstance(prompt, (Tensor, np.ndarray)) else prompt
    if not isinstance(ids, (list, tuple)) or not all(map(_is_id, ids)):
        raise TypeError(
            f"prompt {number}: got {described(prompt)}; a prompt is text, token ids, or a list of texts and images"
        )
    return [int(token) for token in ids]


def _is_id(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def in_one(prompts: object, images: object) -> tuple[object, object]:
    """Prompts in parts as texts, and the images of each prompt."""
    if not isinstance(prompts, (list, tuple)):
        return prompts, images
    if any(_is_image(part) for part in prompts):
        prompts = [prompts]
    if not any(_in_parts(prompt) for prompt in prompts):
        return prompts, images
    if images is not None:
        raise ValueError("a prompt in parts has its images among them: leave images out")
    rows = [prompt if _in_parts(prompt) else [prompt] for prompt in prompts]
    texts = ["".join(part if isinstance(part, str) else PLACEHOLDER for part in row) for row in rows if _in_parts(row)]
    if len(texts) < len(rows):
        raise TypeError("prompts in parts and token ids cannot be mixed")
    own = [[part for part in row if not isinstance(part, str)] for row in rows]
    return texts, own if any(own) else None


def _in_parts(prompt: object) -> bool:
    """Whether this is a list of texts and images."""
    return isinstance(prompt, (list, tuple)) and any(isinstance(part, str) or _is_image(part) for part in prompt)


def _is_image(part: object) -> bool:
    """Whether this is an image beside texts, no token ids."""
    if isinstance(part, (Tensor, np.ndarray)):
        return part.ndim > 1
    return hasattr(part, "convert")  # of pillow


# ---- chats -----------------------------------------------------------------------------------------------------------


def chats_in(prompts: object) -> list[Chat] | None:
    """The chats, if prompts are one message, a chat, or several chats. Raises TypeError for other dicts."""
    if isinstance(prompts, VisionInputs):
        raise TypeError("these are VisionInputs, which are ready: give them to the model")
    if isinstance(prompts, Mapping):
        if "input_ids" in prompts:
            raise TypeError("this is the output of a processor, which is ready: model(**inputs)")
        prompts = [prompts]
    if not isinstance(prompts, (list, tuple)) or not prompts:
        return None
    chats = [prompts] if any(isinstance(each, Mapping) for each in prompts) else list(prompts)
    if not any(isinstance(m, Mapping) for chat in chats if isinstance(chat, (list, tuple)) for m in chat):
        return None
    for i, chat in enumerate(chats):
        if not isinstance(chat, (list, tuple)):
            raise TypeError(f"chat {i}: got {described(chat)}; a chat is a list of messages")
        for message in chat:
            _check_message(message)
    return chats


def _check_message(message: object) -> None:
    """Raises TypeError unless this is a message of a chat."""
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        raise TypeError(f"got {described(message)}; a message of a chat is a dict with 'role' and 'content'")
    content = message["content"]
    is_list = isinstance(content, (list, tuple)) and all(isinstance(part, Mapping) for part in content)
    if not isinstance(content, str) and not is_list:
        raise TypeError(f"got content {described(content)}; it is text, or a list of dicts with 'type'")


def images_in(chats: Sequence[Chat]) -> list[list[Any]]:
    """The images in the messages of each chat, in their order."""
    keys = ("image", "url", "path", "base64")
    found = []
    for chat in chats:
        parts = [part for m in chat if not isinstance(m["content"], str) for part in m["content"]]
        images = [part for part in parts if part.get("type") == "image"]
        found.append([part[key] for part in images for key in keys if key in part])
    return found


def with_parts(chat: Chat) -> list[dict[str, Any]]:
    """A chat whose contents are lists, as most templates of models with images read them."""
    return [
        {**m, "content": [{"type": "text", "text": m["content"]}] if isinstance(m["content"], str) else m["content"]}
        for m in chat
    ]


# ---- images ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GivenImages:
    """Images one by one, all of one kind: pictures, or pixels that are ready.

    `counts` are the numbers of images of each prompt, if they were given so.
    """

    images: list[Any]
    counts: list[int] | None = None
    are_pictures: bool = False

    def check(self, n_places: Sequence[int]) -> None:
        """Raises ValueError if prompts have other numbers of places for images."""
        self.check_prompts(n_places)
        if sum(n_places) != len(self.images):
            raise ValueError(unlike(sum(n_places), len(self.images)))

    def check_prompts(self, n_places: Sequence[int]) -> None:
        """Raises ValueError if images were given by prompt, and a prompt has another number of places."""
        for i, (places, n) in enumerate(zip(n_places, self.counts or n_places, strict=True)):
            if places != n:
                raise ValueError(f"prompt {i} has {counted(places, 'place')} for images, but {counted(n, 'image')}")


def unlike(n_places: int, n_images: int) -> str:
    """The error for prompts with other numbers of places and images."""
    are = "is" if n_images == 1 else "are"
    return f"the prompts have {counted(n_places, 'place')} for images, but there {are} {counted(n_images, 'image')}"


def counted(n: int, what: str) -> str:
    """A number of things.

    >>> counted(1, "place"), counted(2, "place")
    ('1 place', '2 places')
    """
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def given_images(images: object, n_prompts: int) -> GivenImages:
    """The images of prompts, one after the other, or nested: those of each prompt in a list.

    Raises TypeError for what is no image, and for pictures beside pixels that are ready; ValueError unless there are as many
    lists as prompts.
    """
    groups = images if isinstance(images, (list, tuple)) else [] if images is None else _several(images)
    counts = None
    if any(each is None or isinstance(each, (list, tuple)) or _is_batch(each) for each in groups):
        if len(groups) != n_prompts:
            raise ValueError(
                f"images are nested, {counted(len(groups), 'group')} for {counted(n_prompts, 'prompt')}: give the images of each "
                "prompt in a list, or all in one"
            )
        counts = [len(_several(each)) for each in groups]
    found = [image for each in groups for image in _several(each)]
    for i, image in enumerate(found):
        if not is_ready(image) and not _is_picture(image):
            raise TypeError(
                f"image {i}: got {described(image)}; an image is a picture of pillow or of integers; {READY}"
            )
        if is_ready(image) != is_ready(found[0]):
            raise TypeError(
                f"image 0 is {described(found[0])}, image {i} {described(image)}: give only pictures, or only pixels that are "
                f"ready; {READY}"
            )
    if found and is_ready(found[0]):
        return GivenImages([ready_pixels(image) for image in found], counts)
    return GivenImages([os.fspath(x) if isinstance(x, os.PathLike) else x for x in found], counts, bool(found))


def _several(images: Any) -> list[Any]:
    """An image, or several, as a list."""
    if images is None:
        return []
    if isinstance(images, (list, tuple)):
        return [image for each in images for image in _several(each)]
    return list(images) if getattr(images, "ndim", 3) == 4 else [images]


def _is_batch(images: object) -> bool:
    """Whether this tensor or array holds another number of images than one."""
    return isinstance(images, (Tensor, np.ndarray)) and images.ndim == 4 and len(images) != 1


def check_files(images: Sequence[Any]) -> None:
    """Raises FileNotFoundError for a picture that is the path of no file."""
    for image in images:
        if isinstance(image, str) and not (os.path.isfile(image) or _is_elsewhere(image)):
            raise FileNotFoundError(f"cannot read {image}: there is no such file; it should hold a picture")


def _is_elsewhere(text: str) -> bool:
    """Whether a text is an address, or a picture in base64, both of which processors read."""
    if text.startswith(("http://", "https://", "data:")):
        return True
    try:
        return len(text) > SHORTEST_PICTURE and bool(base64.b64decode(text, validate=True))
    except ValueError:
        return False


def _is_picture(image: object) -> bool:
    """Whether a processor can read this: integers, a picture of pillow, a path or an address."""
    if isinstance(image, (Tensor, np.ndarray)):
        return image.ndim in (2, 3)
    return isinstance(image, (str, os.PathLike)) or hasattr(image, "convert")
