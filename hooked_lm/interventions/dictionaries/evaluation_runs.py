"""The metrics of dictionaries on vectors, and in forward passes with reconstructions in the place of sites.

All are lists with an entry for each layer, and one for all layers together; of a dictionary of one site a list of one entry.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hooked_lm.hooks import HookPoint
from hooked_lm.interventions.dictionaries.hook import Coder, Dictionary, decoded, encoded
from hooked_lm.interventions.dictionaries.stream import Activations, Pair, by_layer
from hooked_lm.interventions.dictionaries.transcode import Transcode
from hooked_lm.interventions.dictionaries.transcoder_set import LayerTranscoders
from hooked_lm.models.decoder import Decoder

Coders = Mapping[str, Coder | LayerTranscoders]
Figures = dict[str, list[dict[str, float]]]  # of each dictionary, by layer
Run = tuple[str, int]  # what takes the place of sites, and the number of the group of layers
UNCHANGED = ("", -1)
Replaced = list[tuple[str, Callable[..., Any]]]  # sites and their hooks


class _Sums:
    """What the metrics of one dictionary need of the vectors of a layer that have come by."""

    def __init__(self) -> None:
        self.error, self.n_active = 0.0, 0.0
        self.ever: Tensor | None = None

    def add(self, features: Tensor, made: Tensor, written: Tensor) -> None:
        if made.shape != written.shape:
            raise ValueError(
                f"the dictionary decodes vectors {list(made.shape)}, and those of the site are {list(written.shape)}"
            )
        active = features != 0
        self.error += (made.double() - written.double()).pow(2).sum().item()
        self.n_active += active.sum().item()
        self.ever = active.any(0) if self.ever is None else self.ever | active.any(0)


class _Moments:
    """The number, mean and variance of the vectors of a layer; the variance is the sum over all vectors."""

    def __init__(self, first: Float[Tensor, " d"]) -> None:
        self.first = first.double()  # sums are over deviations from it, so that large means cost no precision
        self.n, self.shift, self.total = 0, torch.zeros_like(self.first), 0.0

    def add(self, vectors: Float[Tensor, "row d"]) -> None:
        moved = vectors.double() - self.first
        self.shift += moved.sum(0)
        self.total += moved.pow(2).sum().item()
        self.n += len(vectors)

    @property
    def variance(self) -> float:
        return self.total - (self.shift.pow(2).sum() / self.n).item()

    @property
    def mean(self) -> Float[Tensor, " d"]:
        return (self.first + self.shift / self.n).float()


def _reconstructed(sae: Coder | LayerTranscoders, read: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The features and the reconstruction of each layer."""
    if isinstance(sae, LayerTranscoders):
        xs = by_layer(read)
        features = [sae.encode(place, x) for place, x in enumerate(xs)]
        return list(zip(features, sae.outputs(features, xs), strict=True))
    of_one = encoded(sae, read)
    return [(of_one, decoded(sae, of_one, read))]


def of_vectors(
    stream: Activations, coders: Coders, pairs: Iterator[Pair]
) -> tuple[Figures, list[Float[Tensor, " d_out"]]]:
    """The metrics of each dictionary that need no spliced forward passes, and the mean output vector of each layer."""
    sums: dict[str, list[_Sums]] = {}
    moments: list[_Moments] = []
    for read, written in pairs:
        ys = by_layer(written)
        moments = moments or [_Moments(y[0]) for y in ys]
        for name, sae in coders.items():
            known = sums.setdefault(name, [_Sums() for _ in ys])
            for of, y, (features, made) in zip(known, ys, _reconstructed(sae, read), strict=True):
                of.add(features, made, y)
        for of_layer, y in zip(moments, ys, strict=True):
            of_layer.add(y)
    if not moments:
        raise ValueError(f"no prompt has a position that counts, with skip={stream.skip}")
    figures = {name: _by_layer_and_all(each, moments, stream.of_layers) for name, each in sums.items()}
    return figures, [of_layer.mean for of_layer in moments]


def _by_layer_and_all(sums: Sequence[_Sums], moments: Sequence[_Moments], of_layers: bool) -> list[dict[str, float]]:
    """The figures of each layer, and of all together."""
    groups = [[place] for place in range(len(sums))] + ([[*range(len(sums))]] if of_layers else [])
    found = []
    for places in groups:
        variance = sum(moments[place].variance for place in places)
        error = sum(sums[place].error for place in places)
        ever = [of for place in places if (of := sums[place].ever) is not None]
        found.append(
            {
                "explained variance": 1 - error / variance if variance > 0 else float("nan"),
                "L0": sum(sums[place].n_active / moments[place].n for place in places),
                "dead": 1 - torch.cat(ever).float().mean().item(),
            }
        )
    return found


def with_runs(
    figures: Figures,
    model: Decoder,
    stream: Activations,
    coders: Coders,
    rows: Sequence[range],
    means: Sequence[Float[Tensor, " d_out"]],
) -> Figures:
    """The metrics with the cross entropies of the model, unchanged and with sites replaced."""
    n = len(means)
    groups = [[place] for place in range(n)] + ([[*range(n)]] if stream.of_layers else [])
    runs: dict[Run, Replaced] = {}
    for number, places in enumerate(groups):
        outs = [stream.sites[place - n] for place in places]
        for how, of in (("mean", means), ("zero", [torch.zeros_like(mean) for mean in means])):
            runs[how, number] = [(site, _constant(of[place])) for site, place in zip(outs, places, strict=True)]
        for name, sae in coders.items():
            runs[name, number] = _splice(sae, stream.sites, places)
    kept = {key: [(site, _kept(hook, stream.skip)) for site, hook in hooks] for key, hooks in runs.items()}
    losses = _losses(model, stream, rows, {UNCHANGED: [], **kept})
    plain = losses[UNCHANGED][0]
    found: Figures = {name: [] for name in figures}
    for name, each in figures.items():
        for number, before in enumerate(each):
            spliced, divergence = losses[name, number]
            after = {**before, "CE": plain, "CE spliced": spliced}
            after |= {f"CE {how}-ablated": losses[how, number][0] for how in ("mean", "zero")}
            for how in ("mean", "zero"):
                lost = losses[how, number][0]
                after[f"CE recovered ({how})"] = (lost - spliced) / (lost - plain) if lost != plain else float("nan")
            found[name].append({**after, "KL spliced": divergence})
    return found


def _splice(sae: Coder | LayerTranscoders, sites: Sequence[str], places: Sequence[int]) -> Replaced:
    """The hooks that replace the outputs of some layers by reconstructions, without the error."""
    if isinstance(sae, LayerTranscoders):
        splice: Dictionary = Transcode(sae=sae, error="drop")
        reads = sorted({source for place in places for source in sae.sources(place)})
        there = [*(sites[place] for place in reads), *(sites[len(sae) + place] for place in places)]
    else:
        there = [*sites]
        splice = (
            Transcode(there, sae=sae, error="drop") if len(sites) == 2 else Dictionary(sites[0], sae=sae, error="drop")
        )
    return [(site, splice) for site in there]


def _constant(vector: Float[Tensor, " d"]) -> Callable[..., Any]:
    """A hook that replaces a value by one vector at all positions."""
    return lambda value, hook: vector.to(value).expand(*value.shape[:2], -1).reshape(value.shape).clone()


def _kept(hook: Callable[..., Any], skip: int) -> Callable[..., Any]:
    """A hook that does not change the skipped positions."""

    def change(value: Tensor, hook_point: HookPoint) -> Tensor | None:
        new = hook(value, hook_point)
        return new if new is None or not skip else torch.cat([value[:, :skip], new[:, skip:]], 1)

    return change


def _losses(
    model: Decoder, stream: Activations, rows: Sequence[range], runs: Mapping[Run, Replaced]
) -> dict[Run, tuple[float, float]]:
    """The mean cross entropy of next tokens with these hooks, and the divergence from the first of the runs, in nats."""
    totals, n = {run: [0.0, 0.0] for run in runs}, 0
    for some in rows:
        tokens, mask = stream.inputs(some)
        assert mask is not None
        options: dict[str, Any] = {"return_type": "both", "loss_per_token": True, "attention_mask": mask.long()}
        counts = mask[:, 1:] & mask[:, :-1]
        n += int(counts.sum())
        plain: Tensor | None = None
        for run, hooks in runs.items():
            logits, losses = model.run_with_hooks(tokens, fwd_hooks=hooks, **options)
            plain = logits if plain is None else plain
            totals[run][0] += losses[counts].double().sum().item()
            totals[run][1] += _divergence(logits, plain, counts)
    return {run: (ce / n, kl / n) if n else (float("nan"), float("nan")) for run, (ce, kl) in totals.items()}


def _divergence(
    logits: Float[Tensor, "batch pos d_vocab"],
    plain: Float[Tensor, "batch pos d_vocab"],
    counts: Bool[Tensor, "batch next"],
) -> float:
    """The sum of KL(plain || changed) over the predictions that count."""
    total = 0.0
    for row, which in enumerate(counts):  # one row at a time: a vocabulary is large
        log_q, log_p = (of[row, :-1][which].float().log_softmax(-1) for of in (logits, plain))
        total += (log_p.exp() * (log_p - log_q)).sum(-1).double().sum().item()
    return total
