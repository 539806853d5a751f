"""The input of a model that reads images: token ids, and the images among them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_lm.components.vision.patches import Patches
from hooked_lm.models.text.chat import Chat
from hooked_lm.models.text.source_and_target import SourceAndTarget
from hooked_lm.notebook_repr import NotebookRepr, Table, short_repr

ImageTensors = Mapping[str, Tensor]  # what describes images, under the names that processors give it


@dataclass(frozen=True)
class TowerInputs:
    """Images in a vision tower: cut into `patches`, or read by some of its blocks.

    `streams` are those of the tower after so many blocks each. It goes on from the last of them; without any, from the patches.
    """

    patches: Patches
    streams: Mapping[int, Float[Tensor, "image place width"]] = field(default_factory=dict)

    def repeated(self, n: int) -> "TowerInputs":
        """The same images, `n` times one after the other."""
        streams = {layer: torch.cat([stream] * n) for layer, stream in self.streams.items()}
        return TowerInputs(self.patches.repeated(n), streams)


@dataclass(frozen=True)
class VisionInputs(NotebookRepr):
    """Token ids [batch, pos], and tensors of images under the names that processors of transformers give them.

    Images are in the order in which their tokens occur, row after row. A run that has read them in part has `TowerInputs` in
    their place. `len` is the number of prompts; `model.rows(inputs,
    which)` are some of them, with their images. `tokens` may also be text. `is_image` marks the tokens
    of images; None: all with the id of image tokens. `is_suffix` marks the tokens after a prompt, for a model that
    reads prompts in both directions; None: all are of the prompt. It and the mask may include cached tokens.

    >>> inputs = VisionInputs(
    ...     torch.tensor([[1, 9, 9, 2]]), {"pixel_values": torch.zeros(1, 3, 4, 8)}
    ... )
    >>> inputs.repeated(2).tokens.shape, inputs.repeated(2).images["pixel_values"].shape
    (torch.Size([2, 4]), torch.Size([2, 3, 4, 8]))
    """

    tokens: Any
    images: Any = field(default_factory=dict)  # a mapping of tensors, or `TowerInputs`
    attention_mask: Int[Tensor, "batch all_pos"] | Bool[Tensor, "batch all_pos"] | None = None
    is_image: Bool[Tensor, "batch pos"] | None = None
    is_suffix: Bool[Tensor, "batch suffix_pos"] | None = None

    def repr_table(self) -> Table:
        """The tensors with their shapes."""
        if isinstance(self.images, TowerInputs):
            images: ImageTensors = {"patches": self.images.patches.vectors}
        else:
            images = self.images
        named = {"tokens": self.tokens, **images, **self.of_rows()}
        return Table(("", "value"), [(name, short_repr(value)) for name, value in named.items() if value is not None])

    def __repr__(self) -> str:
        shown = ", ".join(f"{name} {value}" for name, value in self.repr_table().rows)
        return f"VisionInputs({shown})"

    def __len__(self) -> int:
        return 1 if isinstance(self.tokens, str) else len(self.tokens)

    @property
    def shape(self) -> torch.Size:
        """The number of prompts, or of images that a dual encoder compares with texts, and the length of the token ids."""
        return torch.Size([len(self), *self.tokens.shape[1:]])

    def to(self, device: torch.device | str) -> "VisionInputs":
        """The same inputs on a device; images in a tower stay on that of the tower."""
        return self._each(lambda x: x.to(device), lambda images: images)

    def repeated(self, n: int) -> "VisionInputs":
        """The same rows, `n` times one after the other."""
        return self._each(lambda x: torch.cat([x] * n), lambda images: images.repeated(n))

    def _each(
        self, change: Callable[[Tensor], Tensor], in_tower: Callable[[TowerInputs], TowerInputs]
    ) -> "VisionInputs":
        """The inputs with a change of each tensor, and one of images in a tower."""
        if isinstance(self.images, TowerInputs):
            images: ImageTensors | TowerInputs = in_tower(self.images)
        else:
            images = {name: change(x) for name, x in self.images.items()}
        return replace(self, images=images, **{name: change(x) for name, x in self.of_rows().items()})

    def of_rows(self) -> dict[str, Tensor]:
        """The tensors that have one entry for each prompt: token ids and marks."""
        return {name: x for name, x in vars(self).items() if name != "images" and x is not None}


@dataclass(frozen=True)
class ImagesAndTexts(VisionInputs):
    """What a dual encoder compares: each image with each text. Rows of the similarity are images."""

    def __len__(self) -> int:
        return len(self.images["pixel_values"])


# Text, ids, a conversation, or the output of a processor.
Given = str | Sequence[str] | Tensor | VisionInputs | Chat | Mapping[str, Any] | None
GivenImages = Mapping[str, Tensor | None]  # the same as arguments, of which some may be left out
Pixels = Float[Tensor, "..."] | np.ndarray | Sequence[Float[Tensor, "channel height width"]]  # that are ready
PromptRows = Int[Tensor, "_batch _pos"] | VisionInputs  # token ids, alone or with images among them
Rows = PromptRows | SourceAndTarget  # what a model reads
SomeRows = TypeVar("SomeRows", bound=Rows)


def ids_of(rows: Rows | Chat) -> Int[Tensor, "batch pos"]:
    """The token ids of what a model reads."""
    return rows if isinstance(rows, Tensor) else rows.tokens


def repeated_rows(rows: SomeRows, n: int) -> SomeRows:
    """What a model reads, `n` times one after the other."""
    return rows.repeat(n, 1) if isinstance(rows, Tensor) else rows.repeated(n)  # type: ignore[return-value]
