"""A vector of the stream as a sparse sum of a lens's token directions, with coefficients that are not negative."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_lm.analysis.reading.jacobian_lens import JacobianLens, before_final_norm
from hooked_lm.analysis.reading.lens import MOST_NUMBERS, spelled
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import norm_of
from hooked_lm.extras import lazy_import
from hooked_lm.hooks.indices import indices_in
from hooked_lm.models.decoder import Decoder
from hooked_lm.results import stored
from hooked_lm.results.control import Control
from hooked_lm.results.scores import Scores, provenance
from hooked_lm.results.tabular import Tabular

if TYPE_CHECKING:
    from types import ModuleType

    import pandas as pd
    import plotly.graph_objects as go

    optimize: ModuleType
else:
    pd = lazy_import("pandas", "viz")
    optimize = lazy_import("scipy.optimize", "probes")

__all__ = ["LensDecomposition", "lens_decomposition"]

FORMAT = "hooked_lm.LensDecomposition"
OF = ("lens", "random")
SMALLEST = 1e-4  # a direction with a smaller cosine to what is left explains nothing


@dataclass(frozen=True, eq=False, repr=False)
class LensDecomposition(Tabular):
    """Vectors as sums of token directions, computed by `lens_decomposition`.

    `tokens` [vector, rank] are the ids in the order in which they were chosen, -1 where none helped any more; `coefficients`
    [vector, rank] are those of directions of length 1, in the end. `explained` is the share of each vector's squared length,
    with the axes of ("lens", and "random": the mean of lenses that were rotated at random) and tokens (how many).
    """

    tokens: Int[Tensor, "vector rank"]
    coefficients: Float[Tensor, "vector rank"]
    explained: Scores
    words: Mapping[int, str]

    @property
    def about(self) -> Mapping[str, Any]:
        """The model, the lens, its layer and settings."""
        return self.explained.about

    def to_dataframe(self) -> "pd.DataFrame":
        """A row for each vector and token: `vector`, `rank`, `token`, `id`, `coefficient`, and `explained`, with the tokens up to
        this one, beside that of random directions."""
        n, k = self.tokens.shape
        shares = {of: self.explained.select(of=of).values.T.flatten() for of in OF}
        table = pd.DataFrame(list(product(range(n), range(k))), columns=["vector", "rank"])
        ids = self.tokens.flatten()
        table = table.assign(
            token=[self.words.get(token, "") for token in ids.tolist()],
            id=ids.numpy(),
            coefficient=self.coefficients.flatten().numpy(),
            explained=shares["lens"].numpy(),
            random=shares["random"].numpy(),
        )
        return table[table["id"] >= 0].reset_index(drop=True)

    def plot(self, title: str = "") -> "go.Figure":
        """Lines over the number of tokens: the explained share, and that by random directions, with intervals over vectors."""
        from hooked_lm import viz

        parts = {of: self.explained.select(of=of) for of in OF}
        ends = {of: part.interval() for of, part in parts.items()} if self.explained.n_prompts > 1 else None
        return viz.lines(
            [int(n) for n in self.explained.axes["tokens"]],
            {of: part.mean for of, part in parts.items()},
            ends,
            title or f"Token directions at layer {self.about['layer']}",
            "tokens",
            "explained share",
            references=["random"],
        )

    def save(self, path: str | Path) -> None:
        """Write everything to one safetensors file; `load` restores it exactly."""
        tensors = {"tokens": self.tokens, "coefficients": self.coefficients, "explained": self.explained.values}
        header = {"axes": list(self.explained.axes.items()), "about": self.about, "words": list(self.words.items())}
        stored.write(path, FORMAT, tensors, header)

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "LensDecomposition":
        """Read what `save` wrote. Raises ValueError for any other file."""
        tensors, header = stored.read(path, FORMAT)
        explained = Scores(tensors.pop("explained"), dict(header["axes"]), about=header["about"])
        return cls(**tensors, explained=explained, words=dict(header["words"]))

    def __repr__(self) -> str:
        own, random = (float(self.explained.select(of=of).mean[-1]) for of in OF)
        n, k = self.tokens.shape
        what = f"{n} vector{'s' * (n != 1)} at layer {self.about['layer']}, at most {k} tokens"
        return f"LensDecomposition({what}; explained {own:.2f}, by random directions {random:.2f})"


@torch.no_grad()
def lens_decomposition(
    model: Decoder,
    vectors: Float[Tensor, "*vector d_model"],
    lens: JacobianLens,
    layer: int,
    *,
    k: int = 10,
    n_random: int = 4,
    seed: int = 0,
) -> LensDecomposition:
    """Write vectors of a layer's stream as sums of at most `k` token directions of a lens, with coefficients of at least 0.

    Greedy: the direction with the largest cosine to what is left joins those that were chosen, and all their coefficients are
    fitted anew (orthogonal matching pursuit, Pati et al. 1993, with the least squares of Lawson and Hanson 1974). If the final
    norm is a LayerNorm, the vectors' mean over dimensions is taken out first, which no direction has. Of tens of thousands of
    directions some always fit: so the same is done with the lens after random rotations of the stream.

    Args:
        vectors: of the stream at the lens's site, or any other directions there.
        layer: of these vectors; -1 is the last.
        n_random: how many random rotations are averaged.
        seed: seed of the rotations.

    Warns if random directions explain about as much. Raises ValueError for vectors of another width or of length 0, a lens of
    another model, and numbers out of range; IndexError for a layer that the model lacks; ImportError without scipy
    (`pip install 'hooked-lm[probes]'`).

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.analysis import fit_jacobian_lens
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> lens = fit_jacobian_lens(model, ["Mary went home."], layers=[2], held_out=0)
    >>> she, he = lens.vectors(model, [" she", " he"])[0]
    >>> found = lens_decomposition(model, 2 * she + he, lens, 2, k=2)
    >>> found.to_dataframe()["token"].tolist()
    [' she', ' he']
    """
    [layer] = indices_in("layer", [layer], model.cfg.n_layers)
    lens.check(model, lens.site, [layer])
    if vectors.shape[-1] != model.cfg.d_model:
        raise ValueError(f"vectors are as wide as the stream, {model.cfg.d_model}, got {list(vectors.shape)}")
    if not 1 <= k <= model.cfg.d_vocab or n_random < 1:
        raise ValueError(
            f"k is from 1 to {model.cfg.d_vocab}, the vocabulary, and n_random at least 1; got {k}, {n_random}"
        )
    x = vectors.detach().reshape(-1, vectors.shape[-1]).to(model.device, torch.float32)
    if isinstance(norm_of(model, "ln_final"), LayerNorm):
        x = x - x.mean(-1, keepdim=True)
    if bool((x.norm(dim=-1) < 1e-12).any()):
        raise ValueError("a vector has the length 0: there is nothing to decompose")
    tokens, coefficients, own = _pursuit(_Directions(model, lens, layer), x, k)
    others = [_pursuit(_Directions(model, lens.rotated(seed + i), layer), x, k)[2] for i in range(n_random)]
    random = torch.stack(others).mean(0)
    control = Control.compared(
        "random rotations of the stream",
        "explained share",
        float(own[-1].mean()),
        float(random[-1].mean()),
        "the directions",
    )
    control.warn_if_as_well()
    about = provenance(model, layer=layer, site=lens.site, lens=lens.name, n_random=n_random, seed=seed)
    axes: dict[str, Sequence[Any]] = {"of": OF, "tokens": range(1, k + 1)}
    explained = Scores(torch.stack([own, random]), axes, about=about | control.about())
    words = {-1: "", **spelled(model, tokens[tokens >= 0])}
    return LensDecomposition(tokens.cpu(), coefficients.cpu(), explained, words)


class _Directions:
    """The directions of all tokens at a layer, computed when they are needed."""

    def __init__(self, model: Decoder, lens: JacobianLens, layer: int) -> None:
        self.model, self.J = model, lens.J[lens.layers.index(layer)].to(model.device)
        step = max(1, MOST_NUMBERS // model.cfg.d_model)
        ids = torch.arange(model.cfg.d_vocab, device=model.device)
        self.lengths = torch.cat([self.of(some).norm(dim=-1) for some in ids.split(step)])
        self.step = max(1, MOST_NUMBERS // model.cfg.d_vocab)

    def of(self, ids: Int[Tensor, " token"]) -> Float[Tensor, "token d_model"]:
        """The directions of some tokens."""
        return before_final_norm(self.model, self.model.W_U.detach()[:, ids].T.to(self.J.dtype)) @ self.J

    def nearest(
        self, left: Float[Tensor, "vector d_model"], taken: Bool[Tensor, "vector token"]
    ) -> tuple[Float[Tensor, " vector"], Int[Tensor, " vector"]]:
        """The largest product of each vector with a direction of length 1 that is not taken, and its token."""
        W = self.model.W_U.detach().to(self.J.dtype)
        gained = (
            before_final_norm(self.model, torch.eye(len(W), device=W.device)) @ self.J @ left.T
        )  # [d_model, vector]
        products = (gained.T @ W) / self.lengths.clamp(min=1e-12)
        found = products.masked_fill(taken | (self.lengths <= 1e-12), -torch.inf).max(-1)
        return found.values, found.indices


def _pursuit(
    directions: _Directions, x: Float[Tensor, "vector d_model"], k: int
) -> tuple[Int[Tensor, "vector rank"], Float[Tensor, "vector rank"], Float[Tensor, "tokens vector"]]:
    """The tokens, their coefficients in the end, and the explained share after each step."""
    parts = [_pursued(directions, some, k) for some in x.split(directions.step)]
    tokens, coefficients, shares = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(coefficients), torch.cat(shares, -1)


def _pursued(
    directions: _Directions, x: Float[Tensor, "vector d_model"], k: int
) -> tuple[Int[Tensor, "vector rank"], Float[Tensor, "vector rank"], Float[Tensor, "tokens vector"]]:
    n, whole = len(x), x.square().sum(-1)
    tokens = torch.full((n, k), -1, device=x.device)
    coefficients = x.new_zeros(n, k)
    taken = torch.zeros(n, directions.model.cfg.d_vocab, dtype=torch.bool, device=x.device)
    left, shares = x.clone(), []
    for step in range(k):
        size, token = directions.nearest(left, taken)
        for row in (size > SMALLEST * whole.sqrt()).nonzero().flatten().tolist():
            tokens[row, step] = token[row]
            taken[row, token[row]] = True
            chosen = tokens[row, : step + 1]
            units = directions.of(chosen) / directions.lengths[chosen][:, None]
            fitted, _ = optimize.nnls(*(each.double().cpu().numpy() for each in (units.T, x[row])))
            coefficients[row, : step + 1] = torch.from_numpy(fitted)
            left[row] = x[row] - coefficients[row, : step + 1] @ units
        shares.append(1 - left.square().sum(-1) / whole)
    return tokens, coefficients, torch.stack(shares)
