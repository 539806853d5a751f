"""Rules of backward passes: coefficients in place of some derivatives. The forward pass computes the same bits.

Gradients describe a model at one point. Where it is saturated or curved they say little about an exchange that moves it far,
so several methods replace some derivatives by other coefficients. Their rules are a value, `BackwardRules`, which knows no
component: norms and softmaxes are recognised by the functions of PyTorch that they call, other parts by their sites. A module
names the factors of its activations (`Activated`), and a part for which a rule has no meaning is refused by its name.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode

from hooked_lm.components.activations import Activated
from hooked_lm.components.attention.multihead import AbstractAttention
from hooked_lm.components.blocks.wiring import wiring_of
from hooked_lm.components.norms.norm import upcast
from hooked_lm.hooks import HookedRootModule, HookPoint

Hooks = list[tuple[str, Callable[..., Any]]]


@dataclass(frozen=True)
class BackwardRules:
    """What backward passes use in place of derivatives. Without arguments all derivatives are those of the model.

    Args:
        freeze_norms: norms divide by a constant: that of the forward pass.
        activation_ratios: an activation function multiplies its argument by a constant, act(x) / x.
        share_products: each of the n factors of a gated activation gets a share 1/n of the gradient. By this and the two rules
            above, the input's products with its gradient sum to the output of a part without biases.
        softmax_temperature: the derivative of softmax(x) is taken with the weights of softmax(x / temperature), in attention and
            in every other softmax of the model, as those of routers.
        q_scale, k_scale, v_scale: what the gradients at queries, keys and values are multiplied by. With 0 for queries and keys,
            attention patterns are constants, unless they depend on something else, as masks that are computed from values.

    Raises ValueError for a temperature that is not positive and for scales that are negative.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.analysis import attribute, metrics
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> answers = metrics.logit_difference(" Mary", " John", model=model)
    >>> both = "When Mary and John left, Mary", "When Mary and John left, John"
    >>> found = attribute(
    ...     model,
    ...     *both,
    ...     metric=answers,
    ...     sites="mlp_out",
    ...     backward=BackwardRules(freeze_norms=True),
    ...     check=False,
    ... )
    >>> list(found.axes)
    ['layer', 'position']
    """

    freeze_norms: bool = False
    activation_ratios: bool = False
    share_products: bool = False
    softmax_temperature: float = 1.0
    q_scale: float = 1.0
    k_scale: float = 1.0
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.softmax_temperature < float("inf"):
            raise ValueError(f"softmax_temperature must be a positive number, got {self.softmax_temperature}")
        for name in ("q_scale", "k_scale", "v_scale"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a number from 0 on, got {getattr(self, name)}")

    @classmethod
    def of(cls, backward: "str | BackwardRules") -> "BackwardRules":
        """The rules of a name, or the given rules. Raises ValueError for anything else."""
        if isinstance(backward, BackwardRules):
            return backward
        if backward not in NAMED:
            raise ValueError(
                f"backward must be one of {', '.join(map(repr, NAMED))}, or BackwardRules; got {backward!r}"
            )
        return NAMED[backward]

    @property
    def settings(self) -> dict[str, bool | float]:
        """The rules that differ from derivatives."""
        return {
            rule.name: getattr(self, rule.name) for rule in fields(self) if getattr(self, rule.name) != rule.default
        }

    @property
    def shows_scores(self) -> bool:
        """Whether attention scores are computed in the graph."""
        return self.softmax_temperature != 1.0

    # ---- where they attach -------------------------------------------------------------------------------------------

    def attached(self, model: HookedRootModule) -> "Attached":
        """The hooks of these rules for one run; raises ValueError, naming a part that a rule has no meaning for."""
        if self == PLAIN:
            return Attached(self)
        if self.activation_ratios or self.share_products:
            check_products(model)
        found, has_attention = Attached(self), False
        for name, module in model.named_modules():
            if isinstance(module, AbstractAttention):
                has_attention = True
                found.scale(model, name)
            if isinstance(module, Activated) and (
                self.activation_ratios or (self.share_products and len(module.factors) > 1)
            ):
                found.multiply(name, module)
        if not has_attention and (rules := sorted(self.settings.keys() & OF_ATTENTION)):
            raise ValueError(f"{', '.join(rules)}: rules of attention, and this model has none")
        return found


OF_ATTENTION = {"softmax_temperature", "q_scale", "k_scale", "v_scale"}
PLAIN = BackwardRules()
RELP = BackwardRules(freeze_norms=True, activation_ratios=True, share_products=True)
GIM = BackwardRules(freeze_norms=True, softmax_temperature=2.0, q_scale=0.25, k_scale=0.25, v_scale=0.5)
# Jafari et al. 2025 (arXiv:2508.21258); Edin et al. 2025 (arXiv:2505.17630)
NAMED: Mapping[str, BackwardRules] = {"plain": PLAIN, "relp": RELP, "gim": GIM}


def rules_of(method: str, own: BackwardRules | None, backward: str | BackwardRules) -> BackwardRules:
    """The rules of the backward passes of a method: those it is given, or its own; None if it takes derivatives alone. Raises
    ValueError if it is given others than its own."""
    given = BackwardRules.of(backward)
    if given in (PLAIN, own):
        return own or PLAIN
    if own != PLAIN:
        raise ValueError(f"method {method!r} has its own backward pass: leave out backward, or choose another method")
    return given


class Keep:
    """A hook that keeps the values at its sites, with their graph."""

    records = True  # it edits nothing, so it may get the value itself and not a copy

    def __init__(self) -> None:
        self.live: dict[str, Tensor] = {}

    def __call__(self, value: Tensor, hook: HookPoint) -> None:
        self.live[str(hook.name)] = value


@dataclass
class Attached:
    """The rules in one run: hooks `before` and `after` the other hooks, and the `scope` of the run."""

    rules: BackwardRules
    before: Hooks = field(default_factory=list)
    after: Hooks = field(default_factory=list)

    def scale(self, model: HookedRootModule, attention: str) -> None:
        """Multiplies the gradients at queries, keys and values, where an attention has them."""
        for letter, by in (("q", self.rules.q_scale), ("k", self.rules.k_scale), ("v", self.rules.v_scale)):
            site = f"{attention}.hook_{letter}"
            if by != 1.0 and site in model.hook_dict:
                self.after.append((site, scaled_gradient(by)))

    def multiply(self, part: str, module: Activated) -> None:
        """Replaces the derivative of activations with respect to their factors."""
        keep, factors = Keep(), [f"{part}.{site}" for site in module.factors]
        self.after += [(site, keep) for site in factors]

        def multiplied(value: Tensor, hook: HookPoint) -> Tensor:
            found = [keep.live.pop(site) for site in factors]
            return with_gradient_of(value, shared_product(value, found, self.rules)) if value.requires_grad else value

        self.before.append((f"{part}.{module.product_site}", multiplied))

    @contextmanager
    def scope(self) -> Iterator[None]:
        """A context in which the norms and softmaxes of this thread have other derivatives."""
        ways = _ways(self.rules)
        if not ways:
            yield
            return
        with _OtherDerivatives(ways):
            yield


def check_products(model: HookedRootModule) -> None:
    """Raises ValueError for a part of a block that multiplies values in a way that is not known here."""
    for name in [site.rpartition(".")[0] for site in model.all_points() if site.endswith(".hook_resid_pre")]:
        block = model.get_submodule(name)
        wiring = wiring_of(block)
        if not wiring.steps or wiring.by_hand:
            raise ValueError(
                f"'{name}' has {wiring.by_hand or 'no known parts'}: ratios of activations have no rule for it"
            )
        for step in wiring.sublayers:
            part = block.get_submodule(step.part)
            if not _has_rules(part):
                raise ValueError(
                    f"'{name}.{step.part}' is a {type(part).__name__}, which multiplies values that the rules do not know: "
                    "choose backward='plain' or 'gim', or rules without activation_ratios and share_products"
                )


def _has_rules(part: nn.Module) -> bool:
    """Whether the products in a part of a block are known: those of an MLP whose activation is 0 at 0, and patterns with
    values."""
    if isinstance(part, AbstractAttention):
        return part.mixes_linearly
    if not isinstance(part, Activated):
        return False
    weight = next(part.parameters())
    zero = torch.zeros(1, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        return bool((part.act_fn(zero) == 0).all())


# ---- coefficients ----------------------------------------------------------------------------------------------------


class _WithGradientOf(torch.autograd.Function):
    """The first argument, with the gradient of the second."""

    @staticmethod
    def forward(ctx: FunctionCtx, value: Tensor, way: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def with_gradient_of(value: Float[Tensor, "*shape"], way: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """`value`, whose gradient is that of `way`.

    >>> x = torch.tensor([3.0], requires_grad=True)
    >>> with_gradient_of(x.detach() ** 2, 10 * x).backward()
    >>> float(x.grad)
    10.0
    """
    found: Tensor = _WithGradientOf.apply(value.detach(), way.to(value.dtype))
    return found


def scaled_gradient(by: float) -> Callable[..., Tensor]:
    """A hook that multiplies the gradient at its site, and of what comes before it."""

    def hook(value: Tensor, hook: HookPoint) -> Tensor:
        same = value.view_as(value)
        if same.requires_grad:
            same.register_hook(lambda gradient: gradient * by)
        return same

    return hook


def shared_product(value: Tensor, factors: list[Tensor], rules: BackwardRules) -> Tensor:
    """A sum of the factors of a value, the first of which is the argument of an activation function, with constant coefficients.

    With `activation_ratios` each is multiplied by value / factor; else the first by its derivative. With `share_products` each
    has an equal share. Where a factor is 0, the limit is taken: the derivative.
    """
    share = 1 / len(factors) if rules.share_products else 1.0
    parts = []
    for place, factor in enumerate(factors):
        if place == 0 and not rules.activation_ratios:
            [slope] = torch.autograd.grad(value.sum(), factor, retain_graph=True)
            parts.append(slope * factor)
        else:
            ratio = (value / factor).detach().masked_fill(factor == 0, 0.0)
            parts.append(torch.where(factor == 0, value, ratio * factor))
    return share * sum(parts[1:], parts[0])


class _OtherDerivatives(TorchFunctionMode):
    """Computes some functions as they are, with the derivatives of others."""

    def __init__(self, ways: Mapping[Callable[..., Any], Callable[..., Tensor]]) -> None:
        super().__init__()
        self.ways = ways

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in self.ways or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        with torch.no_grad():
            value = func(*args, **kwargs)
        way = self.ways[func](*args, **kwargs)
        return with_gradient_of(value, way) if way.requires_grad else value


def _ways(rules: BackwardRules) -> dict[Callable[..., Any], Callable[..., Tensor]]:
    """For each function of PyTorch with another derivative, a function with that derivative."""
    found: dict[Callable[..., Any], Callable[..., Tensor]] = {}
    if rules.freeze_norms:
        found |= {F.layer_norm: _layer_norm, F.rms_norm: _rms_norm, torch.linalg.vector_norm: _constant_norm}
    if rules.softmax_temperature != 1.0:
        tempered = _Tempered(rules.softmax_temperature)
        found |= dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax), tempered.softmax)
        found[F.scaled_dot_product_attention] = tempered.attention
    return found


def _constant_norm(x: Tensor, ord: float = 2, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return torch.linalg.vector_norm(x.detach(), ord, dim, keepdim)


def _layer_norm(
    x: Tensor, shape: tuple[int, ...], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Layer normalisation that divides by a constant; in at least fp32, as squares of half precision overflow."""
    axes = [-1 - axis for axis in range(len(shape))]
    wide = upcast(x)
    centred = wide - wide.mean(axes, keepdim=True)
    found = (centred * (centred.detach().square().mean(axes, keepdim=True) + eps).rsqrt()).to(x.dtype)
    found = found if weight is None else found * weight
    return found if bias is None else found + bias


def _rms_norm(x: Tensor, shape: tuple[int, ...], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """RMS normalisation that divides by a constant."""
    axes = [-1 - axis for axis in range(len(shape))]
    least = torch.finfo(x.dtype).eps if eps is None else eps
    found = x * (x.detach().square().mean(axes, keepdim=True) + least).rsqrt()
    return found if weight is None else found * weight


@dataclass(frozen=True)
class _Tempered:
    """Functions whose derivatives are those of softmax with the weights at a temperature."""

    temperature: float

    def softmax(self, x: Tensor, dim: int = -1, *, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
        """The derivative of softmax(x / t) with respect to x is 1 / t times that at the temperature."""
        return self.temperature * (x / self.temperature).softmax(dim, dtype=dtype)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attention in steps; [batch, head, pos, d_head]."""
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if enable_gqa:
            k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        scores = upcast(q @ k.transpose(-1, -2)) * scale
        if is_causal:
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~allowed, -torch.inf)
        if attn_mask is not None:
            is_allowed = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if is_allowed else scores + attn_mask
        with torch.no_grad():
            pattern = scores.softmax(-1)
        return with_gradient_of(pattern, self.softmax(scores)).to(v.dtype) @ v
