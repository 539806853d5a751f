"""Gradients of a metric at the sites of a run: one forward and one backward pass, and no gradient of any weight."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.components.norm import norm_of
from hooked_lm.hooks import HookedRootModule, HookPoint, is_listening
from hooked_lm.models.decoder import HookedTransformer
from hooked_lm.patching.base import logits_of
from hooked_lm.patching.reads import Logits, reads_of

Metric = Callable[[Tensor], Any]
Hooks = Sequence[tuple[str, Callable[..., Any]]]
_LOCK, _APART = Lock(), WeakKeyDictionary[nn.Module, tuple[int, list[tuple[Tensor, bool]]]]()  # how many are inside
EMBEDDINGS = ("embed", "pos_embed")  # the modules with which a graph begins


@dataclass(frozen=True)
class Gradients:
    """What a run had at some sites, and how its metric changes with it.

    `scores` [prompt] is the metric, one number a prompt or one for all; `values` and `gradients` have the shapes of the sites.
    As prompts do not see each other, the gradient of one prompt's row is that of its own number.
    """

    scores: Float[Tensor, " prompt"]
    values: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


def gradients(
    model: HookedRootModule,
    tokens: Int[Tensor, "batch pos"],
    sites: Sequence[str],
    metric: Metric,
    hooks: Hooks = (),
    check: bool = True,
) -> Gradients:
    """Values and gradients at sites (full names); `hooks` change the run.

    Raises ValueError for a metric without a gradient, for a site that the metric does not depend on (with `check`; zeros
    otherwise), and for gradients that are NaN, named by site.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> site = "blocks.1.hook_mlp_out"
    >>> found = gradients(model, model.to_tokens("When Mary and John left"), [site], lambda logits: logits[:, -1, 7])
    >>> found.gradients[site].shape == found.values[site].shape
    True
    """
    graph = Tape(model, tokens, sites, metric, hooks)
    return Gradients(graph.scores.detach(), graph.values, graph.gradients(check))


class Keep:
    """A hook that keeps the values it sees, with their graph."""

    records = True  # edits nothing, so that it may be shown the value itself

    def __init__(self) -> None:
        self.live: dict[str, Tensor] = {}

    def __call__(self, value: Tensor, hook: Any) -> None:
        self.live[hook.name] = value


class Tape:
    """A forward pass whose gradients can be taken, more than once if need be."""

    def __init__(
        self,
        model: HookedRootModule,
        tokens: Int[Tensor, "batch pos"],
        sites: Sequence[str],
        metric: Metric,
        hooks: Hooks = (),
    ) -> None:
        keep = Keep()
        self.live = keep.live
        with torch.enable_grad(), weights_apart(model), model.hooks(fwd_hooks=[*hooks, *((s, keep) for s in sites)]):
            self.scores = self._scored(metric, logits_for(model, tokens))
        self.sites = list(sites)
        if missing := [site for site in sites if site not in self.live]:
            raise ValueError(f"the run did not come by '{missing[0]}'")

    def _scored(self, metric: Metric, logits: Tensor | Logits) -> Float[Tensor, " prompt"]:
        _, [scores] = reads_of([metric], logits)
        if not isinstance(scores, Tensor) or not scores.requires_grad:
            name = getattr(metric, "name", getattr(metric, "__name__", type(metric).__name__))
            raise ValueError(
                f"the metric {name} has no gradient: it must compute a tensor from the logits by differentiable operations "
                "(a logit difference, a log probability or a loss has one; a rank or an argmax has none)"
            )
        if scores.ndim > 1 or len(scores.reshape(-1)) not in (1, logits.shape[0]):
            raise ValueError(
                f"the metric must give one number, or one for each of the {logits.shape[0]} prompts, got {tuple(scores.shape)}"
            )
        return scores.reshape(-1)

    @property
    def values(self) -> dict[str, Tensor]:
        """What the run had at its sites."""
        return {site: self.live[site].detach() for site in self.sites}

    def gradients(self, check: bool = True, again: bool = False) -> dict[str, Tensor]:
        """The gradients at all sites; with `again` they can be taken once more."""
        live = [self.live[site] for site in self.sites]
        own = [value for value in live if value.requires_grad]
        ones = torch.ones_like(self.scores)
        found = iter(torch.autograd.grad(self.scores, own, ones, retain_graph=again, allow_unused=True))
        each = {
            site: next(found) if value.requires_grad else None for site, value in zip(self.sites, live, strict=True)
        }
        for site, gradient in each.items():
            if gradient is None and check:
                raise ValueError(f"the metric does not depend on '{site}': there is no gradient")
            # a sum is a tenth of the work, and NaN wherever a part is
            if gradient is not None and bool(gradient.sum().isnan()) and bool(gradient.isnan().any()):
                raise ValueError(f"the gradient at '{site}' is NaN")
        return {
            site: torch.zeros_like(value) if each[site] is None else each[site]  # type: ignore[misc]
            for site, value in zip(self.sites, live, strict=True)
        }


def check_grad_mode(what: str) -> None:
    """Raises RuntimeError in inference mode, where `what` cannot have the gradients that it needs."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(f"{what} takes gradients, and there are none in torch.inference_mode(): leave it before")


def logits_for(model: HookedRootModule, tokens: Int[Tensor, "batch pos"]) -> Tensor | Logits:
    """The logits of a run; of a decoder only what is read of them is computed."""
    if not isinstance(model, HookedTransformer) or type(model).forward is not HookedTransformer.forward:
        return model(tokens)
    normalized = norm_of(model, "ln_final")(model(tokens, stop_at_layer=len(model.blocks))).to(model.embed.W_E.dtype)
    points = (module for module in model.unembed.modules() if isinstance(module, HookPoint))
    return model.cap_logits(model.unembed(normalized)) if is_listening(*points) else logits_of(model, normalized)


@contextmanager
def weights_apart(model: nn.Module, begins: Container[str] = EMBEDDINGS) -> Iterator[None]:
    """Inside, no weight asks for a gradient but those of the modules with which a graph begins: the embeddings.

    What a weight's gradient would need is then not kept, and nothing is computed for it: a third of a backward pass's work
    and most of its memory. What each weight asked for before, it asks for again behind; of several threads, behind the last.
    """
    embedding = {id(weight) for name, weight in model.named_parameters() if name.split(".")[0] in begins}
    with _LOCK:
        inside, before = _APART.get(model, (0, [(weight, weight.requires_grad) for weight in model.parameters()]))
        _APART[model] = inside + 1, before
    try:
        for weight, _ in before:
            weight.requires_grad_(id(weight) in embedding)
        yield
    finally:
        with _LOCK:
            inside, before = _APART.pop(model)
            if inside > 1:
                _APART[model] = inside - 1, before
            else:
                for weight, asks in before:
                    weight.requires_grad_(asks)
