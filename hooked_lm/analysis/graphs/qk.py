"""QK attribution: which pairs of sources, one at the query and one at a key, an attention score is the sum of."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.graphs.qk_maps import Side, refusal, sites_read
from hooked_lm.analysis.graphs.qk_sources import HEADS, WHOLE, sites_written, sources, terms_read
from hooked_lm.analysis.untrained import check_control, untrained_twin
from hooked_lm.components.attention.multihead import AbstractAttention
from hooked_lm.components.attention.position_scale import ScaledQueries
from hooked_lm.components.blocks.wiring import has_part
from hooked_lm.engine.conversations import reads_chats
from hooked_lm.engine.decoders import decoder
from hooked_lm.engine.prompts import Prompts, position_labels, rows_of
from hooked_lm.extras import lazy_import
from hooked_lm.hooks import Slice
from hooked_lm.hooks.head_labels import head_label, parse_head_label
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.vision.inputs import Rows
from hooked_lm.results import Label
from hooked_lm.results.control import UNTRAINED, Control
from hooked_lm.results.scores import Scores, provenance

if TYPE_CHECKING:
    import plotly.graph_objects as go
else:
    go = lazy_import("plotly.graph_objects", "viz")

__all__ = ["QKAttribution", "qk_attribution"]

QUERY, KEY, POSITION = "query_source", "key_source", "position"
BIAS = "position_bias"
TOLERANCE = 1e-4
Pairs = Float[Tensor, "head query_source key_source pos prompt"]


@dataclass(frozen=True, eq=False, repr=False)
class QKAttribution(Scores):
    """The terms of a head's attention scores; see `qk_attribution`.

    `values` are [query_source, key_source, position, prompt], or with several heads an axis more in front. A cell is what the
    two sources together add to the score of a key. `scores` [position, prompt] are those of the run, at `hook_attn_scores`.
    """

    scores: Float[Tensor, "..."] | None = None

    @property
    def completeness(self) -> float:
        """The largest difference between the sum of all terms of a key and its score, as a share of the largest score."""
        return float(self.about["completeness"])

    @property
    def control(self) -> Control | None:
        """The largest term of an untrained model, if it was computed."""
        return Control.of(self.about)

    def between_keys(self) -> "QKAttribution":
        """The terms minus their mean over keys. A softmax depends on these alone: what all keys have in common is 0.

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> found = qk_attribution(model, "When Mary and John left, Mary", "L1H7", control=None)
        >>> bool(found.between_keys().mean.sum(-1).abs().max() < 1e-3)
        True
        """
        axis = list(self.axes).index(POSITION)
        assert self.scores is not None
        about = {**self.about, "of": f"{self.about['of']}, minus the mean over keys"}
        of_scores = self.scores - self.scores.nanmean(-2, keepdim=True)
        return replace(
            self, values=self.values - self.values.nanmean(axis, keepdim=True), scores=of_scores, about=about
        )

    def plot(self, title: str = "", show_values: bool = False, position: Label | None = None) -> "go.Figure":
        """A heat map of the pairs of sources at one key: `position`, by default the key with the largest score."""
        if POSITION not in self.axes or len(self.axes) > 3:
            return super().plot(title, show_values)
        if position is None:
            assert self.scores is not None
            position = self.axes[POSITION][int(self.scores.mean(-1).nan_to_num(-torch.inf).argmax())]
        return Scores(self.values, self.axes, about=self.about).select(position=position).plot(title, show_values)

    def _changed_by(self, name: str, index: int | list[int]) -> dict[str, Any] | None:
        kept = [axis for axis in self.axes if axis not in (QUERY, KEY)]
        if self.scores is None or name not in kept:
            return None
        return {"scores": self.scores[(slice(None),) * kept.index(name) + (index,)]}

    def _summary(self) -> list[str]:
        sums = f"sums differ from the scores by {self.completeness:.1g} of the largest"
        return [sums, *([] if self.control is None else [repr(self.control)])]


@torch.no_grad()
@reads_chats
def qk_attribution(
    model: Decoder,
    prompts: Prompts,
    heads: str | Sequence[str],
    *,
    positions: int = -1,
    by: str = "layer",
    control: str | None = "auto",
) -> QKAttribution:
    """Which pairs of sources make a head attend where it does: its scores as a sum over what is written to the stream.

    Queries and keys are linear in the stream if the scales of the norms in front of them are held fixed, and the stream is the
    sum of its sources. So a score is a sum over pairs of a source at the query and one at the key,
    `x_a^T W_Q^T R(i - j) W_K x_b * scale` (Elhage et al. 2021, "A mathematical framework for transformer circuits"). All terms
    are kept: biases are sources, norms of queries and keys have fixed scales too, and a bias of positions is a term of its own,
    the cell ("position_bias", "position_bias"). A soft cap multiplies the terms of a score by its ratio, capped / uncapped
    (`about` says so).

    Args:
        prompts: texts or ids [batch, pos] of one length, `VisionInputs`, or a conversation.
        heads: the label of a head, such as "L1H7"; or several of one layer, an axis "head".
        positions: the position of the query, -1 for the last.
        by: "layer": a source is the output of a whole sublayer; "head": attention is split into heads and bias.
        control: "untrained": also the largest term of the same head of the untrained twin, for `.control`; "auto": of a small
            model; None.

    Returns a `QKAttribution` with the axes query_source, key_source and position, the keys that the query sees. NaN where a key
    is seen in other prompts only. Raises ValueError, with the name of the part, for attention that does something else than this,
    for a stream that is no sum, and if the terms do not sum to the scores; IndexError for heads and positions out of range.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> found = qk_attribution(model, "When Mary and John left, Mary", "L1H7", by="head")
    >>> found.completeness < 1e-5
    True
    >>> pair = found.select(position=-1).top(1)
    >>> list(pair.columns)
    ['query_source', 'key_source', 'value']
    """
    check_control(control)
    if by not in (WHOLE, HEADS):
        raise ValueError(f"by must be 'layer' or 'head', got {by!r}")
    layer, which = _heads_of(decoder(model, "QK attribution needs"), heads)
    rows = rows_of(model, prompts).to(model.device)
    if not -rows.shape[1] <= positions < rows.shape[1]:
        raise IndexError(f"position {positions} is out of range: the prompts have {rows.shape[1]} tokens")
    run = _Run(model, rows, layer, which, positions % rows.shape[1], by)
    found = run.found(isinstance(heads, str))
    if (twin := untrained_twin(model, control)) is None:
        return found
    of_twin = _Run(decoder(twin, "QK attribution needs"), rows, layer, which, run.query, by).found(
        isinstance(heads, str)
    )
    own, other = (float(each.between_keys().mean.abs().nan_to_num().max()) for each in (found, of_twin))
    beside = Control.compared(UNTRAINED, "largest term that differs between keys", own, other, "training")
    return replace(found, about={**found.about, **beside.about()})


def _heads_of(model: Decoder, heads: str | Sequence[str]) -> tuple[int, list[int]]:
    """The layer and the indices of heads. Raises ValueError for heads of several layers, IndexError for one that there is not."""
    labels = [heads] if isinstance(heads, str) else list(heads)
    found = [parse_head_label(label) for label in labels]
    layers = sorted({layer for layer, _ in found})
    if len(layers) != 1:
        raise ValueError(f"heads must be of one layer, got {labels}: each layer reads another stream")
    [layer] = layers
    if layer >= model.cfg.n_layers or not has_part(model.blocks[layer], "attn"):
        raise IndexError(f"there is no attention at layer {layer}; the model has {model.cfg.n_layers} layers")
    n_heads = model.blocks[layer].attn.cfg.n_heads
    if wrong := [label for label, (_, head) in zip(labels, found, strict=True) if head >= n_heads]:
        raise IndexError(f"there is no head {wrong[0]}: layer {layer} has {n_heads} heads")
    return layer, [head for _, head in found]


class _Run:
    """A cached run, and the terms of the scores of some heads at one query."""

    def __init__(self, model: Decoder, rows: Rows, layer: int, heads: list[int], query: int, by: str) -> None:
        self.model, self.rows, self.layer, self.heads, self.query, self.by = model, rows, layer, heads, query, by
        self.attn: Any = model.blocks[layer].attn
        _check_scores(self.attn, layer)
        self.context = model.embedded(rows)[2]
        self.sides = {name: Side(model, {}, self.context, layer, name, Slice(None)) for name in "qk"}
        self.terms = {name: terms_read(model, side.source_layer, side.reads) for name, side in self.sides.items()}
        self.at = f"blocks.{layer}.attn.hook_attn_scores"
        sites = {self.at, *sites_read(model, layer)}
        sites.update(site for of in self.terms.values() for site in sites_written(model, of, by))
        _, self.cache = model.run_with_cache(
            rows, names_filter=sorted(sites), return_type=None, stop_at_layer=layer + 1
        )

    def found(self, is_one: bool) -> QKAttribution:
        """The terms of all pairs, checked against the scores."""
        of_run = self.cache[self.at][:, self.heads, self.query].float().permute(1, 2, 0)  # [head, pos, prompt]
        seen = of_run.isfinite()
        keys = seen.any(0).any(-1).nonzero().flatten().tolist()
        of_run = of_run.masked_fill(~seen, torch.nan)[:, keys]
        queries, of_keys = self.read("q", [self.query]), self.read("k", keys)
        terms = torch.einsum(
            "abhd,cbkhd->hackb", torch.stack([*queries.values()])[:, :, 0], torch.stack([*of_keys.values()])
        )
        terms, note = self.capped(terms * self.attn.scale)
        axes: dict[str, Sequence[Label]] = {QUERY: list(queries), KEY: list(of_keys)}
        if (bias := self.position_bias(keys)) is not None:
            terms = torch.nn.functional.pad(terms, (0, 0, 0, 0, 0, 1, 0, 1))
            terms[:, -1, -1] = bias
            axes = {name: [*labels, BIAS] for name, labels in axes.items()}
        terms = terms.masked_fill(of_run.isnan()[:, None, None], torch.nan).float().cpu()
        completeness = self.checked(terms, of_run.cpu())
        labels = position_labels(self.model, self.rows)
        axes[POSITION] = [labels[key] for key in keys]
        names = [head_label(self.layer, head) for head in self.heads]
        about = provenance(
            self.model,
            of="attention score",
            heads=names,
            query=str(labels[self.query]),
            by=self.by,
            completeness=completeness,
        )
        about |= {} if note is None else {"soft_cap": note}
        if is_one:
            return QKAttribution(terms[0], axes, scores=of_run[0].cpu(), about=about)
        return QKAttribution(terms, {"head": names, **axes}, scores=of_run.cpu(), about=about)

    def read(self, name: str, positions: list[int]) -> dict[str, Float[Tensor, "prompt pos head d_head"]]:
        """What each source is in the queries or keys of the heads at some positions."""
        at = Slice(positions)
        side = replace(self.sides[name], cache=self.cache, positions=at)
        found = side.run(sources(self.model, self.cache, self.terms[name], self.by, at))
        n_heads, n_made = self.attn.cfg.n_heads, next(iter(found.values())).shape[2]
        which = [head // (n_heads // n_made) for head in self.heads]
        return {label: value[:, :, which] for label, value in found.items()}

    def capped(self, terms: Pairs) -> tuple[Pairs, str | None]:
        """The terms times the ratio of capped to uncapped scores, and what was done in words."""
        if (cap := self.attn.soft_cap) is None:
            return terms, None
        raw = terms.sum((1, 2), keepdim=True)
        ratio = torch.where(raw == 0, 1.0, cap * (raw / cap).tanh() / raw)
        return (
            terms * ratio,
            f"terms are times the ratio of the soft cap of {cap:g}, {ratio.min():.3g} to {ratio.max():.3g}",
        )

    def position_bias(self, keys: list[int]) -> Float[Tensor, "head pos #prompt"] | None:
        """The bias of positions that is added to the scores; None if there is none, or it only masks."""
        if self.attn.position_bias is None:
            return None
        bias = self.attn.position_bias.bias(self.context, torch.float32)
        whole = bias.expand(-1, self.attn.cfg.n_heads, self.rows.shape[1], self.rows.shape[1])
        found = whole[:, self.heads, self.query][..., keys].permute(1, 2, 0)
        return found if bool((found.isfinite() & (found != 0)).any()) else None

    def checked(self, terms: Pairs, of_run: Float[Tensor, "head pos prompt"]) -> float:
        """The largest difference of a sum from a score, as a share of the largest. Raises ValueError if it is no rounding."""
        difference = (terms.sum((1, 2)) - of_run).abs().nan_to_num()
        size = max(float(of_run.abs().nan_to_num().max()), torch.finfo(torch.float32).tiny)
        spread = float(terms.square().sum((1, 2)).sqrt().nan_to_num().max())
        eps = torch.finfo(self.cache[self.at].dtype).eps
        if not float(difference.max()) <= max(TOLERANCE, 32 * eps) * max(size, spread):
            why = "does something that is not linear"
            if getattr(self.attn.cfg, "clip", None) is not None:
                why = f"clips its queries and keys at {self.attn.cfg.clip:g}"
            found = f"{why}: the sum of the terms differs from scores up to {size:.3g} by {float(difference.max()):.2g}"
            raise refusal(self.layer, self.attn, found)
        return float(difference.max()) / size


def _check_scores(attn: Any, layer: int) -> None:
    """Raises ValueError for attention whose scores are more than products of its queries and keys."""
    if not isinstance(attn, AbstractAttention):
        raise refusal(layer, attn, "is not known here")
    if type(attn).scored not in (AbstractAttention.scored, ScaledQueries.scored):
        raise refusal(layer, attn, "adds something to its scores that depends on the stream")
