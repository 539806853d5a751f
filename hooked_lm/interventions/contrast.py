"""Contrast of two sets of prompts ("sides"): their activations at a site, the direction between them, and its separation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_lm.engine.prompts import site_of_layer, some_rows
from hooked_lm.hooks import HookedRootModule, HookPoint
from hooked_lm.hooks.token_labels import Named, is_named
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.encoder import Encoder
from hooked_lm.models.text.chat import Chat
from hooked_lm.models.vision.inputs import Rows, VisionInputs
from hooked_lm.results.measures import MetricScores
from hooked_lm.results.scores import provenance

Prompts = str | Sequence[str] | Sequence[tuple[str, str]] | Int[Tensor, "..."] | VisionInputs | Chat
# prompts that have a length
Listed = Sequence[str | tuple[str, str] | Int[Tensor, "_"]] | Int[Tensor, "_ _"] | VisionInputs | Chat
PairPositions = int | Named | Sequence[int] | Sequence[Sequence[int]] | Int[Tensor, "..."]
Places = (
    str | Int[Tensor, " prompt"] | Bool[Tensor, "prompt pos"]
)  # "mean", a position of each prompt, or those of a mean
Real = Bool[Tensor, "batch pos"]  # which tokens are no padding
Take = Callable[[str, Tensor, Tensor, slice], Tensor]  # of the site, its value, the mask of real tokens, the prompts

STREAM = ("batch", "pos", "d_model")
METHODS = ("mean", "pca", "logistic")
METRICS = ("accuracy", "auc", "d_prime")
SHARES = (True, True, False)  # which of them are shares from 0 to 1
N_RANDOM = 32  # directions in the control
PENALTY = 0.01  # of the squared weights of the logistic probe, in inputs of mean square 1


# ---- the prompts -----------------------------------------------------------------------------------------------------


def check_model(model: object) -> None:
    """Raises TypeError unless the model is a decoder or an encoder."""
    if not isinstance(model, (Decoder, Encoder)):
        raise TypeError(
            f"contrasts need a HookedTransformer or a HookedEncoder, got {type(model).__name__}; for other models give "
            "AddDirection a direction that you have computed"
        )


def listed(prompts: Prompts, name: str) -> Listed:
    """The prompts as a list, a tensor [batch, pos] or ids with images; ValueError if there are none."""
    if isinstance(prompts, VisionInputs) and not isinstance(prompts.tokens, Tensor):
        raise TypeError(f"{name} have images, so they must be ids: model.prepare(texts, images) writes them")
    several = [prompts] if isinstance(prompts, str) else prompts
    if isinstance(several, Tensor):
        if several.ndim not in (1, 2):
            raise ValueError(f"{name} must be texts, or ids [batch, pos] or [pos], got {tuple(several.shape)}")
        several = several if several.ndim == 2 else several[None]
    if len(several) == 0:
        raise ValueError(f"{name} are empty: give at least one prompt")
    return several if isinstance(several, (Tensor, VisionInputs, Chat)) else list(several)


def pairs(positive: Prompts, negative: Prompts) -> tuple[Listed, Listed]:
    """Both sides; ValueError if they have different numbers of prompts."""
    sides = listed(positive, "the positive prompts"), listed(negative, "the negative prompts")
    n_positive, n_negative = map(len, sides)
    if n_positive != n_negative:
        raise ValueError(f"pairs are needed, and there are {n_positive} positive and {n_negative} negative prompts")
    return sides


def tokenized(model: Any, prompts: Listed) -> tuple[tuple[Rows | Chat], dict[str, Any], Real]:
    """The model's arguments and keyword arguments, and the mask of real tokens."""
    args: tuple[Rows | Chat]
    if isinstance(model, Encoder):
        tokens, types, mask = model._inputs(prompts, None, None)
        args, options = (tokens,), {"token_type_ids": types, "attention_mask": mask}
    elif isinstance(prompts, Chat):
        tokens, mask = prompts.tokens, prompts.attention_mask
        args, options = (prompts,), {}
    elif isinstance(prompts, VisionInputs):
        tokens, mask = model._tokens_and_mask(prompts.tokens, None, None, prompts.attention_mask)
        args, options = (prompts,), {"attention_mask": mask}
    else:
        tokens, mask = model._tokens_and_mask(prompts, None, None, None)
        args, options = (tokens,), {"attention_mask": mask}
    return args, options, torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool().to(tokens.device)


def sites_of(
    model: HookedRootModule, site: str, layers: str | int | Sequence[int], dims: tuple[str, ...]
) -> dict[int, str]:
    """Layer -> full name, for the layers that have the site; it must have these axes.

    Raises KeyError, with similar names, if no layer has it (or one of the given layers lacks it), IndexError for a layer out
    of range, ValueError for a site with other axes.
    """
    n_layers = model.cfg.n_layers
    given = [layers] if isinstance(layers, int) else layers
    if not (given == "each" if isinstance(given, str) else len(given)):
        raise ValueError(f"layers must be 'each', a layer or some, got {layers!r}")
    found = {}
    for layer in range(n_layers) if isinstance(given, str) else given:
        name = site_of_layer(model, site, layer) if isinstance(given, str) else model.names((site, layer))[0]
        if name is not None:
            found[layer % n_layers] = name
    if not found:
        model.names((site, 0))  # raises KeyError with similar names
    for name in found.values():
        if model.hook_dict[name].dims != dims:
            raise ValueError(f"'{name}' has the axes {list(model.hook_dict[name].dims)}; expected {list(dims)}")
    return found


# ---- activations of the prompts --------------------------------------------------------------------------------------


@dataclass
class _Taker:
    """A hook that keeps the results of `take` for one batch; as it edits nothing, it gets the values without a copy."""

    take: Take
    real: Real
    rows: slice
    kept: dict[str, list[Tensor]]
    records = True

    def __call__(self, value: Tensor, hook: HookPoint) -> None:
        name = hook.name or ""
        found = self.take(name, value.detach(), self.real.to(value.device), self.rows)
        self.kept.setdefault(name, []).append(found.float().cpu())


@torch.no_grad()
def read(
    model: HookedRootModule, prompts: Listed, sites: Sequence[str], take: Take, batch_size: int
) -> dict[str, list[Tensor]]:
    """The results of `take` for each site, batch by batch; the values themselves are not kept."""
    if batch_size < 1:
        raise ValueError(f"batch_size is a number of prompts, at least 1, got {batch_size}")
    kept: dict[str, list[Tensor]] = {}
    for start in range(0, len(prompts), batch_size):
        rows = slice(start, start + batch_size)
        some = some_rows(model, prompts, rows) if isinstance(prompts, VisionInputs) else prompts[rows]
        args, options, real = tokenized(model, some)
        taker = _Taker(take, real, rows, kept)
        # run_with_cache stops after the last layer with a hook
        with model.hooks([(site, taker) for site in sites]):
            model.run_with_cache(*args, return_type=None, names_filter=list(sites[:1]), **options)
    return kept


def values_at(
    model: HookedRootModule, prompts: Listed, sites: Sequence[str], positions: Places, batch_size: int
) -> dict[str, Float[Tensor, "prompt ..."]]:
    """Each site's values [prompt, ...] at one position of each prompt [prompt], or the mean over its tokens ("mean") or some.

    Raises IndexError for a position that a prompt does not have, ValueError for a value that is not finite.
    """

    def take(site: str, value: Tensor, real: Tensor, rows: slice) -> Tensor:
        if isinstance(positions, str) or positions.ndim == 2:
            some = real if isinstance(positions, str) else positions[rows, -real.shape[1] :].to(real.device)
            shown = some.view(*real.shape, *[1] * (value.ndim - 2))
            return value.float().masked_fill(~shown, 0).sum(1) / shown.sum(1)
        return value[torch.arange(len(value), device=value.device), columns(positions[rows], real, rows.start)]

    found = {site: torch.cat(parts) for site, parts in read(model, prompts, sites, take, batch_size).items()}
    for site, values in found.items():
        if strange := (~values.flatten(1).isfinite().all(1)).nonzero()[:, 0].tolist():
            raise ValueError(
                f"'{site}' is not finite at the position of {len(strange)} prompts, first of prompt {strange[0]}"
            )
    return found


def columns(positions: Int[Tensor, " batch"], real: Real, first: int = 0) -> Int[Tensor, " batch"]:
    """The columns of these positions in the padded rows; negative positions count from the end of each text."""
    lengths, positions = real.sum(1), positions.to(real.device)
    place = torch.where(positions < 0, positions + lengths, positions)
    for row in ((place < 0) | (place >= lengths)).nonzero()[:1, 0].tolist():
        n = int(lengths[row])
        raise IndexError(
            f"position {int(positions[row])} is out of range: prompt {first + row} has {n} tokens, so {-n} to {n - 1}"
        )
    return ((real.cumsum(1) - 1 == place[:, None]) & real).int().argmax(1)


def positions_of(positions: PairPositions, sides: tuple[Listed, Listed]) -> tuple[Places, Places]:
    """The position in each prompt of both sides: one for all, one for each pair, or one for each pair and side.

    Of conversations those that a name such as "assistant" selects, over which the mean is taken.
    """
    n_pairs = len(sides[0])
    if is_named(positions):
        if not all(isinstance(side, Chat) for side in sides):
            raise ValueError(f"positions={positions!r} need prompts with roles on both sides: give model.chat([...])")
        return sides[0].mask(positions), sides[1].mask(positions)  # type: ignore[union-attr]  # both are conversations
    if isinstance(positions, str):
        if positions != "mean":
            raise ValueError(f"positions must be an int, one for each pair, or 'mean', got {positions!r}")
        return positions, positions
    given = torch.as_tensor(positions).cpu()
    if given.is_floating_point() or given.dtype == torch.bool:
        raise TypeError(f"positions are whole numbers, got {given.dtype}")
    if tuple(given.shape) not in ((), (n_pairs,), (n_pairs, 2)):
        raise ValueError(
            f"positions must be one number, one for each of {n_pairs} pairs, or [{n_pairs}, 2] for both sides; got shape "
            f"{list(given.shape)}"
        )
    both = given.long().expand(n_pairs) if given.ndim < 2 else given.long()
    return (both[:, 0], both[:, 1]) if both.ndim == 2 else (both, both)


# ---- directions ------------------------------------------------------------------------------------------------------


def fitted(
    method: str, positive: Float[Tensor, "pair width"], negative: Float[Tensor, "pair width"]
) -> Float[Tensor, " width"]:
    """The direction from the negative to the positive side; its length is the distance of their means along it.

    "mean": the mean of the differences. "pca": the first principal component of the differences, taken with both signs and
    therefore not centred. "logistic": the weights of a logistic probe with a small L2 penalty.
    """
    positive, negative = positive.double(), negative.double()
    difference = (positive - negative).mean(0)
    if method == "mean":
        return difference.float()
    found = _component(positive - negative) if method == "pca" else _probe(positive, negative)
    unit, along = F.normalize(found, dim=0), F.normalize(found, dim=0) @ difference
    if method == "pca":  # the sign of a component is arbitrary
        return (unit * along).float()
    return (unit * along.abs()).float()


def _component(differences: Float[Tensor, "pair width"]) -> Float[Tensor, " width"]:
    return torch.linalg.svd(differences, full_matrices=False).Vh[0]


@torch.inference_mode(False)
@torch.enable_grad()
def _probe(positive: Float[Tensor, "pair width"], negative: Float[Tensor, "pair width"]) -> Float[Tensor, " width"]:
    """The weights of the optimal probe; deterministic, since the loss is convex and the weights start at zero."""
    inputs = torch.cat([positive, negative]).detach()
    sides = torch.cat([torch.ones(len(positive)), -torch.ones(len(negative))]).double()
    inputs = inputs - inputs.mean(0)
    inputs = inputs / inputs.square().mean().sqrt().clamp(min=torch.finfo(inputs.dtype).tiny)
    weights, bias = (torch.zeros(size, dtype=torch.double, requires_grad=True) for size in (inputs.shape[1], 1))
    steps = torch.optim.LBFGS([weights, bias], max_iter=300, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        steps.zero_grad()
        found = F.softplus(-sides * (inputs @ weights + bias)).mean() + PENALTY / 2 * weights.square().sum()
        found.backward()
        return found

    steps.step(loss)
    return weights.detach()


# ---- separation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """The pairs for computing a direction (`train`), and the held-out pairs for evaluating it (`held`)."""

    train: Int[Tensor, " train"]
    held: Int[Tensor, " held"]

    @classmethod
    def drawn(cls, n_pairs: int, held_out: float, generator: torch.Generator) -> "Split":
        """A random split with a fraction `held_out`, at least one pair; ValueError for an invalid fraction or too few pairs."""
        if not 0 < held_out < 1:
            raise ValueError(
                f"held_out is the share of pairs to try the directions on, between 0 and 1, got {held_out}"
            )
        if n_pairs < 2:
            raise ValueError(f"steering vectors need at least two pairs, of which one is held out; got {n_pairs}")
        n_held = min(max(round(n_pairs * held_out), 1), n_pairs - 1)
        order = torch.randperm(n_pairs, generator=generator)
        return cls(order[n_held:].sort().values, order[:n_held].sort().values)


@dataclass(frozen=True)
class Sides:
    """The values of both sides at one site [pair, width], and their split."""

    positive: Float[Tensor, "pair width"]
    negative: Float[Tensor, "pair width"]
    split: Split

    def direction(self, method: str) -> Float[Tensor, " width"]:
        """The direction of a method for the training pairs."""
        return fitted(method, self.positive[self.split.train], self.negative[self.split.train])

    def midpoint(self, direction: Float[Tensor, "*n width"]) -> Float[Tensor, "*n"]:
        """The threshold: halfway between the mean projections of the two sides of the training pairs."""
        train = self.split.train
        return direction @ ((self.positive[train].mean(0) + self.negative[train].mean(0)) / 2)

    def norm(self) -> float:
        """The mean norm of the values of the training pairs."""
        return torch.cat([self.positive[self.split.train], self.negative[self.split.train]]).norm(dim=-1).mean().item()

    def separation(self, directions: Float[Tensor, "n width"]) -> Float[Tensor, "metric held"]:
        """How well projections separate each held-out pair: accuracy, AUC and d', averaged over directions.

        Accuracy is the fraction of the pair on the correct side of the threshold; AUC the fraction of correctly ordered
        comparisons of each prompt of the pair with the held-out prompts of the other side. Ties count one half. d' is the
        difference of the pair in standard deviations of a side (NaN if only one pair is held out).
        """
        threshold = self.midpoint(directions)
        up, down = (side[self.split.held] @ directions.T for side in (self.positive, self.negative))
        accuracy = (_above(up, threshold) + _above(threshold, down)) / 2
        beats = _above(up[:, None], down[None])  # [positive, negative, n]
        auc = (beats.mean(1) + beats.mean(0)) / 2
        deviation = torch.stack([up, down]).var(1, correction=0).mean(0).sqrt()
        d_prime = ((up - down) / deviation).masked_fill(up == down, 0)
        d_prime = d_prime if len(up) > 1 else torch.full_like(up, torch.nan)
        return torch.stack([accuracy.mean(-1), auc.mean(-1), d_prime.mean(-1)])

    def control(self, generator: torch.Generator) -> Float[Tensor, "n width"]:
        """Random directions with signs (and, in `separation`, thresholds) fitted to the training pairs."""
        drawn = torch.randn(N_RANDOM, self.positive.shape[1], generator=generator)
        train = self.split.train
        along = drawn @ (self.positive[train] - self.negative[train]).mean(0)
        return torch.where(along < 0, -1.0, 1.0)[:, None] * F.normalize(drawn, dim=1)


def _above(one: Tensor, other: Tensor) -> Tensor:
    """1 where `one` is larger, 0 where it is smaller, one half where they are equal."""
    return ((one - other).sign() + 1) / 2


# ---- many parts of a model ---------------------------------------------------------------------------------------------


def rank_heads(
    model: HookedRootModule,
    positive: Prompts,
    negative: Prompts,
    *,
    positions: PairPositions = -1,
    method: str = "mean",
    held_out: float = 0.25,
    seed: int = 0,
    batch_size: int = 32,
) -> MetricScores:
    """How well the output of each head and each MLP separates held-out pairs of prompts, along its contrast direction.

    The arguments are those of `steering_vectors`. The output of a head is `z`, that of an MLP `mlp_out`.

    Returns Measures with the axes metric (accuracy and auc, with 0.5 at chance, and d_prime), layer and head (the last label is
    "mlp"), and a value for each held-out pair; NaN for heads and MLPs that a layer lacks.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> women = ["Mary was ill, so", "Anna slept late because"]
    >>> men = ["Tom was ill, so", "Paul slept late because"]
    >>> rank_heads(model, women, men).select(metric="auc").mean.shape
    torch.Size([4, 9])
    """
    sides, split, places, _ = prepared(model, positive, negative, positions, method, held_out, seed)
    heads = _present(model, "z", ("batch", "pos", "head", "d_head"))
    mlps = _present(model, "mlp_out", STREAM)
    if not heads and not mlps:
        raise ValueError("this model has neither heads (z) nor MLPs (mlp_out) to rank")
    up, down = (
        values_at(model, side, [*heads.values(), *mlps.values()], place, batch_size)
        for side, place in zip(sides, places, strict=True)
    )
    n_heads = max((up[name].shape[1] for name in heads.values()), default=0)
    scores = torch.full((len(METRICS), model.cfg.n_layers, n_heads + 1, len(split.held)), torch.nan)
    parts = [
        (layer, head, up[name][:, head], down[name][:, head])
        for layer, name in heads.items()
        for head in range(up[name].shape[1])
    ]
    parts += [(layer, n_heads, up[name], down[name]) for layer, name in mlps.items()]
    for layer, head, above, below in parts:
        both = Sides(above, below, split)
        scores[:, layer, head] = both.separation(both.direction(method)[None])
    axes = {"metric": METRICS, "layer": range(model.cfg.n_layers), "head": [*range(n_heads), "mlp"]}
    return MetricScores(scores, axes, SHARES, about=provenance(model, **settings_of(method, positions, split, seed)))


def prepared(
    model: HookedRootModule,
    positive: Prompts,
    negative: Prompts,
    positions: PairPositions,
    method: str,
    held_out: float,
    seed: int,
) -> tuple[Any, Split, Any, torch.Generator]:
    """Checks the arguments; returns both sides, the split, the positions of both sides, and a random generator."""
    check_model(model)
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    sides = pairs(positive, negative)
    generator = torch.Generator().manual_seed(seed)
    split = Split.drawn(len(sides[0]), held_out, generator)
    return sides, split, positions_of(positions, sides), generator


def settings_of(method: str, positions: PairPositions, split: Split, seed: int) -> dict[str, Any]:
    """The settings of a contrast, for the metadata of its results."""
    as_given = isinstance(positions, (int, str)) or is_named(positions)
    where = positions if as_given else torch.as_tensor(positions).tolist()
    counts = {"train_pairs": len(split.train), "held_out_pairs": len(split.held)}
    return {"method": method, "positions": where, "seed": seed, **counts}


def _present(model: HookedRootModule, site: str, dims: tuple[str, ...]) -> dict[int, str]:
    """The layers that have a site; empty if none has it."""
    try:
        return sites_of(model, site, "each", dims)
    except KeyError:
        return {}
