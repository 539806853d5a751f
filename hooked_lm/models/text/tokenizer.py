"""What models and functions use of a tokenizer."""

from typing import Any, Protocol, SupportsIndex, runtime_checkable

import numpy as np
from torch import Tensor

from hooked_lm.models.vision.inputs import VisionInputs

# one id, ids [pos], or rows of ids
TokenIds = SupportsIndex | Tensor | np.ndarray | list[Any] | tuple[Any, ...] | VisionInputs


@runtime_checkable
class Tokenizer(Protocol):
    """The least that a model asks of a tokenizer. Those of transformers have it, fast and slow ones."""

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def pad_token_id(self) -> int | None: ...

    def __call__(self, *args: Any, **options: Any) -> Any: ...

    def decode(self, ids: Any, **options: Any) -> Any: ...


@runtime_checkable
class SidedTokenizer(Tokenizer, Protocol):
    """A tokenizer that says how many tokens there are, and on which side it pads."""

    @property
    def padding_side(self) -> str: ...

    def __len__(self) -> int: ...


@runtime_checkable
class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer with the template of conversations, and with the places of tokens in a text if it is fast."""

    chat_template: Any
    is_fast: bool

    def apply_chat_template(self, conversation: list[Any], **options: object) -> Any: ...

    def get_chat_template(self, chat_template: str | None = None, tools: object = None) -> str: ...
