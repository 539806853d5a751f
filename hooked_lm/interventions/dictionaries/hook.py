"""Hooks with a dictionary (any object with `encode` and `decode`): splice it into the model, read and edit its features.

Transcoders of several layers have a dictionary for each site that they read: a part.
"""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable
from weakref import ref

import torch
from torch import Tensor, nn

from hooked_lm.hooks import HookedRootModule, HookPoint
from hooked_lm.hooks.indices import Indices, plain_indices
from hooked_lm.interventions.base import Controller, Detector, HookObject
from hooked_lm.interventions.dictionaries.normalized import Normalized
from hooked_lm.interventions.dictionaries.sae import SAE, frozen
from hooked_lm.interventions.dictionaries.site import check_dictionary, own_site, warn_if_elsewhere
from hooked_lm.interventions.dictionaries.transcoder_set import LayerTranscoders, from_dict
from hooked_lm.interventions.part import parts_of
from hooked_lm.interventions.part_editor import check_finite
from hooked_lm.interventions.per_thread import PerThread
from hooked_lm.interventions.positions import Positions, check_positions

Edit = Callable[[Tensor], Tensor | None]
Decode = Callable[[Sequence[Tensor]], Tensor]
Edits = Edit | Mapping[int, Edit] | None  # of transcoders of several layers by the number of the layer
Chosen = Indices | Mapping[int, Indices]  # features, likewise
ERRORS = ("keep", "detach", "drop")
NUMBERS = ("value", "factor", "coefficient")  # what is done to a feature
_foreign = RLock()  # third-party dictionaries may keep state from `encode` to `decode`: one thread at a time


@runtime_checkable
class Coder(Protocol):
    """Any dictionary, of this package or another: it encodes vectors as features, and decodes them."""

    def encode(self, x: Tensor, /) -> Tensor:
        """The features of vectors."""

    def decode(self, features: Tensor, /) -> Tensor:
        """The vectors of features."""


class _Read(NamedTuple):
    """The vectors at a site, their features, and `watched`: the features as a separate graph node, for gradients."""

    site: str
    x: Tensor
    features: Tensor
    watched: Tensor


class _Seen:
    """The features at a site in the last forward pass: in its graph while something else keeps that alive, then detached."""

    def __init__(self, features: Tensor) -> None:
        has_graph = features.grad_fn is not None
        self.values = features.detach() if has_graph else features
        self.in_graph = ref(features) if has_graph else None

    @property
    def features(self) -> Tensor:
        found = None if self.in_graph is None else self.in_graph()
        return self.values if found is None else found


@dataclass(eq=False, repr=False)
class DictionaryHook(HookObject):
    """Base class of hooks with a dictionary: keeps the features of the last forward pass of each thread."""

    sae: Any = None
    _seen: PerThread[dict[str, _Seen]] = field(default_factory=lambda: PerThread(dict), init=False)

    def __post_init__(self) -> None:
        if isinstance(self.hook_point, str) and not self.hook_point:
            self.hook_point = self._own_site()
        super().__post_init__()
        if not isinstance(self.sae, LayerTranscoders):
            check_dictionary(self.sae)

    def _own_site(self) -> Any:
        """The site in the dictionary's config, or ""; of transcoders of several layers the sites that they read."""
        return list(self.sae.sites) if isinstance(self.sae, LayerTranscoders) else own_site(self.sae)

    def _part(self, site: str) -> Any:
        """The dictionary of a site that is read. Raises ValueError for a site that no transcoder of a layer reads."""
        if not isinstance(self.sae, LayerTranscoders):
            return self.sae
        if site not in self.sae.sites:
            raise ValueError(f"no transcoder of {self.sae!r} reads '{site}': they read {', '.join(self.sae.sites)}")
        return self.sae.parts[self.sae.sites.index(site)]

    @property
    def features(self) -> Tensor:
        """The features of this thread's last forward pass (or generation step), [batch, pos, feature], before any edit.

        While the output (or loss) of the forward pass is alive, a `Dictionary` returns the tensor in its graph, for gradients
        with respect to it. Afterwards, and for `Features`, the tensor is detached; `run_with_features` returns features in the
        graph for both. Raises ValueError before the first forward pass, and for several sites (see `by_site`).
        """
        found = self.by_site
        if len(found) != 1:
            sites = ", ".join(found) or "no run yet in this thread"
            raise ValueError(f"{self!r} has the features of {len(found)} sites ({sites}): see by_site")
        return next(iter(found.values()))

    @property
    def by_site(self) -> Mapping[str, Tensor]:
        """Site -> features of the last forward pass in this thread."""
        return {site: seen.features for site, seen in self._seen.value.items()}

    def forget(self) -> None:
        """Deletes the features of the last forward pass in this thread."""
        self._seen.value.clear()

    def _encoded(self, value: object, hook: HookPoint, written: str | None = None) -> "_Read":
        """The features of the vectors at a site; `written` is that of a transcoder's output."""
        name = str(hook.name)
        sae = self._part(name)
        warn_if_elsewhere(sae, name, written)
        x = flat(sae, value, f"'{name}'")
        x = x.to(_dtype(sae, x))
        features = encoded(sae, x)
        if not isinstance(features, Tensor):
            raise TypeError(f"encode of {type(sae).__name__} at '{name}' gave a {type(features).__name__}, no tensor")
        if not bool(features.isfinite().all()):
            n_wrong = int((~features.isfinite()).sum())
            whose = "" if bool(x.isfinite().all()) else "; the site's own value is not finite either"
            raise ValueError(
                f"encode of {type(sae).__name__} at '{name}' gave features {list(features.shape)} of which {n_wrong} are "
                f"NaN or infinite{whose}"
            )
        watched = features
        if torch.is_grad_enabled():  # a separate node, whose gradient is that of all later uses
            watched = features.clone() if features.requires_grad else features.detach().requires_grad_()
        self._seen.value[name] = _Seen(watched)
        if (kept := _kept.get()) is not None:
            kept.append((self, name, watched))
        return _Read(name, x, features, watched)

    def packed(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings with the dictionary's kind and sizes, and its weights as tensors `sae.<name>`."""
        sae = self.sae
        if not isinstance(sae, (SAE, LayerTranscoders)):
            raise ValueError(
                f"{self!r} cannot be serialised: its sae is a {type(sae).__name__}, not a dictionary of this package"
            )
        weights = {f"sae.{name}": weight.detach().cpu() for name, weight in sae.state_dict().items()}
        return {**settings, "sae": sae.to_dict(), **weights}

    @classmethod
    def unpacked(cls, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments of the constructor, with the dictionary that the settings describe."""
        weights = {name[4:]: value.clone() for name, value in settings.items() if name.startswith("sae.")}
        rest = {name: value for name, value in settings.items() if not name.startswith("sae.")}
        sae = from_dict(rest.pop("sae", None), weights, "its dictionary")
        if isinstance(chosen := rest.get("feature"), Mapping):  # whose numbers of layers are text in a file
            rest["feature"] = {int(layer): of for layer, of in chosen.items()}
        return {**rest, "sae": frozen(sae)}


@dataclass(eq=False, repr=False)
class Features(DictionaryHook, Detector):
    """Computes the features at a site, without changing its value; of transcoders of several layers at the sites they read.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> sae = SAE.Config(d_in=128, d_sae=512).build().to(model.device)
    >>> watch = Features("blocks.1.hook_mlp_out", sae=sae)
    >>> logits = model.run_with_hooks("The capital of France is", fwd_hooks=[watch])
    >>> watch.features.shape[-1]
    512
    """

    def see(self, value: object, hook: HookPoint) -> None:
        self._encoded(value, hook)


@dataclass(eq=False, repr=False)
class Dictionary(DictionaryHook, Controller):
    """Splices a dictionary into a site: replaces the value by its reconstruction from features, which may be edited.

    Sites with heads, such as `hook_z`, are flattened to [batch, pos, head * d_head] if the dictionary is that wide.

    Args:
        hook_point, layer: the site, or all sites of a glob; by default the site in the dictionary's config.
        sae: an object with `encode` and `decode`. Its mode is not changed: a module should be in evaluation mode.
        error: the treatment of the reconstruction error.
            "keep": it is added back. Without an edit, the forward pass and gradients before the site are unchanged; the
            gradient with respect to `features` is that of their contribution to the value.
            "detach": it is added back as a constant. Gradients flow to earlier layers through the features alone.
            "drop": it is dropped, and the value becomes the reconstruction alone.
        feature: the feature to change, or several; each is set to `value` (0 ablates it), multiplied by `factor`, or raised by
            `coefficient`, at `positions` (all by default; see `PartHook`), whether it is active there or not. As decoders are
            linear, the value moves along the direction of the feature only.
        edit: any other change: a function of a copy of the features, [batch, pos, feature], which changes it in place or
            returns new features.

    Raises ValueError for a feature without one of `value`, `factor` and `coefficient`, or with several; in the forward pass,
    ValueError for a site and a dictionary of different widths, features that are not finite, an edit that changes their shape,
    IndexError for a feature that does not exist. TypeError for an object without `encode` or `decode`.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> sae = SAE.Config(d_in=128, d_sae=512).build().to(model.device)
    >>> dictionary = Dictionary("blocks.1.hook_mlp_out", sae=sae, feature=17, factor=3)
    >>> logits = model.run_with_hooks("The capital of France is", fwd_hooks=[dictionary])
    >>> [gradient] = torch.autograd.grad(logits[0, -1].max(), dictionary.features)
    >>> attribution = gradient * dictionary.features
    """

    error: str = field(default="keep", kw_only=True)
    edit: Edits = field(default=None, kw_only=True)
    feature: Chosen = field(default=None, kw_only=True)
    value: float | int | None = field(default=None, kw_only=True)
    factor: float | int | None = field(default=None, kw_only=True)
    coefficient: float | int | None = field(default=None, kw_only=True)
    positions: Positions = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.positions = check_positions(self.positions)
        if isinstance(self.feature, Mapping):
            self.feature = {layer: plain_indices("feature", each) for layer, each in self.feature.items()}
        else:
            self.feature = plain_indices("feature", self.feature)
        self._check_edit()
        if self.error not in ERRORS:
            raise ValueError(f"error must be one of {', '.join(map(repr, ERRORS))}, got {self.error!r}")
        self._check_sites()

    def _check_edit(self) -> None:
        """Raises ValueError for settings of an edit that do not go together."""
        check_finite(self, *NUMBERS)
        given = [f"{name}={number}" for name in NUMBERS if (number := getattr(self, name)) is not None]
        if self.feature is None and (given or self.positions is not None):
            what = given[0] if given else f"positions={self.positions!r}"
            raise ValueError(f"{what} is of a feature, and none is given: add feature=...")
        if self.feature is not None and len(given) != 1:
            got = ", ".join(given) or "none"
            raise ValueError(
                f"feature={self.feature!r} needs one of {', '.join(NUMBERS)}; got {got} (value=0 ablates it)"
            )
        if self.feature is not None and self.edit is not None:
            raise ValueError("give feature=... or edit=..., not both: a function can change every feature")

    def _check_sites(self) -> None:
        """Raises ValueError for sites that do not suit the dictionary."""
        written = getattr(getattr(self.sae, "cfg", None), "hook_point_out", None)
        if isinstance(self.sae, LayerTranscoders):
            written = self.sae.sites_out[0]
        if written is not None:
            raise ValueError(f"a transcoder reads one site and writes another ({written!r}): use Transcode")

    def change(self, value: Tensor, hook: HookPoint) -> Any:
        read = self._encoded(value, hook)
        edited = self._edited(read.watched, hook, self.edit, self.feature)  # type: ignore[arg-type]
        return self._replaced(value, hook, [read], [edited], lambda features: decoded(self.sae, features[0], read.x))

    def _replaced(
        self, value: Tensor, hook: HookPoint, reads: Sequence[_Read], edited: Sequence[Tensor], decode: Decode
    ) -> Tensor:
        """The value with the reconstruction from the (edited) watched features, and the error according to `error`."""
        made = self._shaped(decode(edited), value, hook)
        if self.error != "drop":
            is_same = all(new is read.features for new, read in zip(edited, reads, strict=True))
            plain = made if is_same else self._shaped(decode([read.features for read in reads]), value, hook)
            missing = value.to(made.dtype) - plain
            made = made + (missing.detach() if self.error == "detach" else missing)
        made = made.to(value.dtype)
        if (node := made.grad_fn) is not None:  # kept alive by the graph, not by this object
            cast(Any, node).metadata["features"] = [read.watched for read in reads]
        return made

    def _edited(self, features: Tensor, hook: HookPoint, edit: Edit | None, chosen: Indices) -> Tensor:
        """The features after an edit of them all, or of those chosen."""
        if chosen is not None:
            for part in parts_of(features, hook, self.positions, features=chosen):
                features = part.replaced(features, self._new)
            return features
        if edit is None:
            return features
        copy = features.clone()
        returned = edit(copy)
        edited = copy if returned is None else returned
        if not isinstance(edited, Tensor) or edited.shape != features.shape:
            got = list(edited.shape) if isinstance(edited, Tensor) else type(edited).__name__
            raise ValueError(f"the edit must change the features in place or return {list(features.shape)}, got {got}")
        return edited

    def _new(self, values: Tensor) -> Tensor:
        """The new values of the chosen features."""
        if self.value is not None:
            return torch.full_like(values, self.value)
        if self.factor is not None:
            return values * self.factor
        assert self.coefficient is not None, "one of the three is given"
        return values + self.coefficient

    def _shaped(self, made: Tensor, value: Tensor, hook: HookPoint) -> Tensor:
        """Decoded features in the shape of the value."""
        if made.numel() != value.numel():
            raise ValueError(
                f"decode of {type(self.sae).__name__} gave {list(made.shape)}, and '{hook.name}' has {_axes(value, hook)}"
            )
        return made.reshape(value.shape)


_kept: ContextVar[list[tuple[DictionaryHook, str, Tensor]] | None] = ContextVar("features", default=None)


def run_with_features(
    model: HookedRootModule, prompts: Any, dictionaries: "DictionaryHook | Sequence[DictionaryHook]", **options: Any
) -> tuple[Any, dict[str, Tensor]]:
    """A forward pass with dictionaries: returns the logits, and the features at each site, [batch, pos, feature], in its graph.

    Args:
        prompts: the input of the model.
        dictionaries: `Dictionary` or `Transcode` (which change values), or `Features` (which do not): an object or several, one
            at each site.
        options: other arguments of the model, such as `attention_mask`; TypeError for one that it does not have.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> watch = Features(
    ...     "blocks.*.hook_mlp_out",
    ...     sae=SAE.Config(d_in=128, d_sae=512).build().to(model.device),
    ... )
    >>> logits, features = run_with_features(model, "The capital of France is", [watch])
    >>> list(features)[0], features["blocks.0.hook_mlp_out"].shape[-1]
    ('blocks.0.hook_mlp_out', 512)
    """
    dictionaries = [dictionaries] if isinstance(dictionaries, DictionaryHook) else list(dictionaries)
    for one in dictionaries:
        one.forget()
    kept: list[tuple[DictionaryHook, str, Tensor]] = []
    token = _kept.set(kept)
    try:
        output = model.run_with_hooks(prompts, fwd_hooks=dictionaries, **options)
    finally:
        _kept.reset(token)
    found: dict[str, tuple[DictionaryHook, Tensor]] = {}
    for one, site, features in kept:
        if one not in dictionaries:  # registered on the model elsewhere
            continue
        if found.get(site, (one,))[0] is not one:
            raise ValueError(
                f"two dictionaries have features at '{site}': use one forward pass for each, or read their by_site"
            )
        found[site] = one, features
    return output, {site: features for site, (_, features) in found.items()}


def encoded(sae: Coder, x: Tensor) -> Any:
    """`sae.encode(x)`; third-party objects may keep state between `encode` and `decode`, so a lock serialises their calls.

    Raises ValueError for a dictionary on another device than the values.
    """
    check_place(sae, x)
    if isinstance(sae, (SAE, Normalized)):
        return sae.encode(x)
    with _foreign:
        return sae.encode(x)


def check_place(sae: object, x: Tensor) -> None:
    """Raises ValueError for a dictionary on another device than the values it reads."""
    weight = next(sae.parameters(), None) if isinstance(sae, nn.Module) else None
    if weight is not None and weight.device != x.device:
        raise ValueError(
            f"the dictionary is on {weight.device}, what it reads on {x.device}: move it, sae.to('{x.device}')"
        )


def decoded(sae: Coder, features: Tensor, x: Tensor) -> Tensor:
    """The decoded `features`, which are those of `x`, possibly edited.

    A third-party object may keep state in `encode` that one `decode` consumes, so `encode(x)` is called first.
    """
    if isinstance(sae, (SAE, Normalized)):
        return sae.decode(features, of=x)
    with _foreign:
        sae.encode(x)
        return sae.decode(features)


def width(sae: object) -> int | None:
    """The input width of a dictionary, if it has one of the usual attributes; else None."""
    weight = getattr(sae, "W_enc", None)
    sizes = (getattr(getattr(sae, "cfg", None), "d_in", None), getattr(sae, "activation_dim", None))
    known = (*sizes, weight.shape[0] if isinstance(weight, Tensor) else None)
    return next((size for size in known if isinstance(size, int)), None)


def flat(sae: object, value: object, where: str) -> Tensor:
    """A site's value with heads flattened to [..., head * d_head], if that is the dictionary's width.

    Raises ValueError, with both widths, if neither shape fits; TypeError unless the value is a floating-point tensor.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = f"{value.dtype} numbers" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise TypeError(f"{where} passes {got}, and a dictionary reads vectors")
    d_in = width(sae)
    if d_in is None or value.shape[-1] == d_in or getattr(sae, "hook_z_reshaping_mode", False):  # of SAELens
        return value
    if value.ndim > 3 and value.shape[-2] * value.shape[-1] == d_in:
        return value.flatten(-2)
    raise ValueError(
        f"{where} has vectors of width {value.shape[-1]} (its shape is {list(value.shape)}), and the dictionary "
        f"({type(sae).__name__}) reads vectors of width {d_in}"
    )


def _axes(value: Tensor, hook: HookPoint) -> str:
    return f"{list(value.shape)} ({', '.join(hook.dims)})" if hook.dims else str(list(value.shape))


def _dtype(sae: object, x: Tensor) -> torch.dtype:
    """The dtype of the dictionary's weights, or of `x` if it has none."""
    weights = sae.parameters() if isinstance(sae, nn.Module) else ()
    return next((weight.dtype for weight in weights if weight.is_floating_point()), x.dtype)
