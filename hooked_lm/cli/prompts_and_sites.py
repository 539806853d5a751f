"""Prompts and sites as they are typed, and as the library takes them."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hooked_lm.cli.inputs import conversation_or_text, integers

if TYPE_CHECKING:
    from torch import Tensor

    from hooked_lm.models.decoder import Decoder
    from hooked_lm.models.encoder_decoder import EncoderDecoder
    from hooked_lm.models.text.chat import Chat

IN_A_LAYER = re.compile(r"blocks\.\d+\..*|[a-z_]+\d+")
IN_ALL_LAYERS = re.compile(r"(?:blocks\.\*\.|\*\.?)?(?:attn\.|mlp\.|mixer\.)?hook_(\w+)")


def sites_of(model: "Decoder", given: Sequence[str]) -> list[str]:
    """Full names of sites. A short name means the site in all layers; names, globs and commas work, too.

    Raises KeyError for a site that the model lacks, with the nearest ones.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> sites_of(model, ["z1", "*.hook_resid_mid", "hook_embed"])[:3]
    ['blocks.1.attn.hook_z', 'blocks.0.hook_resid_mid', 'blocks.1.hook_resid_mid']
    >>> sites_of(model, ["z"]) == model.names("*.hook_z")
    True
    """
    found: dict[str, None] = {}
    for site in (part.strip() for each in given for part in each.split(",")):
        side, _, short = site.rpartition(".")
        short = short.removeprefix("hook_")
        everywhere = [
            name
            for name in model.all_points()
            if name.rpartition(".")[2] == f"hook_{short}" and name.startswith(f"{side}." if side else "")
        ]
        is_short = site in (short, f"{side}.{short}", f"hook_{short}") and site not in model.all_points()
        found |= dict.fromkeys(everywhere if everywhere and is_short else model.names(site))
    return list(found)


def short_name(site: str, layers: str = "") -> str:
    """The short name of a site in all layers. Raises ValueError for a site in one layer; `layers` says how to choose layers.

    >>> (
    ...     short_name("blocks.*.attn.hook_z"),
    ...     short_name("*hook_resid_post"),
    ...     short_name("resid_post"),
    ... )
    ('z', 'resid_post', 'resid_post')
    """
    if match := IN_ALL_LAYERS.fullmatch(site):
        return match[1]
    if IN_A_LAYER.fullmatch(site):
        short = re.sub(r"^.*hook_|\d+$", "", site)
        raise ValueError(f"{site!r} is a site in one layer: give its short name, {short!r}{layers}")
    return site


def prompt_of(
    model: "Decoder | EncoderDecoder", text: str, name: str = "the prompt"
) -> "tuple[str | Tensor | Chat, list[str]]":
    """A prompt as the library takes it, and its tokens as strings.

    A prompt such as "@chat.json" is the conversation in that file, up to where the assistant answers. For a model without a
    tokenizer a prompt is token ids, such as "12,7,3". Raises ValueError for a prompt without tokens, for anything but ids
    there, and for a model that reads no texts.
    """
    from hooked_lm.models.text.methods import TextMethods

    if not isinstance(model, TextMethods):
        raise ValueError(
            f"{name} is a text, which a {type(model).__name__} does not read: pass images to it from Python"
        )
    if text and getattr(model, "tokenizer", None) is None:
        import torch

        if not re.fullmatch(r"[\d\s,-]+", text):
            raise ValueError(f"this model has no tokenizer: give {name} as token ids, such as '12,7,3'; got {text!r}")
        ids = integers(name, re.sub(r"\s*,\s*|\s+", ",", text.strip()))
        if wrong := [i for i in ids if not 0 <= i < model.cfg.d_vocab]:
            raise ValueError(
                f"{name} has the token id {wrong[0]}; those of this model are 0 to {model.cfg.d_vocab - 1}"
            )
        return torch.tensor([ids]), list(map(str, ids))
    if isinstance(given := conversation_or_text(text), dict):
        from hooked_lm.models.text.chat_of_messages import as_prompts

        chat = as_prompts(model, [given])
        return chat, list(chat.str_tokens[0])
    words = list(map(str, model.to_str_tokens(text))) if text else []
    if not words:
        raise ValueError(f"{name} has no tokens: give some text")
    return text, words
