"""What a feature of a dictionary is about: top texts, how often it is active, its logit effects, and what ablating it does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.reading.corpus import Corpus
from hooked_lm.analysis.reading.feature_runs import FeatureRuns, logit_effects, neighbours, sites_of
from hooked_lm.analysis.reading.max_activating import FeatureValues, MaxActivating, examples_of
from hooked_lm.analysis.reading.neurons import token_strings
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.extras import lazy_import
from hooked_lm.hooks.token_labels import Named, TokenLabel
from hooked_lm.interventions.dictionaries.hook import Coder
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.text.chat import Chat
from hooked_lm.results import stored
from hooked_lm.results.scores import provenance

if TYPE_CHECKING:
    import pandas as pd

    from hooked_lm.viz.view import View
else:
    pd = lazy_import("pandas", "viz")

__all__ = ["FeatureReport", "feature_report"]

FORMAT = "hooked_lm.FeatureReport"
N_BINS = 40
TABLES = ("promoted", "suppressed", "more likely without it", "less likely without it")
Table = list[tuple[str, float]]
Site = str | tuple[str, int]


@dataclass(frozen=True, eq=False, repr=False)
class FeatureReport:
    """A feature of a dictionary on a data set; see `feature_report`.

    Args:
        examples: the positions with the largest activations.
        bins, counts: the edges [bin + 1] of the histogram of activations that are not zero, and how many are in each bin.
        logit_bins, logit_counts: those of the logit effects of all tokens; empty if there are none.
        tables: tokens with numbers: "promoted" and "suppressed" by the feature's direction, in logits for an activation of 1
            before the final norm's division; "more likely without it" and "less likely without it", the change of the mean
            probability of the next token at its positions.
        n_positions, n_active: the positions of the data set, and those where the feature is active.
        loss: the next-token loss in nats, a mean over the active positions that have a next token; `loss_ablated` without the
            feature. NaN if there is none.
        about: model, site, feature and settings.
        neighbours: the features with the closest directions, and the cosines.
    """

    examples: MaxActivating
    bins: Float[Tensor, " edge"]
    counts: Float[Tensor, " bin"]
    logit_bins: Float[Tensor, " logit_edge"]
    logit_counts: Float[Tensor, " logit_bin"]
    tables: dict[str, Table]
    n_positions: int
    n_active: int
    loss: float
    loss_ablated: float
    about: dict[str, Any]
    neighbours: list[tuple[int, float]] = field(default_factory=list)

    @property
    def density(self) -> float:
        """The share of positions where the feature is active."""
        return self.n_active / self.n_positions

    def to_dataframe(self) -> "pd.DataFrame":
        """A row for each example and each token of the tables: `part`, `token`, `value`, and the `snippet` of examples."""
        found = self.examples.to_dataframe()[["token", "value", "snippet"]].assign(part="example")
        rows = [(name, token, value) for name in TABLES for token, value in self.tables[name]]
        tables = pd.DataFrame(rows, columns=["part", "token", "value"]).assign(snippet="")
        return pd.concat([found, tables], ignore_index=True)[["part", "token", "value", "snippet"]]

    def plot(self, links: Mapping[int, str] | None = None) -> "View":
        """The page of the feature, as a view: `show()`, `write_html(path)`, or a part of a report.

        `links` are the files of the pages of several features, this one among them: the page leads to the previous and the next
        one, and to its neighbours; `FeaturesTable.write_pages` writes such pages.
        """
        from hooked_lm.viz.features import feature_view

        return feature_view(
            f"{self.about['site']}, feature {self.about['feature']}",
            self.facts(),
            self.examples.snippets(),
            (self.bins.tolist(), self.counts.tolist()),
            self.tables,
            NOTES,
            self.neighbours,
            self.about["feature"],
            links or {},
        )

    def facts(self) -> dict[str, str]:
        """Key figures of the feature as text."""
        from hooked_lm.viz.numbers import aligned, rounded

        change = rounded(self.loss_ablated - self.loss, 3, sign=True)
        largest = float(self.examples.values[0]) if len(self.examples) else 0.0
        return {
            "density": f"{self.density:.2%}",
            "active at": f"{self.n_active:,} of {self.n_positions:,} positions",
            "largest activation": aligned([largest])[0],
            "loss without it": f"{change} nats, where it is active",
        }

    def save(self, path: str | Path) -> None:
        """Writes everything to one safetensors file, atomically; `load` restores it exactly."""
        tensors = {name: getattr(self, name) for name in ("bins", "counts", "logit_bins", "logit_counts")}
        tensors |= {f"examples.{name}": getattr(self.examples, name) for name in EXAMPLES}
        numbers = ("tables", "n_positions", "n_active", "about", "neighbours")
        header = {name: getattr(self, name) for name in numbers} | {
            "losses": [repr(self.loss), repr(self.loss_ablated)]
        }
        header |= {"words": list(self.examples.words.items()), "examples_about": self.examples.about}
        header |= {"labels": self.examples.labels}
        stored.write(path, FORMAT, tensors, header)

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "FeatureReport":
        """Reads what `save` wrote. Raises ValueError for any other file."""
        tensors, header = stored.read(path, FORMAT)
        words, about = dict(header.pop("words")), header.pop("examples_about")
        labels = tuple(TokenLabel(*label) for label in header.pop("labels", ()))
        of_examples = {name: tensors.pop(f"examples.{name}") for name in EXAMPLES}
        examples = MaxActivating(**of_examples, words=words, about=about, labels=labels)
        loss, ablated = map(float, header.pop("losses"))
        header["tables"] = {name: [(token, value) for token, value in rows] for name, rows in header["tables"].items()}
        header["neighbours"] = [(other, cosine) for other, cosine in header.get("neighbours", [])]
        rest: dict[str, Any] = {**tensors, **header}
        return cls(examples=examples, **rest, loss=loss, loss_ablated=ablated)

    def _repr_html_(self) -> str:
        return self.plot()._repr_html_()

    def __repr__(self) -> str:
        promotes = ", ".join(repr(token) for token, _ in self.tables["promoted"][:3])
        says = f"; promotes {promotes}" if promotes else ""
        return f"FeatureReport({self.about['site']} feature {self.about['feature']}: density {self.density:.2%}{says})"


EXAMPLES = ("values", "texts", "positions", "tokens", "activations")
NOTES = {
    "promoted": "The feature's direction in the dictionary times the unembedding, with the gain and centring of the final norm, "
    "without the division by its scale: logits for an activation of 1.",
    "more likely without it": "The feature is set to zero wherever it is active, and the reconstruction error is kept: changes "
    "of the mean probability of the next token at these positions.",
}


# fmt: off
@overload
def feature_report(
    model: Decoder, sae: Coder, feature: int, prompts: Sequence[str] | Tensor | Chat, *, site: Site | None = None,
    site_out: Site | None = None, n_examples: int = 10, context: int = 10, k: int = 10, skip: int = 0,
    positions: Named | None = None, batch_size: int = 8,
) -> FeatureReport: ...
@overload
def feature_report(
    model: Decoder, sae: Coder, feature: Sequence[int], prompts: Sequence[str] | Tensor | Chat, *, site: Site | None = None,
    site_out: Site | None = None, n_examples: int = 10, context: int = 10, k: int = 10, skip: int = 0,
    positions: Named | None = None, batch_size: int = 8,
) -> list[FeatureReport]: ...
# fmt: on
@keeps_torch_state
@torch.no_grad()
def feature_report(
    model: Decoder,
    sae: Coder,
    feature: int | Sequence[int],
    prompts: Sequence[str] | Tensor | Chat,
    *,
    site: Site | None = None,
    site_out: Site | None = None,
    n_examples: int = 10,
    context: int = 10,
    k: int = 10,
    skip: int = 0,
    positions: Named | None = None,
    batch_size: int = 8,
) -> FeatureReport | list[FeatureReport]:
    """Describes a feature of a sparse dictionary on a data set, or several features in the same passes.

    Args:
        sae: a dictionary with `encode` and `decode`, an autoencoder or a transcoder.
        feature: an index, or a list of several.
        prompts: texts, token ids [prompt, pos], or conversations (`model.chat`); the data set is read twice, and the texts in
            which a feature is active once more for each feature, to ablate it.
        site, site_out: the site of a dictionary, and the output site of a transcoder; by default those in its config.
        n_examples, context: the number of top texts, of each of which the strongest position is shown, and of tokens on each
            side.
        k: the number of tokens in each table, and of neighbours.
        skip: the number of tokens left out at the start of each text, such as a BOS.
        positions: of conversations only these tokens, by meaning, such as "assistant".
        batch_size: how many prompts run together.

    Returns a FeatureReport, or a list of them: `plot()` is its page, `to_dataframe()` its numbers. The logit effects are those
    of the direct path alone; they are empty for a site that is not in the residual stream. Raises IndexError for a feature out
    of range, and ValueError for a dictionary whose site is not known or does not fit, and for data without positions.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.interventions.dictionaries import TopK
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> sae = (
    ...     TopK.Config(d_in=128, d_sae=256, k=8, hook_point="blocks.1.hook_mlp_out")
    ...     .build()
    ...     .eval()
    ... )
    >>> sae = sae.to(model.device)
    >>> report = feature_report(
    ...     model, sae, 17, ["The capital of France is Paris", "When Mary and John left"]
    ... )
    >>> sorted(report.tables)
    ['less likely without it', 'more likely without it', 'promoted', 'suppressed']
    """
    read, write = sites_of(model, sae, site, site_out)
    if not 1 <= k <= model.cfg.d_vocab:
        raise ValueError(f"k must be from 1 to {model.cfg.d_vocab}, the number of tokens, got {k}")
    features = [feature] if isinstance(feature, int) else list(feature)
    corpus = Corpus(model, prompts, batch_size, skip, positions)
    examples = examples_of(corpus, FeatureValues(model, read, sae, features), n_examples, context, one_per_text=True)
    runs = FeatureRuns(model, sae, features, read, write)
    for batch in corpus:
        runs.add(batch)
    about = provenance(model, site=read, site_out=write, skip=skip, prompts=len(prompts))
    about |= {} if positions is None else {"positions": positions}
    reports = [_report(model, sae, runs, i, of, k, about | {"feature": features[i]}) for i, of in enumerate(examples)]
    return reports[0] if isinstance(feature, int) else reports


def _report(
    model: Decoder, sae: Coder, runs: FeatureRuns, i: int, examples: MaxActivating, k: int, about: dict[str, Any]
) -> FeatureReport:
    """The report on the i-th feature of the runs."""
    sums, feature = runs.sums[i], about["feature"]
    effects = logit_effects(model, sae, feature, about["site_out"])
    tables = {name: Table() for name in TABLES}
    if effects is not None:
        tables |= _ends(model, effects, k, "promoted", "suppressed")
    if sums.n_active:
        tables |= _ends(model, (sums.changes / sums.n_active).float(), k, TABLES[2], TABLES[3])
    histogram = _histogram(torch.cat(sums.active) if sums.active else torch.zeros(0), 0.0)
    of_logits = _histogram(torch.zeros(0) if effects is None else effects.cpu())
    n, (loss, ablated), near = (runs.n_positions, sums.n_active), sums.mean_losses, neighbours(sae, feature, k)
    return FeatureReport(examples, *histogram, *of_logits, tables, *n, loss, ablated, about, near)


def _ends(model: Decoder, values: Float[Tensor, " d_vocab"], k: int, most: str, least: str) -> dict[str, Table]:
    """The tokens with the largest and the smallest values."""
    found = {}
    for name, best in ((most, values.topk(k)), (least, values.topk(k, largest=False))):
        found[name] = list(zip(map(str, token_strings(model, best.indices)), best.values.tolist(), strict=True))
    return found


def _histogram(values: Float[Tensor, " n"], low: float | None = None) -> tuple[Tensor, Tensor]:
    """The edges of bins of equal width, from `low` or the smallest value to the largest, and the number of values in each."""
    if not len(values):
        return torch.zeros(0), torch.zeros(0)
    least, most = float(values.min()), float(values.max())
    least = least if low is None else min(least, low)
    most = most if most > least else least + 1.0
    return torch.linspace(least, most, N_BINS + 1), torch.histc(values.float(), N_BINS, least, most)
