"""Embeddings of further ids that tokens have beside their types: boxes on a page, cells of a table, shapes of characters, tasks.

The ids are arguments of an encoder's forward pass, under their names in transformers; by default all are 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.components.constants import constant, numbers
from hooked_lm.components.readable import check
from hooked_lm.components.stack_context import StackContext

Vectors = Float[Tensor, "batch pos d_embed"]


@dataclass(frozen=True)
class ExtraIds:
    """Ids that each token has, by the name of their argument: one of `n_ids`, or one of each kind."""

    name: str
    d_embed: int
    n_ids: int | tuple[int, ...]

    @property
    def per_token(self) -> tuple[int, ...]:
        """The axes after those of the tokens."""
        return () if isinstance(self.n_ids, int) else (len(self.n_ids),)

    def of(self, tokens: Int[Tensor, "batch pos"], context: StackContext) -> Int[Tensor, "batch pos *each"]:
        """The ids of these tokens."""
        given = context.extra_ids.get(self.name)
        return tokens.new_zeros(*tokens.shape, *self.per_token) if given is None else given


def sizes(ids: ExtraIds) -> tuple[int, ...]:
    """The number of ids of each kind."""
    return (ids.n_ids,) if isinstance(ids.n_ids, int) else ids.n_ids


class ExtraEmbed(nn.Module):
    """A learned vector for each id. `W_extra` is [id, d_embed]."""

    axes = {"W_extra": "[id] d_embed"}

    @dataclass(frozen=True)
    class Config(ExtraIds):
        def build(self) -> "ExtraEmbed":
            return ExtraEmbed(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.W_extra = nn.Parameter(torch.empty(*sizes(cfg), cfg.d_embed))

    def forward(self, tokens: Int[Tensor, "batch pos"], context: StackContext) -> Vectors:
        return F.embedding(self.cfg.of(tokens, context), self.W_extra)


class BoxEmbed(nn.Module):
    """The place and size of a token on its page (Xu et al. 2019, arXiv:1912.13318): the sum of learned vectors for the left,
    upper, right and lower edge, the height and the width. `W_x`, `W_y`, `W_h` and `W_w` are [place, d_embed]."""

    axes = dict.fromkeys(("W_x", "W_y", "W_h", "W_w"), "[place] d_embed")

    @dataclass(frozen=True)
    class Config(ExtraIds):
        def build(self) -> "BoxEmbed":
            return BoxEmbed(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        x, y, *_ = sizes(cfg)
        self.W_x, self.W_y, self.W_h, self.W_w = (nn.Parameter(torch.empty(n, cfg.d_embed)) for n in (x, y, y, x))

    def forward(self, tokens: Int[Tensor, "batch pos"], context: StackContext) -> Vectors:
        left, upper, right, lower = self.cfg.of(tokens, context).unbind(-1)
        corners = F.embedding(torch.stack([left, right]), self.W_x) + F.embedding(torch.stack([upper, lower]), self.W_y)
        return corners.sum(0) + F.embedding(lower - upper, self.W_h) + F.embedding(right - left, self.W_w)


class TableEmbed(nn.Module):
    """Types of several kinds, such as the cell of a token in a table (Herzig et al. 2020, arXiv:2004.02349): the sum of a learned
    vector for each. `W_kinds` is a list of [id, d_embed]."""

    axes = {"W_kinds": "[id] d_embed"}

    @dataclass(frozen=True)
    class Config(ExtraIds):
        def build(self) -> "TableEmbed":
            return TableEmbed(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.W_kinds = nn.ParameterList(nn.Parameter(torch.empty(n, cfg.d_embed)) for n in sizes(cfg))

    def forward(self, tokens: Int[Tensor, "batch pos"], context: StackContext) -> Vectors:
        kinds = self.cfg.of(tokens, context).unbind(-1)
        vectors = [F.embedding(ids, W) for ids, W in zip(kinds, self.W_kinds, strict=True)]
        return torch.stack(vectors).sum(0)


def checked_extra_ids(known: Sequence[ExtraIds], given: dict[str, Tensor], tokens: Tensor) -> dict[str, Tensor]:
    """The ids on the device of the tokens. TypeError for another argument; ValueError for a wrong shape, or ids out of range."""
    by_name, found = {ids.name: ids for ids in known}, {}
    for name, value in given.items():
        if name not in by_name:
            others = f"; this model has {', '.join(by_name)}" if by_name else ""
            raise TypeError(f"forward() got an unexpected keyword argument {name!r}{others}")
        ids = by_name[name]
        value, expected = value.to(tokens.device, torch.long), (*tokens.shape, *ids.per_token)
        value = value[None] if value.ndim == len(expected) - 1 else value
        if value.shape != expected:
            raise ValueError(f"{name} is {tuple(value.shape)}; expected {expected}")
        right = ((value >= 0) & (value < constant(value, numbers, ids.n_ids))).all()
        check(right, f"{name} has an id that is not of this model; the numbers of ids are {ids.n_ids}")
        if isinstance(ids, BoxEmbed.Config):
            right = (value[..., 2:] >= value[..., :2]).all()
            check(right, f"{name} has a box that ends before it begins; boxes are left, upper, right, lower")
        found[name] = value
    return found
