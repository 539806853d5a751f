"""Floors: dictionaries of random directions and of principal components, with which any dictionary is compared.

Those of a transcoder have the same encoders, on its inputs, and directions that are fitted to its outputs.
"""

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.interventions.dictionaries.architectures import TopK
from hooked_lm.interventions.dictionaries.hook import Coder, encoded
from hooked_lm.interventions.dictionaries.sae import frozen

CONTROLS = ("auto", None)
OWN_SEEDS = 30_014_159  # so that a dictionary does not start from the directions of its floor
FIT_ROWS = 16_384  # vectors from which floors are made
PER_DIMENSION = 2  # vectors for each dimension from which a PCA dictionary is made
FEATURES = 2**26  # numbers that are in memory at once


class Floors(NamedTuple):
    """The dictionaries that need no training, of the size and L0 of another; no PCA where there are too few vectors for it."""

    random: TopK
    pca: TopK | None

    def by_name(self) -> dict[str, TopK]:
        """Those that there are, by the names of the fields."""
        return {"random": self.random, **({} if self.pca is None else {"pca": self.pca})}


def random_dictionary(
    vectors: Float[Tensor, "row d_in"],
    width: int,
    k: int,
    *,
    norm: float = 1.0,
    seed: int = 0,
    outputs: Float[Tensor, "row d_out"] | None = None,
    skip_connection: bool = False,
) -> TopK:
    """A dictionary of random directions: what a dictionary reaches by its size alone.

    The `k` directions with the largest products with a vector, less the mean of all, are active. All features share one factor,
    which makes reconstructions of these vectors as good as it can.

    Args:
        width, k: the number of features, and how many are active.
        norm: of the rows of `W_dec`.
        outputs, skip_connection: the outputs of a transcoder for these vectors, and whether it has a skip connection. Then the
            directions are fitted: that of each feature is the regression of the outputs on it alone, all times one factor. A
            skip connection is the regression of the outputs on the vectors, and the features explain what it leaves.

    Raises ValueError for fewer than two vectors.

    >>> x = torch.randn(500, 16, generator=torch.Generator().manual_seed(0))
    >>> random_dictionary(x, width=64, k=4)
    TopK(d_in=16, d_sae=64, subtract_b_dec=True, k=4)
    """
    mean = _mean(vectors)
    sae = TopK.Config(d_in=vectors.shape[1], d_sae=width, k=k).build(seed + OWN_SEEDS).to(vectors.device)
    with torch.no_grad():
        sae.b_dec.copy_(mean)
        few = _some(vectors, width)
        made, wanted = sae(few) - mean, few - mean
        size = float(made.pow(2).sum())
        sae.W_enc.mul_(float((made * wanted).sum()) / size if size else 1.0)
        sae.scale_features_(torch.full((width,), 1 / norm, device=vectors.device))
    return frozen(sae if outputs is None else _fitted(sae, vectors, outputs, skip_connection, norm))


def pca_dictionary(
    vectors: Float[Tensor, "row d_in"],
    width: int,
    k: int,
    *,
    norm: float = 1.0,
    outputs: Float[Tensor, "row d_out"] | None = None,
    skip_connection: bool = False,
) -> TopK:
    """A dictionary of principal components: what a dictionary reaches by the variance of the vectors alone.

    Each component is two features, one for each sign, and the `k` largest of a vector are active. It has at most two features
    for each dimension; `width` and `k` are the most.

    Args:
        width, k: the number of features, and how many are active, at most one for each component.
        norm: of the rows of `W_dec`.
        outputs, skip_connection: as for `random_dictionary`.

    Raises ValueError for fewer vectors than components are active.

    >>> x = torch.randn(500, 16, generator=torch.Generator().manual_seed(0))
    >>> sae = pca_dictionary(x, width=64, k=16)
    >>> sae.cfg.d_sae, torch.allclose(sae(x), x, atol=1e-5)
    (32, True)
    """
    mean = _mean(vectors)
    if len(vectors) <= k:
        raise ValueError(f"{len(vectors)} vectors have fewer than k={k} principal components: give more vectors")
    centred = (vectors - mean).double()
    components = torch.linalg.eigh(centred.T @ centred).eigenvectors.T.flip(0).float()[: ceil(width / 2)]
    directions = torch.stack([components, -components], 1).flatten(0, 1)[:width]
    n = len(directions)
    sae = TopK.Config(d_in=vectors.shape[1], d_sae=n, k=min(k, n)).build().to(vectors.device)
    with torch.no_grad():
        sae.b_dec.copy_(mean)
        sae.W_dec.copy_(directions)
        sae.W_enc.copy_(directions.T)
        sae.scale_features_(torch.full((n,), 1 / norm, device=vectors.device))
    return frozen(sae if outputs is None else _fitted(sae, vectors, outputs, skip_connection, norm))


def _fitted(sae: TopK, x: Tensor, outputs: Float[Tensor, "row d_out"], skip_connection: bool, norm: float) -> TopK:
    """The transcoder with the encoder of a dictionary, and directions that are fitted to the outputs."""
    cfg = replace(sae.cfg, d_out=outputs.shape[1], subtract_b_dec=False, skip_connection=skip_connection)
    made = cfg.build().to(x.device)
    with torch.no_grad():
        made.W_enc.copy_(sae.W_enc)
        made.b_enc.copy_(-sae.b_dec @ sae.W_enc)
        left = outputs
        if made.W_skip is not None:
            made.W_skip.copy_(_regression(x, outputs, lambda x, y: torch.linalg.lstsq(x, y).solution))
            left = outputs - x @ made.W_skip
        features = made.encode(few := _some(x, sae.cfg.d_sae))
        left = left[: len(few)]
        made.W_dec.copy_(_regression(features, left, _one_by_one))
        made.b_dec.copy_((left - features @ made.W_dec).mean(0))
        made.scale_features_(made.W_dec.norm(dim=1).clamp_min(1e-12) / norm)
    return made


def _one_by_one(x: Float[Tensor, "row d"], y: Float[Tensor, "row d_out"]) -> Float[Tensor, "d d_out"]:
    """The regression of y on each entry of x alone, smaller for an entry that is hardly ever active, as it says little."""
    sizes = x.pow(2).sum(0)
    return (x.T @ y) / (sizes + sizes.mean().clamp_min(1e-12))[:, None]


def _regression(
    x: Float[Tensor, "row d"], y: Float[Tensor, "row d_out"], fit: Callable[[Tensor, Tensor], Tensor]
) -> Float[Tensor, "d d_out"]:
    """Weights that predict y from x, both less their means, times the factor that is best for rows outside of the fit.

    The factor comes from a fit to every second row, so that what fits the noise of few rows becomes small.
    """
    x, y = ((values - values.mean(0)).double() for values in (x, y))
    made, wanted = x[1::2] @ fit(x[::2], y[::2]), y[1::2]
    size = float(made.pow(2).sum())
    return (fit(x, y) * (float((made * wanted).sum()) / size if size else 1.0)).float()


def floors_of(
    sae: Coder,
    vectors: Float[Tensor, "row d_in"],
    control: str | None,
    seed: int = 0,
    outputs: Float[Tensor, "row d_out"] | None = None,
) -> tuple[Floors | None, str]:
    """The floors of a dictionary, with as many features and as many of them active on these vectors; and what they are, in words.

    `outputs`: what a transcoder should make of the vectors. None, with the reason, if no control is wanted, and if there are no
    more vectors than active features. Raises ValueError for another control.
    """
    check_control(control)
    if control is None:
        return None, "none"
    with torch.no_grad():
        width = encoded(sae, vectors[:1]).shape[-1]
        features = encoded(sae, _some(vectors, width))
    k = min(width, max(1, ceil(float((features != 0).sum()) / len(features))))
    if len(vectors) <= k:
        return None, f"none: {len(vectors)} vectors are too few"
    weight = getattr(sae, "W_dec", None)
    norm = float(weight.detach().norm(dim=-1).median()) if isinstance(weight, Tensor) else 1.0
    norm = norm or 1.0
    options: dict[str, Any] = {"norm": norm, "outputs": outputs}
    if outputs is not None:
        options["skip_connection"] = getattr(sae, "W_skip", None) is not None
    random = random_dictionary(vectors, width, k, seed=seed, **options)
    if len(vectors) < PER_DIMENSION * vectors.shape[1]:  # components that were made from few vectors explain just those
        words = f"{len(vectors)} vectors are too few for {vectors.shape[1]} principal components"
        return Floors(random, None), f"a random dictionary with {k} active features; {words}"
    made = Floors(random, pca_dictionary(vectors, width, k, **options))
    return made, f"random and PCA dictionaries with {k} active features"


def check_control(control: str | None) -> None:
    """Raises ValueError for a control that is not known."""
    if control not in CONTROLS:
        raise ValueError(f"control must be 'auto' or None, got {control!r}")


def _some(vectors: Float[Tensor, "row d_in"], width: int) -> Float[Tensor, "some d_in"]:
    """The first vectors, so many that their features take no more than 256 MB."""
    return vectors[: max(256, FEATURES // width)]


def _mean(vectors: Float[Tensor, "row d_in"]) -> Float[Tensor, " d_in"]:
    if vectors.ndim != 2 or len(vectors) < 2:
        raise ValueError(f"vectors are [row, d_in], at least two, got {list(vectors.shape)}")
    return vectors.double().mean(0).to(vectors.dtype)
