"""Forward passes of a data set with and without features of a dictionary, and the logits of their directions."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.reading.corpus import TextBatch
from hooked_lm.analysis.reading.neurons import to_logits
from hooked_lm.engine.prompts import some_rows
from hooked_lm.hooks.token_labels import reading
from hooked_lm.interventions.dictionaries.hook import (
    Coder,
    Dictionary,
    Edit,
    decoded,
    encoded,
    run_with_features,
)  # fmt: skip
from hooked_lm.interventions.dictionaries.site import site_read, warn_if_elsewhere
from hooked_lm.interventions.dictionaries.transcode import Transcode
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.names import checked_index
from hooked_lm.models.vision.inputs import ids_of


def sites_of(
    model: Decoder, sae: Coder, site: str | tuple[str, int] | None, site_out: str | tuple[str, int] | None
) -> tuple[str, str]:
    """The full names of the sites that the dictionary reads and writes."""
    cfg = getattr(sae, "cfg", None)
    given = site_read(sae, site), site_out or getattr(cfg, "hook_point_out", None)
    names = [model.names(of) for of in (given[0], given[1] or given[0])]
    if several := next((found for found in names if len(found) != 1), None):
        raise ValueError(f"a dictionary has one site, and {len(several)} are meant: give one, such as {several[0]!r}")
    warn_if_elsewhere(sae, names[0][0], names[1][0] if given[1] else None)
    return names[0][0], names[1][0]


@dataclass(eq=False)
class FeatureSums:
    """The sums of one feature over a data set.

    Args:
        changes: of the probabilities of the next token without the feature, at the positions where it is active.
        active: the activations that are not zero, of each batch.
        n_active, n_next: the positions where it is active, and those of them that have a next token.
        losses: of the next tokens, in nats, with and without the feature.
    """

    changes: Float[Tensor, " d_vocab"]
    active: list[Float[Tensor, " n"]] = field(default_factory=list)
    n_active: int = 0
    n_next: int = 0
    losses: Float[Tensor, "2"] = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))

    def add(
        self, values: Float[Tensor, " active"], log_p: Sequence[Float[Tensor, "active d_vocab"]], next_ids: Tensor
    ) -> None:
        """Adds the active positions of a batch; `next_ids` [active] is -1 where there is no next token."""
        self.n_active += len(values)
        self.active.append(values)
        self.changes += (log_p[1].exp() - log_p[0].exp()).sum(0)
        has_next = next_ids >= 0
        self.n_next += int(has_next.sum())
        picked = [of[has_next].gather(1, next_ids[has_next, None]).sum() for of in log_p]
        self.losses -= torch.stack(picked)

    @property
    def mean_losses(self) -> tuple[float, float]:
        """The mean losses with and without the feature; NaN without a next token."""
        whole, without = (self.losses / (self.n_next or float("nan"))).tolist()
        return whole, without


class FeatureRuns:
    """Sums over a data set for several features: a pass of each batch, and for each feature one of the texts where it acts."""

    def __init__(self, model: Decoder, sae: Coder, features: Sequence[int], read: str, write: str) -> None:
        self.model, self.sae, self.features, self.n_positions = model, sae, list(features), 0
        zeros = (torch.zeros(model.cfg.d_vocab, dtype=torch.float64) for _ in self.features)
        self.sums = [FeatureSums(changes) for changes in zeros]
        self.where: Any = read if read == write else [read, write]
        self.kind: type[Dictionary] = Dictionary if read == write else Transcode

    def add(self, batch: TextBatch) -> None:
        """Adds a batch."""
        tokens, real, counts = batch.tokens, batch.real, batch.counts
        logits, features = self._run(batch, [*range(len(real))], None)
        values = next(iter(features.values())).detach().float()
        size = values.shape[-1]
        values = values[..., [checked_index(of, size, "feature", "the dictionary") for of in self.features]].cpu()
        ids = ids_of(tokens).cpu()
        following = torch.full_like(ids, -1)
        following[:, :-1] = ids[:, 1:].where(real[:, 1:], -1)
        self.n_positions += int(counts.sum())
        for feature, sums, acts in zip(self.features, self.sums, values.unbind(-1), strict=True):
            active = counts & (acts != 0)
            rows = active.any(1).nonzero().flatten().tolist()
            if not rows:
                continue

            def without(found: Tensor, feature: int = feature, there: Tensor = counts[rows]) -> None:
                found[..., feature].masked_fill_(there.to(found.device), 0.0)

            ablated, _ = self._run(batch, rows, without)
            both = logits[active.to(logits.device)], ablated[active[rows].to(ablated.device)]
            sums.add(acts[active], [found.double().log_softmax(-1).cpu() for found in both], following[active])

    def _run(self, batch: TextBatch, rows: Sequence[int], edit: Edit | None) -> tuple[Tensor, dict[str, Tensor]]:
        model, hook = self.model, self.kind(self.where, sae=self.sae, error="keep", edit=edit)
        tokens, mask = some_rows(model, batch.tokens, rows), batch.real[rows].long()
        with reading(None if batch.labels is None else [batch.labels[row] for row in rows]):
            return run_with_features(model, tokens.to(model.device), hook, attention_mask=mask.to(model.device))


def logit_effects(model: Decoder, sae: Coder, feature: int, site: str) -> Float[Tensor, " d_vocab"] | None:
    """The logits of the feature's direction; None for a site that is not in the residual stream.

    A feature of a cross-layer transcoder has a direction for each layer to which it writes; these are added up.
    """
    if model.hook_dict[site].dims[2:] != ("d_model",):
        return None
    W_dec = getattr(sae, "W_dec", None)
    if isinstance(W_dec, Tensor):
        direction = W_dec[feature].unflatten(0, (-1, model.cfg.d_model)).sum(0)
    else:
        x = torch.ones(model.cfg.d_model, device=model.device)
        one = torch.zeros_like(encoded(sae, x))
        one[..., feature] = 1.0
        direction = decoded(sae, one, x) - decoded(sae, torch.zeros_like(one), x)
    return to_logits(model, direction.detach().to(model.device).float())


def neighbours(sae: Coder, feature: int, k: int) -> list[tuple[int, float]]:
    """The `k` features whose directions are closest, with the cosines; none if the dictionary has no `W_dec`."""
    W_dec = getattr(getattr(sae, "sae", sae), "W_dec", None)
    if not isinstance(W_dec, Tensor):
        return []
    cosines = torch.nn.functional.cosine_similarity(W_dec.detach().float(), W_dec[feature].detach().float(), dim=1)
    cosines[feature] = -torch.inf
    best = cosines.topk(min(k, len(cosines) - 1))
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
