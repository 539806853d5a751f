"""QK attribution: which pairs of sources, one at the query and one at a key, an attention score is the sum of."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.graphs.qk_run import QKRun, ScoreTerms
from hooked_lm.analysis.graphs.qk_sources import HEADS, WHOLE
from hooked_lm.analysis.untrained import check_control, untrained_twin
from hooked_lm.components.blocks.wiring import has_part
from hooked_lm.engine.conversations import reads_chats
from hooked_lm.engine.decoders import decoder
from hooked_lm.engine.prompts import Prompts, position_labels, rows_of
from hooked_lm.extras import lazy_import
from hooked_lm.hooks.head_labels import head_label, parse_head_label
from hooked_lm.interventions.dictionaries import LayerTranscoders
from hooked_lm.models.decoder import Decoder
from hooked_lm.results import Label
from hooked_lm.results.control import UNTRAINED, Control
from hooked_lm.results.scores import Scores, provenance

if TYPE_CHECKING:
    import plotly.graph_objects as go
else:
    go = lazy_import("plotly.graph_objects", "viz")

__all__ = ["QKAttribution", "qk_attribution"]

QUERY, KEY, POSITION = "query_source", "key_source", "position"


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

    def _own_figure(self, title: str, show_values: bool) -> "go.Figure | None":
        """A heat map of the pairs of sources at the key with the largest score; for another one, `select` it first."""
        if POSITION not in self.axes or len(self.axes) > 3:
            return None
        assert self.scores is not None
        positions = self.axes[POSITION][int(self.scores.mean(-1).nan_to_num(-torch.inf).argmax())]
        return Scores(self.values, self.axes, about=self.about).select(position=positions).plot(title, show_values)

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
    transcoders: LayerTranscoders | None = None,
    k: int = 20,
    control: str | None = "auto",
) -> QKAttribution:
    """Which pairs of sources make a head attend where it does: its scores as a sum over what is written to the stream.

    Queries and keys are linear in the stream if the scales of the norms in front of them are held fixed, and the stream is the
    sum of its sources. So a score is a sum over pairs of a source at the query and one at the key,
    `x_a^T W_Q^T R(i - j) W_K x_b * scale` (Elhage et al. 2021, "A mathematical framework for transformer circuits"). All terms
    are kept: biases are sources, norms of queries and keys have fixed scales too, and a bias of positions is a term of its own,
    the cell ("position_bias", "position_bias"). A soft cap multiplies the terms of a score by its ratio, capped / uncapped
    (`about` says so). The terms of n heads, q sources of the query and s of the keys take 4 n q s bytes for each key and prompt,
    several times at once: with `by="head"` choose few heads of a deep model.

    Args:
        prompts: texts or ids [batch, pos] of one length, `VisionInputs`, or a conversation.
        heads: the label of a head, such as "L1H7"; or several of one layer, an axis "head".
        positions: the position of the query, -1 for the last.
        by: "layer": a source is the output of a whole sublayer; "head": attention is split into heads and bias.
        transcoders: split the outputs of MLPs into features, such as "L0F17", the biases of the dictionaries, skip connections
            and errors; of one prompt.
        k: how many features of the query and of the keys are sources of their own, those with the largest terms. The others are
            one source, "other features".
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
    if transcoders is not None and (rows.shape[0] != 1 or k < 1):
        raise ValueError(f"features are sources of one prompt, at least k=1; got {rows.shape[0]} prompts and k={k}")
    query, is_one = positions % rows.shape[1], isinstance(heads, str)
    run = QKRun(model, rows, layer, which, query, by, transcoders, k)
    found = _result(run, run.found(), is_one)
    if (twin := untrained_twin(model, control)) is None:
        return found
    both = [model, decoder(twin, "QK attribution needs")]  # without features, which the twin has none of
    runs = [QKRun(each, rows, layer, which, query, by) for each in both]
    own, other = (float(_result(run, run.found(), is_one).between_keys().mean.abs().nan_to_num().max()) for run in runs)
    beside = Control.compared(UNTRAINED, "largest term that differs between keys", own, other, "training")
    return replace(found, about={**found.about, **beside.about()})


def _result(run: QKRun, found: ScoreTerms, is_one: bool) -> QKAttribution:
    """The terms with the names of their axes; without that of heads if it `is_one`."""
    labels = position_labels(run.model, run.rows)
    names = [head_label(run.layer, head) for head in run.heads]
    axes: dict[str, Sequence[Label]] = {
        QUERY: found.queries,
        KEY: found.of_keys,
        POSITION: [labels[key] for key in found.keys],
    }
    about = provenance(
        run.model,
        of="attention score",
        heads=names,
        query=str(labels[run.query]),
        by=run.by,
        completeness=found.completeness,
    )
    about |= {} if found.soft_cap is None else {"soft_cap": found.soft_cap}
    if is_one:
        return QKAttribution(found.terms[0], axes, scores=found.scores[0], about=about)
    return QKAttribution(found.terms, {"head": names, **axes}, scores=found.scores, about=about)


def _heads_of(model: Decoder, heads: str | Sequence[str]) -> tuple[int, list[int]]:
    """The layer and the indices of heads. Raises ValueError for heads of several layers, IndexError for an unknown one."""
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
