"""Checks that the values at a model's sites satisfy their identities; correct logits alone do not show that."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.components.attention.global_tokens import every_third
from hooked_lm.components.verification.registry import Identity, Pair, Sites
from hooked_lm.hooks import HookedRootModule, HookPoint
from hooked_lm.models.config.flat import HookedTransformerConfig
from hooked_lm.notebook_repr import NotebookRepr, Table

Errors = dict[str, list[float]]
TWO_PASSES = "output == output with sites on demand"


@dataclass(frozen=True)
class Check:
    """One identity: its error in each layer (or one for the whole model), and the tolerance."""

    name: str
    errors: tuple[float, ...]
    tolerance: float

    @property
    def largest(self) -> float:
        return max(self.errors, default=0.0, key=lambda error: float("inf") if error != error else error)

    @property
    def ok(self) -> bool:
        return all(error <= self.tolerance for error in self.errors)


@dataclass(frozen=True, repr=False)
class Verification(NotebookRepr):
    """A table of checks; `ok` is True if all of them hold, `str` formats it."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def failed(self) -> list[str]:
        """The names of the checks that do not hold."""
        return [check.name for check in self.checks if not check.ok]

    def __getitem__(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)

    def __repr__(self) -> str:
        failed = f"{len(self.failed)} of {len(self.checks)} checks failed: {', '.join(self.failed)}"
        return f"Verification({failed if self.failed else f'all {len(self.checks)} checks hold'})"

    def repr_table(self) -> Table:
        """For each check its largest error, the tolerance, and the layers where it fails."""
        rows = [(each.name, f"{each.largest:.2e}", f"{each.tolerance:.0e}", _outcome(each)) for each in self.checks]
        return Table(("check", "largest error", "tolerance", ""), rows)

    def __str__(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = [
            f"{check.name:<{width}}  {check.largest:9.2e}  " + _outcome(check, f": more than {check.tolerance:.0e}")
            for check in self.checks
        ]
        return "\n".join(lines)


def _outcome(check: Check, why: str = "") -> str:
    return "ok" if check.ok else f"FAILED{why}{_where(check)}"


def _where(check: Check) -> str:
    layers = [str(layer) for layer, error in enumerate(check.errors) if not error <= check.tolerance]
    return f" in layers {', '.join(layers)}" if len(check.errors) > 1 else ""


def drawn_tokens(
    cfg: HookedTransformerConfig, d_vocab: int | None = None, most: int = 12, seed: int = 0
) -> Int[Tensor, "2 pos"]:
    """Random token ids for a check, [2, up to `most`]; the same ids on every call."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(d_vocab or cfg.d_vocab, (2, min(most, cfg.n_ctx)), generator=generator)


def drawn_masks(model: HookedRootModule, tokens: Int[Tensor, "batch pos"]) -> dict[str, Tensor]:
    """The masks of a check: every third token has global attention, where tokens can; the sites are reached only then."""
    if model.global_tokens is None:
        return {}
    return {"global_attention_mask": every_third(tokens.shape[1]).expand(tokens.shape)}


def check_inputs(inputs: tuple[Any, ...]) -> None:
    """Raises TypeError for inputs that are no tensors, such as texts."""
    if wrong := [type(each).__name__ for each in inputs if not isinstance(each, Tensor)]:
        raise TypeError(f"verify reads tensors of token ids or pixels, got {wrong[0]}: model.to_tokens(text) gives ids")


@torch.no_grad()
def verify(
    model: HookedRootModule,
    inputs: tuple[Tensor, ...],
    identities: Callable[[Sites, Tensor], Iterator[Identity]],
    **masks: Tensor,
) -> Verification:
    """Checks the identities between a model's sites in one forward pass, and that each site fires exactly once.

    `identities` yields them, given the values at the sites and the output; `masks` are keywords of the model's call. A second
    pass with the remaining on-demand sites must give the same output. Errors are relative to the largest expected
    value if that is above one. The tolerance is the larger of 1e-5 and four machine epsilons of the output's dtype; for the two
    passes, in which rounding adds up, times the root of the number of layers. A failed identity raises no error. Raises TypeError
    for inputs that are no tensors.

    >>> from hooked_lm import HookedTransformer, HookedTransformerConfig
    >>> cfg = HookedTransformerConfig(
    ...     n_layers=2, d_model=16, n_heads=2, n_ctx=8, d_vocab=10, act_fn="relu"
    ... )
    >>> HookedTransformer(cfg).verify().ok
    True
    """
    check_inputs(inputs)
    inputs = tuple(each.to(model.device) for each in inputs)
    with without_copies(model):
        return _checked(model, inputs, identities, masks)


@contextmanager
def without_copies(model: HookedRootModule) -> Iterator[None]:
    """Switches off `use_attn_in` and `use_split_qkv_input` in a `with` block, so that norms read the stream itself."""
    own, model.cfg = model.cfg, copy(model.cfg)
    model.cfg.use_attn_in = model.cfg.use_split_qkv_input = False
    try:
        yield
    finally:
        model.cfg = own


def _checked(
    model: HookedRootModule,
    inputs: tuple[Tensor, ...],
    identities: Callable[[Sites, Tensor], Iterator[Identity]],
    masks: dict[str, Tensor],
) -> Verification:
    points = model.all_points()
    plain = [name for name, point in points.items() if not point.on_demand or _is_read(name, point)]
    output, sites, fired = run_recorded(model, inputs, plain, **masks)
    again, _, fired_then = run_recorded(model, inputs, [name for name in points if name not in plain], **masks)
    errors: Errors = {TWO_PASSES: [error_of(lambda: (again, output))]}
    for name, pair in identities(sites.__getitem__, output):
        errors.setdefault(name, []).append(error_of(pair))
    tolerance = max(1e-5, 4 * torch.finfo(output.dtype).eps)
    depth = max(map(len, errors.values()))
    wrong = sum((fired + fired_then)[name] != 1 for name in points)
    checks = [
        Check(name, tuple(found), tolerance * (depth**0.5 if name == TWO_PASSES else 1))
        for name, found in errors.items()
    ]
    return Verification((Check("sites that do not fire once", (float(wrong),), 0.0), *checks))


def _is_read(name: str, point: HookPoint) -> bool:
    """Whether identities use the value at this on-demand site."""
    return name.endswith(("hook_result", "shortcut.hook_out")) or "routed" in point.dims


def run_recorded(
    model: HookedRootModule, inputs: tuple[Tensor, ...], names: list[str], **masks: Tensor
) -> tuple[Tensor, dict[str, Tensor], Counter[str]]:
    """The model's output, the values at these sites, and how often each site fired."""
    fired: Counter[str] = Counter()
    sites: dict[str, Tensor] = {}

    def record(value: Tensor, hook: HookPoint) -> None:
        fired[hook.name or ""] += 1
        sites[hook.name or ""] = value.clone()

    with model.hooks([(names, record)]):
        logits = model(*inputs, **masks)
    return logits, sites, fired


def error_of(pair: Pair) -> float:
    """The relative error between two tensors; infinite if a site is missing or the shapes do not match."""
    try:
        left, right = pair()
        difference = (left.float() - right.float()).abs().max()
        return float(difference / right.float().abs().max().clamp(min=1.0))
    except (KeyError, RuntimeError, AttributeError):
        return float("inf")
