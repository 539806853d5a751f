"""Compares the outputs of models that read images with those of transformers, on random images."""

from collections.abc import Callable, Iterator
from functools import singledispatch
from inspect import signature

from jaxtyping import Int
from torch import Tensor, nn

from hooked_lm.hub.model_classes import Model
from hooked_lm.models.vision.dual_encoder import DualEncoder
from hooked_lm.models.vision.encoder import VisionEncoder
from hooked_lm.models.vision.inputs import ImageTensors
from hooked_lm.models.vision.vision_language import VisionLanguage

Complete = Callable[[Tensor], Tensor]
Compared = tuple[str, Tensor, Tensor]  # the name of a check, our output, and that of transformers
# name of an output of a tower in transformers -> our return type
TOWER_OUTPUTS = {
    "logits": "logits",
    "image_embeds": "projected",
    "pooler_output": "pooled",
    "last_hidden_state": "embeddings",
}


@singledispatch
def compared(model: Model, reference: nn.Module, complete: Complete = lambda logits: logits) -> Iterator[Compared]:
    """Yields the outputs of both models for random images, and random texts where the model reads texts; none for a model that
    reads no images.

    `complete` adds what transformers leaves out of the logits of texts.
    """
    yield from ()


@compared.register
def _(model: VisionLanguage, reference: nn.Module, complete: Complete = lambda logits: logits) -> Iterator[Compared]:
    name, ours, expected = _with_text(model, reference)
    yield name, ours, complete(expected)


@compared.register
def _(model: DualEncoder, reference: nn.Module, *_: object) -> Iterator[Compared]:
    tokens, images = model.drawn_inputs()
    given = {"input_ids": tokens.to(model.device), **_like(model, images)}
    yield "similarities as in transformers", model(**given), reference(**given).logits_per_image


@compared.register
def _(model: VisionEncoder, reference: nn.Module, *_: object) -> Iterator[Compared]:
    yield _of_tower(model, reference)


def words(model: VisionLanguage, length: int) -> Int[Tensor, "2 length"]:
    """Random ids of words, none of images."""
    tokens = model.drawn_inputs().tokens
    rows = [row[~is_image] for row, is_image in zip(tokens, model.images_among(tokens), strict=True)]
    return rows[0].new_tensor([(row.tolist() * length)[:length] for row in rows])


def _with_text(model: VisionLanguage, reference: nn.Module) -> Compared:
    inputs = model.drawn_inputs()
    tokens, images = inputs.tokens.to(model.device), _like(model, inputs.images)
    is_image = model.images_among(tokens)
    of_prompt = model.reads_both_ways  # then types mark the tokens after it, and there are none
    known = signature(reference.forward).parameters
    types = {"mm_token_type_ids": is_image.int(), "token_type_ids": is_image.long() * (not of_prompt)}
    given = {name: value for name, value in types.items() if name in known}
    expected = reference(input_ids=tokens, attention_mask=tokens.new_ones(tokens.shape), **given, **images).logits
    return "logits as in transformers, with images", model(tokens, **images), expected


def _of_tower(model: VisionEncoder, reference: nn.Module) -> Compared:
    """The output of a tower's last head that both have; what transformers returns beside it may lack the last norm."""
    images = _like(model, model.drawn_images())
    found = reference(**images)
    heads = {"logits": model.classifier, "projected": model.projection, "pooled": model.pooler, "embeddings": model}
    name, return_type = next(
        (name, kind) for name, kind in TOWER_OUTPUTS.items() if found.get(name) is not None and heads[kind] is not None
    )
    ours = model(**images, return_type=return_type)
    expected = found[name].view_as(ours)  # images of some towers are one row in transformers
    return f"{return_type} as in transformers", ours, expected


def _like(model: Model, images: ImageTensors) -> dict[str, Tensor]:
    """Images on the device of a model, and in its dtype."""
    kinds = {name: model.cfg.dtype if x.is_floating_point() else x.dtype for name, x in images.items()}
    return {name: x.to(model.device, kinds[name]) for name, x in images.items()}
