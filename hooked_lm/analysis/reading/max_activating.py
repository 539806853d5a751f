"""Max-activating examples: the positions of a dataset with the largest activations of a direction, neuron, head or feature."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.analysis.reading.corpus import Corpus, Data
from hooked_lm.analysis.reading.lens import spelled
from hooked_lm.components.norms.norm import upcast
from hooked_lm.engine.cells_before_blocks import is_of_images
from hooked_lm.extras import lazy_import
from hooked_lm.hooks.head_labels import head_at_site
from hooked_lm.hooks.token_labels import KEYS, Labels, Named, TokenLabel
from hooked_lm.interventions.dictionaries.hook import Coder, encoded, flat
from hooked_lm.interventions.dictionaries.site import site_read, warn_if_elsewhere
from hooked_lm.interventions.top_examples import Examples, TopExamples
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.names import checked_index
from hooked_lm.results import stored
from hooked_lm.results.scores import provenance

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from hooked_lm.viz import View
else:
    pd = lazy_import("pandas", "viz")

__all__ = ["MaxActivating", "max_activating_examples"]

Site = str | tuple[str, int]


@dataclass(frozen=True, eq=False, repr=False)
class MaxActivating:
    """The positions of a dataset with the largest (or smallest) activations, sorted.

    `values` [example] are the activations; `texts` and `positions` [example] are the row in the dataset and the position in it.
    `tokens` and `activations` [example, place] are the context around the example, which is in the middle; -1 and NaN beyond
    the ends of the text. `words` maps ids to strings. `labels` say what the token of each example is, if the data are
    conversations.
    """

    values: Float[Tensor, " example"]
    texts: Int[Tensor, " example"]
    positions: Int[Tensor, " example"]
    tokens: Int[Tensor, "example place"]
    activations: Float[Tensor, "example place"]
    words: dict[int, str]
    about: dict[str, Any]
    labels: tuple[TokenLabel, ...] = ()

    @property
    def context(self) -> int:
        """The number of context tokens on each side."""
        return self.tokens.shape[1] // 2

    def __len__(self) -> int:
        return len(self.values)

    def to_dataframe(self) -> "pd.DataFrame":
        """A row for each example: `value`, `text`, `position`, `token`, and the `snippet` with the token in brackets.

        Of conversations also `turn`, `role` and `part`.
        """
        found = Examples(self.values, self.texts, self.positions, self.tokens)
        table = found.to_dataframe(self.words).drop(columns="rank")
        return table.assign(**{key: [getattr(label, key) for label in self.labels] for key in KEYS if self.labels})

    def view(self, title: str = "") -> "View":
        """The snippets as a view: each token coloured by its activation, with the number on hover and focus."""
        from hooked_lm import viz

        return viz.snippets(self.snippets(), title or self._title)

    @property
    def _title(self) -> str:
        which = "Largest" if self.about.get("largest", True) else "Smallest"
        return f"{which} activations of {self.about.get('of', 'the site')}"

    def snippets(self) -> list[tuple[str, list[str], list[float], int]]:
        """For each example its value and role, the tokens around it with their activations, and its place among them."""
        from hooked_lm.viz.numbers import aligned

        found, labels = [], aligned(self.values)
        for i in range(len(self)):
            there = self.tokens[i] >= 0
            words = [self.words[token] for token in self.tokens[i][there].tolist()]
            place = int(there[: self.context].sum())
            head = f"{labels[i]} {who(self.labels[i])}" if self.labels else labels[i]
            found.append((head, words, self.activations[i][there].tolist(), place))
        return found

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>{self.view()._repr_html_()}"

    def plot(self, title: str = "") -> "go.Figure":
        """Plot the snippets as a grid with a row for each example; colour shows the activation."""
        from hooked_lm.viz.numbers import aligned
        from hooked_lm.viz.token_views import token_grid

        return token_grid(
            self.activations,
            [[self.words[token] if token >= 0 else "" for token in row] for row in self.tokens.tolist()],
            x_labels=list(range(-self.context, self.context + 1)),
            y_labels=[f"{rank}: {value}" for rank, value in enumerate(aligned(self.values), 1)],
            title=title or self._title,
            x_title="position from the example",
            y_title="example: activation",
            value_name="activation",
        )

    def save(self, path: str | Path) -> None:
        """Write everything to one safetensors file; `load` restores it exactly."""
        names = ("values", "texts", "positions", "tokens", "activations")
        header = {"words": list(self.words.items()), "about": self.about, "labels": self.labels}
        stored.write(path, "hooked_lm.MaxActivating", {name: getattr(self, name) for name in names}, header)

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "MaxActivating":
        """Read what `save` wrote. Raises ValueError for any other file."""
        tensors, header = stored.read(path, "hooked_lm.MaxActivating")
        labels = tuple(TokenLabel(*label) for label in header.get("labels", ()))
        return cls(**tensors, words=dict(header["words"]), about=header["about"], labels=labels)

    def __repr__(self) -> str:
        ends = f"{self.values[0]:.4g} to {self.values[-1]:.4g}" if len(self) else "none"
        return f"MaxActivating({self.about.get('of')}: {ends}, {len(self)} of {self.about.get('positions')} positions)"


@torch.no_grad()
def max_activating_examples(
    model: Decoder,
    prompts: Data,
    *,
    site: Site | None = None,
    direction: Float[Tensor, " d"] | None = None,
    neuron: int | None = None,
    heads: int | str | None = None,
    sae: object | None = None,
    feature: int | None = None,
    k: int = 20,
    context: int = 10,
    largest: bool = True,
    skip: int = 0,
    positions: Named | None = None,
    batch_size: int = 8,
    one_per_text: bool = False,
) -> MaxActivating:
    """The `k` positions of a dataset with the largest activation at a site, in one pass over the data.

    The activation at a position is the dot product with `direction`, or the entry `neuron` of the last axis, or the norm of the
    vector if neither is given. At a site with heads, such as ("z", 3), `heads` selects one. With `sae` and `feature` it is that
    feature of a sparse dictionary, and positions where it is zero are left out. Among equal activations the first is kept. Only
    one batch and `k` examples are in memory.

    Args:
        prompts: texts, token ids [prompt, pos], `VisionInputs`, conversations (`model.chat`), or an iterator of batches of
            these; or a harvest that has the site (`ActivationStore`), for which the model is not run. Texts get the model's BOS
            and are truncated at n_ctx; padding is left out.
        site: a full name, or a short one with its layer, such as ("post", 2); None: that in the config of `sae`.
        sae: a dictionary with `encode`, whose `feature` is an index.
        context: the number of context tokens on each side.
        largest: False for the smallest activations.
        skip: the number of tokens left out at the start of each text, such as a BOS, whose activations are often extreme.
        positions: of conversations only these tokens, by meaning, such as "assistant" or ("user", -1); a conversation may have
            none of them.
        one_per_text: take the best position of each text alone.

    Raises ValueError for data without positions, a site without positions, a direction of another width, or activations that
    are NaN; IndexError for a neuron, head or feature out of range; KeyError for an unknown site.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> texts = ["The capital of France is Paris", "When Mary and John went to the store"]
    >>> found = max_activating_examples(
    ...     model, texts, site=("post", 1), neuron=5, k=3, context=2
    ... )
    >>> found.to_dataframe().columns.tolist()
    ['value', 'text', 'position', 'token', 'snippet']
    """
    measure = _measure(model, site, direction, neuron, heads, sae, feature, largest)
    corpus = Corpus(model, prompts, batch_size, skip, positions)
    return examples_of(corpus, measure, k=k, context=context, largest=largest, one_per_text=one_per_text)[0]


def examples_of(
    corpus: Corpus,
    measure: "_Measure | FeatureValues",
    k: int,
    context: int,
    largest: bool = True,
    one_per_text: bool = False,
) -> list[MaxActivating]:
    """The examples of each of the numbers that a measure gives, in one pass."""
    for name, number, least in (("k", k, 1), ("context", context, 0)):
        if number < least:
            raise ValueError(f"{name} must be at least {least}, got {number}")
    settings: dict[str, Any] = {"largest": largest, "one_per_text": one_per_text, "activations": True}
    top = TopExamples(measure.site, measure=measure, k=k, context=context, **settings)
    n_positions, labels, documents = 0, list[Labels](), list[int]()
    for batch in corpus.batches(measure.site):
        batch.run_to(measure.site, top)
        n_positions += int(batch.counts.sum())
        labels += batch.labels or ()
        documents += batch.documents
    n_texts = top.inputs.n_texts
    if not n_positions:
        raise ValueError(f"the data have no position to look at: {n_texts} texts{corpus.described}")
    results, whole = [], top.examples()
    for i, of in enumerate(measure.names):
        found = {name: value[: min(k, n_positions)] for name, value in whole[i].tensors().items()}
        acts = found["texts"] >= 0
        if isinstance(measure, FeatureValues):
            acts &= (found["values"] != 0) & found["values"].isfinite()
            found["activations"] = found["activations"].masked_fill(found["activations"] == torch.inf, 0.0)
        found = {name: value[acts] for name, value in found.items()}
        words = spelled(corpus.model, found["tokens"][found["tokens"] >= 0])
        about = provenance(corpus.model, of=of, largest=largest, positions=n_positions, prompts=n_texts)
        places = zip(found["texts"].tolist(), found["positions"].tolist(), strict=True)
        which = tuple(labels[text][position] for text, position in places) if labels else ()
        if documents:
            found["texts"] = torch.tensor(documents)[found["texts"]]
        results.append(MaxActivating(**found, words=words, about=about, labels=which))
    return results


def who(label: TokenLabel) -> str:
    """Whose a token is, in words."""
    turn, role, part = label
    name = role if part == "content" else f"{role}, {part}"
    return name if turn < 0 else f"{turn} {name}"


class FeatureValues:
    """Activations of features of a dictionary at each position; infinite where a search for the smallest skips them."""

    def __init__(
        self, model: Decoder, site: Site | None, sae: object, features: Sequence[int] | None, largest: bool = True
    ) -> None:
        read = site_read(sae, site)
        names = model.names(read)
        if len(names) != 1:
            raise ValueError(f"{read!r} means {len(names)} sites: give one, such as {names[0]!r}")
        warn_if_elsewhere(sae, names[0])
        self.site, self.sae, self.features, self.largest = names[0], cast(Coder, sae), features, largest
        self.names = [f"{self.site} feature {feature}" for feature in features or ()]

    def __call__(self, value: Float[Tensor, "batch pos *d"]) -> Float[Tensor, "batch pos feature"]:
        found = encoded(self.sae, flat(self.sae, upcast(value), f"'{self.site}'"))
        if self.features is not None:
            size = found.shape[-1]
            found = found[..., [checked_index(of, size, "feature", "the dictionary") for of in self.features]]
        return found if self.largest else found.masked_fill(found == 0, torch.inf)


def _measure(
    model: Decoder,
    site: Site | None,
    direction: Tensor | None,
    neuron: int | None,
    heads: int | str | None,
    sae: object | None,
    feature: int | None,
    largest: bool,
) -> "_Measure | FeatureValues":
    """The function from the value at a site to the activation at each position, from the arguments that say which."""
    if sae is not None or feature is not None:
        if not (direction is None and neuron is None and heads is None):
            raise ValueError("a feature of a dictionary is no direction, neuron or head: give sae and feature alone")
        if sae is None or feature is None:
            raise ValueError("sae= is a dictionary, and feature= the index of one of its features: give both")
        return FeatureValues(model, site, sae, [feature], largest)
    if site is None:
        raise ValueError("give site=, such as ('post', 2), or sae= and feature=")
    return _Measure(model, site, direction, neuron, heads)


class _Measure:
    """A function from the value at a site to the activation at each position."""

    def __init__(
        self,
        model: Decoder,
        site: Site,
        direction: Tensor | None,
        neuron: int | None,
        heads: int | str | None,
    ) -> None:
        if direction is not None and neuron is not None:
            raise ValueError("give a direction or a neuron, not both: a neuron is the direction of one entry")
        names = model.names(site)
        if len(names) != 1:
            raise ValueError(f"{site!r} means {len(names)} sites: give one, such as {names[0]!r}")
        self.site = names[0]
        dims = model.hook_dict[self.site].dims
        has_head = dims[2:3] in (("head",), ("kv_head",), ("ssm_head",))
        if dims[:2] != ("batch", "pos") or len(dims) != 3 + has_head or is_of_images(model, self.site):
            raise ValueError(f"'{self.site}' [{', '.join(dims)}] has no vector at each position of the text")
        if has_head != (heads is not None):
            fix = "say which one, heads=" if has_head else "it has no heads, so give none"
            raise ValueError(f"'{self.site}' [{', '.join(dims)}]: {fix}")
        head = None if heads is None else head_at_site(heads, self.site)
        self.direction, self.neuron, self.head = direction, neuron, head
        what = "norm" if direction is None else "direction"
        parts = ["" if head is None else f"head {head}", f"neuron {neuron}" if neuron is not None else what]
        self.names = [" ".join([self.site, *filter(None, parts)])]

    def __call__(self, value: Float[Tensor, "batch pos *d"]) -> Float[Tensor, "batch pos 1"]:
        return self._at(upcast(value))[..., None]

    def _at(self, value: Float[Tensor, "batch pos *d"]) -> Float[Tensor, "batch pos"]:
        if self.head is not None:
            value = value[:, :, checked_index(self.head, value.shape[2], "head", self.site)]
        if self.neuron is not None:
            return value[..., checked_index(self.neuron, value.shape[2], "neuron", self.site)]
        if self.direction is None:
            return value.norm(dim=-1)
        if tuple(self.direction.shape) != (value.shape[2],):
            raise ValueError(
                f"the direction is {list(self.direction.shape)}, and the vectors at '{self.site}' have {value.shape[2]} entries"
            )
        return value @ self.direction.detach().to(value)
