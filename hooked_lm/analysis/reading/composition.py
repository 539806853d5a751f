"""Composition scores of pairs of heads, computed from the weights."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.reading.heads import ChanceScores, check_model
from hooked_lm.components.blocks.wiring import has_part
from hooked_lm.factored_matrix import FactoredMatrix
from hooked_lm.models.decoder import Decoder
from hooked_lm.results.scores import Scores, provenance

KINDS = ("Q", "K", "V")
WEIGHTS = ("W_Q", "W_K", "W_V", "W_O")
Shape = tuple[int, ...]
PairScores = Float[Tensor, "head later_head"]


@dataclass(frozen=True, eq=False, repr=False)
class CompositionScores(ChanceScores):
    """Scores of pairs of heads; `chance` is the mean score of random heads, `spread` the standard deviation."""

    spread: Float[Tensor, "..."] | None = None
    GRID: ClassVar[tuple[str, ...]] = ("values", "chance", "spread")

    def in_deviations(self) -> Scores:
        """The z-scores of the pairs: (score - chance) / spread. A pair within 2 is like most random pairs."""
        assert self.spread is not None
        return Scores(self.above_chance().values / self.spread, self.axes, about=self.about)


def head_composition(model: Decoder, kind: str = "Q", *, n_random: int = 50, seed: int = 0) -> CompositionScores:
    """The composition scores of each head with each head of a later layer, through its queries, keys or values.

    `|OV1 M2| / (|OV1| |M2|)` in Frobenius norms, between 0 and 1, where M2 is `W_Q W_K^T` of the later head for "Q", its
    transpose for "K", and `W_V W_O` for "V" (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"). The
    scores equal those of `model.all_composition_scores`, and hybrid models are supported. Random matrices have scores above 0,
    so `chance` is the mean score of `n_random` pairs of heads of the same shapes with independent normal weights (the baseline
    of the same paper), drawn with `seed`, and `spread` the standard deviation.

    Neither norm weights that are not folded nor rotary embeddings are taken into account. With grouped-query attention, each
    query head uses the keys and values of its group.

    Returns scores with the axes layer, head, later_layer, later_head, for one "prompt"; NaN unless later_layer > layer, and for
    layers without these weights. Raises ValueError for an unknown kind, n_random below 2, and if no layer has these weights.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> scores = head_composition(model, "K")
    >>> far = scores.in_deviations().select(layer=0, head=6, later_layer=1).mean > 6
    >>> far.tolist()  # all heads of layer 1 but the second are induction heads, and head 6 tells what came before
    [True, False, True, True, True, True, True, True]
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be 'Q', 'K' or 'V', got {kind!r}")
    if n_random < 2:
        raise ValueError(f"n_random must be 2 or more, got {n_random}")
    check_model(model)
    attentions = _attentions(model)
    n_layers, n_heads = len(model.blocks), max(attn.cfg.n_heads for attn in attentions.values())
    values = torch.full((n_layers, n_heads, n_layers, n_heads), torch.nan)
    chance, spread = values.clone(), values.clone()
    known = dict[tuple[Shape, Shape], tuple[float, float]]()
    with torch.no_grad():
        written = dict[int, _Thin]()
        for later, attn in attentions.items():
            read = _Thin.right(_reader(attn, kind))
            for layer, left in written.items():
                found = _scores(left, read)
                shapes = left.shape, read.shape
                if shapes not in known:
                    known[shapes] = _of_random_heads(*shapes, n_random, seed)
                place = (layer, slice(found.shape[0]), later, slice(found.shape[1]))
                values[place] = found.cpu()
                chance[place], spread[place] = known[shapes]
            written[later] = _Thin.left(_output(attn))
    axes = {
        "layer": range(n_layers),
        "head": range(n_heads),
        "later_layer": range(n_layers),
        "later_head": range(n_heads),
    }
    about = provenance(model, of=f"{kind}-composition score", kind=kind, n_random=n_random, seed=seed)
    return CompositionScores(values[..., None], axes, chance=chance[..., None], spread=spread[..., None], about=about)


def _attentions(model: Decoder) -> dict[int, Any]:
    """The attention of each layer that has the weights W_Q, W_K, W_V and W_O."""
    found = {
        layer: block.attn
        for layer, block in enumerate(model.blocks)
        if has_part(block, "attn") and set(WEIGHTS) <= {name for name, _ in block.attn.named_parameters()}
    }
    if not found:
        raise ValueError(f"no layer of this model has attention with the weights {', '.join(WEIGHTS)}")
    return found


@dataclass(frozen=True)
class _Thin:
    """Low-rank matrices of heads without their outer orthogonal factor, [head, d_head, d_model] or [head, d_model, d_head], whose
    products have the same norms; the norms of the matrices; and the shape [d_model, d_head] of their factors."""

    matrices: Float[Tensor, "head _ _"]
    norms: Float[Tensor, " head"]
    shape: Shape

    @classmethod
    def left(cls, matrices: FactoredMatrix) -> "_Thin":
        """For the left factors of products."""
        return cls(matrices.collapse_l(), matrices.S.norm(dim=-1), tuple(matrices.A.shape[-2:]))

    @classmethod
    def right(cls, matrices: FactoredMatrix) -> "_Thin":
        """For the right factors of products."""
        return cls(matrices.collapse_r(), matrices.S.norm(dim=-1), tuple(matrices.A.shape[-2:]))


def _output(attn: Any) -> FactoredMatrix:
    """`W_V W_O` of each head."""
    return FactoredMatrix(_of_query_heads(attn, attn.W_V).float(), attn.W_O.float())


def _reader(attn: Any, kind: str) -> FactoredMatrix:
    """The matrix M2 of each head; see `head_composition`."""
    if kind == "V":
        return _output(attn)
    W_Q, W_K = attn.W_Q.float(), _of_query_heads(attn, attn.W_K).float()
    return FactoredMatrix(W_Q, W_K.mT) if kind == "Q" else FactoredMatrix(W_K, W_Q.mT)


def _of_query_heads(attn: Any, weight: Float[Tensor, "kv_head d_model d_head"]) -> Float[Tensor, "head d_model d_head"]:
    return weight.repeat_interleave(attn.cfg.n_heads // weight.shape[0], 0)


def _scores(left: _Thin, right: _Thin) -> PairScores:
    """`|left right| / (|left| |right|)` for each pair of heads."""
    norms = torch.stack([(matrix @ right.matrices).norm(dim=(-2, -1)) for matrix in left.matrices])
    return norms / (left.norms[:, None] * right.norms)


def _of_random_heads(left: Shape, right: Shape, n_random: int, seed: int) -> tuple[float, float]:
    """The mean score of pairs of heads with independent normal weights, and the standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    pairs = ([_random(shape, generator) for shape in (left, right)] for _ in range(n_random))
    scores = torch.stack([_scores(_Thin.left(one), _Thin.right(other))[0, 0] for one, other in pairs])
    return float(scores.mean()), float(scores.std())


def _random(shape: Shape, generator: torch.Generator) -> FactoredMatrix:
    A, B = (torch.randn(1, *shape, generator=generator) for _ in range(2))
    return FactoredMatrix(A, B.mT)
