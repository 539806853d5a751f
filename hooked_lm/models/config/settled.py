"""Configs whose flat names and tree cannot disagree.

A config remembers which fields were set. Everything else follows from them and is computed anew whenever one is set: the
fields in `DERIVED`, and the tree. A config that was made from a tree keeps it: fields that are set later are carried over
to it (`tree_edit`). What the new tree then says in flat names must be what was set; otherwise the field is refused by name.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar, get_args

import torch

from hooked_lm.models.config.tree_edit import edited

Config = TypeVar("Config", bound="SettledConfig")

# Fields that say nothing of the tree: names, text, where and how weights are made, what a bare cache holds.
FREE = frozenset(
    (
        *("model_name", "original_architecture", "from_checkpoint", "trust_remote_code", "processed", "tree"),
        *("checkpoint_index", "checkpoint_label_type", "checkpoint_value", "n_params"),
        *("tokenizer_name", "tokenizer_prepends_bos", "default_prepend_bos", "default_padding_side"),
        *("decoder_start_token_id", "eos_token_id", "pad_token_id", "forced_bos_token_id", "suppress_tokens"),
        *("init_mode", "init_weights", "initializer_range", "seed", "device", "n_devices", "dtype"),
        *("use_attn_result", "use_split_qkv_input", "use_hook_mlp_in", "use_attn_in", "use_hook_tokens"),
        *("ungroup_grouped_query_attention", "fused_attention"),
    )
)
# Free fields that are derived, or that others are derived from.
TRACKED = frozenset(("n_params", "initializer_range", "init_mode"))

# What is computed where it is not set, in this order.
DERIVED: dict[str, Callable[[Any], Any]] = {
    "d_head": lambda c: c.d_model // c.n_heads,
    "n_heads": lambda c: c.d_model // c.d_head,
    "n_decoder_layers": lambda c: c.n_layers,
    "d_mlp": lambda c: None if c.attn_only else 4 * c.d_model,
    "d_vocab_out": lambda c: c.d_vocab,
    "attn_scale": lambda c: c.attn_scale if c.d_head == -1 else c.d_head**0.5 if c.use_attn_scale else 1.0,
    "rotary_dim": lambda c: c.d_head if c.positional_embedding_type == "rotary" else None,
    "n_params": lambda c: c.n_layers * _params_per_layer(c),
    "initializer_range": lambda c: 0.8 / c.d_model**0.5 if c.init_mode == "gpt2" else 1.0,
}

# A field -> fields that may switch off what it says; it may then be set without effect, if one of them was set too.
SWITCHES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("window_size", "attn_types", "yarn_global_attn_only"), ("use_local_attn",)),
    "rotary_base_local": ("use_local_attn", "positional_embedding_type"),
    "use_local_attn": ("attn_types",),
    **dict.fromkeys(
        (
            *("rotary_dim", "rotary_base", "rotary_scaling_factor", "rotary_adjacent_pairs", "use_yarn_rope"),
            *("use_NTK_by_parts_rope", "relative_attention_num_buckets", "relative_attention_max_distance"),
        ),
        ("positional_embedding_type",),
    ),
    **dict.fromkeys(
        (
            *("NTK_by_parts_low_freq_factor", "NTK_by_parts_high_freq_factor", "NTK_by_parts_factor"),
            "NTK_original_ctx_len",
        ),
        ("use_NTK_by_parts_rope", "positional_embedding_type"),
    ),
    **dict.fromkeys(
        (
            *("yarn_factor", "yarn_attention_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_truncate"),
            "yarn_original_max_position_embeddings",
        ),
        ("use_yarn_rope", "positional_embedding_type"),
    ),
    **dict.fromkeys(
        ("d_mlp", "act_fn", "gated_mlp", "num_experts", "experts_per_token", "parallel_attn_mlp"), ("attn_only",)
    ),
    "norm_topk_prob": ("num_experts", "attn_only"),
    **dict.fromkeys(("eps", "use_normalization_before_and_after", "post_embedding_ln"), ("normalization_type",)),
    "attn_scale": ("use_attn_scale",),
}

SLOTS = ("_given", "_base", "_of_model")


class SettledConfig(ABC):
    """The memory of a config: the fields that were set, the tree that it was made from, whether a model was built of it."""

    __slots__ = SLOTS
    READ_AT_EVERY_RUN: ClassVar[frozenset[str]] = frozenset()  # fields of the tree that a built model reads here
    __dataclass_fields__: ClassVar[dict[str, Any]]

    _given: dict[str, Any]
    _base: Any
    _of_model: bool
    tree: Any

    @property
    def origin(self) -> "SettledConfig":
        """This config: what `dataclasses.replace` hands to the new one, before the fields that it copies."""
        return self

    # ---- what each class says ----------------------------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def build(c: Any) -> Any:
        """The tree of flat names; None where they are not enough for one yet."""

    @staticmethod
    @abstractmethod
    def names_of(tree: Any) -> dict[str, Any]:
        """What the flat names say of a tree."""

    @staticmethod  # noqa: B027 (optional: some flat names need no check)
    def check(c: Any) -> None:
        """Raises ValueError for flat names that mean nothing."""

    @classmethod
    def from_tree(cls: type[Config], tree: Any, **flat: Any) -> Config:
        """The face of a tree; `flat` adds what a tree does not say (names, device, dtype, defaults)."""
        made: Any = cls
        return made(**{**cls.names_of(tree), **flat}, tree=tree)

    # ---- setting fields ----------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SLOTS or not hasattr(self, "_given"):  # while it is made
            return object.__setattr__(self, name, value)
        value = normalized(type(self), name, value)
        if name == "n_ctx" and self._of_model and isinstance(value, int) and 0 < value <= self.tree.n_ctx:
            return object.__setattr__(self, name, value)  # for a while: prompts are held to it, and the positions stay
        is_of_tree = name == "tree" or (name in flat_fields(type(self)) and name not in FREE)
        if is_of_tree and self._of_model and name not in self.READ_AT_EVERY_RUN:
            if value is getattr(self, name) or value == getattr(self, name):
                return None
            raise ValueError(
                f"cfg.{name} cannot become {value!r}: a model was built from this config with {getattr(self, name)!r}, and "
                f"would stay as it is; build another one from dataclasses.replace(model.cfg, {name}=...)"
            )
        object.__setattr__(self, name, value)
        if name == "tree":
            self._given, self._base = ({} if value is not None else self._all_given()), value
        elif is_of_tree or name in TRACKED:
            self._given[name] = value
        else:
            return None
        try:
            self.settle()
        except ValueError:  # other fields may follow; whoever builds a model is told
            object.__setattr__(self, "tree", self.tree if self._of_model else None)
        return None

    def settle(self) -> None:
        """Compute what follows from the fields that were set. Raises ValueError for those that make no model."""
        if self._base is None:
            values = settled_values(type(self), self._given)
            tree = self.build(SimpleNamespace(**values))
        else:
            values = self._names_on_tree()
            tree = self._edited_tree(values)
        if tree is not None:
            names = self.names_of(tree)
            self._check_effect(values, names)
            values |= {n: v for n, v in names.items() if n not in self._given and not same(v, values.get(n))}
        for name, value in {**values, "tree": tree}.items():
            object.__setattr__(self, name, value)

    def seal(self) -> None:
        """From now on this is the config of a model: what its modules were built from is no longer set."""
        self._of_model = True

    def follow(self: Config, tree: Any) -> None:
        """Take the tree of a model whose modules were changed; flat names say what it says."""
        said = self.names_of(tree)
        kept = {name: value for name, value in self._given.items() if name not in said or same(said[name], value)}
        self._given, self._base = kept, tree
        self.settle()

    def given(self) -> dict[str, Any]:
        """The flat names of the tree that were set, and their values."""
        return dict(self._given if self._base is None else self._all_given())

    # ---- how it is settled -------------------------------------------------------------------------------------------

    def _stated(self) -> dict[str, Any]:
        """What the tree that this was made from says in flat names, without what would follow from the rest."""
        names = {name: value for name, value in self.names_of(self._base).items() if name != "n_params"}
        stated = dict(names)
        for name in DERIVED.keys() & names.keys() - self._given.keys() - {"n_heads"}:
            others = {n: v for n, v in names.items() if n != name}
            if same(names[name], settled_values(type(self), others).get(name)):
                del stated[name]
        return stated

    def _all_given(self) -> dict[str, Any]:
        """As if all of the tree's flat names had been set."""
        return {**({} if self._base is None else self._stated()), **self._given}

    def _names_on_tree(self) -> dict[str, Any]:
        names = self._stated() if self._edits() else self.names_of(self._base)
        return settled_values(type(self), {**names, **self._given})

    def _edits(self) -> dict[str, Any]:
        """The fields that were set to something other than what the tree says."""
        names, defaults = self.names_of(self._base), default_values(type(self))
        return {
            name: value
            for name, value in self._given.items()
            if name not in FREE and not same(value, names.get(name, defaults.get(name)))
        }

    def _edited_tree(self, values: dict[str, Any]) -> Any:
        edits = self._edits()
        if not edits:
            return self._base
        try:
            before = self.build(SimpleNamespace(**settled_values(type(self), self._stated())))
            after = self.build(SimpleNamespace(**values))
            return None if after is None else edited(self._base, before, after)
        except (ValueError, TypeError, ZeroDivisionError) as error:
            named = ", ".join(f"{name}={value!r}" for name, value in edits.items())
            raise ValueError(
                f"{named} cannot be set on this config, which was made from a tree: {error}. Change the tree, or build from "
                f"flat names alone: dataclasses.replace(cfg, {next(iter(edits))}=..., tree=None)"
            ) from error

    def _check_effect(self, values: dict[str, Any], names: dict[str, Any]) -> None:
        """Raises ValueError for a field that was set and that the tree does not show."""
        defaults, c = default_values(type(self)), SimpleNamespace(**values)
        for name, value in self._given.items():
            default = defaults.get(name)
            if name in FREE or (self._base is None and same(value, default)) or not c.n_layers > 0:
                continue
            shown = names.get(name, default)
            if same(_canonical(name, value, c), _canonical(name, shown, c)):
                continue
            switches = SWITCHES.get(name, ())
            if any(switch in self._given for switch in switches):
                continue
            needs = f"; set {' or '.join(switches)} too" if switches else ""
            raise ValueError(f"{name}={value!r} would have no effect on this model, which has {shown!r}{needs}")

    # ---- copies ------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> Any:
        """A copy belongs to no model."""
        return dict(vars(self)), dict(self._given), self._base

    def __setstate__(self, state: Any) -> None:
        values, given, base = state
        vars(self).update(values)
        self._given, self._base, self._of_model = given, base, False


def remembers(cls: type[Config]) -> type[Config]:
    """A dataclass whose configs remember which fields were set; `dataclasses.replace` hands that on.

    What `replace` was given stands before `origin`, what it copied after. What was copied counts as set where it was set
    in the origin, or differs from it.
    """
    init = cls.__init__
    positional = [field.name for field in fields(cls) if field.init and not field.kw_only]

    @wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        named = [*positional[: len(args)], *kwargs]
        origin = kwargs.pop("origin", None)
        chosen = named if origin is None else named[: named.index("origin")]
        init(self, *args, **kwargs)
        for name in flat_fields(cls):
            object.__setattr__(self, name, normalized(cls, name, getattr(self, name)))
        self._of_model = False
        is_copied = origin is not None and "tree" not in chosen
        self._base = origin._base if is_copied else self.tree
        if self._base is not None and not is_dataclass(self._base):
            raise TypeError(f"tree must be a tree of component configs, got {type(self._base).__name__}")
        says_itself = self._base is not None and origin is None
        said = settled_values(cls, {**self.names_of(self._base), "init_mode": self.init_mode}) if says_itself else {}
        before = (
            {} if origin is None or (self._base and not is_copied) else origin._given if is_copied else origin.given()
        )
        self._given = {
            name: getattr(self, name)
            for name in named
            if name in flat_fields(cls)
            and (name not in FREE or name in TRACKED)
            and (name in chosen or name in before or not same(getattr(self, name), getattr(origin, name, None)))
            and not (name in said and same(said[name], getattr(self, name)))
        }
        self.settle()

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


def flat_fields(cls: type[Any]) -> frozenset[str]:
    """The fields of a class of configs."""
    return frozenset(field.name for field in fields(cls))


def default_values(cls: type[Any]) -> dict[str, Any]:
    """The fields that have a default, and it."""
    return {field.name: field.default for field in fields(cls) if field.default is not MISSING}


def settled_values(cls: type[SettledConfig], given: dict[str, Any]) -> dict[str, Any]:
    """The flat names of the tree, those that were not set at their defaults, and what follows from them computed."""
    defaults = {n: v for n, v in default_values(cls).items() if n not in FREE or n in TRACKED}
    c = SimpleNamespace(**{**defaults, **given})
    cls.check(c)
    for name, rule in DERIVED.items():
        needs = {"d_head": c.n_heads, "n_heads": c.d_head}.get(name)
        if hasattr(c, name) and getattr(c, name) in (None, -1, -1.0) and needs != -1:
            setattr(c, name, rule(c))
    return vars(c)


def normalized(cls: type, name: str, value: Any) -> Any:
    """A value as a field holds it: a dtype of torch, a device, and a float where a number may be one."""
    if name == "dtype" and isinstance(value, str):
        dtype = getattr(torch, value.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"unknown dtype {value!r}; one of torch's, such as 'float32' or 'bfloat16'")
        return dtype
    if name == "device" and value is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if is_int and name in _floats(cls) else value


_FLOATS: dict[type[Any], frozenset[str]] = {}


def _floats(cls: type[Any]) -> frozenset[str]:
    """The fields that may hold a float."""
    if cls not in _FLOATS:
        _FLOATS[cls] = frozenset(field.name for field in fields(cls) if {float, int} <= {*get_args(field.type)})
    return _FLOATS[cls]


def same(a: Any, b: Any) -> bool:
    """Equal, numbers up to the rounding of a reciprocal."""
    if isinstance(a, float) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-9)
    return bool(a == b)


def _canonical(name: str, value: Any, c: Any) -> Any:
    """One way to say what may be said in several."""
    if name == "n_key_value_heads":
        return value or c.n_heads
    if name == "attn_types":
        return None if value is None or "local" not in value[: c.n_layers] else list(value[: c.n_layers])
    if name == "rotary_base_local":
        return c.rotary_base if value is None else value
    if name in ("attn_scores_soft_cap", "output_logits_soft_cap"):
        return max(value, 0.0)
    if name == "scale_attn_by_inverse_layer_idx":
        return value and c.n_layers > 1
    return value


def _params_per_layer(c: Any) -> int:
    """Weights of a layer, without biases, norms and embeddings: the count that papers quote."""
    n_kv = c.n_key_value_heads or c.n_heads
    attention = 2 * c.d_model * c.d_head * (c.n_heads + n_kv)
    mlp = 0 if c.attn_only else (3 if c.gated_mlp else 2) * c.d_model * (c.d_mlp or 0)
    return int(attention + mlp)
