"""Linear probes: what can be read off the activations of a site, evaluated on held-out prompts and with a control."""

from collections.abc import Mapping, Sequence
from typing import overload

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.probe_results import BY_TOKEN, CONTROL, PROBE, SHUFFLED, Probes, RegressionProbes
from hooked_lm.analysis.probe_tasks import Classification, Folds, ProbeTask, places_of, task_of
from hooked_lm.analysis.probe_vectors import checked_vectors, vectors_of
from hooked_lm.callers import warn_caller
from hooked_lm.extras import require_extra
from hooked_lm.hooks.token_labels import Named
from hooked_lm.models.caches.activation_cache import ActivationCache
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.text.chat import Chat
from hooked_lm.progress import progress_bar
from hooked_lm.results.bootstrap import in_words
from hooked_lm.results.labels import Label
from hooked_lm.results.scores import provenance

__all__ = ["Probes", "RegressionProbes", "train_probe"]


# The kind of the result depends on the labels; a type checker must see all arguments in each overload.
@overload
def train_probe(
    source: Decoder | ActivationCache | Mapping[int, Tensor],
    labels: Sequence[str | int | bool],
    *,
    prompts: Sequence[str] | Tensor | Chat | None = ...,
    site: str = ...,
    layers: Sequence[int] | None = ...,
    positions: int | Named = ...,
    tokens: Sequence[str | int] | Tensor | None = ...,
    groups: Sequence[str | int] | None = ...,
    n_folds: int = ...,
    n_shuffles: int = ...,
    regularisation: float = ...,
    seed: int = ...,
    batch_size: int = ...,
    progress: bool | None = ...,
) -> Probes: ...
@overload
def train_probe(
    source: Decoder | ActivationCache | Mapping[int, Tensor],
    labels: Sequence[float],
    *,
    prompts: Sequence[str] | Tensor | Chat | None = ...,
    site: str = ...,
    layers: Sequence[int] | None = ...,
    positions: int | Named = ...,
    tokens: Sequence[str | int] | Tensor | None = ...,
    groups: Sequence[str | int] | None = ...,
    n_folds: int = ...,
    n_shuffles: int = ...,
    regularisation: float = ...,
    seed: int = ...,
    batch_size: int = ...,
    progress: bool | None = ...,
) -> RegressionProbes: ...
def train_probe(
    source: Decoder | ActivationCache | Mapping[int, Tensor],
    labels: Sequence[str | int | bool] | Sequence[float] | Tensor,
    *,
    prompts: Sequence[str] | Tensor | Chat | None = None,
    site: str = "resid_post",
    layers: Sequence[int] | None = None,
    positions: int | Named = -1,
    tokens: Sequence[str | int] | Tensor | None = None,
    groups: Sequence[str | int] | None = None,
    n_folds: int = 5,
    n_shuffles: int = 3,
    regularisation: float = 1.0,
    seed: int = 0,
    batch_size: int = 32,
    progress: bool | None = None,
) -> Probes | RegressionProbes:
    """Linear regression of a label from the activations of each layer, evaluated on held-out prompts.

    Strings, ints and bools are classes, which logistic regression tells apart; floats are numbers, which ridge regression
    predicts. Prompts are cut into folds, stratified by class. Each fold is predicted by a probe of the others, so every prompt is
    held out once. Vectors are standardised by the mean and deviation of the training prompts.

    The control is a probe of a control task (Hewitt and Liang 2019, arXiv:1909.03368): a random label for each token at the
    position that is read. A probe can learn such labels by heart, in a model without training too, so an accuracy that the
    control reaches as well says nothing of the model. Labels are exchanged between tokens, and shared out at random among the
    prompts of a token: where the token says nothing of the label, or is not known, these are shuffled labels, which show what
    the number of prompts and the width allow by chance. Warns if the token alone predicts the label of held-out prompts: then
    prompts with the same token belong in one of the `groups`, and so do prompts that share something else. Warns if the probe of
    no layer is better than its control.

    Args:
        source: a model, which runs `prompts`; a cache of a run without padding; or vectors [prompt, width] by layer.
        labels: the class of each prompt (a string, int or bool), or a number (a float).
        site: the short name of a site, one for each layer. Heads are side by side.
        layers: None for all layers.
        positions: the position whose vector is read; negative ones count from the last token of each prompt. Of conversations
            (`model.chat`) also tokens by their role, such as "assistant" or ("user", -1): the mean over them is read.
        tokens: the token that each vector is of, an id or a string, for a cache or vectors; a model reads those of its prompts.
        groups: prompts of one group, such as those of one template or entity, are held out together; intervals are over groups.
        n_folds: the number of folds; each class needs as many prompts, or groups.
        n_shuffles: random labelings over which the control is averaged.
        regularisation: the inverse strength of the L2 penalty (C of scikit-learn's logistic regression, 1 / alpha of its ridge).
        batch_size: how many prompts run together.
        progress: whether to show a bar; None: if the work takes longer than two seconds.

    Returns Probes with `accuracy`, or for numbers RegressionProbes with `r2`; both have `selectivity`, `to_dataframe`, `plot` and
    `direction(layer)`, for steering. Raises TypeError for labels that are neither classes nor numbers; ValueError for labels that
    do not fit, labels that are all equal, too few prompts or groups, positions out of range and values that are not finite;
    ImportError without scikit-learn (`pip install 'hooked-lm[probes]'`).

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> names = ["Mary", "Alice", "Sarah", "Laura", "John", "Tom", "Peter", "David"]
    >>> prompts = [
    ...     f"When {name} went to the {place},"
    ...     for place in ("store", "park")
    ...     for name in names
    ... ]
    >>> probes = train_probe(
    ...     model,
    ...     [i % 8 < 4 for i in range(16)],
    ...     prompts=prompts,
    ...     positions=1,
    ...     layers=[0, 3],
    ...     n_folds=4,
    ... )
    >>> probes.direction(3).shape
    torch.Size([128])
    >>> lengths = train_probe(
    ...     model,
    ...     [float(len(text)) for text in prompts],
    ...     prompts=prompts,
    ...     layers=[0],
    ...     n_folds=4,
    ... )
    >>> lengths.axes["layer"], lengths.r2.shape
    ((0,), torch.Size([1]))
    """
    _check_numbers(n_folds, n_shuffles, regularisation)
    task = task_of(labels)
    n_labels = len(task.targets)
    if groups is not None and len(groups) != n_labels:
        raise ValueError(f"there are {len(groups)} groups for {n_labels} labels: give one for each prompt")
    require_extra("sklearn", "probes")  # raises before the model runs
    vectors, name, read = vectors_of(source, prompts, site, layers, positions, batch_size)
    tokens = _tokens(tokens, read, n_labels)
    data = {layer: checked_vectors(value, n_labels, layer) for layer, value in vectors.items()}
    folds = task.folds(groups, n_folds, seed)
    if tokens is not None:
        _warn_if_tokens_tell(task, tokens, folds)
    generator = torch.Generator().manual_seed(seed)
    shuffled = [task.control(range(n_labels) if tokens is None else tokens, generator) for _ in range(n_shuffles)]
    found, weights, biases = [], [], []
    for value in progress_bar("probes", len(data), progress, unit="layers", steps=list(data.values())):
        x = value.flatten(1).double().numpy()
        chance = torch.stack([task.held_out(x, targets, folds, regularisation) for targets in shuffled])
        found.append(torch.stack([task.held_out(x, task.targets, folds, regularisation), chance.mean(0)]))
        weight, bias = task.fitted(x, regularisation)
        weights.append(weight)
        biases.append(bias)
    values = _by_group(torch.stack(found, 1), groups)
    folds_of = torch.zeros(n_labels)
    for number, (_, test) in enumerate(folds):
        folds_of[test] = number
    settings = {"folds": n_folds, "shuffles": n_shuffles, "regularisation": regularisation, "seed": seed}
    about = provenance(source if isinstance(source, Decoder) else None, site=name, position=positions, **settings)
    about["control"] = SHUFFLED if tokens is None else BY_TOKEN
    if groups is not None:
        about["groups"] = values.shape[-1]
    axes: dict[str, Sequence[Label]] = {"of": [PROBE, CONTROL], "layer": list(data)}
    shape, by_unit = list(next(iter(data.values())).shape[1:]), _by_group(folds_of, groups).int().tolist()
    common = (values, axes, torch.stack(weights), torch.stack(biases), shape, by_unit)
    made: Probes | RegressionProbes
    if isinstance(task, Classification):
        counts = [list(task.labels).count(label) for label in task.classes]
        made = Probes(*common, list(task.classes), counts, about=about)
    else:
        spread = task.targets.mean().item(), task.targets.std(correction=0).item()
        made = RegressionProbes(*common, n_labels, *spread, about=about)
    _warn_if_no_better(made)
    return made


def _warn_if_no_better(made: Probes | RegressionProbes) -> None:
    """Warns if the interval of no layer, all of them at once, is above the control's mean."""
    if made.control.does_as_well:
        measured, control = made.mean
        best = int(measured.argmax())
        warn_caller(
            f"no layer's probe is better than its control: the best, of layer {made.axes['layer'][best]}, has {made.MEASURE} "
            f"{measured[best]:.2f}, the control {control[best]:.2f}. Its direction means nothing: give more prompts, or read "
            "another position or site"
        )


def _check_numbers(n_folds: int, n_shuffles: int, regularisation: float) -> None:
    for name, number, least in (("n_folds", n_folds, 2), ("n_shuffles", n_shuffles, 1)):
        if number < least:
            raise ValueError(f"{name} must be at least {least}, got {number}")
    if not regularisation > 0:
        raise ValueError(f"regularisation must be positive, got {regularisation}")


def _tokens(
    tokens: Sequence[str | int] | Tensor | None, read: list[int] | None, n_labels: int
) -> Sequence[str | int] | None:
    """The token of each vector; raises ValueError for tokens beside a model, and for another number of them."""
    if tokens is None:
        return read
    if read is not None:
        raise ValueError("tokens are for a cache or vectors: a model reads those of its prompts")
    if len(tokens) != n_labels:
        raise ValueError(f"there are {len(tokens)} tokens for {n_labels} labels: give one for each prompt")
    return tokens.tolist() if isinstance(tokens, Tensor) else tokens


def _warn_if_tokens_tell(task: ProbeTask, tokens: Sequence[str | int], folds: Folds) -> None:
    """Warns if the tokens of held-out prompts predict their labels better than one guess for all."""
    guessed = task.by_token(tokens, folds)
    with in_words():  # nothing is shown
        low, _ = task.interval(guessed)
    if low > task.chance:
        warn_caller(
            f"the token at this position alone predicts the labels of held-out prompts ({float(guessed.mean()):.2f}, one guess "
            f"for all {task.chance:.2f}): a probe can learn the label of each token by heart, and the control shows how well; to "
            "hold out prompts with the same token together, name it in groups"
        )


def _by_group(values: Float[Tensor, "*grid prompt"], groups: Sequence[str | int] | None) -> Float[Tensor, "*grid unit"]:
    """The mean over the prompts of each group."""
    if groups is None:
        return values
    return torch.stack([values[..., some].mean(-1) for some in places_of(groups).values()], -1)
