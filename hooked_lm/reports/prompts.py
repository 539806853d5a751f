"""The first prompt of a task, as reports show it: its text, its tokens, and whose they are."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.engine.prompts import rows_of
from hooked_lm.models.text.chat import Chat
from hooked_lm.models.vision.inputs import VisionInputs, ids_of
from hooked_lm.pretrained import HookedTransformer
from hooked_lm.viz.labels import Who


def last_text(model: HookedTransformer, prompts: object) -> str:
    """The first prompt; of a conversation the last message."""
    if isinstance(prompts, Chat):
        return str(prompts.messages[0][-1].get("content"))
    if isinstance(prompts, VisionInputs):
        return str(model.to_string(_ids(model, prompts)))
    assert isinstance(prompts, Sequence), "texts"
    return str(prompts[0])


def words_of(model: HookedTransformer, prompts: object) -> list[str]:
    """The tokens of the first prompt, of which an image is one."""
    if isinstance(prompts, Chat):
        return list(prompts.str_tokens[0])
    given = _ids(model, prompts) if isinstance(prompts, VisionInputs) else last_text(model, prompts)
    return list(map(str, model.to_str_tokens(given)))


def turns_of(prompts: object) -> Sequence[Who] | None:
    """Whose the tokens of the first prompt are, if it is a conversation."""
    return prompts.labels[0] if isinstance(prompts, Chat) else None


def _ids(model: HookedTransformer, prompts: VisionInputs) -> Int[Tensor, " word"]:
    """The ids of the first prompt, of which an image is one."""
    tokens = ids_of(rows_of(model, prompts)).cpu()
    among = model.images_among(tokens)
    assert among is not None, "a model that reads images"
    ids, is_image = tokens[0], among[0]
    return torch.cat([ids[:1], ids[1:][~(is_image[1:] & is_image[:-1])]])
