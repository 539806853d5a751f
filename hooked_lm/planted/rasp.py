"""Programs over sequences, as values: the operations of RASP (Weiss et al. 2021, arXiv:2106.06981) that heads and MLPs can do.

An operation gives a value for each token of a prompt. `Token` and `Position` are given. `Map` and `Combine` change values token
by token, as MLPs do. `Find`, `Average` and `count` collect them from the positions that a `Match` selects, as heads do. A program
is its last operation: `run` computes it, and `compile_program` makes a model that does.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.keywords import answer_keywords

__all__ = ["Average", "Combine", "Find", "Map", "Match", "Operation", "Position", "StartShare", "Token", "count"]

Value = Hashable  # of an operation at a token: a letter, a number, a bool; None where nothing was selected
Inputs = list[Float[Tensor, "_ neuron"]]  # of a pointwise operation: from each operation that it reads
Neurons = tuple[
    Inputs, Float[Tensor, "neuron size"], list[float]
]  # the weights of the inputs and outputs, and the biases


@dataclass(frozen=True, eq=False)
class Operation(ABC):
    """A value for each token. In the stream it is a one-hot vector over its domain, or one coordinate for a number."""

    is_number: ClassVar[bool] = False

    @property
    def inputs(self) -> tuple["Operation", ...]:
        """The operations whose values it reads."""
        return ()

    @property
    @abstractmethod
    def domain(self) -> tuple[Value, ...]:
        """The values that it can have; of a number, in ascending order."""

    @abstractmethod
    def run(self, tokens: Sequence[Value]) -> list[Value]:
        """Its values for the tokens of a prompt, the start token not among them."""

    @property
    def size(self) -> int:
        """The coordinates that it takes in the stream."""
        return 1 if self.is_number else len(self.domain)

    def varies(self) -> bool:
        """Whether its values depend on the tokens, not on positions alone."""
        return isinstance(self, Token) or any(each.varies() for each in self.inputs)


@dataclass(frozen=True, eq=False)
class Token(Operation):
    """The token itself, one of some letters."""

    letters: tuple[str, ...]

    @property
    def domain(self) -> tuple[Value, ...]:
        return self.letters

    def run(self, tokens: Sequence[Value]) -> list[Value]:
        return list(tokens)


@dataclass(frozen=True, eq=False)
class Position(Operation):
    """The place of the token, from 0, in prompts of at most `n` tokens."""

    n: int

    @property
    def domain(self) -> tuple[Value, ...]:
        return tuple(range(self.n))

    def run(self, tokens: Sequence[Value]) -> list[Value]:
        return list(range(len(tokens)))


# ---- token by token: MLPs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pointwise(Operation):
    """An operation that an MLP computes."""

    @abstractmethod
    def neurons(self) -> Neurons:
        """The weights from each input and to the value, and the biases."""


@dataclass(frozen=True, eq=False)
class Map(Pointwise):
    """A function of a value.

    >>> Map(str.upper, Token(("a", "b"))).run(["b", "a"])
    ['B', 'A']
    """

    function: Callable[..., Value]
    source: Operation

    @property
    def inputs(self) -> tuple[Operation, ...]:
        return (self.source,)

    @property
    def domain(self) -> tuple[Value, ...]:
        return tuple(dict.fromkeys(map(self.function, self.source.domain)))

    def run(self, tokens: Sequence[Value]) -> list[Value]:
        return [None if value is None else self.function(value) for value in self.source.run(tokens)]

    def neurons(self) -> Neurons:
        """One that is on for each value; of a number, two for each step between values of which the function differs."""
        values, domain = self.source.domain, self.domain
        outputs = torch.stack([one_hot(self.function(value), domain) for value in values])
        if not self.source.is_number:
            return [2 * torch.eye(len(values))], outputs, [-1.0] * len(values)
        slopes, biases, writes = [0.0], [1.0], [outputs[0]]  # the lowest value, and what each step changes
        for (low, at), (high, after) in pairwise(zip(values, outputs, strict=True)):
            if not torch.equal(at, after):
                below, above = exact_number(low), exact_number(high)
                slope, middle = float(2 / (above - below)), float(above + below) / 2
                slopes += [slope, slope]
                biases += [0.5 - slope * middle, -0.5 - slope * middle]
                writes += [after - at, at - after]
        return [torch.tensor([slopes])], torch.stack(writes), biases


@dataclass(frozen=True, eq=False)
class Combine(Pointwise):
    """A function of two values that are no numbers."""

    function: Callable[..., Value]
    first: Operation
    second: Operation

    def __post_init__(self) -> None:
        if self.first.is_number or self.second.is_number:
            raise ValueError(
                "Combine has a neuron for each pair of values, and this one is a number: use Map on it first"
            )

    @property
    def inputs(self) -> tuple[Operation, ...]:
        return (self.first, self.second)

    @property
    def domain(self) -> tuple[Value, ...]:
        return tuple(dict.fromkeys(self.function(*pair) for pair in self._pairs))

    @property
    def _pairs(self) -> list[tuple[Value, Value]]:
        return [(one, other) for one in self.first.domain for other in self.second.domain]

    def run(self, tokens: Sequence[Value]) -> list[Value]:
        both = zip(self.first.run(tokens), self.second.run(tokens), strict=True)
        return [None if None in pair else self.function(*pair) for pair in both]

    def neurons(self) -> Neurons:
        """One that is on for each pair of values."""
        columns = zip(*self._pairs, strict=True)
        reads = [
            2 * torch.stack([one_hot(value, each.domain) for value in column], 1)
            for each, column in zip(self.inputs, columns, strict=True)
        ]
        writes = torch.stack([one_hot(self.function(*pair), self.domain) for pair in self._pairs])
        return reads, writes, [-3.0] * len(writes)


# ---- from other positions: heads --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Match:
    """For each token, the positions whose key and its query satisfy a predicate of both: (key, query) -> bool."""

    keys: Operation
    queries: Operation
    predicate: Callable[..., bool]

    def __post_init__(self) -> None:
        if self.keys.is_number or self.queries.is_number:
            raise ValueError("a head compares one-hot vectors, and this key or query is a number: use Map on it first")

    def run(self, tokens: Sequence[Value]) -> list[list[int]]:
        """The selected positions for each token."""
        keys = self.keys.run(tokens)
        return [
            [i for i, key in enumerate(keys) if None not in (key, query) and self.predicate(key, query)]
            for query in self.queries.run(tokens)
        ]

    def relation(self) -> Float[Tensor, "query key"]:
        """The predicate of all values."""
        rows = [[float(self.predicate(key, query)) for key in self.keys.domain] for query in self.queries.domain]
        return torch.tensor(rows)


@dataclass(frozen=True, eq=False)
class Gather(Operation):
    """An operation that a head computes from the positions of a match."""

    match: Match
    rest: ClassVar[float] = 0.5  # the score of the start token, as a share of that of a selected one

    @property
    def inputs(self) -> tuple[Operation, ...]:
        copied = () if self.copied is None else (self.copied,)
        return (self.match.queries, self.match.keys, *copied)

    @property
    @abstractmethod
    def copied(self) -> Operation | None:
        """The operation whose values are copied; None: the flag of the start token."""

    @abstractmethod
    def mapping(self) -> Float[Tensor, "value size"]:
        """From what is copied to what is written."""


@dataclass(frozen=True, eq=False)
class Find(Gather):
    """The value at the one position that is selected; None if there is none.

    >>> position = Position(3)
    >>> before = Match(position, position, lambda key, query: key == query - 1)
    >>> Find(before, Token(("a", "b", "c"))).run(["c", "a", "b"])
    [None, 'c', 'a']
    """

    source: Operation

    @property
    def domain(self) -> tuple[Value, ...]:
        return self.source.domain

    @property
    def copied(self) -> Operation | None:
        return self.source

    def mapping(self) -> Float[Tensor, "value size"]:
        return torch.eye(self.source.size)

    def run(self, tokens: Sequence[Value]) -> list[Value]:
        values, selected = self.source.run(tokens), self.match.run(tokens)
        if several := next((places for places in selected if len(places) > 1), None):
            raise ValueError(f"Find copies from one position, and {several} are selected: use Average or count")
        return [values[places[0]] if places else None for places in selected]


@dataclass(frozen=True, eq=False)
class Average(Gather):
    """The mean of the values at the selected positions, which are numbers; 0 if there are none.

    >>> position = Position(3)
    >>> up_to_here = Match(position, position, lambda key, query: key <= query)
    >>> [str(mean) for mean in Average(up_to_here, position).run("abc")]
    ['0', '1/2', '1']
    """

    source: Operation
    n: int = 0  # how many positions are selected at most
    is_number: ClassVar[bool] = True

    @property
    def domain(self) -> tuple[Value, ...]:
        sums, found = {Fraction(0)}, {Fraction(0)}
        for k in range(1, self.n + 1):
            sums = {total + exact_number(value) for total in sums for value in self.source.domain}
            found |= {total / k for total in sums}
        return tuple(sorted(found))

    @property
    def copied(self) -> Operation | None:
        return self.source

    def mapping(self) -> Float[Tensor, "value size"]:
        return torch.tensor([[float(exact_number(value))] for value in self.source.domain])

    def run(self, tokens: Sequence[Value]) -> list[Value]:
        values = self.source.run(tokens)
        return [
            sum((exact_number(values[i]) for i in places), Fraction(0)) / max(1, len(places))
            for places in self.match.run(tokens)
        ]


@dataclass(frozen=True, eq=False)
class StartShare(Gather):
    """The share of attention that is left to the start token, beside w selected positions: 1 / (1 + w)."""

    n: int = 0  # how many positions are selected at most
    rest: ClassVar[float] = 1.0
    is_number: ClassVar[bool] = True

    @property
    def domain(self) -> tuple[Value, ...]:
        return tuple(Fraction(1, 1 + n) for n in reversed(range(self.n + 1)))

    @property
    def copied(self) -> Operation | None:
        return None

    def mapping(self) -> Float[Tensor, "value size"]:
        return torch.ones(1, 1)

    def run(self, tokens: Sequence[Value]) -> list[Value]:
        return [Fraction(1, 1 + len(places)) for places in self.match.run(tokens)]


def count(match: Match, n: int) -> Map:
    """How many positions are selected, at most `n`: a head, and an MLP that reads the number off the share of the start token.

    >>> token = Token(("a", "b"))
    >>> count(Match(token, token, lambda key, query: key == query), 3).run("aba")
    [2, 1, 2]
    """
    return Map(lambda share: int(1 / share) - 1, StartShare(match, n))


def exact_number(value: Value) -> Fraction:
    """A value that is a whole number or a fraction; raises TypeError for any other."""
    if not isinstance(value, int | Fraction):
        raise TypeError(f"an average is of whole numbers and fractions, got {value!r}: use Map on it first")
    return Fraction(value)


def one_hot(value: Value, domain: Sequence[Value]) -> Float[Tensor, " size"]:
    """The vector of a value."""
    return torch.eye(len(domain))[list(domain).index(value)]


answer_keywords(__name__)
