"""Rows of the table of flat names, which read values from a tree."""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from inspect import signature
from typing import Any, get_args

DECODER, ENCODER, ENCODER_DECODER, VISION = "decoder", "encoder", "encoder-decoder", "vision encoder"
DUAL_ENCODER = "dual encoder"
OF_TEXT = (DECODER, ENCODER, ENCODER_DECODER)
EVERY_KIND = (*OF_TEXT, VISION, DUAL_ENCODER)
ABSENT: Any = object()  # the tree lacks the part that the name describes


@dataclass(frozen=True)
class FlatField:
    """The definition of a flat name; `doc` is its description.

    `paths` lead through the tree to the parts that the name describes; the first path that finds a part is used. `*` means
    each entry of a tuple, `part[Class]` selects parts of one class, absent parts are skipped. `read` converts the first
    part found (with `reads_all` the list of parts) to the flat value. With `is_fact` the name describes the model but not
    its tree, such as the tokenizer; its paths then only supply a value if it is not set.

    `follows` computes the value from other names, which are its parameters, while the name is not set. A value without effect
    is accepted if a name in `unless`, which can switch it off, is also set. `spelling` maps equivalent values to the same
    value. `kinds` are the kinds of models that have the name, `least` and `choices` limit its values. A `live` value is read
    in every forward pass, so it can be changed on a built model.
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
        """The names that the value is derived from."""
        return () if self.follows is None else tuple(signature(self.follows).parameters)

    def value(self, tree: object) -> Any:
        """The value of the name in a tree, or ABSENT."""
        for path in self.paths:
            if parts := found(tree, path):
                part = parts if self.reads_all else parts[0]
                return part if self.read is None else self.read(part)
        return ABSENT

    def check(self, name: str, value: object) -> None:
        """Raises ValueError for a value that is not in `choices` or below `least`."""
        if len(self.choices) == 1 and value not in self.choices:
            raise ValueError(f"{name} is {self.doc}; got {value!r}")
        if self.choices and value not in self.choices:
            raise ValueError(f"{name} must be one of {self.choices}, got {value!r}")
        if self.least is not None and not (
            isinstance(value, int) and not isinstance(value, bool) and value >= self.least
        ):
            raise ValueError(f"{name} must be a whole number of at least {self.least}, got {value!r}")


def of_tree(doc: str, *paths: str, default: Any = MISSING, **row: Any) -> Any:
    """A dataclass field for a name that describes part of the tree; the keywords are those of `FlatField`."""
    return field(default=default, metadata={"row": FlatField(doc, paths, **row)})


def fact(doc: str, default: Any = MISSING, *paths: str, factory: Any = MISSING, **row: Any) -> Any:
    """A dataclass field for a name that does not describe the tree; the keywords are those of `FlatField`."""
    metadata = {"row": FlatField(doc, paths, is_fact=True, **row)}
    if factory is not MISSING:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def found(tree: object, path: str) -> list[Any]:
    """The parts of a tree at a path.

    >>> from hooked_lm.models.config.flat import HookedTransformerConfig
    >>> cfg = HookedTransformerConfig(
    ...     n_layers=2, d_model=8, n_heads=2, n_ctx=4, d_vocab=5, act_fn="relu"
    ... )
    >>> (
    ...     found(cfg.tree, "blocks.*.attn.n_heads"),
    ...     found(cfg.tree, "blocks.*.attn.rotary.theta"),
    ... )
    ([2, 2], [])
    """
    parts: list[Any] = [tree]
    for step in path.split(".") if path else ():
        if step == "*":
            parts = [each for part in parts for each in part]
            continue
        name, _, kind = step.rstrip("]").partition("[")
        parts = [getattr(part, name) for part in parts if part is not None and hasattr(part, name)]
        if kind:
            parts = [part for part in parts if type(part).__qualname__.split(".")[0] == kind]
    return parts


class FlatFields:
    """The rows of a config class, and sets of names computed from them.

    A subclass that only changes the default of a name inherits its row. `of_tree` are the names that describe the tree,
    `following` the derived names. `remembered` are the names for which a config records whether they were set: both of
    these, and the names that values are derived from. `floats` are the names with float values. `last_read` is the tree
    that was read last, and its values.
    """

    def __init__(self, cls: type) -> None:
        declared = [vars(base).get("__dataclass_fields__", {}) for base in cls.__mro__]
        candidates = {f.name: [d[f.name].metadata.get("row") for d in declared if f.name in d] for f in fields(cls)}
        self.rows: dict[str, FlatField] = {
            name: row for name, of in candidates.items() for row in filter(None, of[::-1])
        }
        self.defaults = {f.name: f.default for f in fields(cls) if f.default is not MISSING and f.name in self.rows}
        self.of_tree = frozenset(name for name, row in self.rows.items() if not row.is_fact)
        self.following = frozenset(name for name, row in self.rows.items() if row.follows is not None)
        sources = {source for row in self.rows.values() for source in row.sources}
        self.remembered = self.of_tree | self.following | sources
        self.last_read: tuple[Any, dict[str, Any]] = (None, {})
        self.floats = frozenset(f.name for f in fields(cls) if {float, int} <= {*get_args(f.type)})


TABLES: dict[type, FlatFields] = {}


def table(cls: type) -> FlatFields:
    """The table of a config class, cached."""
    if cls not in TABLES:
        TABLES[cls] = FlatFields(cls)
    return TABLES[cls]
