"""One run of a model, and the terms of the attention scores of some heads in it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.analysis.graphs.features import rounding
from hooked_lm.analysis.graphs.qk_features import OTHERS, FeatureSplit
from hooked_lm.analysis.graphs.qk_maps import Side, refusal, sites_read
from hooked_lm.analysis.graphs.qk_sources import sites_written, sources, terms_read
from hooked_lm.components.attention.multihead import AbstractAttention
from hooked_lm.components.attention.position_scale import ScaledQueries
from hooked_lm.hooks import Slice
from hooked_lm.interventions.dictionaries import LayerTranscoders
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.vision.inputs import Rows

BIAS = "position_bias"
TOLERANCE = 1e-4
Pairs = Float[Tensor, "head query_source key_source pos prompt"]
Vectors = dict[str, Float[Tensor, "prompt _pos head d_head"]]  # of each source, in the queries or keys of heads


@dataclass(frozen=True)
class ScoreTerms:
    """The terms of the scores of heads at one query.

    `keys` are the positions that it sees, `scores` those of the run, NaN where a prompt does not see a key. `soft_cap` says in
    words what was done with a cap, and `completeness` is the largest difference of a sum, as a share of the largest score.
    """

    terms: Pairs
    queries: list[str]
    of_keys: list[str]
    keys: list[int]
    scores: Float[Tensor, "head pos prompt"]
    completeness: float
    soft_cap: str | None


class QKRun:
    """A cached run for the scores of some heads of a layer.

    Args:
        query: the position of the query.
        by: "layer" or "head", as in `qk_attribution`.
        transcoders, k: features that are sources; of each side the k with the largest terms.

    Raises ValueError for attention whose scores are no such sum.
    """

    def __init__(
        self,
        model: Decoder,
        rows: Rows,
        layer: int,
        heads: Sequence[int],
        query: int,
        by: str,
        transcoders: LayerTranscoders | None = None,
        k: int = 1,
    ) -> None:
        self.model, self.rows, self.layer, self.heads, self.query = model, rows, layer, list(heads), query
        self.by, self.k = by, k
        self.attn: Any = model.blocks[layer].attn
        _check_scores(self.attn, layer)
        self.context = model.embedded(rows)[2]
        self.sides = {name: Side(model, {}, self.context, layer, name, Slice(None)) for name in "qk"}
        self.terms = {name: terms_read(model, side.source_layer, side.reads) for name, side in self.sides.items()}
        self.at = f"blocks.{layer}.attn.hook_attn_scores"
        sites = {self.at, *sites_read(model, layer)}
        sites.update(site for of in self.terms.values() for site in sites_written(model, of, by))
        sites.update(() if transcoders is None else FeatureSplit.sites(model, transcoders))
        stop = layer + 1 if transcoders is None else None
        _, self.cache = model.run_with_cache(rows, names_filter=sorted(sites), return_type=None, stop_at_layer=stop)
        self.splits: dict[str, FeatureSplit] = {}
        if transcoders is not None:
            of = {name: FeatureSplit(model, self.cache, transcoders, terms) for name, terms in self.terms.items()}
            self.splits = {name: split for name, split in of.items() if split.terms}

    def found(self) -> ScoreTerms:
        """The terms of all pairs, checked against the scores."""
        scores = self.cache[self.at][:, self.heads, self.query].float().permute(1, 2, 0)  # [head, pos, prompt]
        seen = scores.isfinite()
        keys = seen.any(0).any(-1).nonzero().flatten().tolist()
        scores = scores.masked_fill(~seen, torch.nan)[:, keys]
        queries, of_keys = self._read(keys)
        ends = torch.stack([*queries.values()])[:, :, 0], torch.stack([*of_keys.values()])
        terms, note = self._capped(torch.einsum("abhd,cbkhd->hackb", *ends) * self.attn.scale)
        names, other_names = list(queries), list(of_keys)
        if (bias := self._position_bias(keys)) is not None:
            terms = F.pad(terms, (0, 0, 0, 0, 0, 1, 0, 1))
            terms[:, -1, -1] = bias
            names, other_names = [*names, BIAS], [*other_names, BIAS]
        terms = terms.masked_fill(scores.isnan()[:, None, None], torch.nan).float().cpu()
        scores = scores.cpu()
        return ScoreTerms(terms, names, other_names, keys, scores, self._checked(terms, scores), note)

    # ---- queries and keys ------------------------------------------------------------------------------------------------

    def _read(self, keys: list[int]) -> tuple[Vectors, Vectors]:
        """What each source is in the query, and in the keys at some positions."""
        whole = {"q": self._written("q", [self.query]), "k": self._written("k", keys)}
        if not self.splits:
            return whole["q"], whole["k"]
        at = {"q": [self.query], "k": keys}
        features = {name: [self._features(name, position) for position in at[name]] for name in "qk"}
        sums = {
            name: torch.stack([*whole[name].values()]).sum(0)[0]  # [pos, head, d_head]
            + torch.stack([sum(each.values(), torch.zeros_like(whole[name]["embed"][0, 0])) for each in features[name]])
            for name in "qk"
        }
        with_keys = torch.einsum("khd->hdk", sums["k"])
        return (
            whole["q"] | self._kept(features["q"], lambda vectors: torch.einsum("fhd,hdk->fhk", vectors, with_keys)),
            whole["k"] | self._kept(features["k"], lambda vectors: torch.einsum("fhd,hd->fh", vectors, sums["q"][0])),
        )

    def _side(self, name: str, positions: list[int]) -> Side:
        return replace(self.sides[name], cache=self.cache, positions=Slice(positions))

    def _of_heads(self, value: Float[Tensor, "*lead made d_head"]) -> Float[Tensor, "*lead head d_head"]:
        """The vectors of the heads, some of which may share one."""
        group = self.attn.cfg.n_heads // value.shape[-2]
        return value[..., [head // group for head in self.heads], :]

    def _written(self, name: str, positions: list[int]) -> Vectors:
        """What each source is in the queries or keys at some positions, and what split MLPs add besides features."""
        at, split = Slice(positions), self.splits.get(name)
        without = [] if split is None else split.labels
        found = sources(self.model, self.cache, self.terms[name], self.by, at, without)
        found |= {} if split is None else split.rest(at)
        return {label: self._of_heads(value) for label, value in self._side(name, positions).run(found).items()}

    def _features(self, name: str, position: int) -> dict[str, Float[Tensor, "head d_head"]]:
        """What each active feature is in the query or the key at a position."""
        split = self.splits.get(name)
        written = {} if split is None else split.at(position)
        if not written:
            return {}
        vectors = self._side(name, [position]).linear(torch.stack([*written.values()])[:, None, None])
        return dict(zip(written, self._of_heads(vectors)[:, 0, 0].unbind(), strict=True))

    def _kept(self, features: list[dict[str, Tensor]], terms_of: Callable[[Tensor], Tensor]) -> Vectors:
        """The features with the largest terms, by label, and the sum of the others."""
        largest: dict[str, float] = {}
        for each in features:
            if each:
                sizes = terms_of(torch.stack([*each.values()])).abs().flatten(1).amax(1)
                for label, size in zip(each, sizes.tolist(), strict=True):
                    largest[label] = max(size, largest.get(label, 0.0))
        labels = sorted(largest, key=largest.__getitem__, reverse=True)
        if not labels:
            return {}
        zero = torch.zeros_like(next(vector for each in features for vector in each.values()))
        kept, rest = labels[: self.k], set(labels[self.k :])
        found = {label: torch.stack([each.get(label, zero) for each in features])[None] for label in kept}
        others = [sum((vector for label, vector in each.items() if label in rest), zero) for each in features]
        return found | ({OTHERS: torch.stack(others)[None]} if rest else {})

    # ---- scores ----------------------------------------------------------------------------------------------------------

    def _capped(self, terms: Pairs) -> tuple[Pairs, str | None]:
        """The terms times the ratio of capped to uncapped scores, and what was done in words."""
        if (cap := self.attn.soft_cap) is None:
            return terms, None
        raw = terms.sum((1, 2), keepdim=True)
        ratio = torch.where(raw == 0, 1.0, cap * (raw / cap).tanh() / raw)
        return (
            terms * ratio,
            f"terms are times the ratio of the soft cap of {cap:g}, {ratio.min():.3g} to {ratio.max():.3g}",
        )

    def _position_bias(self, keys: list[int]) -> Float[Tensor, "head pos #prompt"] | None:
        """The bias of positions that is added to the scores; None if there is none, or it only masks."""
        if self.attn.position_bias is None:
            return None
        bias = self.attn.position_bias.bias(self.context, torch.float32)
        whole = bias.expand(-1, self.attn.cfg.n_heads, self.rows.shape[1], self.rows.shape[1])
        found = whole[:, self.heads, self.query][..., keys].permute(1, 2, 0)
        return found if bool((found.isfinite() & (found != 0)).any()) else None

    def _checked(self, terms: Pairs, scores: Float[Tensor, "head pos prompt"]) -> float:
        """The largest difference of a sum from a score, as a share of the largest. Raises ValueError if it is no rounding."""
        difference = float((terms.sum((1, 2)) - scores).abs().nan_to_num().max())
        size = max(float(scores.abs().nan_to_num().max()), torch.finfo(torch.float32).tiny)
        spread = float(terms.square().sum((1, 2)).sqrt().nan_to_num().max())
        eps = max(
            [torch.finfo(self.cache[self.at].dtype).eps, *(rounding(each.transcoders) for each in self.splits.values())]
        )
        if not difference <= max(TOLERANCE, 4 * eps) * max(size, spread):
            clip = getattr(self.attn.cfg, "clip", None)
            why = "does something that is not linear" if clip is None else f"clips its queries and keys at {clip:g}"
            found = f"{why}: the sum of the terms differs from scores up to {size:.3g} by {difference:.2g}"
            raise refusal(self.layer, self.attn, found)
        return difference / size


def _check_scores(attn: nn.Module, layer: int) -> None:
    """Raises ValueError for attention whose scores are more than products of its queries and keys."""
    if not isinstance(attn, AbstractAttention):
        raise refusal(layer, attn, "is not known here")
    if type(attn).scored not in (AbstractAttention.scored, ScaledQueries.scored):
        raise refusal(layer, attn, "adds something to its scores that depends on the stream")
