"""Pictures of coloured shapes and questions about them, for the bundled vision-language model.

A picture has a shape in each of its four quarters. A question asks for the colour of one, or for the kind of one:

    <image> what colour is the shape in the upper left ?    ->  red
    <image> which shape is in the lower right ?             ->  circle

Pictures are drawn by a few lines of torch. A fixed hash holds out one picture in eight for evaluation.
"""

import random
import zlib
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

SIZE, PATCH = 36, 6  # of a picture and of a patch, in pixels
COLOURS = {
    "red": (0.9, 0.2, 0.2),
    "green": (0.2, 0.75, 0.25),
    "blue": (0.2, 0.35, 0.9),
    "yellow": (0.9, 0.85, 0.2),
    "white": (0.95, 0.95, 0.95),
}
SHAPES = ("square", "circle", "triangle", "cross")
QUARTERS = ("upper left", "upper right", "lower left", "lower right")
WORDS = ["what", "colour", "which", "shape", "is", "the", "in", "upper", "lower", "left", "right", "?"]
HELD_OUT_SHARE = 8

IMAGE = "<image>"
VOCABULARY = ["<pad>", "<s>", "</s>", IMAGE, *WORDS, *COLOURS, *SHAPES]


@dataclass(frozen=True)
class Picture:
    """A shape in each quarter, as (kind, colour); `seed` decides their exact places and sizes, and the background."""

    shapes: tuple[tuple[str, str], ...]
    seed: int = 0

    @property
    def is_held_out(self) -> bool:
        """Whether the picture is kept for evaluation."""
        return zlib.crc32(repr(self.shapes).encode()) % HELD_OUT_SHARE == 0

    def with_shape(self, quarter: int, kind: str | None = None, colour: str | None = None) -> "Picture":
        """The same picture with another kind or colour in one quarter, in the same place."""
        shapes = list(self.shapes)
        shapes[quarter] = (kind or shapes[quarter][0], colour or shapes[quarter][1])
        return replace(self, shapes=tuple(shapes))


def random_picture(rng: random.Random, held_out: bool = False) -> Picture:
    """A picture drawn at random, held out or not."""
    while True:
        shapes = tuple((rng.choice(SHAPES), rng.choice(list(COLOURS))) for _ in QUARTERS)
        picture = Picture(shapes, rng.randrange(2**31))
        if picture.is_held_out == held_out:
            return picture


def pixels(picture: Picture) -> Float[Tensor, "channel height width"]:
    """The pixels of a picture, [channel, height, width], from -1 to 1.

    >>> pixels(Picture((("circle", "red"),) * 4)).shape
    torch.Size([3, 36, 36])
    """
    generator = torch.Generator().manual_seed(picture.seed)
    image = 0.1 + 0.08 * torch.rand(3, SIZE, SIZE, generator=generator)
    half = SIZE // 2
    for quarter, (kind, colour) in enumerate(picture.shapes):
        radius = 5.0 + 1.5 * torch.rand((), generator=generator).item()
        shift = (2.0 * torch.rand(2, generator=generator) - 1.0).tolist()
        centre = [half * (part + 0.5) + by for part, by in zip(divmod(quarter, 2), shift, strict=True)]
        inside = _inside(kind, centre, radius)
        image[:, inside] = torch.tensor(COLOURS[colour])[:, None]
    return 2.0 * image - 1.0


def _inside(kind: str, centre: list[float], radius: float) -> Tensor:
    """Which pixels a shape covers, [height, width]."""
    at = torch.arange(SIZE) + 0.5
    down, right = torch.meshgrid(at - centre[0], at - centre[1], indexing="ij")
    if kind == "square":
        return torch.maximum(down.abs(), right.abs()) < 0.85 * radius
    if kind == "circle":
        return down**2 + right**2 < radius**2
    if kind == "triangle":
        return (down < 0.8 * radius) & (right.abs() < 0.6 * (down + radius))
    arms = torch.minimum(down.abs(), right.abs()) < 0.3 * radius
    return arms & (torch.maximum(down.abs(), right.abs()) < radius)


@dataclass(frozen=True)
class Question:
    """A question about a picture, with its answer."""

    picture: Picture
    quarter: int
    asks_colour: bool

    @property
    def text(self) -> str:
        """The question, after the place of the picture."""
        where = QUARTERS[self.quarter]
        asked = "what colour is the shape" if self.asks_colour else "which shape is"
        return f"{IMAGE} {asked} in the {where} ?"

    @property
    def answer(self) -> str:
        """The answer, one word."""
        kind, colour = self.picture.shapes[self.quarter]
        return colour if self.asks_colour else kind


def random_question(rng: random.Random, held_out: bool = False) -> Question:
    """A question drawn at random, about a picture that is held out or not.

    >>> question = random_question(random.Random(0))
    >>> question.text, question.answer
    ('<image> which shape is in the upper right ?', 'square')
    """
    return Question(random_picture(rng, held_out), rng.randrange(len(QUARTERS)), rng.random() < 0.5)
