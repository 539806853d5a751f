"""The base class of configs: setting a flat name updates the tree, or raises ValueError.

A config records which names were set. The tree is built from these, and all other names are read from the tree by the rows
of the table (`flat.py`). A config made from a tree keeps that tree, which may have parts without a flat name: setting a
name changes only the parts that the name describes (`tree_edit.py`). A set name that has no effect on the tree raises.
"""

import difflib
import math
from collections.abc import Container
from dataclasses import fields
from functools import wraps
from inspect import signature
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import torch

from hooked_lm.keywords import check_keywords
from hooked_lm.models.config.build import tree_of_kind
from hooked_lm.models.config.read import Tree
from hooked_lm.models.config.row import ABSENT, table
from hooked_lm.models.config.shown import ShownConfig
from hooked_lm.models.config.stored import StoredConfig
from hooked_lm.models.config.tree_edit import edited

Config = TypeVar("Config", bound="FlatConfig")

# Fields in configs of other libraries that have no effect here -> the only accepted value (...: any value).
FOREIGN_FIELDS: dict[str, Any] = {
    "quantization_method": None,
    "use_logn_attn": False,
    "use_dynamic_ntk_rope": False,
    "train_seq_length": ...,
    "uses_rms_norm": ...,
    "layer_norm_folding": ...,
}
# Names that say of which kinds of parts a model is made.
KINDS_OF_PARTS = {"positional_embedding_type", "normalization_type", "attention_dir", "attn_only", "gated_mlp"}
UNSET = (None, -1, -1.0)  # values of a derived name before it is computed


class FlatConfig(ShownConfig, StoredConfig):
    """A config as flat names, and its tree.

    `_given` holds the names that were set, with their values; `_base`, the tree that the config was made from; `_shown`, the
    values of the names that describe the tree when it was last computed; `_of_model`, whether a model was built from it.
    """

    __slots__ = ("_base", "_given", "_of_model", "_shown")
    kind: ClassVar[str]  # decoder, encoder or encoder-decoder
    # names without which there is no tree -> the error that says so
    needed: ClassVar[dict[str, str]] = {"d_vocab": "d_vocab is missing: give it in the config, or give a tokenizer"}
    __dataclass_fields__: ClassVar[dict[str, Any]]

    _given: dict[str, Any]
    _base: Any
    _shown: dict[str, Any]
    _of_model: bool
    tree: Any

    @property
    def origin(self) -> "FlatConfig":
        """This config. `dataclasses.replace` passes it to the new config, before the copied fields."""
        return self

    @classmethod
    def build(cls, c: SimpleNamespace, is_sketch: bool = False) -> Any:
        """The tree built from flat names; None while required names are missing. See `tree_of_kind`."""
        tree = tree_of_kind(cls.kind, c, is_sketch)
        return tree if tree is None or is_sketch else cls._whole(tree, c)

    @classmethod
    def _whole(cls, tree: Tree, c: SimpleNamespace) -> Tree | None:
        """The tree of the model, from that of what its flat names describe; None while required names are missing."""
        return tree

    # ---- other ways to make one, and out again -----------------------------------------------------------------------

    @classmethod
    def from_tree(cls: type[Config], tree: Tree, **facts: Any) -> Config:
        """The config of a tree; `facts` are the fields that are not in the tree (names, device, dtype, defaults)."""
        made: Any = cls
        return made(**{**values_of(cls, tree), **facts}, tree=tree)

    @classmethod
    def from_dict(cls: type[Config], config_dict: dict[str, Any]) -> Config:
        """A config from a dict of flat names. Raises TypeError for unknown names.

        Known fields of other libraries are dropped if their value has no effect here, and raise ValueError otherwise.
        """
        known = {f.name for f in fields(cls)} | FOREIGN_FIELDS.keys()
        if unknown := config_dict.keys() - known:
            raise TypeError(f"unknown config fields {sorted(unknown)}; known are {sorted(known)}")
        made: Any = cls
        return made(**config_dict)

    @classmethod
    def unwrap(cls, config: Any) -> Any:
        """The config of a dict, or the config of a model of this class for a given one; see `adopted`."""
        return cls.from_dict(config) if isinstance(config, dict) else cls.adopted(config)

    @classmethod
    def adopted(cls, config: "FlatConfig") -> "FlatConfig":
        """The config of a model of this class for a config of any kind: by default the same."""
        return config

    def to_dict(self) -> dict[str, Any]:
        """The flat names and the tree as a dict, for `from_dict`."""
        return dict(vars(self))

    def flat_values(self) -> dict[str, Any]:
        """The flat names without those that are derived and were not set, for a config of another kind."""
        given = self._all_given()
        derived = table(type(self)).following - given.keys()
        return {name: getattr(self, name) for name in table(type(self)).rows if name not in derived}

    # ---- setting names -----------------------------------------------------------------------------------------------

    def __post_init__(self, origin: "FlatConfig | None") -> None:
        for name, row in table(type(self)).rows.items():
            if row.is_fact:
                row.check(name, getattr(self, name))

    def __setattr__(self, name: str, value: object) -> None:
        row = table(type(self)).rows.get(name)
        if not hasattr(self, "_given"):  # during __init__
            return object.__setattr__(self, name, value)
        if row is None and name != "tree":
            return self._set_other(name, value)
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
        except ValueError:  # later assignments may fix it; building a model raises the error
            object.__setattr__(self, "tree", self.tree if self._of_model else None)
        return None

    def _set_other(self, name: str, value: object) -> None:
        """Sets an attribute that is no config field; AttributeError if it looks like a misspelt one."""
        is_known = name.startswith("_") or hasattr(type(self), name) or name in FOREIGN_FIELDS
        near = () if is_known else difflib.get_close_matches(name, table(type(self)).rows, n=1, cutoff=0.85)
        for field in near:
            raise AttributeError(
                f"{type(self).__name__} has no field {name!r}, so it would have no effect; did you mean {field!r}?"
            )
        object.__setattr__(self, name, value)

    def _set_on_model(self, name: str, value: object) -> None:
        """Accepts only the same value, or any `n_ctx`; ValueError otherwise, as the modules are built."""
        if name == "n_ctx" and isinstance(value, int) and value > 0:
            object.__setattr__(self, name, value)  # limits prompts only; the position embedding keeps its size
        elif not (value is getattr(self, name) or value == getattr(self, name)):
            raise ValueError(
                f"cfg.{name} cannot become {value!r}: this is the config of a built model, with {getattr(self, name)!r}; build "
                f"another model from dataclasses.replace(model.cfg, {name}=...)"
            )

    def is_layer_norm_activation(self) -> bool:
        """Whether MLPs normalise what comes of their activation ("solu_ln")."""
        act_fn: str | None = self.act_fn  # type: ignore[attr-defined]
        return (act_fn or "").endswith("_ln")

    @property
    def longest_input(self) -> int:
        """The number of tokens that the model reads: `n_ctx`, but never more than the model was built for."""
        limit: int = min(self.n_ctx, self.tree.n_ctx)  # type: ignore[attr-defined]
        return limit

    def seal(self) -> None:
        """Marks this as the config of a built model: names that determine its modules can no longer be changed."""
        self._of_model = True

    def adopt_tree(self, tree: Tree) -> None:
        """Replaces the tree after a model's modules were changed."""
        values = values_of(type(self), tree)
        self._given = {n: value for n, value in self._given.items() if n not in values or same(values[n], value)}
        self._base, self._shown = tree, {}
        self.resolve()

    def check_tree(self) -> None:
        """Raises ValueError if no model can be built from this config."""
        self.resolve()
        if self.tree is not None:
            return
        cfg: Any = self
        for name, problem in self.needed.items():
            if getattr(self, name) in UNSET:
                raise ValueError(problem)
        if cfg.act_fn is None and not cfg.attn_only:
            raise ValueError("a model with MLPs needs act_fn, e.g. 'gelu' or 'relu'")
        raise ValueError(
            f"positional_embedding_type '{cfg.positional_embedding_type}' is that of encoder-decoders: build a "
            "HookedEncoderDecoder from this config"
        )

    # ---- from the names that were set to all names and the tree ------------------------------------------------------

    def resolve(self) -> None:
        """Computes the tree and all names from the names that were set. Raises ValueError if they describe no valid model."""
        self._notice_changes()
        if self._base is None:
            values = completed(type(self), self._given)
            check_heads(values, self._given)
            check_experts(values, self._given)
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
        """Treats a value that was changed in place, such as an entry of `attn_types`, as set."""
        if not self._of_model:
            here = vars(self)
            self._given |= {n: here[n] for n, value in self._shown.items() if not same(here[n], value)}

    def _stated(self) -> dict[str, Any]:
        """The flat values of the base tree, without those that can be derived from the rest."""
        cls = type(self)
        values = {n: value for n, value in values_of(cls, self._base).items() if n in table(cls).of_tree}
        stated = dict(values)
        free = self._given.keys() | {"n_heads"}  # d_head is derived from it
        for name in table(cls).following & values.keys() - free:
            others = {n: v for n, v in values.items() if n != name}
            if same(values[name], completed(cls, others).get(name)):
                del stated[name]
        return stated

    def _all_given(self) -> dict[str, Any]:
        """The names that were set, and the values of the base tree."""
        return {**({} if self._base is None else self._stated()), **self._given}

    def _values_on_base(self) -> dict[str, Any]:
        edits, of_tree = self._edits(), values_of(type(self), self._base)
        given = {**(self._stated() if edits else of_tree), **self._given}
        if edits.get("num_experts") and not of_tree.get("num_experts") and "gated_mlp" not in self._given:
            given.pop("gated_mlp", None)  # that of the plain MLPs which the experts replace
        values = completed(type(self), given)
        check_heads(values, given)
        check_experts(values, edits)
        return values

    def _edits(self) -> dict[str, Any]:
        """The set names whose values differ from the base tree."""
        cls = type(self)
        values = {**table(cls).defaults, **values_of(cls, self._base)}
        return {n: v for n, v in self._given.items() if n in table(cls).of_tree and not same(v, values.get(n))}

    def _edited_base(self, values: dict[str, Any]) -> Any:
        edits = self._edits()
        if not edits:
            return self._base
        try:
            old = completed(type(self), self._stated())
            is_sketch = not KINDS_OF_PARTS & edits.keys()
            before = self.build(SimpleNamespace(**old), is_sketch)
            after = self.build(SimpleNamespace(**values), is_sketch)
            return None if after is None else edited(self._base, before, after, old, values)
        except (ValueError, TypeError, ZeroDivisionError) as error:
            named = ", ".join(f"{name}={value!r}" for name, value in edits.items())
            raise ValueError(
                f"{named} cannot be set on this config, which was made from a tree: {error}. Change the tree, or build from "
                f"flat names alone: dataclasses.replace(cfg, {next(iter(edits))}=..., tree=None)"
            ) from error

    def _check_effect(self, values: dict[str, Any], shown: dict[str, Any]) -> set[str]:
        """The set names that keep their value; all other names take the value of the tree.

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
        """The state without `_of_model`: a copy is not the config of a built model."""
        return dict(vars(self)), dict(self._given), self._base, dict(self._shown)

    def __setstate__(self, state: tuple[dict[str, Any], dict[str, Any], Tree | None, dict[str, Any]]) -> None:
        values, given, base, shown = state
        vars(self).update(values)
        self._given, self._base, self._shown, self._of_model = given, base, shown, False


def remembers(cls: type[Config]) -> type[Config]:
    """Makes the configs of a dataclass record which names were set, also through `dataclasses.replace`.

    `replace` passes its keyword arguments first, then `origin`, then the copied fields. A copied name counts as set if it was
    set in the origin, or differs from the value in the origin's tree.
    """
    init = cls.__init__
    fields_of_init = list(signature(init).parameters)[1:]
    positional = [field.name for field in fields(cls) if field.init and not field.kw_only]

    @wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs = without_foreign(kwargs)
        check_keywords(cls.__name__, kwargs, fields_of_init)
        named = [*positional[: len(args)], *kwargs]
        origin = kwargs.pop("origin", None)
        chosen = named if origin is None else named[: named.index("origin")]
        init(self, *args, **kwargs)
        for name in table(cls).rows:
            object.__setattr__(self, name, normalized(cls, name, getattr(self, name)))
        self._of_model, self._shown = False, {}
        is_copied = origin is not None and "tree" not in chosen
        self._base = origin._base if is_copied else self.tree
        if self._base is not None and not isinstance(self._base, Tree):
            raise TypeError(f"tree must be a tree of component configs, got {type(self._base).__name__}")
        is_from_tree = self._base is not None and origin is None
        in_tree = completed(cls, {**values_of(cls, self._base), "init_mode": self.init_mode}) if is_from_tree else {}
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
            and not (name in in_tree and same(in_tree[name], getattr(self, name)))
        }
        self.resolve()

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


# ---- values ----------------------------------------------------------------------------------------------------------


def values_of(cls: type[FlatConfig], tree: Tree | None) -> dict[str, Any]:
    """The flat names of a tree and their values, without names for parts that the tree lacks."""
    names = table(cls)
    last_tree, values = names.last_read
    if last_tree is not tree:  # trees do not change, and most configs are resolved several times on one tree
        read = {name: row.value(tree) for name, row in names.rows.items() if row.paths and cls.kind in row.kinds}
        values = {name: value for name, value in read.items() if value is not ABSENT}
        names.last_read = tree, values
    return {name: [*value] if isinstance(value, list) else value for name, value in values.items()}


def completed(cls: type[FlatConfig], given: dict[str, Any]) -> dict[str, Any]:
    """The given values, the defaults, and the values derived from both. Raises ValueError for invalid values."""
    known = table(cls).remembered
    values = {**{name: value for name, value in table(cls).defaults.items() if name in known}, **given}
    for name, row in table(cls).rows.items():
        if name in values and not (values[name] == -1 and table(cls).defaults.get(name) == -1):
            row.check(name, values[name])
    for name, row in table(cls).rows.items():
        sources = [values[source] for source in row.sources]
        if row.follows is not None and values[name] in UNSET and -1 not in sources:
            values[name] = row.follows(*sources)
    if "gated_mlp" not in given and _has_experts(values) and cls.kind in table(cls).rows["num_experts"].kinds:
        values["gated_mlp"] = True
    return values


def _has_experts(values: dict[str, Any]) -> bool:
    return values.get("num_experts") is not None and not values.get("attn_only")


def check_experts(values: dict[str, Any], given: Container[str]) -> None:
    """Raises ValueError for experts that are said not to be gated: TransformerLens ignores that, and gates them."""
    if "gated_mlp" in given and not values.get("gated_mlp") and _has_experts(values):
        raise ValueError(
            f"gated_mlp=False with num_experts={values['num_experts']}: the experts of flat names are gated; leave gated_mlp "
            "out, or make a tree whose MoE.Config has an MLP.Config as its expert"
        )


def check_heads(values: dict[str, Any], given: Container[str]) -> None:
    """Raises ValueError if the width or the number of heads is derived, and would leave a part of `d_model` out."""
    for name, other in {"d_head": "n_heads", "n_heads": "d_head"}.items():
        width, divisor = values.get("d_model"), values.get(other)
        if name not in given and other in given and width and divisor and width % divisor:
            raise ValueError(
                f"d_model={width} is no multiple of {other}={divisor}: give {name} as well ({width // divisor} leaves "
                f"{width % divisor} of {width} out), or change one of them"
            )


def without_foreign(given: dict[str, Any]) -> dict[str, Any]:
    """The fields without those of other libraries; raises ValueError for one whose value would have an effect there."""
    for name in given.keys() & FOREIGN_FIELDS.keys():
        if FOREIGN_FIELDS[name] not in (given[name], ...):
            raise ValueError(
                f"{name}={given[name]!r} is not supported: it must be {FOREIGN_FIELDS[name]!r} or left out"
            )
    return {name: value for name, value in given.items() if name not in FOREIGN_FIELDS}


def normalized(cls: type[FlatConfig], name: str, value: object) -> Any:
    """The stored form of a value: dtype names become torch dtypes, device None a device, ints in float fields floats."""
    if name == "dtype" and isinstance(value, str):
        dtype = getattr(torch, value.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"unknown dtype {value!r}; one of torch's, such as 'float32' or 'bfloat16'")
        return dtype
    if name == "device" and value is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(value, int) and not isinstance(value, bool) and name in table(cls).floats:
        return float(value)
    return value


def same(a: object, b: object) -> bool:
    """Whether two values are equal; floats up to a relative difference of 1e-9."""
    if isinstance(a, float) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-9)
    return bool(a == b)
