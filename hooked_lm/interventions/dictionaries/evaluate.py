"""Evaluates dictionaries: explained variance, sparsity, and the model's loss with reconstructions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.callers import warn_caller
from hooked_lm.hooks import HookedRootModule, HookPoint
from hooked_lm.hooks.select import Site
from hooked_lm.interventions.dictionaries.floors import FIT_ROWS, Floors, check_control, floors_of
from hooked_lm.interventions.dictionaries.hook import Coder, Dictionary, Transcode, decoded, encoded
from hooked_lm.interventions.dictionaries.scores import DictionaryScores, beside_floors
from hooked_lm.interventions.dictionaries.site import site_read, warn_if_elsewhere
from hooked_lm.interventions.dictionaries.stream import Activations, Pair, Prompts
from hooked_lm.models.decoder import Decoder
from hooked_lm.results.scores import provenance


def evaluate_dictionary(
    model: HookedRootModule,
    prompts: Prompts,
    sae: Coder,
    *,
    site: Site | None = None,
    site_out: Site | None = None,
    skip: int = 0,
    control: str | None = "auto",
    batch_size: int = 32,
    seed: int = 0,
) -> DictionaryScores:
    """The metrics of a dictionary on texts, along the axis `figure`, beside those of a random and of a PCA dictionary.

    "explained variance": one minus the squared error of reconstructions over the variance of the vectors; 1 is perfect, 0 no
    better than the mean vector, and it can be negative. "L0": the average number of active features of a vector; few are good at
    the same explained variance. "dead": the fraction of features that are never active, at best 0; rare features look dead on few
    texts. For language models also the next-token cross entropy in nats: "CE" of the unchanged model; "CE spliced" with the site
    replaced by reconstructions, without the error, at best "CE"; "CE mean-ablated", "CE zero-ablated" with the mean vector or
    zeros, far above "CE" if the site matters; and the fraction of that difference which reconstructions recover, "CE recovered
    (mean)", "CE recovered (zero)": at best 1, 0 is as bad as the ablation. In the residual stream it is close to 1 for almost any
    dictionary, because its ablation does so much harm.

    The floors need no training: `random_dictionary` and `pca_dictionary` of these vectors, with as many features and as many of
    them active. Warns of a dictionary that explains no more variance than the random one.

    Args:
        prompts, skip: as for `train_dictionary`; skipped positions are unchanged in the spliced forward passes.
        batch_size: how many prompts run together.
        site, site_out: by default those in the dictionary's config.
        control: "auto" measures the floors, at the cost of one forward pass over the texts each; principal components need two
            vectors for each dimension, and transcoders have no floors. None leaves them out.
        seed: of the random dictionary.

    Raises ValueError if the site is not known, or the widths differ.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.interventions.dictionaries import load
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> texts = ["The capital of France is Paris.", "Mary was ill, so she slept late."]
    >>> found = evaluate_dictionary(model, texts, load("demo").to(model.device), skip=1)
    >>> found.select(figure="L0").mean
    tensor(12.)
    >>> found.no_better_than, list(found.floors)
    ([], ['random'])
    """
    found = figures_of(
        model, prompts, sae, site, site_out, skip=skip, control=control, batch_size=batch_size, seed=seed
    )
    found.warn_if_no_better()
    return found


def figures_of(
    model: HookedRootModule,
    prompts: Prompts,
    sae: Coder,
    site: Site | None,
    site_out: Site | None,
    *,
    skip: int,
    control: str | None = "auto",
    batch_size: int,
    seed: int = 0,
) -> DictionaryScores:
    """As `evaluate_dictionary`, without a warning of a poor dictionary."""
    check_control(control)
    cfg = getattr(sae, "cfg", None)
    site = site_read(sae, site)
    site_out = site_out if site_out is not None else getattr(cfg, "hook_point_out", None)
    stream = Activations(model, prompts, site, site_out, batch_size=batch_size, skip=skip)
    warn_if_elsewhere(sae, *stream.sites)
    n_prompts = len(stream.prompts)
    rows = [range(start, min(start + batch_size, n_prompts)) for start in range(0, n_prompts, batch_size)]
    with torch.no_grad():
        pairs, floors, said = _with_floors(stream, sae, rows, control, seed)
        coders: dict[str, Coder] = {"values": sae, **(floors.by_name() if floors else {})}
        figures, mean = _of_vectors(stream, coders, pairs)
        if isinstance(model, Decoder):
            figures = _with_runs(figures, model, stream, coders, rows, mean)
    about = provenance(model, sites=stream.sites, prompts=n_prompts, skip=skip, control=said, seed=seed)
    columns = {name: torch.tensor(list(of.values())) for name, of in figures.items()}
    return beside_floors(columns, {"figure": list(figures["values"])}, about, "explained variance")


def _with_floors(
    stream: Activations, sae: Coder, rows: Sequence[range], control: str | None, seed: int
) -> tuple[Iterator[Pair], Floors | None, str]:
    """All vectors, by batches, and the floors that were made from the first of them; and what the floors are, in words."""
    batches = (pair for some in rows if len((pair := stream.vectors(some))[0]))
    if control is None or len(stream.sites) == 2:
        return batches, None, "none" if control is None else "none: a transcoder"
    first: list[Pair] = []
    for pair in batches:
        first.append(pair)
        if sum(len(read) for read, _ in first) >= FIT_ROWS:
            break
    floors, said = None, "none"
    if first:
        floors, said = floors_of(sae, torch.cat([read for read, _ in first])[:FIT_ROWS], control, seed)
    return chain(first, batches), floors, said


def warn_if_poor(figures: DictionaryScores, steps: int, width: int) -> None:
    """Warns of a dictionary that explains less than half of the variance or no more than a random one, or of whose features half
    are never active."""
    explained, dead = (figures.select(figure=name).mean.item() for name in ("explained variance", "dead"))
    random = figures.floors.get("random", torch.full((1,), -torch.inf))[0]
    found = []
    if explained < 0.5 or not explained > random:
        beside = f" (a random dictionary {random:.2f})" if random.isfinite() else ""
        found.append(f"explains {explained:.2f} of the variance of the held-out texts{beside}")
    found += [f"has {dead:.0%} features that are never active there"] if dead > 0.5 else []
    if found:
        warn_caller(
            f"the dictionary {' and '.join(found)}, so its features may mean nothing: train longer (steps, now {steps:,}), on "
            f"more texts, or with fewer features (width, now {width:,})"
        )


class _Sums:
    """What the metrics of one dictionary need of the vectors that have come by."""

    def __init__(self) -> None:
        self.error, self.n_active = 0.0, 0.0
        self.ever: Tensor | None = None

    def add(self, sae: Coder, read: Tensor, written: Tensor) -> None:
        features = encoded(sae, read)
        made = decoded(sae, features, read)
        if made.shape != written.shape:
            raise ValueError(
                f"the dictionary decodes vectors {list(made.shape)}, and those of the site are {list(written.shape)}"
            )
        active = features != 0
        self.error += (made.double() - written.double()).pow(2).sum().item()
        self.n_active += active.sum().item()
        self.ever = active.any(0) if self.ever is None else self.ever | active.any(0)


def _of_vectors(
    stream: Activations, coders: Mapping[str, Coder], pairs: Iterator[Pair]
) -> tuple[dict[str, dict[str, float]], Float[Tensor, " d_out"]]:
    """The metrics of each dictionary that need no spliced forward passes, and the mean of the output vectors."""
    n, total = 0, 0.0
    sums = {name: _Sums() for name in coders}
    first: Tensor | None = None  # sums are over deviations from the first vector, so that large means cost no precision
    shift: Tensor | None = None
    for read, written in pairs:
        for name, sae in coders.items():
            sums[name].add(sae, read, written)
        first = written[0].double() if first is None else first
        moved = written.double() - first
        shift = moved.sum(0) if shift is None else shift + moved.sum(0)
        total += moved.pow(2).sum().item()
        n += len(read)
    if first is None or shift is None:
        raise ValueError(f"no prompt has a position that counts, with skip={stream.skip}")
    variance = total - (shift.pow(2).sum() / n).item()
    figures = {}
    for name, of in sums.items():
        assert of.ever is not None
        explained = 1 - of.error / variance if variance > 0 else float("nan")
        dead = 1 - of.ever.float().mean().item()
        figures[name] = {"explained variance": explained, "L0": of.n_active / n, "dead": dead}
    return figures, (first + shift / n).float()


def _with_runs(
    figures: Mapping[str, dict[str, float]],
    model: Decoder,
    stream: Activations,
    coders: Mapping[str, Coder],
    rows: Sequence[range],
    mean: Float[Tensor, " d_out"],
) -> dict[str, dict[str, float]]:
    """The metrics with the cross entropies of the model, unchanged and with the site replaced."""
    target = stream.sites[-1]

    def constant(vector: Tensor) -> Callable[..., Any]:
        return lambda value, hook: vector.to(value).expand(*value.shape[:2], -1).reshape(value.shape).clone()

    def measured(replaced: Mapping[str, Callable[..., Any]]) -> float:
        return _cross_entropy(
            model, stream, rows, [(site, _kept(hook, stream.skip)) for site, hook in replaced.items()]
        )

    plain = measured({})
    ablated = {
        name: measured({target: constant(vector)})
        for name, vector in (("mean", mean), ("zero", torch.zeros_like(mean)))
    }
    found = {}
    for name, sae in coders.items():
        two = len(stream.sites) == 2
        splice: Dictionary = (
            Transcode(stream.sites, sae=sae, error="drop") if two else Dictionary(target, sae=sae, error="drop")
        )
        spliced = measured(dict.fromkeys(stream.sites, splice))
        of = {"CE": plain, "CE spliced": spliced, **{f"CE {how}-ablated": lost for how, lost in ablated.items()}}
        for how, lost in ablated.items():
            of[f"CE recovered ({how})"] = (lost - spliced) / (lost - plain) if lost != plain else float("nan")
        found[name] = {**figures[name], **of}
    return found


def _kept(hook: Callable[..., Any], skip: int) -> Callable[..., Any]:
    """A hook that does not change the skipped positions."""

    def change(value: Tensor, hook_point: HookPoint) -> Tensor | None:
        new = hook(value, hook_point)
        return new if new is None or not skip else torch.cat([value[:, :skip], new[:, skip:]], 1)

    return change


def _cross_entropy(
    model: Decoder, stream: Activations, rows: Sequence[range], hooks: Sequence[tuple[str, Any]]
) -> float:
    """The mean cross entropy of next tokens, in nats."""
    total, n = 0.0, 0
    for some in rows:
        tokens, mask = stream.inputs(some)
        assert mask is not None
        options: dict[str, Any] = {"return_type": "loss", "loss_per_token": True, "attention_mask": mask.long()}
        losses = model.run_with_hooks(tokens, fwd_hooks=list(hooks), **options)
        counts = mask[:, 1:] & mask[:, :-1]
        total += losses[counts].double().sum().item()
        n += int(counts.sum())
    return total / n if n else float("nan")
