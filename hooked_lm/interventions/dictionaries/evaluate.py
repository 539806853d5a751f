"""Evaluates dictionaries: explained variance, sparsity, and the model's loss with reconstructions."""

from collections.abc import Iterator, Sequence
from itertools import chain

import torch

from hooked_lm.callers import warn_caller
from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.select import Site
from hooked_lm.interventions.dictionaries.evaluation_runs import of_vectors, with_runs
from hooked_lm.interventions.dictionaries.floors import FIT_ROWS, check_control, floors_of
from hooked_lm.interventions.dictionaries.hook import Coder
from hooked_lm.interventions.dictionaries.scores import WHOLE, DictionaryScores, beside_floors
from hooked_lm.interventions.dictionaries.site import site_read, warn_if_elsewhere
from hooked_lm.interventions.dictionaries.stream import Activations, Pair, Prompts, Sites, by_layer
from hooked_lm.interventions.dictionaries.transcoder_set import LayerTranscoders, TranscoderSet
from hooked_lm.models.decoder import Decoder
from hooked_lm.results.labels import Label
from hooked_lm.results.scores import provenance


def evaluate_dictionary(
    model: HookedRootModule,
    prompts: Prompts,
    sae: Coder | LayerTranscoders,
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
    zeros, far above "CE" if the site matters; the fraction of that difference which reconstructions recover, "CE recovered
    (mean)", "CE recovered (zero)": at best 1, 0 is as bad as the ablation; and "KL spliced", the divergence of the predictions
    with reconstructions from the unchanged ones, at best 0. In the residual stream the recovered fraction is close to 1 for
    almost any dictionary, because its ablation does so much harm.

    Transcoders of several layers have a second axis, `layer`: figures with one layer replaced, and, at "all", with all layers
    replaced at once, where each reads what those before it have changed; the explained variance is then of all outputs together,
    and L0 the sum over layers.

    The floors need no training: `random_dictionary` and `pca_dictionary` of these vectors, with as many features and as many of
    them active; those of transcoders are fitted to the outputs, those of several layers are a transcoder for each layer. Warns
    of a dictionary that explains no more variance than the random one.

    Args:
        prompts, skip: as for `train_dictionary`; skipped positions are unchanged in the spliced forward passes.
        batch_size: how many prompts run together.
        site, site_out: by default those in the dictionary's config.
        control: "auto" measures the floors, at the cost of one forward pass over the texts each; principal components need two
            vectors for each dimension. None leaves them out.
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
    sae: Coder | LayerTranscoders,
    site: Sites | None,
    site_out: Sites | None,
    *,
    skip: int,
    control: str | None = "auto",
    batch_size: int,
    seed: int = 0,
) -> DictionaryScores:
    """As `evaluate_dictionary`, without a warning of a poor dictionary."""
    check_control(control)
    if isinstance(sae, LayerTranscoders):
        site, site_out = (
            list(sae.sites) if site is None else site,
            list(sae.sites_out) if site_out is None else site_out,
        )
    else:
        site = site_read(sae, site)
        site_out = site_out if site_out is not None else getattr(getattr(sae, "cfg", None), "hook_point_out", None)
    stream = Activations(model, prompts, site, site_out, batch_size=batch_size, skip=skip)
    if not isinstance(sae, LayerTranscoders):
        warn_if_elsewhere(sae, *stream.sites)
    n_prompts = len(stream.prompts)
    rows = [range(start, min(start + batch_size, n_prompts)) for start in range(0, n_prompts, batch_size)]
    with torch.no_grad():
        pairs, floors, said = _with_floors(stream, sae, rows, control, seed)
        coders: dict[str, Coder | LayerTranscoders] = {"values": sae, **floors}
        figures, means = of_vectors(stream, coders, pairs)
        if isinstance(model, Decoder):
            figures = with_runs(figures, model, stream, coders, rows, means)
    about = provenance(model, sites=stream.sites, prompts=n_prompts, skip=skip, control=said, seed=seed)
    names = list(figures["values"][0])
    columns = {name: torch.tensor([[of[figure] for of in each] for figure in names]) for name, each in figures.items()}
    axes: dict[str, Sequence[Label]] = {"figure": names}
    if isinstance(sae, LayerTranscoders):
        axes["layer"] = [*sae.layers, WHOLE]
    else:
        columns = {name: values[:, 0] for name, values in columns.items()}
    return beside_floors(columns, axes, about, "explained variance")


def _with_floors(
    stream: Activations, sae: Coder | LayerTranscoders, rows: Sequence[range], control: str | None, seed: int
) -> tuple[Iterator[Pair], dict[str, Coder | LayerTranscoders], str]:
    """All vectors, by batches, and the floors that were made from the first of them; and what the floors are, in words."""
    batches = (pair for some in rows if len((pair := stream.vectors(some))[0]))
    first: list[Pair] = []
    if control is not None:
        for pair in batches:
            first.append(pair)
            if sum(len(read) for read, _ in first) >= FIT_ROWS:
                break
    if not first:
        return batches, {}, "none"
    read, written = (torch.cat(list(values))[:FIT_ROWS] for values in zip(*first, strict=True))
    whole = chain(first, batches)
    if not isinstance(sae, LayerTranscoders):
        floors, said = floors_of(sae, read, control, seed, written if len(stream.sites) == 2 else None)
        return whole, {} if floors is None else {**floors.by_name()}, said
    triples = zip(sae.parts, by_layer(read), by_layer(written), strict=True)
    each = [floors_of(part, x, control, seed, y) for part, x, y in triples]
    made = [{} if floors is None else floors.by_name() for floors, _ in each]
    found: dict[str, Coder | LayerTranscoders] = {}
    for name in made[0]:
        parts = [of[name] for of in made if name in of]
        if len(parts) == len(sae):
            pairs = zip(parts, sae.sites, sae.sites_out, strict=True)
            found[name] = TranscoderSet(part.at(site, out) for part, site, out in pairs)
    return whole, found, "; ".join(dict.fromkeys(said for _, said in each))


def warn_if_poor(figures: DictionaryScores, steps: int, width: int) -> None:
    """Warns of a dictionary that explains less than half of the variance or no more than a random one, or of whose features half
    are never active."""
    whole = figures.select(layer=WHOLE) if "layer" in figures.axes else figures
    explained, dead = (whole.select(figure=name).mean.item() for name in ("explained variance", "dead"))
    random = whole.floors.get("random", torch.full((1,), -torch.inf))[0]
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
