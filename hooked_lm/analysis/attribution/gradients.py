"""Gradients of a metric at the sites of a run: one forward and one backward pass, and no gradient of any weight."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hooked_lm.analysis.attribution.backward_rules import PLAIN, BackwardRules, Keep
from hooked_lm.components.norms.norm import norm_of
from hooked_lm.engine.base_run import logits_of
from hooked_lm.engine.cells_before_blocks import is_of_images
from hooked_lm.engine.decoders import runs_as_written
from hooked_lm.engine.metric_rows import numbers_of
from hooked_lm.engine.metric_trace import Logits, TracedLogits, reads_of
from hooked_lm.hooks import HookedRootModule, HookPoint, is_listening
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.vision.inputs import Rows

Metric = Callable[[Tensor], Any]
Hooks = Sequence[tuple[str, Callable[..., Any]]]
# the modules at whose weights a graph begins
EMBEDDINGS = ("embed", "pos_embed", "decoder_embed", "decoder_pos_embed", "vision.embed", "vision.pos_embed")
# Attributes and methods that describe a weight and compute nothing with it.
_ASKED = [getattr(Tensor, name) for name in ("requires_grad", "grad", "is_leaf", "grad_fn")]
_SAID = [getattr(Tensor, name) for name in ("requires_grad", "grad", "data")]
OF_THE_WEIGHT = {Tensor.requires_grad_, *(of.__get__ for of in _ASKED), *(of.__set__ for of in _SAID)}


@dataclass(frozen=True)
class Gradients:
    """The values of a run at some sites, and the gradients of its metric there.

    `scores` [prompt] is the metric, one number for each prompt or one for all; `values` and `gradients` have the shapes of the
    sites. As prompts do not see each other, the gradient in the row of a prompt is that of the prompt's score.
    """

    scores: Float[Tensor, " prompt"]
    values: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


def gradients(
    model: HookedRootModule,
    tokens: Rows,
    sites: Sequence[str],
    metric: Metric,
    hooks: Hooks = (),
    check: bool = True,
    rules: BackwardRules = PLAIN,
) -> Gradients:
    """The values and gradients at sites (full names) of a run with these hooks, by these rules of its backward pass.

    Raises ValueError for a metric without a gradient, for a site that the metric does not depend on (with `check`; zeros
    otherwise), and for gradients that are NaN, named by site.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> site = "blocks.1.hook_mlp_out"
    >>> found = gradients(
    ...     model,
    ...     model.to_tokens("When Mary and John left"),
    ...     [site],
    ...     lambda logits: logits[:, -1, 7],
    ... )
    >>> found.gradients[site].shape == found.values[site].shape
    True
    """
    graph = Tape(model, tokens, sites, metric, hooks, rules)
    return Gradients(graph.scores.detach(), graph.values, graph.gradients(check))


class Tape:
    """A forward pass of which gradients can be taken, also several times."""

    def __init__(
        self,
        model: HookedRootModule,
        tokens: Rows,
        sites: Sequence[str],
        metric: Metric,
        hooks: Hooks = (),
        rules: BackwardRules = PLAIN,
    ) -> None:
        keep, attached = Keep(), rules.attached(model)
        self.live = keep.live
        reads_tower = any(is_of_images(model, site) or site.endswith(".hook_deepstack") for site in sites)
        begins = [part for part in EMBEDDINGS if reads_tower or not part.startswith("vision.")]
        every = [*attached.before, *hooks, *attached.after, *((site, keep) for site in sites)]
        with torch.enable_grad(), freeze_weights(model, begins), model.hooks(fwd_hooks=every):
            with attached.scope():
                logits = logits_for(model, tokens)
            self.scores = self._scored(metric, logits)
        self.sites = list(sites)
        if missing := [site for site in sites if site not in self.live]:
            raise ValueError(f"the site '{missing[0]}' was not reached in this forward pass")

    def _scored(self, metric: Metric, logits: Tensor | Logits) -> Float[Tensor, " prompt"]:
        _, [scores] = reads_of([metric], logits)
        if not isinstance(scores, Tensor) or not scores.requires_grad:
            name = getattr(metric, "name", getattr(metric, "__name__", type(metric).__name__))
            raise ValueError(
                f"the metric {name} has no gradient: it must compute a tensor from the logits by differentiable operations "
                "(a logit difference, a log probability or a loss has one; a rank or an argmax has none)"
            )
        return numbers_of(scores, logits.shape[0])

    @property
    def values(self) -> dict[str, Tensor]:
        """The values at its sites."""
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
            # the sum is NaN if any entry is, and takes a tenth of the time
            if gradient is not None and bool(gradient.sum().isnan()) and bool(gradient.isnan().any()):
                raise ValueError(f"the gradient at '{site}' is NaN")
        return {
            site: torch.zeros_like(value) if each[site] is None else each[site]  # type: ignore[misc]
            for site, value in zip(self.sites, live, strict=True)
        }


def check_grad_mode(what: str) -> None:
    """Raises RuntimeError in inference mode, where there are no gradients; `what` names the caller in the message."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(f"{what} takes gradients, and there are none in torch.inference_mode(): leave it before")


def logits_for(model: HookedRootModule, tokens: Rows) -> Tensor | Logits:
    """The logits of a run; for a decoder only those that are read are computed."""
    if not isinstance(model, Decoder) or not runs_as_written(model):
        return model(tokens)
    normalized = norm_of(model, "ln_final")(model(tokens, stop_at_layer=len(model.blocks))).to(model.embed.W_E.dtype)
    points = (module for module in model.unembed.modules() if isinstance(module, HookPoint))
    return model.cap_logits(model.unembed(normalized)) if is_listening(*points) else logits_of(model, normalized)


@contextmanager
def freeze_weights(model: nn.Module, begins: Container[str] = EMBEDDINGS) -> Iterator[None]:
    """A context in which this thread's operations have no graph to the weights of the model, except to those of the modules
    `begins`, by default the embeddings.

    This saves the gradients of weights and the activations kept for them: a third of the work of a backward pass and most of
    its memory. The model itself is not changed; other threads may train it at the same time.
    """
    with _SeparateLogits(model, begins):
        yield


class _SeparateLogits(TorchFunctionMode):
    """Replaces weights by detached views in this thread's calls of torch functions."""

    def __init__(self, model: nn.Module, begins: Container[str]) -> None:
        super().__init__()
        self._views: dict[int, tuple[nn.Parameter, Tensor]] = {}  # with the weight, whose id nothing else can have then
        for name, weight in model.named_parameters():
            part, _, inner = name.partition(".")
            is_first = part in begins or f"{part}.{inner.partition('.')[0]}" in begins
            has_gradient = weight.is_floating_point() or weight.is_complex()
            self._views[id(weight)] = weight, weight.detach().requires_grad_(is_first and has_gradient)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in OF_THE_WEIGHT:
            return func(*args, **(kwargs or {}))
        if func is Tensor.__getitem__ and isinstance(args[0], TracedLogits):  # its logits are computed by this call
            with self:
                return TracedLogits.__torch_function__(func, types, args, kwargs)
        return func(*self._apart(args), **(self._apart(kwargs) if kwargs else {}))

    def _apart(self, given: Any) -> Any:
        """The arguments with views in place of weights."""
        if type(given) in (tuple, list):
            return type(given)(map(self._apart, given))
        if type(given) is dict:
            return {name: self._apart(item) for name, item in given.items()}
        return self._views.get(id(given), (None, given))[1]
