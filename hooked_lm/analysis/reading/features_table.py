"""All features of a dictionary in one table, pages that are linked from it, and the features that are active in a prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.analysis.reading.corpus import Corpus
from hooked_lm.analysis.reading.feature_report import FeatureReport
from hooked_lm.analysis.reading.feature_runs import FeatureRuns, logit_effects, sites_of
from hooked_lm.analysis.reading.max_activating import FeatureValues
from hooked_lm.analysis.reading.neurons import token_strings
from hooked_lm.engine.conversations import reads_chats
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.pairs import RightAndWrong, metric_of
from hooked_lm.extras import lazy_import
from hooked_lm.files import made_folder
from hooked_lm.hooks.token_labels import Named
from hooked_lm.interventions.dictionaries.hook import Coder, Dictionary, run_with_features
from hooked_lm.interventions.dictionaries.transcode import Transcode
from hooked_lm.interventions.top_examples import TopExamples
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.names import checked_index
from hooked_lm.models.text.chat import Chat
from hooked_lm.progress import progress_bar
from hooked_lm.results import stored
from hooked_lm.results.scores import provenance
from hooked_lm.results.tabular import Tabular

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
else:
    pd = lazy_import("pandas", "viz")

__all__ = ["FeaturesTable", "features_table", "top_features"]

FORMAT = "hooked_lm.FeaturesTable"
N_PLACES = 8  # positions of a feature, of whose tokens the first different ones are shown
Site = str | tuple[str, int]


@dataclass(frozen=True, eq=False, repr=False)
class FeaturesTable(Tabular):
    """Features of a dictionary with numbers: a row for each; see `features_table` and `top_features`.

    Args:
        features: the indices.
        columns: the numbers of each feature, by name; NaN where they were not computed.
        tokens: of each feature a few tokens, those where it is largest or those that it promotes.
        about: model, sites and settings.
    """

    features: Int[Tensor, " feature"]
    columns: dict[str, Float[Tensor, " feature"]]
    tokens: list[list[str]]
    about: dict[str, Any]

    def __len__(self) -> int:
        return len(self.features)

    def to_dataframe(self) -> "pd.DataFrame":
        """A row for each feature: `feature`, the columns, and `tokens`, as one text."""
        numbers = {name: values.numpy() for name, values in self.columns.items()}
        shown = [" ".join(map(repr, tokens)) for tokens in self.tokens]
        return pd.DataFrame({"feature": self.features.numpy(), **numbers, "tokens": shown})

    def top(self, n: int = 10, by: str | None = None) -> "pd.DataFrame":
        """The `n` features with the largest absolute values in a column, by default the first; those without a value are left
        out. Raises ValueError for an unknown column."""
        return self.to_dataframe().iloc[self._largest(n, by)].reset_index(drop=True)

    def plot(self, by: str | None = None, n: int = 20, title: str = "") -> "go.Figure":
        """The `n` features with the largest absolute values in a column, as bars."""
        from hooked_lm import viz

        rows, by = self._largest(n, by), by or next(iter(self.columns))
        labels = [f"{self.features[row]} {''.join(self.tokens[row][:1])!r}" for row in rows]
        title = title or f"Features of {self.about['site']}"
        return viz.bars(self.columns[by][rows], labels, title=title, x_title="feature", y_title=by)

    def _largest(self, n: int, by: str | None) -> list[int]:
        """The rows of the largest values, in absolute value."""
        by = next(iter(self.columns)) if by is None else by
        if by not in self.columns:
            raise ValueError(f"there is no column {by!r}: by= is one of {', '.join(map(repr, self.columns))}")
        values = self.columns[by].abs()
        order = values.nan_to_num(nan=-1.0).argsort(descending=True, stable=True)
        return order[: min(n, int((~values.isnan()).sum()))].tolist()

    def write_pages(self, reports: Sequence[FeatureReport], folder: str | Path) -> Path:
        """Writes a folder of linked pages, which need no network: `index.html` with this table, which sorts by each column, and a
        page for each report. Returns the path of the index.

        Pages are in the order of the reports. Raises ValueError for no reports, and for those of another model or site.
        """
        from hooked_lm.viz.features import INDEX, features_index

        links = {report.about["feature"]: f"feature-{report.about['feature']}.html" for report in reports}
        if not links:
            raise ValueError("there are no reports to write: give those of feature_report(model, sae, [...], prompts)")
        for name in ("model", "site"):
            if others := {report.about.get(name) for report in reports} - {self.about.get(name)}:
                raise ValueError(
                    f"the reports are of the {name} {others.pop()!r}, the table of {self.about.get(name)!r}"
                )
        made = made_folder(folder)
        for report in reports:
            report.plot(links).write_html(made / links[report.about["feature"]])
        columns = {name: values.tolist() for name, values in self.columns.items()}
        title = f"Features of {self.about['site']}"
        return features_index(title, self.features.tolist(), columns, self.tokens, links).write_html(made / INDEX)

    def save(self, path: str | Path) -> None:
        """Writes everything to one safetensors file; `load` restores it."""
        header = {"columns": list(self.columns), "tokens": self.tokens, "about": self.about}
        stored.write(path, FORMAT, {"features": self.features, **self.columns}, header)

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "FeaturesTable":
        """Reads a file that `save` wrote; ValueError for any other file."""
        tensors, header = stored.read(path, FORMAT)
        columns = {name: tensors[name] for name in header["columns"]}
        return cls(tensors["features"], columns, header["tokens"], header["about"])

    def __repr__(self) -> str:
        return f"FeaturesTable({self.about['site']}: {len(self):,} features; {', '.join(self.columns)})"


@keeps_torch_state
@torch.no_grad()
def features_table(
    model: Decoder,
    sae: Coder,
    prompts: Sequence[str] | Int[Tensor, "prompt pos"] | Chat,
    *,
    ablate: int | Sequence[int] = 20,
    site: Site | None = None,
    site_out: Site | None = None,
    n_tokens: int = 3,
    skip: int = 0,
    positions: Named | None = None,
    batch_size: int = 8,
    progress: bool | None = None,
) -> FeaturesTable:
    """All features of a sparse dictionary on a data set: how often and how strongly each is active, and what it is good for.

    Columns: "density", the share of positions where the feature is active; "largest", its largest activation; "loss", the
    increase of the next-token loss, in nats, at the positions where it is active if it is set to zero there.

    Args:
        sae: a dictionary with `encode` and `decode`, an autoencoder or a transcoder.
        prompts: texts, token ids [prompt, pos], or conversations (`model.chat`).
        ablate: the features with a "loss": as many of those that are active most often, or a list of indices; the others have
            NaN, and without any there is no such column. Density, largest activation and tokens cost one pass of the data, as far
            as the site; losses a whole pass, and for each feature another one of the texts in which it is active.
        site, site_out: the site of a dictionary, and the output site of a transcoder; by default those in its config.
        n_tokens: how many different tokens are shown of each feature, at most: those of its largest activations.
        skip: the number of tokens left out at the start of each text, such as a BOS.
        positions: of conversations only these tokens, by meaning, such as "assistant".
        batch_size: how many prompts run together.
        progress: a bar for the ablations; None: if they take more than two seconds.

    Returns a FeaturesTable with a row for each feature: `top(n, by="loss")`, `write_pages`. Raises IndexError for a feature out
    of range, ValueError for a dictionary whose site is not known or does not fit, and for data without positions.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.interventions import dictionaries
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> sae = dictionaries.load("demo").to(model.device)
    >>> texts = [
    ...     "The capital of France is Paris",
    ...     "Tom left early because he was late",
    ...     "Mary was ill",
    ... ]
    >>> table = features_table(model, sae, texts, ablate=2, skip=1)
    >>> table
    FeaturesTable(blocks.1.hook_resid_post: 512 features; density, largest, loss)
    >>> table.top(1, by="largest")["feature"].item()
    449
    """
    read, write = sites_of(model, sae, site, site_out)
    measure = _Counted(model, read, sae)
    top, n_positions = TopExamples(read, measure=measure, k=N_PLACES, context=0), 0
    corpus = Corpus(model, prompts, batch_size, skip, positions)
    for batch in corpus:
        measure.counts = batch.counts
        n_positions += int(batch.counts.sum())
        batch.run_to(read, top)
    if measure.n_active is None or not n_positions:
        raise ValueError(f"the data have no position to look at: {len(prompts)} texts{corpus.described}")
    density, best = measure.n_active.double().cpu() / n_positions, top.examples()
    largest = best.values[:, 0].nan_to_num(0.0)
    loss = torch.full_like(largest, torch.nan)
    chosen = _chosen(ablate, density)
    runs = FeatureRuns(model, sae, chosen, read, write)
    n_batches = -(-len(prompts) // batch_size)
    for batch in progress_bar("ablated features", n_batches, progress, "batches", corpus if chosen else ()):
        runs.add(batch)
    for feature, sums in zip(chosen, runs.sums, strict=True):
        whole, without = sums.mean_losses
        loss[feature] = without - whole
    columns = {"density": density.float(), "largest": largest, **({"loss": loss} if chosen else {})}
    about = provenance(model, site=read, site_out=write, skip=skip, prompts=len(prompts), positions=n_positions)
    about |= {} if positions is None else {"of_positions": positions}
    acts = best.values.nan_to_num(0.0) != 0
    ids = best.tokens[..., 0].where(acts, -1).tolist()
    distinct = [[of for of in dict.fromkeys(row) if of >= 0][:n_tokens] for row in ids]
    used = torch.tensor(sorted({of for row in distinct for of in row}), dtype=torch.long)
    words = dict(zip(used.tolist(), map(str, token_strings(model, used)), strict=True))
    return FeaturesTable(torch.arange(len(loss)), columns, [[words[of] for of in row] for row in distinct], about)


class _Counted(FeatureValues):
    """All features at each position; `n_active` counts where each is active among the positions in `counts`."""

    def __init__(self, model: Decoder, site: Site, sae: object) -> None:
        super().__init__(model, site, sae, None)
        self.counts: Tensor = torch.zeros(0)
        self.n_active: Int[Tensor, " feature"] | None = None

    def __call__(self, value: Float[Tensor, "batch pos *d"]) -> Float[Tensor, "batch pos feature"]:
        found = super().__call__(value)
        active = (found[self.counts.to(found.device)] != 0).sum(0)
        self.n_active = active if self.n_active is None else self.n_active + active
        return found


def _chosen(ablate: int | Sequence[int], density: Float[Tensor, " feature"]) -> list[int]:
    """The features to ablate."""
    if not isinstance(ablate, int):
        return [checked_index(of, len(density), "feature", "the dictionary") for of in ablate]
    order = density.argsort(descending=True, stable=True)[:ablate].tolist()
    return [feature for feature in order if density[feature] > 0]


@keeps_torch_state
@reads_chats
def top_features(
    model: Decoder,
    sae: Coder,
    prompt: str | Int[Tensor, "1 pos"],
    *,
    positions: int = -1,
    metric: Callable[[Tensor], Tensor] | None = None,
    answers: RightAndWrong | None = None,
    site: Site | None = None,
    site_out: Site | None = None,
    n_tokens: int = 3,
) -> FeaturesTable:
    """The features that are active at a position of a prompt, strongest first, with what they contribute to an answer.

    Args:
        positions: the position; a negative one counts from the end.
        metric, answers: a differentiable function of the logits, or the right and the wrong next token, whose logit difference
            it is. The column "attribution" is then the gradient of the metric times the activation (Marks et al. 2024,
            arXiv:2403.19647): an estimate of what is lost without the feature at that position, from one backward pass.
        site, site_out: the site of a dictionary, and the output site of a transcoder; by default those in its config.
        n_tokens: how many tokens are shown of each feature: those that its direction promotes, as in `feature_report`.

    Returns a FeaturesTable with the columns "activation" and, with a metric, "attribution". Raises IndexError for a position out
    of range, TypeError for a metric and answers, ValueError for a dictionary whose site is not known or does not fit.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.interventions import dictionaries
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> sae = dictionaries.load("demo").to(model.device)
    >>> found = top_features(model, sae, "Tom left early because", answers=(" he", " she"))
    >>> found.top(1, by="attribution")[["feature", "tokens"]].values.tolist()
    [[61, "' he' ' his' 'eor'"]]
    """
    read, write = sites_of(model, sae, site, site_out)
    score = metric_of(model, metric, answers)
    kind: type[Dictionary] = Dictionary if read == write else Transcode
    where: Any = read if read == write else [read, write]
    with torch.set_grad_enabled(score is not None):
        logits, by_site = run_with_features(model, prompt, kind(where, sae=sae, error="keep"))
        [features] = by_site.values()
        if len(logits) != 1:
            raise ValueError(f"top_features describes one prompt, and {len(logits)} are given")
        place = checked_index(positions, features.shape[1], "position", "the prompt")
        at = features[0, place].detach()
        active = at.nonzero().flatten()
        active = active[at[active].argsort(descending=True)]
        columns = {"activation": at[active].float().cpu()}
        if score is not None:
            [gradient] = torch.autograd.grad(score(logits).sum(), features)
            columns["attribution"] = (gradient[0, place] * at)[active].float().cpu()
    tokens = []
    for feature in active.tolist():
        with torch.no_grad():
            effects = logit_effects(model, sae, feature, write)
        best = torch.zeros(0, dtype=torch.long) if effects is None else effects.topk(n_tokens).indices.cpu()
        tokens.append(list(map(str, token_strings(model, best))))
    given = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    about = provenance(model, site=read, site_out=write, prompt=given, position=place)
    return FeaturesTable(active.cpu(), columns, tokens, about)
