"""Conversations with images: whose the tokens are, those of images among them."""

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.token_labels import TEMPLATE, TokenLabel
from hooked_lm.models.text.chat import Chat
from hooked_lm.models.text.chat_of_messages import (
    ChatRow,
    Renders,
    chat_of_rows,
    checked_messages,
    labelled,
    make_chat,
    rendered,
)
from hooked_lm.models.text.chat_spans import Message, Span, Spans, spans_of
from hooked_lm.models.vision.given_prompts import images_in, with_parts
from hooked_lm.models.vision.prompts_with_images import ImageSize, PromptWriter, image_sizes, written

INSTEAD = "model.prepare(messages) reads it without roles"


def chat(
    model: HookedRootModule, messages: Sequence[Any], add_generation_prompt: bool = False, **template_options: object
) -> Chat:
    """Returns a conversation with images as token ids, with the turn, the role and the part of a message of each token.

    Arguments are those of a model of text (`HookedTransformer.chat`). Content with images is a list of parts, such as
    [{"type": "image", "image": picture}, {"type": "text", "text": "What is it?"}]. The tokens of an image, with those that the
    processor writes around it, are the message's, and their part is "image".

    Raises as a model of text does, and as `prepare`; and ValueError where the tokens that the processor writes are not those
    of its text with the images written out, so that it is not certain whose they are.
    """
    options = {"add_generation_prompt": add_generation_prompt, **template_options}
    several = [messages] if messages and isinstance(messages[0], Mapping) else messages
    if not isinstance(several, (list, tuple)) or not any(map(_has_images, several)):
        return make_chat(model.tokens, messages, options).to(model.device)
    checked = [checked_messages(one, reads_images=True) for one in several]
    found = [_spans(model, one, options) for one in checked]
    images = images_in(checked)
    inputs = written(model, [each.text for each in found], images, is_chat=True)
    sizes = iter(image_sizes(model, model.inputs(inputs).images))
    writer = PromptWriter(model, [each.text for each in found])
    rows = []
    for number, (one, each) in enumerate(zip(checked, found, strict=True)):
        ids = inputs.tokens[number]
        real = ids if inputs.attention_mask is None else ids[inputs.attention_mask[number].bool()]
        rows.append(_row(model, one, _expanded(writer, each, one, sizes), real.tolist()))
    made = chat_of_rows(model.tokens, rows, options)
    return replace(made, tokens=inputs.tokens, inputs=inputs).to(model.device)


def _has_images(conversation: object) -> bool:
    """Whether a message has a part that is no text."""
    contents = (
        [m.get("content") for m in conversation if isinstance(m, Mapping)]
        if isinstance(conversation, (list, tuple))
        else []
    )
    parts = [part for content in contents if isinstance(content, (list, tuple)) for part in content]
    return any(isinstance(part, Mapping) and part.get("type") == "image" for part in parts)


def _spans(model: HookedRootModule, messages: tuple[Message, ...], options: Mapping[str, Any]) -> Spans:
    """The text of the template, and its spans; contents that it does not read as text are given to it in parts."""
    template = model.processor if getattr(model.processor, "chat_template", None) else model.tokens.need_tokenizer()
    if not (options.get("chat_template") or getattr(template, "chat_template", None)):
        raise ValueError(
            "the processor and the tokenizer have no chat template: load a model that was trained on conversations, or give "
            "chat_template=..., the text of one"
        )
    tried = [_spans_or_error(template, some, options) for some in (messages, with_parts(messages))]
    if certain := [found for found in tried if isinstance(found, Spans) and not found.missing]:
        return certain[0]
    why = next((found.missing[0] for found in tried if isinstance(found, Spans)), tried[0])
    raise ValueError(f"{why}; {INSTEAD}")


def _spans_or_error(template: Renders, messages: Sequence[Message], options: Mapping[str, Any]) -> Spans | ValueError:
    try:
        return spans_of(messages, lambda some: rendered(template, some, options))
    except ValueError as error:
        return error


def _expanded(writer: PromptWriter, found: Spans, messages: Sequence[Message], sizes: Iterator[ImageSize]) -> Spans:
    """The spans in the text with the tokens of images written out, each image a span of its message."""
    owners = [
        TokenLabel(turn, message["role"], "image")
        for turn, message in enumerate(messages)
        for part in (message["content"] if isinstance(message["content"], (list, tuple)) else ())
        if part.get("type") == "image"
    ]
    places = list(writer.places.finditer(found.text))
    if len(places) != len(owners):
        raise ValueError(
            f"the messages have {len(owners)} images, and the text of the template {len(places)} places for images: roles cannot "
            f"be told; {INSTEAD}"
        )
    text, spans, ends, shifts = "", list[Span](), [0], [0]
    for place, owner in zip(places, owners, strict=True):
        _check_place(found, place, owner)
        text += found.text[ends[-1] : place.start()]
        new = str(writer.expanded(place[0], sizes))
        spans.append(Span(len(text), len(text) + len(new), owner))
        text += new
        ends.append(place.end())
        shifts.append(len(text) - place.end())
    text += found.text[ends[-1] :]

    def moved(place: int) -> int:
        return place + shifts[bisect_right(ends, place) - 1]

    spans += [Span(moved(start), moved(stop - 1) + 1, label) for start, stop, label in found.spans]
    return Spans(text, tuple(sorted(spans)), found.changed, found.missing)


def _check_place(found: Spans, place: re.Match[str], owner: TokenLabel) -> None:
    """Raises ValueError if the place of an image is not between the texts of earlier and of later messages, or in one."""
    for start, stop, label in found.spans:
        is_within = start < place.end() and place.start() < stop
        is_beyond = (label.turn < owner.turn and start >= place.end()) or (
            label.turn > owner.turn and stop <= place.start()
        )
        if is_within or is_beyond:
            raise ValueError(
                f"it is not certain that the image at character {place.start()} is of turn {owner.turn} ({owner.role}), near "
                f"text of turn {label.turn}; {INSTEAD}"
            )


def _row(model: HookedRootModule, messages: tuple[Message, ...], found: Spans, ids: list[int]) -> ChatRow:
    """The labels of the tokens. Raises ValueError unless they are those of the text."""
    tokenizer: Any = model.tokens.need_tokenizer()
    asked = {"return_offsets_mapping": True, "return_special_tokens_mask": True}
    for specials in (False, True):
        encoded = tokenizer(found.text, add_special_tokens=specials, **asked)
        if encoded["input_ids"] == ids:
            break
    else:
        same = next((i for i, pair in enumerate(zip(ids, encoded["input_ids"], strict=False)) if len({*pair}) > 1), 0)
        raise ValueError(
            f"the processor writes other tokens than those of its text with images, from token {same} on, so that it is not "
            f"certain whose they are; {INSTEAD}"
        )
    labels, offsets, shared = labelled(found, encoded["offset_mapping"])
    outside = [
        start == stop == 0 and bool(special)
        for (start, stop), special in zip(encoded["offset_mapping"], encoded["special_tokens_mask"], strict=True)
    ]
    labels = [TEMPLATE if is_outside else label for label, is_outside in zip(labels, outside, strict=True)]
    return ChatRow(messages, found.text, ids, tuple(labels), found.changed, found.missing, shared, offsets)
