"""The base run of a sweep, computed once and shared by all of its cells."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.components.norms.norm import norm_of
from hooked_lm.engine.context import BaseContext
from hooked_lm.engine.cost import TokenCost, token_cost
from hooked_lm.engine.edit import Edit, by_position
from hooked_lm.engine.metric_trace import Logits, TracedAccess
from hooked_lm.engine.site_info import SiteInfo, TokenScope
from hooked_lm.hooks import HookPoint
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.vision.inputs import Rows


class BaseRun:
    """A decoder's forward pass over some prompts, with the residual stream before each block, keys, values and states.

    `edits` are changes of the base run, which all cells share, such as noise on the embeddings.
    """

    def __init__(
        self,
        model: Decoder,
        tokens: Rows,
        site_infos: Mapping[str, SiteInfo],
        edits: Sequence[Edit],
        keep: Sequence[str] = (),
    ) -> None:
        self.model, self.tokens, self.edits = model, tokens, edits
        self.n_prompts, self.n_pos = tokens.shape
        self.kept: dict[str, Tensor] = {}  # the values at these sites
        hooks = [(edit.site, self._hook(edit, site_infos.get(edit.site))) for edit in edits]
        with model.hooks(fwd_hooks=[*hooks, *((site, self._keep) for site in keep)]):
            resid, _, context = model.embedded(tokens)
            self.context = BaseContext.of(context)
            self.streams: list[Float[Tensor, "batch pos d_model"]] = [resid]
            for block in model.blocks:
                resid = block(resid, self.context)
                self.streams.append(resid)
            self.normalized = norm_of(model, "ln_final")(resid).to(model.embed.W_E.dtype)
            is_edited = any(edit.site.startswith("unembed.") for edit in edits)
            self._logits = model.cap_logits(model.unembed(self.normalized)) if is_edited else None

    def _keep(self, value: Tensor, hook: HookPoint) -> None:
        self.kept[hook.name or ""] = value.clone()  # the model may overwrite the value later

    def _hook(self, edit: Edit, info: SiteInfo | None) -> Any:
        def write(value: Tensor, hook: HookPoint) -> None:
            start = self.context.start if info is not None and info.scope is TokenScope.STATE else 0
            n_pos = by_position(value, hook.dims).shape[1] if info is None else self.n_pos
            edit.write(value, hook.dims, start, n_pos)

        return write

    @cached_property
    def costs(self) -> list[TokenCost]:
        """The cost of a token in each layer."""
        return [token_cost(block) for block in self.model.blocks]

    @property
    def logits(self) -> Logits:
        """The logits, computed lazily for the positions and tokens that are read."""
        return Logits.of(self._logits) if self._logits is not None else logits_of(self.model, self.normalized)

    @property
    def n_bytes(self) -> int:
        """The memory of everything that is kept."""
        of_context = [*chain(*self.context.keys_values.values())]
        for states in self.context.states.values():
            of_context += [part for entry in states for part in (entry.window, entry.state) if part is not None]
        kept = [*self.streams, *of_context, *self.kept.values(), self.normalized]
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)


def logits_of(model: Decoder, normalized: Float[Tensor, "batch pos d_model"]) -> Logits:
    """The logits of a normalised stream, without hook points; computed lazily where they are read."""

    def some(reads: TracedAccess) -> Float[Tensor, "batch some_pos some_token"]:
        rows = normalized if reads.positions is None else normalized[:, list(reads.positions)]
        if reads.tokens is None:
            return model.cap_logits(model.unembed.unhooked(rows))
        return model.cap_logits(model.unembed.some(rows, torch.tensor(reads.tokens, device=rows.device)))

    shape = torch.Size([*normalized.shape[:2], model.unembed.cfg.d_vocab])
    return Logits(shape, normalized.dtype, normalized.device, some)
