"""A row of the table of flat names, and how it reads its value from a tree."""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, cached_property
from inspect import signature
from typing import Any, get_args

DECODER, ENCODER, ENCODER_DECODER = "decoder", "encoder", "encoder-decoder"
EVERY_KIND = (DECODER, ENCODER, ENCODER_DECODER)
ABSENT: Any = object()  # the tree has nothing that the name describes


@dataclass(frozen=True)
class Row:
    """What the table says of a flat name.

    `paths` lead through the tree to what the name describes, the first that leads anywhere counts: `*` is each of several
    parts, `part[Class]` the parts of one class, and absent parts are skipped. `read` makes the flat value of what is found:
    of the first, or of the list if `reads_all`. A name with `is_fact` says nothing of the tree: it is a fact about the
    model, such as its tokenizer, and a path is where its value comes from unless it is set.

    `follows` computes the value from other names, its parameters, while it is not set. A value may be set without effect if
    one of the names in `unless`, which can switch off what it describes, is set too. `spelling` brings the ways to say one
    thing to one. A `live` value is read at every run, so it can be set on the config of a model.
    """

    doc: str
    paths: tuple[str, ...] = ()
    read: Callable[[Any], Any] | None = None
    reads_all: bool = False
    is_fact: bool = False
    follows: Callable[..., Any] | None = None
    unless: tuple[str, ...] = ()
    spelling: Callable[[Any, Any], Any] | None = None
    kinds: tuple[str, ...] = EVERY_KIND
    least: int | None = None
    choices: tuple[Any, ...] = ()
    live: bool = False

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """The names that the value follows from."""
        return () if self.follows is None else tuple(signature(self.follows).parameters)

    def value(self, tree: Any) -> Any:
        """The flat value that a tree has, or ABSENT."""
        for path in self.paths:
            if parts := found(tree, path):
                part = parts if self.reads_all else parts[0]
                return part if self.read is None else self.read(part)
        return ABSENT

    def check(self, name: str, value: Any) -> None:
        """Raises ValueError for a value that no model can have."""
        if self.choices and value not in self.choices:
            raise ValueError(f"{name} must be one of {self.choices}, got {value!r}")
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if self.least is not None and not (is_whole and value >= self.least):
            raise ValueError(f"{name} must be a whole number of at least {self.least}, got {value!r}")


def of_tree(doc: str, *paths: str, default: Any = MISSING, **row: Any) -> Any:
    """The field of a name that describes a part of the tree; the keywords are those of `Row`."""
    return field(default=default, metadata={"row": Row(doc, paths, **row)})


def fact(doc: str, default: Any = MISSING, *paths: str, factory: Any = MISSING, **row: Any) -> Any:
    """The field of a name that says nothing of the tree; the keywords are those of `Row`."""
    metadata = {"row": Row(doc, paths, is_fact=True, **row)}
    if factory is not MISSING:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def found(tree: Any, path: str) -> list[Any]:
    """The parts that a path leads to.

    >>> from hooked_lm.models.config.flat import HookedTransformerConfig
    >>> cfg = HookedTransformerConfig(n_layers=2, d_model=8, n_heads=2, n_ctx=4, d_vocab=5, act_fn="relu")
    >>> found(cfg.tree, "blocks.*.attn.n_heads"), found(cfg.tree, "blocks.*.attn.rotary.theta")
    ([2, 2], [])
    """
    parts = [tree]
    for step in path.split(".") if path else ():
        if step == "*":
            parts = [each for part in parts for each in part]
            continue
        name, _, kind = step.rstrip("]").partition("[")
        parts = [getattr(part, name) for part in parts if part is not None and hasattr(part, name)]
        if kind:
            parts = [part for part in parts if type(part).__qualname__.split(".")[0] == kind]
    return parts


class Table:
    """The rows of a class of configs, and what follows from them.

    A class that only gives another default to a name has the row of its base. `remembered` are the names of which a config
    remembers whether they were set: those of the tree, those that follow from others, and these others. Values of `floats`
    may be floats.
    """

    def __init__(self, cls: Any) -> None:
        declared = [vars(base).get("__dataclass_fields__", {}) for base in cls.__mro__]
        candidates = {f.name: [d[f.name].metadata.get("row") for d in declared if f.name in d] for f in fields(cls)}
        self.rows: dict[str, Row] = {name: row for name, of in candidates.items() for row in filter(None, of[::-1])}
        self.defaults = {f.name: f.default for f in fields(cls) if f.default is not MISSING and f.name in self.rows}
        self.of_tree = frozenset(name for name, row in self.rows.items() if not row.is_fact)
        self.following = frozenset(name for name, row in self.rows.items() if row.follows is not None)
        sources = {source for row in self.rows.values() for source in row.sources}
        self.remembered = self.of_tree | self.following | sources
        self.floats = frozenset(f.name for f in fields(cls) if {float, int} <= {*get_args(f.type)})


@cache
def table(cls: Any) -> Table:
    """The table of a class of configs."""
    return Table(cls)
