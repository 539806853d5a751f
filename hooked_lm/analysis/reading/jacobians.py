"""The mean Jacobians of a prompt: how the last layer's stream depends on that of earlier layers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.attribution.backward_rules import BackwardRules, Keep
from hooked_lm.analysis.attribution.gradients import freeze_weights
from hooked_lm.analysis.reading.corpus import TextBatch
from hooked_lm.engine.budget import Budget
from hooked_lm.engine.stacks import refuse_two_stacks
from hooked_lm.hooks import HookPoint
from hooked_lm.hooks.token_labels import reading
from hooked_lm.models.budget import token_bytes
from hooked_lm.models.checks import check_one_stream, first_bidirectional
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.vision.inputs import repeated_rows

STREAM = ("batch", "pos", "d_model")


@dataclass(frozen=True)
class PromptJacobian:
    """What one prompt gives.

    `J` [layer, d_model, d_model] are the Jacobians: the mean over source positions of the sum over target positions, at the
    source or after it, of the derivative of the last layer's stream (rows) with respect to the layer's (columns). `lengths` are
    the median lengths of the layers' vectors. `n_positions` counts the positions, `n_sinks` those left out as sinks.
    """

    J: Float[Tensor, "layer d_model d_model"]
    lengths: Float[Tensor, " layer"]
    n_positions: int
    n_sinks: int

    @property
    def sizes(self) -> Float[Tensor, " layer"]:
        """The size of `J` less the identity of each layer, by the Frobenius norm."""
        return (self.J - torch.eye(self.J.shape[-1], dtype=self.J.dtype)).flatten(1).norm(dim=1)


class PromptJacobians:
    """Computes the Jacobians of prompts, some rows of all layers in one backward pass."""

    def __init__(
        self,
        model: Decoder,
        site: str,
        layers: Sequence[int],
        rules: BackwardRules,
        skip: int,
        sinks: float | None,
        max_memory: int | str,
    ) -> None:
        refuse_two_stacks(model, "fit_jacobian_lens")
        check_one_stream(model, "there is no Jacobian lens")
        blocks = model.stack.blocks_of(model)
        if model.reads_both_ways or (layer := first_bidirectional(blocks)) is not None:
            where = "this model reads prompts" if model.reads_both_ways else f"layer {layer} attends"
            raise ValueError(
                f"{where} in both directions, so that what comes before a token depends on it too: a Jacobian lens sums over the "
                "targets at the source and after it, which needs causal attention"
            )
        self.model, self.rules, self.skip, self.sinks = model, rules, skip, sinks
        self.sites = [model.names((site, layer))[0] for layer in layers]
        self.last = model.stack.site_after(model, len(blocks) - 1)
        for name in self.sites:
            if model.hook_dict[name].dims != STREAM:
                raise ValueError(f"'{name}' is not a residual stream [batch, pos, d_model], so it has no lens")
        self.first = self.sites[min(range(len(layers)), key=lambda place: layers[place])]
        rules.attached(model)  # raises for a part without rules
        self.budget = Budget.of(max_memory, model.device)
        self.token_bytes = token_bytes(blocks[min(layers) :])

    def n_rows(self, n_pos: int) -> int:
        """How many copies of a prompt a pass holds, and so how many rows of the Jacobians; ValueError if none fits."""
        n_bytes = n_pos * self.token_bytes
        if self.budget.is_user_set and n_bytes > self.budget.n_bytes:
            raise ValueError(
                f"max_memory={self.budget.n_bytes:,} bytes is too small: one copy of a prompt of {n_pos} tokens needs about "
                f"{n_bytes:,}"
            )
        fit = min(self.budget.n_tokens // n_pos, self.budget.n_bytes // n_bytes)
        return max(1, min(self.model.cfg.d_model, fit))

    def of(self, text: TextBatch) -> PromptJacobian | None:
        """The Jacobians of one text; None if no position of it counts. Raises FloatingPointError if they are not finite."""
        n_pos, real = text.tokens.shape[1], text.real[0].nonzero().flatten()
        if len(real) < self.skip + 2:  # the first are left out, and the last
            return None
        live = self._run(text, n_rows := self.n_rows(n_pos))
        lengths = torch.stack([live[site][0].detach().double().norm(dim=-1) for site in self.sites])  # [layer, pos]
        medians = lengths[:, real].median(1, keepdim=True).values
        inner = real[self.skip : -1].to(lengths.device)
        limit = torch.inf if self.sinks is None else self.sinks
        is_sink = (lengths[:, inner] > limit * medians).any(0)
        counts = inner[~is_sink]
        if not len(counts):
            return None
        J = torch.cat([*self._rows(live, counts, n_rows)], 1)
        if not bool(J.isfinite().all()):
            raise FloatingPointError(f"the Jacobian of a prompt of {n_pos} tokens is not finite; nothing is returned")
        return PromptJacobian(J, medians.flatten().cpu(), len(counts), int(is_sink.sum()))

    def _run(self, text: TextBatch, n_rows: int) -> dict[str, Tensor]:
        """The values at all sites in `n_rows` equal rows, with a graph that begins at the first site."""
        model, keep, attached = self.model, Keep(), self.rules.attached(self.model)

        def begin(value: Tensor, hook: HookPoint) -> Tensor:
            return value.detach().requires_grad_()

        seen = [(site, keep) for site in dict.fromkeys([*self.sites, self.last])]
        hooks = [*attached.before, (self.first, begin), *attached.after, *seen]
        tokens = repeated_rows(text.tokens, n_rows).to(model.device)
        labels = None if text.labels is None else [*text.labels] * n_rows
        hooked = model.hooks(fwd_hooks=hooks)
        with torch.enable_grad(), freeze_weights(model, ()), hooked, reading(labels), attached.scope():
            model(tokens, return_type=None, stop_at_layer=model.cfg.n_layers)
        return keep.live

    def _rows(
        self, live: dict[str, Tensor], positions: Tensor, n_rows: int
    ) -> Iterator[Float[Tensor, "layer row d_model"]]:
        """The rows of the Jacobians of all layers, as many in one backward pass as there are copies.

        Each copy has the derivatives of one dimension at all targets. As attention is causal, the gradient at a source sums over
        the targets from there on.
        """
        target, sources = live[self.last], [live[site] for site in self.sites]
        d_model = target.shape[-1]
        for start in range(0, d_model, n_rows):
            rows = torch.arange(min(n_rows, d_model - start), device=target.device)
            cotangent = torch.zeros_like(target)
            cotangent[rows[:, None], positions[None], start + rows[:, None]] = 1
            more = start + n_rows < d_model
            found = torch.autograd.grad(target, sources, cotangent, retain_graph=more)
            taken = [gradient[: len(rows)][:, positions.to(gradient.device)] for gradient in found]
            yield torch.stack([gradient.double().mean(1).cpu() for gradient in taken])
