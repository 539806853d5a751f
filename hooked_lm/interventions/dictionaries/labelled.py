"""Evaluates dictionaries on texts whose labels are known: sparse probing, absorption and targeted perturbation."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hooked_lm.hooks.select import Site
from hooked_lm.interventions.dictionaries.floors import FIT_ROWS, check_control, floors_of
from hooked_lm.interventions.dictionaries.halves import half, held_together
from hooked_lm.interventions.dictionaries.hook import Coder, decoded, encoded
from hooked_lm.interventions.dictionaries.recovery import absorbed, directions_of
from hooked_lm.interventions.dictionaries.scores import ABOVE_FLOORS, FLOORS, DictionaryEvaluation, beside_floors
from hooked_lm.interventions.dictionaries.site import site_read, warn_if_elsewhere
from hooked_lm.interventions.dictionaries.stream import Activations, side_by_side
from hooked_lm.models.decoder import Decoder
from hooked_lm.results.bootstrap import Resampling, students_t
from hooked_lm.results.groups import Groups, checked_groups
from hooked_lm.results.labels import Label
from hooked_lm.results.scores import provenance

MOST_STEPS = 50  # of Newton's method; ten do
Vectors = Float[Tensor, "prompt d"]


def evaluate_labels(
    model: Decoder,
    prompts: Sequence[str] | Tensor,
    sae: Coder,
    labels: Sequence[Label],
    *,
    site: Site | None = None,
    positions: int = -1,
    k: Sequence[int] = (1, 2, 5),
    groups: Groups = None,
    skip: int = 0,
    control: str | None = "auto",
    batch_size: int = 32,
    seed: int = 0,
) -> DictionaryEvaluation:
    """How well few latents of a dictionary predict the label of a prompt, beside a random and a PCA dictionary.

    A probe separates each label from the others, by vectors at one position. One half of the distinct prompts (of each label) is
    for choosing latents and fitting probes, the other for the figures, which are of each label and means over labels. Prompts
    with the same token ids are in one half, all of them: else a probe could know a prompt of the test by heart.

    - "AUROC k=1", "AUROC k=2", ...: of a logistic probe of the `k` latents whose means differ most between prompts with the
      label and without (sparse probing: Gurnee et al. 2023, arXiv:2305.01610). Chance is 0.5.
    - "AUROC of vectors": of a probe of the vectors themselves, which no dictionary should be expected to exceed.
    - "absorption": of the prompts with the label that this probe finds, the share in which the latents of the label
      (of the largest `k`, those that are more active with it) are silent, and one other latent makes up half of the projection
      on the probe's direction (after Chanin et al. 2024, arXiv:2409.14507). At best 0; random directions have some, too.
    - "TPP", with three labels or more: by how much more the probe's balanced accuracy for a label falls than those for other
      labels, if the latents of the label are ablated: of the largest `k`, those that are more active with it and move its probe
      towards it (targeted probe perturbation: Karvonen et al. 2024, arXiv:2411.18895). It is the least reliable of these: in an
      audit it ranked dictionaries that were trained longer below others (Chanin 2026, arXiv:2605.18229).

    Args:
        prompts: texts, or token ids [prompt, pos].
        labels: one for each prompt, such as its task or the gender of its name.
        site: by default that in the dictionary's config.
        positions: the position whose vector is read, one for each prompt; negative ones count from its last token.
        k: the numbers of latents in probes, ascending.
        groups: a label for each prompt, such as its template or entity: those of one group are in one half.
        skip: how many positions at the start of each prompt the floors are not made from, such as a BOS.
        control: "auto" measures the floors, which are made from the vectors of all positions of the first half, where there are
            enough of them; None leaves them out.
        batch_size: how many prompts run together.
        seed: of the halves, and of the random dictionary.

    The mean AUROC of the first probes is compared with that of each floor by the interval of their difference (95%, a bootstrap
    over the distinct prompts or groups of the test, with `seed`): a dictionary is no better than a floor unless all of it is
    above 0. That another half for fitting, or other random directions, would give other figures is not in it. There is no floor
    of shuffled labels: no probe that is fitted to them tells those of other prompts, so its AUROC is 0.5 up to chance.

    Returns the `figures` with the floors, and those of `each` label. Warns if the first probe is no better than with random
    directions. Raises ValueError for one label, for labels with fewer than four distinct prompts or groups, or without any in one
    half, for another number of labels or groups than of prompts, for a position that a prompt does not have, and for a `k` above
    the number of latents.

    >>> from random import Random
    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.demo.corpus import TASKS
    >>> from hooked_lm.interventions.dictionaries import load
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> items = [TASKS["pronouns"](Random(i)) for i in range(80)]
    >>> women = [item.answer in (" she", " her") for item in items]
    >>> prompts = [item.prompt for item in items]
    >>> found = evaluate_labels(model, prompts, load("demo").to(model.device), women)
    >>> bool(found.figures.select(figure="AUROC k=1").mean > 0.9)
    True
    """
    check_control(control)
    site = site_read(sae, site)
    stream = Activations(model, prompts, site, batch_size=batch_size, skip=skip)
    warn_if_elsewhere(sae, *stream.sites)
    known = _known(labels, len(stream.prompts))
    of_prompts = checked_groups(groups, len(labels))
    x, ids = _at_position(stream, positions, batch_size)
    units = held_together(ids, *([] if of_prompts is None else [of_prompts]))
    train = half(labels, units, seed)
    for_fitting = train.nonzero()[:, 0].tolist()
    parts = [
        stream.vectors(for_fitting[start : start + batch_size])[0] for start in range(0, len(for_fitting), batch_size)
    ]
    floors, said = floors_of(sae, torch.cat(parts)[:FIT_ROWS], control, seed)
    with torch.no_grad():
        width = encoded(sae, x[:1]).shape[-1]
    if not k or list(k) != sorted({*k}) or k[0] < 1 or k[-1] > width:
        raise ValueError(f"k are numbers of latents, ascending, from 1 to {width}; got {list(k)}")
    of = torch.tensor([[label == each for label in labels] for each in known])
    probes = [_Probe.of(x[train], with_it[train]) for with_it in of]
    coders: dict[str, Coder] = {"values": sae, **(floors.by_name() if floors else {})}
    found = {name: _figures(_Data(x, of, train), coder, probes, k) for name, coder in coders.items()}
    above = _above_floors({name: each.scores for name, each in found.items()}, of[:, ~train], units[~train], seed)
    about = provenance(model, site=stream.sites[0], positions=positions, prompts=len(labels), control=said, seed=seed)
    about["distinct prompts" if of_prompts is None else "groups"] = int(units.max()) + 1
    names: list[Label] = list(found["values"].figures)
    each = {name: torch.stack(list(of_one.figures.values())) for name, of_one in found.items()}
    whole = {name: values.nanmean(1) for name, values in each.items()}
    headline = f"AUROC k={k[0]}"
    figures = beside_floors(whole, {"figure": names}, {**about, ABOVE_FLOORS: above}, headline)
    figures.warn_if_no_better()
    shown = [str(label) if isinstance(label, bool) else label for label in known]
    return DictionaryEvaluation(figures, beside_floors(each, {"figure": names, "label": shown}, about, headline))


class _Data(NamedTuple):
    """Vectors, which labels they have, and which are for fitting."""

    x: Vectors
    of: Bool[Tensor, "label prompt"]
    train: Bool[Tensor, " prompt"]


class _Found(NamedTuple):
    """The figures of one dictionary, of each label, and the scores that its first probes give the prompts of the test."""

    figures: dict[str, Float[Tensor, " label"]]
    scores: Float[Tensor, "label test"]


class _Probe(NamedTuple):
    """A logistic probe: positive scores are guesses that a label is there."""

    weights: Float[Tensor, " d"]
    bias: float
    mean: Float[Tensor, " d"]

    @classmethod
    def of(cls, x: Vectors, there: Bool[Tensor, " prompt"]) -> "_Probe":
        """Fits a probe of standardised vectors; both answers weigh the same."""
        mean, scale = x.mean(0), x.std(0)
        scale = torch.where(scale > 0, scale, 1.0)
        *weights, bias = logistic((x - mean) / scale, there).unbind()
        return cls(torch.stack(weights).to(x) / scale, float(bias), mean)

    def scores(self, x: Vectors) -> Float[Tensor, " prompt"]:
        """The log odds of the label."""
        return (x - self.mean) @ self.weights + self.bias


def _figures(data: _Data, sae: Coder, probes: Sequence[_Probe], k: Sequence[int]) -> _Found:
    """The figures of one dictionary, of each label."""
    x, of, train = data
    with torch.no_grad():
        features = encoded(sae, x)
        whole = decoded(sae, features, x)
    directions = directions_of(sae)
    found: dict[str, list[float]] = {f"AUROC k={n}": [] for n in k}
    more: dict[str, list[float]] = {"AUROC of vectors": [], "absorption": []}
    changed, scores = [], []
    for with_it, probe in zip(of, probes, strict=True):
        differ = _difference(features, with_it, train)
        order = differ.abs().argsort(descending=True, stable=True)
        for n in k:
            few = features[:, order[:n]]
            sparse = _Probe.of(few[train], with_it[train])
            of_test = sparse.scores(few[~train])
            found[f"AUROC k={n}"].append(auroc(of_test, with_it[~train]))
            scores += [of_test] if n == k[0] else []
        more["AUROC of vectors"].append(auroc(probe.scores(x[~train]), with_it[~train]))
        main = torch.zeros(len(differ), dtype=torch.bool, device=x.device)
        main[order[: k[-1]]] = True
        more["absorption"].append(_absorption(data, features, directions, with_it, probe, main & (differ > 0)))
        effects = differ.clamp(min=0) * (directions @ probe.weights).clamp(min=0)
        top = effects.argsort(descending=True, stable=True)[: k[-1]]
        with torch.no_grad():
            ablated = features.clone()
            ablated[:, top[effects[top] > 0]] = 0
            changed.append(x + decoded(sae, ablated, x) - whole)
    if len(of) > 2:
        more["TPP"] = _perturbation(data, probes, changed)
    return _Found({name: torch.tensor(values) for name, values in {**found, **more}.items()}, torch.stack(scores))


def _difference(
    features: Float[Tensor, "prompt latent"], with_it: Bool[Tensor, " prompt"], train: Bool[Tensor, " prompt"]
) -> Float[Tensor, " latent"]:
    """How much larger the mean of each latent is with the label than without, in the prompts for fitting."""
    return features[train & with_it].mean(0) - features[train & ~with_it].mean(0)


def _absorption(
    data: _Data,
    features: Float[Tensor, "prompt latent"],
    directions: Float[Tensor, "latent d"],
    with_it: Bool[Tensor, " prompt"],
    probe: _Probe,
    main: Bool[Tensor, " latent"],
) -> float:
    """The share of prompts with the label in which another latent has taken the place of those of the label; NaN if the
    probe finds none."""
    rows = with_it & ~data.train & (probe.scores(data.x) > 0).cpu()
    direction = probe.weights / probe.weights.norm()
    needed = (data.x[rows] - probe.mean) @ direction
    rows_left = needed > 0
    if not bool(rows_left.any()):
        return float("nan")
    contributions = (features[rows] * (directions @ direction))[rows_left]
    return float(absorbed(contributions, main, needed[rows_left]).float().mean())


def _perturbation(data: _Data, probes: Sequence[_Probe], changed: Sequence[Vectors]) -> list[float]:
    """For each label, how much more its probe loses by the ablation of its latents than the other probes do."""
    test = ~data.train

    def accuracy(values: Vectors, label: int) -> float:
        right = (probes[label].scores(values[test]) > 0).cpu() == data.of[label][test]
        there = data.of[label][test]
        return float((right[there].float().mean() + right[~there].float().mean()) / 2)

    places = range(len(probes))
    before = [accuracy(data.x, label) for label in places]
    lost = torch.tensor([[before[label] - accuracy(values, label) for label in places] for values in changed])
    own = lost.diagonal()
    return (own - (lost.sum(1) - own) / (len(probes) - 1)).tolist()


def logistic(x: Float[Tensor, "row d"], there: Bool[Tensor, " row"]) -> Float[Tensor, " d+1"]:
    """The weights and the bias of logistic regression with a ridge penalty of strength 1, in which both answers weigh the same:
    Newton's method, with steps that are halved until the loss falls."""
    design = torch.cat([x, torch.ones_like(x[:, :1])], 1).double().cpu()
    sign = 2.0 * there.double() - 1
    shares = torch.where(there, there.double().mean(), 1 - there.double().mean())
    counts, penalty = 0.5 / shares, torch.ones(design.shape[1], dtype=torch.float64)
    penalty[-1] = 1e-9  # the bias has none

    def loss(weights: Tensor) -> float:
        logs = nn.functional.softplus(-sign * (design @ weights))
        return float((counts * logs).sum() + (penalty * weights**2).sum() / 2)

    found = torch.zeros_like(penalty)
    for _ in range(MOST_STEPS):
        odds = (sign * (design @ found)).sigmoid()
        gradient = penalty * found - design.T @ (counts * sign * (1 - odds))
        curvature = design.T * (counts * odds * (1 - odds)) @ design + penalty.diag()
        step = torch.linalg.solve(curvature, gradient)
        before, falls = loss(found), float(gradient @ step)
        if falls < 1e-10:
            break
        while loss(found - step) > before - 1e-4 * falls and float(step.abs().max()) > 1e-12:
            step, falls = step / 2, falls / 2
        found = found - step
    return found


def auroc(scores: Float[Tensor, " row"], there: Bool[Tensor, " row"]) -> float:
    """The share of pairs of a row with a label and one without in which the first has the larger score; ties count half."""
    return float(aurocs(scores, there, torch.ones(1, len(there), dtype=torch.float64)))


def aurocs(
    scores: Float[Tensor, " row"], there: Bool[Tensor, " row"], counts: Float[Tensor, "draw row"]
) -> Float[Tensor, " draw"]:
    """The same where rows are there so many times; NaN where none with the label is, or none without."""
    place = scores.double().cpu().unique(return_inverse=True)[1]
    empty = torch.zeros(len(counts), int(place.max()) + 1, dtype=torch.float64)
    with_it, without = (empty.index_add(1, place, counts * which) for which in (there, ~there))
    below = without.cumsum(1) - without / 2
    return (with_it * below).sum(1) / (with_it.sum(1) * without.sum(1))


def _above_floors(
    scores: Mapping[str, Float[Tensor, "label test"]],
    of: Bool[Tensor, "label test"],
    units: Int[Tensor, " test"],
    seed: int,
) -> dict[str, list[float]]:
    """For each floor, the interval of how far the mean AUROC of the dictionary is above its own: the wider one of percentiles
    over draws of distinct prompts, or groups, with replacement, and Student's of their standard deviation."""
    units = units.unique(return_inverse=True)[1]
    n, (level, n_draws, _) = int(units.max()) + 1, Resampling()
    drawn = torch.randint(n, (n_draws, n), generator=torch.Generator().manual_seed(seed))
    counts = torch.zeros(n_draws, n, dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones(1, 1).double().expand_as(drawn)
    )
    both = torch.cat([torch.ones(1, n).double(), counts])[:, units]  # first the prompts as they are
    means = {
        name: torch.stack([aurocs(*each, both) for each in zip(of_labels, of, strict=True)]).nanmean(0)
        for name, of_labels in scores.items()
    }
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    found = {}
    for name in [name for name in means if name != "values"]:
        differences = means["values"] - means[name]
        own, resampled = differences[0], differences[1:][~differences[1:].isnan()]
        reach = students_t(level, n - 1) * resampled.std()
        low, high = resampled.quantile(tails)
        found[FLOORS[name]] = [float(low.minimum(own - reach)), float(high.maximum(own + reach))]
    return found


def _known(labels: Sequence[Label], n_prompts: int) -> list[Label]:
    """The different labels, sorted. Raises ValueError for labels that do not fit."""
    if len(labels) != n_prompts:
        raise ValueError(f"there are {len(labels)} labels for {n_prompts} prompts: give one for each")
    known = sorted({*labels}, key=str)
    if len(known) < 2:
        raise ValueError(
            f"all prompts have the label {known[0]!r}, so that none can be told from others: give two or more"
        )
    return known


@torch.no_grad()
def _at_position(stream: Activations, position: int, batch_size: int) -> tuple[Vectors, list[tuple[int, ...]]]:
    """The vector of each prompt at one position, and its token ids. Raises ValueError for a position that a prompt lacks."""
    found, ids = [], list[tuple[int, ...]]()
    n = len(stream.prompts)
    for start in range(0, n, batch_size):
        tokens, mask = stream.inputs(range(start, min(start + batch_size, n)))
        assert isinstance(tokens, Tensor), "prompts are texts or token ids"
        assert mask is not None
        lengths = mask.sum(1)
        if (short := int(lengths.min())) < (position + 1 if position >= 0 else -position):
            raise ValueError(f"position {position} is out of range: a prompt has {short} tokens, with its BOS")
        ids += [tuple(row[real].tolist()) for row, real in zip(tokens, mask, strict=True)]
        options: dict[str, Any] = {"return_type": None, "attention_mask": mask.long()}
        _, cache = stream.model.run_with_cache(tokens, names_filter=stream.sites, **options)
        value = side_by_side(stream.model, stream.sites[0], cache[stream.sites[0]])
        at = torch.full_like(lengths, position) if position >= 0 else lengths + position
        found.append(value[torch.arange(len(at)), at].float())
    return torch.cat(found), ids
