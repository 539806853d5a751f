"""The targets of a graph: logits of tokens, a difference of two, or any linear read of a site."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.analysis.graphs.frozen import FINAL, Jacobian, Values
from hooked_lm.engine.answers import answer_rows
from hooked_lm.engine.pairs import RightAndWrong
from hooked_lm.models.decoder import Decoder

Direction = Float[Tensor, " width"]


@dataclass(frozen=True, eq=False)
class Target:
    """A linear read: the inner product of a direction and the value at one position of a site.

    Args:
        name: what the graph calls it.
        direction: [width of the site].
        site: a site with the axes [batch, pos, width]; None: the input of the unembedding, after the last norm.
        position: the position, also from the end.
        weight: how much the target counts in influences, above 0.
        offset: a constant that is added.

    >>> Target("first unit", torch.eye(128)[0], site="blocks.2.hook_resid_post").position
    -1
    """

    name: str
    direction: Direction
    site: str | None = None
    position: int = -1
    weight: float = 1.0
    offset: float = 0.0
    token_id: int = -1


class TargetReads:
    """The targets of one graph, as reads of the sites of a model."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self.targets = list(targets)
        names = [target.name for target in self.targets]
        if self.targets and not bool(self.weights.sum() > 0):
            raise ValueError(
                f"the targets, {', '.join(map(repr, names))}, have probabilities of 0: give a Target, which has a weight"
            )
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two targets have the name {twice[0]!r}: give each its own, and each token once")
        self.sites = [target.site or FINAL for target in self.targets]

    def check_widths(self, values: Mapping[str, Tensor]) -> None:
        """Raises ValueError for a direction that has not the width of its site."""
        for target, site in zip(self.targets, self.sites, strict=True):
            if len(target.direction) != (width := values[site].shape[-1]):
                raise ValueError(
                    f"the direction of target {target.name!r} has {len(target.direction)} entries, and '{site}' has {width}"
                )

    @property
    def directions(self) -> Float[Tensor, "target width"]:
        """The directions, with zeros beyond the width of their sites."""
        width = max(len(target.direction) for target in self.targets)
        found = torch.zeros(len(self.targets), width)
        for row, target in enumerate(self.targets):
            found[row, : len(target.direction)] = target.direction.detach().float().cpu()
        return found

    @property
    def weights(self) -> Float[Tensor, " target"]:
        return torch.tensor([target.weight for target in self.targets], dtype=torch.float32)

    def gradients_of(self, rows: Sequence[int], jacobian: Jacobian) -> Values:
        """The gradients [row, pos, width] of some targets at the sites that they read."""
        found: Values = {}
        for row, place in enumerate(rows):
            target, site = self.targets[place], self.sites[place]
            if site not in found:
                found[site] = jacobian.zeros(site, len(rows))
            found[site][row, target.position] = target.direction.to(found[site])
        return found

    def reads(self, values: Mapping[str, Tensor]) -> Float[Tensor, " target"]:
        """The value of each target, for values [1, pos, width] at its site."""
        found = [
            values[site][0, target.position].float() @ target.direction.to(values[site].device, torch.float32)
            + target.offset
            for target, site in zip(self.targets, self.sites, strict=True)
        ]
        return torch.stack(found).detach().cpu()


def checked_targets(model: Decoder, targets: Sequence[Target], n_pos: int) -> list[Target]:
    """The targets with full names of sites. Raises ValueError for a direction with several axes, a position out of range,
    a weight that is not positive, and for a site without positions, KeyError for an unknown site."""
    for target in targets:
        if not target.weight > 0:
            raise ValueError(f"the weight of target {target.name!r} must be above 0, got {target.weight}")
        if not -n_pos <= target.position < n_pos:
            raise ValueError(
                f"target {target.name!r} is at position {target.position}, and the prompt has {n_pos} tokens"
            )
        if target.direction.ndim != 1:
            raise ValueError(
                f"the direction of target {target.name!r} must have one axis, got {list(target.direction.shape)}"
            )
    return [
        target if target.site is None else replace(target, site=_checked_site(model, target.site)) for target in targets
    ]


def _checked_site(model: Decoder, site: str) -> str:
    [found] = model.names(site)
    dims = model.hook_dict[found].dims
    if dims[:2] != ("batch", "pos") or len(dims) != 3:
        raise ValueError(f"a target reads a site [batch, pos, width], and '{found}' is [{', '.join(dims)}]")
    return found


# ---- logits ----------------------------------------------------------------------------------------------------------


def logit_targets(
    model: Decoder,
    final: Float[Tensor, "1 pos d_model"],
    tokens: Sequence[str | int] | Int[Tensor, " token"] | None,
    answers: RightAndWrong | None,
    n_logits: int,
    probability: float,
    position: int,
) -> list[Target]:
    """Logits minus their mean over the vocabulary, before a soft cap, as targets with the probabilities of their tokens.

    `final` is the input of the unembedding. Without `tokens` the most likely tokens are taken whose probabilities sum to
    `probability`, at most `n_logits`. With `answers` there is one target, the logit of the right one minus that of the wrong one.
    """
    with torch.no_grad():
        logits = model.cap_logits(model.unembed(final[:, [position]]))[0, 0]
    probabilities = logits.float().softmax(-1)
    if answers is not None:
        if not isinstance(answers, tuple) or len(answers) != 2:
            raise TypeError('answers must be a tuple of the right and the wrong one, such as (" Mary", " John")')
        pair = [int(_ids(model, one, "answers")[0]) for one in answers]
        if pair[0] == pair[1]:
            raise ValueError(
                f"the right and the wrong answer are the same, give two different tokens; got answers={answers}"
            )
        directions, offsets = _directions(model, final, pair)
        name = " - ".join(f"logit {_token(model, each)!r}" for each in pair)
        return [Target(name, directions[0] - directions[1], None, position, 1.0, float(offsets[0] - offsets[1]))]
    if tokens is None:
        largest, likely = probabilities.topk(min(n_logits, len(probabilities)))
        ids = likely[: int(torch.searchsorted(largest.cumsum(0), probability)) + 1].tolist()
    else:
        ids = _ids(model, tokens, "targets").tolist()
    directions, offsets = _directions(model, final, ids)
    return [
        Target(
            f"logit {_token(model, token)!r}",
            direction,
            None,
            position,
            float(probabilities[token]),
            float(offset),
            token,
        )
        for token, direction, offset in zip(ids, directions, offsets, strict=True)
    ]


def _ids(model: Decoder, given: object, name: str) -> Int[Tensor, " token"]:
    ids = answer_rows(given, name, model)[0].flatten()  # type: ignore[arg-type]
    model.tokens.check_ids(ids)
    return ids


def _token(model: Decoder, token: int) -> str | int:
    return token if model.tokenizer is None else model.to_single_str_token(token)


def _directions(
    model: Decoder, final: Float[Tensor, "1 pos d_model"], ids: Sequence[int]
) -> tuple[Float[Tensor, "token d_model"], Float[Tensor, " token"]]:
    """What logits of tokens, minus the mean logit, read of the input of the unembedding; and their constants."""
    with torch.enable_grad(), torch.inference_mode(False):
        none = torch.zeros_like(final[:1, :1]).detach().clone().requires_grad_()
        logits = model.unembed(none)[0, 0]
        wanted = torch.zeros(len(ids), len(logits)).to(logits) - 1 / len(logits)
        wanted[torch.arange(len(ids)), list(ids)] += 1
        found = [torch.autograd.grad(logits, none, row, retain_graph=True)[0].flatten() for row in wanted]
    return torch.stack(found).float(), (wanted @ logits).detach().float()
