"""The frozen model: attention patterns, gates and scales of norms are constants of one prompt; MLPs write what they are given.

So everything between the writes and the reads is affine: a sum of a constant and a linear function of what is written. One
function, `FrozenModel.run`, gives the Jacobian (by its gradients), the constants (with nothing written) and finite differences.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.analysis.attribution.backward_rules import Keep
from hooked_lm.analysis.attribution.gradients import freeze_weights
from hooked_lm.components.attention.gated import OutputGate
from hooked_lm.components.attention.multihead import AbstractAttention
from hooked_lm.components.blocks.wiring import wiring_of
from hooked_lm.engine.decoders import runs_as_written
from hooked_lm.hooks import HookPoint
from hooked_lm.models.decoder import Decoder

FIRST, FINAL = "blocks.0.hook_resid_pre", "ln_final"  # what enters the blocks, and what the unembedding reads
CONSTANT = (".hook_pattern", ".hook_scale", ".hook_gate")  # the ends of the sites that are constants
Values = dict[str, Tensor]
Link = Callable[[Mapping[str, Tensor]], Tensor]  # a linear function of values at sites


class FrozenModel:
    """The affine model around one prompt.

    Args:
        tokens: the ids of one prompt.
        writes: the sites at which runs are given values, each with the link that is added to what it is given, or None.
        reads: the sites that runs return, besides `FINAL`; a link may depend on these.

    `values` are those of the model at all these sites, in one run. Raises ValueError for a model with other parts than attention
    with constant patterns between the sites, by their names.
    """

    def __init__(
        self, model: Decoder, tokens: Int[Tensor, "1 pos"], writes: Mapping[str, Link | None], reads: Sequence[str]
    ) -> None:
        check_structure(model, writes)
        self.model, self.tokens, self.links, self.reads = model, tokens, dict(writes), list(reads)
        ends = [name for name in model.hook_dict if name.startswith(("blocks.", "ln_final."))]
        constant = [name for name in ends if name.endswith(CONSTANT)]
        keep = Keep()
        every = list(dict.fromkeys([FIRST, *self.links, *self.reads, *constant]))
        with torch.no_grad(), model.hooks(fwd_hooks=[(site, keep) for site in every]):
            keep.live[FINAL] = self._final(tokens)
        if missing := [site for site in (FIRST, *self.links, *self.reads) if site not in keep.live]:
            raise ValueError(f"the site '{missing[0]}' was not reached in this forward pass")
        self.constants = {site: keep.live[site] for site in constant if site in keep.live}
        self.values: Values = {site: keep.live[site] for site in (FIRST, *self.links, *self.reads, FINAL)}
        self.given: Values = {
            site: self.values[site] if link is None else self.values[site] - link(self.values)
            for site, link in self.links.items()
        }

    @property
    def n_pos(self) -> int:
        return self.tokens.shape[1]

    def _final(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """The input of the unembedding."""
        stream = self.model(tokens, stop_at_layer=len(self.model.blocks))
        return self.model.stack.normalized(self.model, stream).to(self.model.embed.W_E.dtype)

    def run(self, stream: Tensor, given: Mapping[str, Tensor]) -> Values:
        """The reads of copies of the prompt, for the stream that enters the blocks and what each write site is given.

        Each is [copy, pos, width]; with gradients if there are some.
        """
        keep, copies = Keep(), stream.shape[0]
        hooks: list[tuple[str, Callable[..., Any]]] = [(FIRST, _returning(stream))]
        hooks += [(site, _expanded(value)) for site, value in self.constants.items()]
        for site, link in self.links.items():
            hooks.append((site, _returning(given[site]) if link is None else _adding(given[site], link, keep.live)))
        hooks += [(site, keep) for site in dict.fromkeys([*self.reads, *self.links])]
        with freeze_weights(self.model, ()), self.model.hooks(fwd_hooks=hooks):
            final = self._final(self.tokens.expand(copies, -1))
        return {**{site: keep.live[site] for site in self.reads}, FINAL: final}


class Jacobian:
    """Gradients of linear reads with respect to what is written, for several reads at once.

    One run with a graph is kept. Its operations are linear, so the graph holds weights and constants, and hardly any values.
    """

    def __init__(self, frozen: FrozenModel) -> None:
        values = {FIRST: frozen.values[FIRST], **frozen.given}
        with torch.enable_grad(), torch.inference_mode(False):
            self.leaves = {site: value.detach().clone().requires_grad_() for site, value in values.items()}
            self.live = frozen.run(self.leaves[FIRST], self.leaves)

    def zeros(self, site: str, n: int) -> Float[Tensor, "read pos width"]:
        """Gradients of n reads at a site that are 0, to be filled."""
        return self.live[site].new_zeros(n, *self.live[site].shape[1:])

    def gradients(self, of: Mapping[str, Float[Tensor, "read pos width"]]) -> Values:
        """The gradients [read, pos, width] at the first stream and at the write sites that matter, for gradients at the reads."""
        sites = [site for site in of if self.live[site].requires_grad]
        if not sites:
            return {}
        found = torch.autograd.grad(
            [self.live[site] for site in sites],
            list(self.leaves.values()),
            [of[site][:, None] for site in sites],
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=True,
        )
        return {site: each[:, 0] for site, each in zip(self.leaves, found, strict=True) if each is not None}


# ---- structure -------------------------------------------------------------------------------------------------------


def check_structure(model: Decoder, cut: Mapping[str, Any]) -> None:
    """Raises ValueError for a model whose parts are not affine while patterns and norms are constant, by the name of the part.

    `cut` are the sites whose values do not depend on what comes before: the parts that write there may be anything.
    """
    if not runs_as_written(model):
        raise ValueError(
            f"{type(model).__name__} has a forward pass of its own: an attribution graph has no rule for it"
        )
    for layer, block in enumerate(model.blocks):
        name, wiring = f"blocks.{layer}", wiring_of(block)
        if not wiring.steps or wiring.by_hand:
            raise ValueError(
                f"'{name}' has {wiring.by_hand or 'no known parts'}: an attribution graph has no rule for it"
            )
        for step in wiring.sublayers:
            part = block.get_submodule(step.part)
            below = (f"{name}.{step.writes}", f"{name}.{step.part}.")
            if not any(site == below[0] or site.startswith(below[1]) for site in cut) and not _is_affine(part):
                raise ValueError(
                    f"'{name}.{step.part}' is a {type(part).__name__}, which is not linear with constant patterns and norms: "
                    "an attribution graph has no rule for it"
                )


def _is_affine(part: nn.Module) -> bool:
    """Whether a part is attention that is affine with a constant pattern, and a constant gate if it has one."""
    is_linear = isinstance(part, OutputGate) or (isinstance(part, AbstractAttention) and part.mixes_linearly)
    return is_linear and "hook_pattern" in part._modules


# ---- hooks -----------------------------------------------------------------------------------------------------------


def _returning(value: Tensor) -> Callable[..., Tensor]:
    def hook(old: Tensor, hook: HookPoint) -> Tensor:
        return value

    return hook


def _expanded(value: Tensor) -> Callable[..., Tensor]:
    def hook(old: Tensor, hook: HookPoint) -> Tensor:
        return value.expand(old.shape)

    return hook


def _adding(given: Tensor, link: Link, live: Mapping[str, Tensor]) -> Callable[..., Tensor]:
    def hook(old: Tensor, hook: HookPoint) -> Tensor:
        return given + link(live)

    return hook
