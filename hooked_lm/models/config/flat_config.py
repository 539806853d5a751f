"""What happens when a flat name is set: the tree changes with it, or the name is refused.

A config remembers which names were set. From these the tree is built, and all other names are read from the tree by the rows
of the table (`flat.py`). A config that was made from a tree keeps it: what the set names change in a tree built from flat
names alone is changed in the given tree too (`tree_edit.py`). A name that was set and that the new tree does not show is
refused with its name.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import fields, is_dataclass
from functools import wraps
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import torch

from hooked_lm.models.config.row import ABSENT, table
from hooked_lm.models.config.tree_edit import edited

Config = TypeVar("Config", bound="FlatConfig")

# Fields of configs written by other libraries that mean nothing here, and the one value that may be given (...: any).
FOREIGN_FIELDS: dict[str, Any] = {
    "load_in_4bit": False,
    "quantization_method": None,
    "use_logn_attn": False,
    "use_dynamic_ntk_rope": False,
    "train_seq_length": ...,
    "uses_rms_norm": ...,
    "layer_norm_folding": ...,
}
UNSET = (None, -1, -1.0)  # what a name that follows from others holds until it is computed


class FlatConfig(ABC):
    """A config in flat names, and its tree.

    Besides the values it holds `_given`, the names that were set; `_base`, the tree that it was made from; `_shown`, the
    values of the tree's names when the tree was last computed; `_of_model`, whether a model was built from it.
    """

    __slots__ = ("_base", "_given", "_of_model", "_shown")
    kind: ClassVar[str]  # of model
    __dataclass_fields__: ClassVar[dict[str, Any]]

    _given: dict[str, Any]
    _base: Any
    _shown: dict[str, Any]
    _of_model: bool
    tree: Any

    @property
    def origin(self) -> "FlatConfig":
        """This config: what `dataclasses.replace` hands to the new one, before the fields that it copies."""
        return self

    @staticmethod
    @abstractmethod
    def build(c: Any) -> Any:
        """The tree of flat names; None where they are not enough for one yet."""

    # ---- other ways to make one, and out again -----------------------------------------------------------------------

    @classmethod
    def from_tree(cls: type[Config], tree: Any, **facts: Any) -> Config:
        """The config of a tree; `facts` adds what a tree does not say (names, device, dtype, defaults)."""
        made: Any = cls
        return made(**{**values_of(cls, tree), **facts}, tree=tree)

    @classmethod
    def from_dict(cls: type[Config], config_dict: dict[str, Any]) -> Config:
        """From flat names; raises TypeError for an unknown one.

        Names that only other libraries use are dropped where their value changes nothing here; ValueError otherwise.
        """
        known = {f.name for f in fields(cls)}
        foreign = {name: value for name, value in config_dict.items() if name not in known}
        if unknown := foreign.keys() - FOREIGN_FIELDS.keys():
            raise TypeError(f"unknown config fields {sorted(unknown)}; known are {sorted(known)}")
        for name, value in foreign.items():
            if FOREIGN_FIELDS[name] not in (value, ...):
                raise ValueError(f"{name}={value!r} is not supported: it must be {FOREIGN_FIELDS[name]!r} or left out")
        made: Any = cls
        return made(**{name: value for name, value in config_dict.items() if name in known})

    @classmethod
    def unwrap(cls, config: Any) -> Any:
        """A config, or the config of a dict."""
        return cls.from_dict(config) if isinstance(config, dict) else config

    def to_dict(self) -> dict[str, Any]:
        """The flat names and the tree; `from_dict` reads it back."""
        return dict(vars(self))

    def flat_values(self) -> dict[str, Any]:
        """The flat names without those that follow from others and were not set: for a config of another kind."""
        given = self._all_given()
        derived = table(type(self)).following - given.keys()
        return {name: getattr(self, name) for name in table(type(self)).rows if name not in derived}

    # ---- setting names -----------------------------------------------------------------------------------------------

    def __post_init__(self, origin: Any) -> None:
        for name, row in table(type(self)).rows.items():
            if row.is_fact:
                row.check(name, getattr(self, name))

    def __setattr__(self, name: str, value: Any) -> None:
        row = table(type(self)).rows.get(name)
        if not hasattr(self, "_given") or (
            row is None and name != "tree"
        ):  # while it is made; an attribute of a user's
            return object.__setattr__(self, name, value)
        value = normalized(type(self), name, value)
        if row is not None and row.is_fact:
            row.check(name, value)
        elif self._of_model and not (row and row.live and self.kind in row.kinds):
            return self._set_on_model(name, value)
        object.__setattr__(self, name, value)
        if name == "tree":
            self._given, self._base = ({} if value is not None else self._all_given()), value
        elif name in table(type(self)).remembered:
            self._given[name] = value
        else:
            return None
        try:
            self.resolve()
        except ValueError:  # further assignments may follow; the reason is raised where a model is built
            object.__setattr__(self, "tree", self.tree if self._of_model else None)
        return None

    def _set_on_model(self, name: str, value: Any) -> None:
        """Raises ValueError unless the value is unchanged: the modules of a model are already built."""
        if name == "n_ctx" and isinstance(value, int) and 0 < value <= self.tree.n_ctx:
            object.__setattr__(self, name, value)  # a limit for prompts; the position embedding stays
        elif not (value is getattr(self, name) or value == getattr(self, name)):
            raise ValueError(
                f"cfg.{name} cannot become {value!r}: a model was built from this config with {getattr(self, name)!r}, and "
                f"would stay as it is; build another one from dataclasses.replace(model.cfg, {name}=...)"
            )

    def seal(self) -> None:
        """Marks this as the config of a model: names that determine its modules can no longer be set."""
        self._of_model = True

    def adopt_tree(self, tree: Any) -> None:
        """Replaces the tree by that of a model whose modules were changed."""
        values = values_of(type(self), tree)
        self._given = {n: value for n, value in self._given.items() if n not in values or same(values[n], value)}
        self._base, self._shown = tree, {}
        self.resolve()

    def check_tree(self) -> None:
        """Raises ValueError unless a model can be built."""
        self.resolve()
        if self.tree is not None:
            return
        cfg: Any = self
        if cfg.d_vocab == -1:
            raise ValueError("d_vocab is missing: give it in the config, or give a tokenizer")
        if cfg.act_fn is None and not cfg.attn_only:
            raise ValueError("a model with MLPs needs act_fn, e.g. 'gelu' or 'relu'")
        raise ValueError(
            f"positional_embedding_type '{cfg.positional_embedding_type}' is that of encoder-decoders: build a "
            "HookedEncoderDecoder from this config"
        )

    # ---- from the names that were set to all names and the tree ------------------------------------------------------

    def resolve(self) -> None:
        """Compute the tree and all names from the names that were set. Raises ValueError where they make no model."""
        self._notice_changes()
        if self._base is None:
            values = completed(type(self), self._given)
            tree = self.build(SimpleNamespace(**values))
        else:
            values = self._values_on_base()
            tree = self._edited_base(values)
        if tree is not None:
            shown = values_of(type(self), tree)
            kept = self._check_effect(values, shown)
            values |= {n: v for n, v in shown.items() if n not in kept and not same(v, values.get(n))}
        for name, value in {**values, "tree": tree}.items():
            object.__setattr__(self, name, value)
        of_tree = table(type(self)).of_tree & values.keys()
        self._shown = {n: [*values[n]] if isinstance(values[n], list) else values[n] for n in of_tree}

    def _notice_changes(self) -> None:
        """Counts a value that was changed in place, such as an entry of `attn_types`, as set."""
        if not self._of_model:
            here = vars(self)
            self._given |= {n: here[n] for n, value in self._shown.items() if not same(here[n], value)}

    def _stated(self) -> dict[str, Any]:
        """The flat values of the tree that this was made from, without those that would follow from the rest."""
        cls = type(self)
        values = {n: value for n, value in values_of(cls, self._base).items() if n in table(cls).of_tree}
        stated = dict(values)
        free = self._given.keys() | {"n_heads"}  # d_head would follow from nothing
        for name in table(cls).following & values.keys() - free:
            others = {n: v for n, v in values.items() if n != name}
            if same(values[name], completed(cls, others).get(name)):
                del stated[name]
        return stated

    def _all_given(self) -> dict[str, Any]:
        """The names that were set, as if the values of the tree that this was made from had been set too."""
        return {**({} if self._base is None else self._stated()), **self._given}

    def _values_on_base(self) -> dict[str, Any]:
        values = self._stated() if self._edits() else values_of(type(self), self._base)
        return completed(type(self), {**values, **self._given})

    def _edits(self) -> dict[str, Any]:
        """The names that were set to something other than what the tree says."""
        cls = type(self)
        values = {**table(cls).defaults, **values_of(cls, self._base)}
        return {n: v for n, v in self._given.items() if n in table(cls).of_tree and not same(v, values.get(n))}

    def _edited_base(self, values: dict[str, Any]) -> Any:
        edits = self._edits()
        if not edits:
            return self._base
        try:
            before = self.build(SimpleNamespace(**completed(type(self), self._stated())))
            after = self.build(SimpleNamespace(**values))
            return None if after is None else edited(self._base, before, after)
        except (ValueError, TypeError, ZeroDivisionError) as error:
            named = ", ".join(f"{name}={value!r}" for name, value in edits.items())
            raise ValueError(
                f"{named} cannot be set on this config, which was made from a tree: {error}. Change the tree, or build from "
                f"flat names alone: dataclasses.replace(cfg, {next(iter(edits))}=..., tree=None)"
            ) from error

    def _check_effect(self, values: dict[str, Any], shown: dict[str, Any]) -> set[str]:
        """The set names that keep their value; all others get the value of the tree.

        Raises ValueError for a set name that has no effect on the tree.
        """
        kept, c, names = set(), SimpleNamespace(**values), table(type(self))
        for name, value in self._given.items():
            row, default = names.rows[name], names.defaults.get(name)
            reading = shown.get(name, default)
            has_row = self.kind in row.kinds
            spelling = (has_row and row.spelling) or (lambda value, c: value)
            is_off = any(switch in self._given for switch in row.unless)
            if row.is_fact or is_off or c.n_layers == 0 or same(spelling(value, c), spelling(reading, c)):
                kept.add(name)
            elif self._base is not None or not same(value, default):
                needs = f"; set {' or '.join(row.unless)} too" if row.unless else ""
                needs = needs if has_row else f": {self.kind}s do not have it"
                raise ValueError(f"{name}={value!r} would have no effect on this model, which has {reading!r}{needs}")
        return kept

    # ---- copies ------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> Any:
        """A copy belongs to no model."""
        return dict(vars(self)), dict(self._given), self._base, dict(self._shown)

    def __setstate__(self, state: Any) -> None:
        values, given, base, shown = state
        vars(self).update(values)
        self._given, self._base, self._shown, self._of_model = given, base, shown, False


def remembers(cls: type[Config]) -> type[Config]:
    """A dataclass whose configs remember which names were set; `dataclasses.replace` hands that on.

    `replace` passes the names that it was given, then `origin`, then those that it copies. A copied name counts as set
    where it was set in the origin, or differs from what the origin's tree says.
    """
    init = cls.__init__
    positional = [field.name for field in fields(cls) if field.init and not field.kw_only]

    @wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        named = [*positional[: len(args)], *kwargs]
        origin = kwargs.pop("origin", None)
        chosen = named if origin is None else named[: named.index("origin")]
        init(self, *args, **kwargs)
        for name in table(cls).rows:
            object.__setattr__(self, name, normalized(cls, name, getattr(self, name)))
        self._of_model, self._shown = False, {}
        is_copied = origin is not None and "tree" not in chosen
        self._base = origin._base if is_copied else self.tree
        if self._base is not None and not is_dataclass(self._base):
            raise TypeError(f"tree must be a tree of component configs, got {type(self._base).__name__}")
        says_itself = self._base is not None and origin is None
        said = completed(cls, {**values_of(cls, self._base), "init_mode": self.init_mode}) if says_itself else {}
        before = (
            {}
            if origin is None or (self._base and not is_copied)
            else origin._given
            if is_copied
            else origin._all_given()
        )
        old = {} if origin is None else {**vars(origin), **origin._shown}
        self._given = {
            name: getattr(self, name)
            for name in named
            if name in table(cls).remembered
            and (name in chosen or name in before or not same(getattr(self, name), old.get(name)))
            and not (name in said and same(said[name], getattr(self, name)))
        }
        self.resolve()

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


# ---- values ----------------------------------------------------------------------------------------------------------


def values_of(cls: Any, tree: Any) -> dict[str, Any]:
    """The flat names of a tree, and their values; those of parts that it does not have are left out."""
    read = {name: row.value(tree) for name, row in table(cls).rows.items() if row.paths and cls.kind in row.kinds}
    return {name: value for name, value in read.items() if value is not ABSENT}


def completed(cls: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The given values, those derived from them, and defaults. Raises ValueError for invalid values."""
    known = table(cls).remembered
    values = {**{name: value for name, value in table(cls).defaults.items() if name in known}, **given}
    for name, row in table(cls).rows.items():
        if name in values and not (values[name] == -1 and table(cls).defaults.get(name) == -1):
            row.check(name, values[name])
    for name, row in table(cls).rows.items():
        sources = [values[source] for source in row.sources]
        if row.follows is not None and values[name] in UNSET and -1 not in sources:
            values[name] = row.follows(*sources)
    return values


def normalized(cls: Any, name: str, value: Any) -> Any:
    """The stored form of a value: a torch dtype, a device, and a float for an int in a float field."""
    if name == "dtype" and isinstance(value, str):
        dtype = getattr(torch, value.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"unknown dtype {value!r}; one of torch's, such as 'float32' or 'bfloat16'")
        return dtype
    if name == "device" and value is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if is_int and name in table(cls).floats else value


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal, floats up to the rounding of a reciprocal."""
    if isinstance(a, float) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-9)
    return bool(a == b)
