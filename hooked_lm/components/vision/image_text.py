"""What prompts say around images, as the processor of a family writes it."""

import re
from dataclasses import dataclass
from typing import Any

PLACEHOLDER = "<image>"


@dataclass(frozen=True)
class ImageText:
    """The text of an image in a prompt.

    `token` represents an image before its tokens are written (empty: one token of images); "<image>" means it too, between
    `start` and `end`. It becomes `before`, the tokens of the image with `end_of_row` after each of their rows but the last, and
    `after`. With `bos_after_images` a prompt has BOS after its last image instead of in front, and `end_of_prompt` at its end.

    >>> ImageText(before="[", after="]", end_of_row=";").written("x", 6, 3)
    '[xxx;xxx]'
    """

    token: str = ""
    start: str = ""
    end: str = ""
    before: str = ""
    after: str = ""
    end_of_row: str = ""
    bos_after_images: bool = False
    end_of_prompt: str = ""

    def place(self, token: str) -> str:
        """What "<image>" means in a prompt; `token` is that of images."""
        return f"{self.start}{self.token or token}{self.end}"

    def written(self, token: str, n_tokens: int, n_columns: int) -> str:
        """The text of an image of so many tokens."""
        if not self.end_of_row:
            return f"{self.before}{token * n_tokens}{self.after}"
        return f"{self.before}{self.end_of_row.join([token * n_columns] * (n_tokens // n_columns))}{self.after}"

    def known_to(self, tokenizer: Any) -> "ImageText":
        """The text without the parts whose special tokens a tokenizer lacks."""
        words = {name: text for name, text in vars(self).items() if isinstance(text, str)}
        known = tokenizer.get_vocab()
        unknown = {
            name
            for name, text in words.items()
            if not all(x in known for x in re.findall(r"<[^<>]+>|\[[A-Z_]+\]", text))
        }
        return ImageText(**{**vars(self), **dict.fromkeys(unknown, "")})
