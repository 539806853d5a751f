"""Interchange interventions: values of source runs replace those of a base run, to compare the model with a causal model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_lm.analysis.attribution.gradients import logits_for
from hooked_lm.engine.answers import Answers, answers_of_prompts, whole_numbers
from hooked_lm.engine.cells_before_blocks import has_one_image_each, is_of_images, rows_and_positions
from hooked_lm.engine.edit import Rewrite
from hooked_lm.engine.metric_trace import reads_of
from hooked_lm.engine.metrics import Where
from hooked_lm.engine.prompts import Prompts, rows_of, some_rows, values_of
from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.head_labels import head_at_site
from hooked_lm.hooks.indices import indices_of_slice
from hooked_lm.hooks.select import Site
from hooked_lm.models.vision.inputs import PromptRows
from hooked_lm.results.groups import Groups, checked_groups
from hooked_lm.results.measures import MetricScores
from hooked_lm.results.scores import provenance

Vectors = Float[Tensor, "batch n width"]
Change = Callable[[Tensor, Tensor], Tensor]  # base and source vectors -> the new vectors of the base run
Hooks = list[tuple[str, Callable[..., Tensor]]]
Positions = int | slice | Sequence[int] | Tensor | None
RowNumbers = Int[Tensor, " row"]


@dataclass(frozen=True, eq=False)
class Location:
    """Positions of a site, for one head or all heads.

    `Location.of` checks its arguments. As an intervention a location exchanges the whole vectors.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> location = Location.of(model, ("z", 1), positions=[-1], heads="L1H3")
    >>> location.site
    'blocks.1.attn.hook_z'
    >>> with model.hooks(location.hooks(torch.zeros(1, 5, 8, 16))):
    ...     logits = model("The capital of France is")
    """

    site: str
    positions: Int[Tensor, "row n"] | None = None  # one row for all prompts, or one for each; None: all positions
    source_positions: Int[Tensor, "other_row n"] | None = None  # of the source run
    heads: int | None = None  # the index of one head; None: all

    @classmethod
    def of(
        cls,
        model: HookedRootModule,
        site: Site,
        positions: Positions = None,
        heads: int | str | None = None,
        source_positions: Positions = None,
    ) -> "Location":
        """A checked location in a model.

        Args:
            site: a full name, or a short one with its layer: ("resid_pre", 2).
            positions: an int or several for all prompts, a `slice` with a start and a stop that are not negative, a tensor
                [batch, n] with a row for each prompt, or None: all.
            heads: one head, an index or a label such as "L1H7"; None: all heads of the site.
            source_positions: the positions in the source run, if they differ.

        Raises KeyError for an unknown site, and ValueError for several sites, for one without a vector at each position,
        for a head at a site without heads, and for different numbers of positions and source positions.
        """
        if len(names := model.names(site)) != 1:
            raise ValueError(f"a location is at one site, and {site!r} means {len(names)}: {', '.join(names[:3])}, ...")
        dims = model.hook_dict[names[0]].dims
        if dims[:2] != ("batch", "pos") or len(dims) < 3:
            raise ValueError(f"'{names[0]}' [{', '.join(dims)}] has no vector at each position")
        if heads is not None and not dims[2].endswith("head"):
            raise ValueError(f"'{names[0]}' [{', '.join(dims)}] has no heads, but heads={heads!r} is given")
        own, others = _rows_of(positions, "positions"), _rows_of(source_positions, "source_positions")
        if others is not None and (own is None or own.shape[1] != others.shape[1]):
            n = "all" if own is None else own.shape[1]
            raise ValueError(f"as many source_positions as positions are needed, got {others.shape[1]} and {n}")
        return cls(names[0], own, others, None if heads is None else head_at_site(heads, names[0]))

    def some(self, rows: RowNumbers) -> "Location":
        """The location for some of the prompts."""
        own, others = (
            given if given is None or len(given) == 1 else given[rows]
            for given in (self.positions, self.source_positions)
        )
        return replace(self, positions=own, source_positions=others)

    def at(self, positions: Positions, source_positions: Positions = None) -> "Location":
        """The same site and head at other positions."""
        own, others = _rows_of(positions, "positions"), _rows_of(source_positions, "source_positions")
        return replace(self, positions=own, source_positions=others)

    def read(self, value: Float[Tensor, "batch pos ..."]) -> Vectors:
        """The vectors at this location, from the value of the site; all heads are concatenated if none is chosen."""
        return value[self._index(value, self.positions)].flatten(2)

    def read_source(self, value: Float[Tensor, "batch pos ..."]) -> Vectors:
        """The same at the positions of the source run."""
        positions = self.positions if self.source_positions is None else self.source_positions
        return value[self._index(value, positions)].flatten(2)

    def written(self, value: Float[Tensor, "batch pos ..."], vectors: Vectors) -> Float[Tensor, "batch pos ..."]:
        """A copy of the value with these vectors at this location."""
        index, new = self._index(value, self.positions), value.clone()
        new[index] = vectors.to(value).view(value[index].shape)
        return new

    def _index(self, value: Tensor, positions: Tensor | None) -> tuple[Any, ...]:
        batch, n_pos = value.shape[:2]
        chosen = torch.arange(n_pos)[None] if positions is None else positions
        if len(chosen) not in (1, batch):
            raise ValueError(f"positions at '{self.site}' are given for {len(chosen)} prompts, and the run has {batch}")
        if positions is not None:
            check_range(positions, n_pos, f"position at '{self.site}'")
        if self.heads is not None:
            check_range(torch.tensor([self.heads]), value.shape[2], f"head of '{self.site}'")
        where = (torch.arange(batch, device=value.device)[:, None], chosen.to(value.device))
        return where if self.heads is None else (*where, self.heads)

    # ---- as an intervention ------------------------------------------------------------------------------------------

    @property
    def location(self) -> "Location":
        """The location itself; see `Intervention`."""
        return self

    def exchanged(self, base: Vectors, source: Vectors) -> Vectors:
        """The vectors with which the base run continues: those of the source run."""
        return source

    def hooks(self, source: Tensor | Mapping[Any, Tensor]) -> Hooks:
        """The intervention, for `model.hooks(...)`; `source` is a cache of the source run, or the value of the site in it."""
        return hooks_of(self, source)

    def rewrite(self, source: Tensor | Mapping[Any, Tensor]) -> Rewrite:
        """The intervention as a change in a cell of `patching.Experiment`."""
        return rewrite_of(self, source)


@runtime_checkable
class Intervention(Protocol):
    """A location, and the exchange that is made there: a `Location` itself, or an `Alignment`."""

    @property
    def location(self) -> Location: ...

    def exchanged(self, base: Tensor, source: Tensor) -> Tensor: ...


def hook_of(location: Location, vectors: Vectors, change: Change) -> tuple[str, Callable[..., Tensor]]:
    """A hook that replaces the vectors of the base run by `change(base, source)`; vectors of one prompt are used for all."""

    def exchange(value: Tensor, hook: Any = None) -> Tensor:
        own = location.read(value)
        if len(vectors) not in (1, len(own)) or vectors.shape[1:] != own.shape[1:]:
            raise ValueError(
                f"source vectors {list(vectors.shape)} (prompts, positions, width) do not match those of the base run "
                f"{list(own.shape)} at '{location.site}'"
            )
        return location.written(value, change(own, vectors.to(own).expand_as(own)))

    return location.site, exchange


def hooks_of(intervention: Intervention, source: Tensor | Mapping[Any, Tensor]) -> Hooks:
    """The hooks of an intervention with the values of a source run."""
    location = intervention.location
    value = source if isinstance(source, Tensor) else source[location.site]
    return [hook_of(location, location.read_source(value.detach()), intervention.exchanged)]


def rewrite_of(intervention: Intervention, source: Tensor | Mapping[Any, Tensor]) -> Rewrite:
    """The intervention with the values of a source run, as a `Rewrite`."""
    [(site, function)] = hooks_of(intervention, source)
    return Rewrite(site, function)


# ---- what an intervened run should say -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class InterchangeAnswers:
    """The right answer of each run at a position, among all tokens or some candidates."""

    answers: Int[Tensor, " batch"]
    positions: int | Int[Tensor, "batch 1"] = -1
    candidates: Int[Tensor, "batch n"] | None = None

    @classmethod
    def of(
        cls,
        model: HookedRootModule,
        tokens: PromptRows,
        answers: Answers,
        positions: int | Tensor = -1,
        candidates: Answers | None = None,
    ) -> "InterchangeAnswers":
        """A question checked for these prompts: ValueError if lengths differ, IndexError for ids or positions out of range."""
        batch, n_pos = tokens.shape
        known = answers_of_prompts(answers, batch, "answers", model).cpu()
        if known.shape[1] > 1:
            raise ValueError(f"answers must be one token for each prompt, got {known.shape[1]}")
        at = positions if isinstance(positions, int) else whole_numbers(positions, "answer_positions").reshape(-1, 1)
        if isinstance(at, Tensor) and len(at) != batch:
            raise ValueError(f"answer_positions are given for {len(at)} prompts, and there are {batch}")
        check_range(at if isinstance(at, Tensor) else torch.tensor([at]), n_pos, "answer_positions")
        some = None
        if candidates is not None:
            some = answers_of_prompts(_in_rows(candidates), batch, "candidates", model).cpu()
            if missing := (some != known).all(1).nonzero()[:, 0].tolist():
                raise ValueError(f"the answers of prompts {missing[:6]} are not among the candidates")
        return cls(known[:, 0], at, some)

    def some(self, rows: RowNumbers) -> "InterchangeAnswers":
        """The question for some of the prompts."""
        candidates = None if self.candidates is None else self.candidates[rows]
        positions = self.positions if isinstance(self.positions, int) else self.positions[rows]
        return InterchangeAnswers(self.answers[rows], positions, candidates)

    def logits(self, model: HookedRootModule, tokens: PromptRows, hooks: Hooks) -> Float[Tensor, "batch candidate"]:
        """The logits of the candidates in a run with these hooks."""
        with model.hooks(fwd_hooks=hooks):
            _, [read] = reads_of([Where(self.positions, self.candidates)], logits_for(model, tokens))
        return read[:, 0]

    @property
    def targets(self) -> Int[Tensor, " batch"]:
        """The index of the right answer."""
        return self.answers if self.candidates is None else (self.candidates == self.answers[:, None]).long().argmax(1)

    def right(self, logits: Float[Tensor, "batch candidate"]) -> Bool[Tensor, " batch"]:
        """Whether the right answer has the highest logit."""
        return logits.argmax(1).cpu() == self.targets


def interchange(
    model: HookedRootModule, prompts: Prompts, changes: Sequence[tuple[Intervention, Prompts]]
) -> Float[Tensor, "batch pos d_vocab"]:
    """The logits of a run into which values of other runs are put, each at its location (Geiger et al. 2021, arXiv:2106.02997).

    Args:
        prompts: texts or ids [batch, pos] of the run that is changed (the base run of the literature); `VisionInputs` for a model
            that reads images.
        changes: interventions, each with the prompts of its source run: one for each prompt, or one for all. In contrast to
            a cell of `patching.sweep`, each has a separate source, positions may differ between prompts and runs, and an
            `Alignment` exchanges its subspace only. Interventions at the same site are applied in the given order, so several
            variables of one site can be exchanged together, each with its alignment. At a site of a vision tower, positions are
            those of patches, and each prompt has one image.

    Raises ValueError for prompts that do not line up, IndexError for positions and heads that do not exist.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> early = Location.of(model, ("resid_pre", 0), 4)
    >>> late = Location.of(model, ("resid_pre", 0), [5])
    >>> base, source = "When Mary and John left, John", "When Mary and Sarah had, John"
    >>> logits = interchange(model, base, [(early, source), (late, source)])
    >>> bool((logits - model("When Mary and Sarah had, John")).abs().max() < 1e-4)
    True
    """
    tokens, sources = _runs(model, prompts, changes)
    with torch.no_grad(), model.hooks(fwd_hooks=_hooks(model, changes, sources)):
        return model(tokens)


def interchange_accuracy(
    model: HookedRootModule,
    prompts: Prompts,
    changes: Sequence[tuple[Intervention, Prompts]],
    answers: Answers,
    *,
    answer_positions: int | Int[Tensor, "..."] = -1,
    candidates: Answers | None = None,
    groups: Groups = None,
    batch_size: int = 64,
) -> MetricScores:
    """Whether the intervened model gives the answer of the causal model: 1 or 0 for each prompt; the accuracy is `.mean`.

    Args:
        prompts, changes: as for `interchange`.
        answers: the answer of the causal model under the same intervention, a string or id for each prompt.
        answer_positions: the position of the answer, one or [batch].
        candidates: the tokens that are compared, a list for all prompts or [batch, n]; None: the vocabulary.
        groups: a label for each prompt, such as its template: intervals count groups, not prompts (see `Scores`).

    Returns Measures of one cell, with Wilson's interval over prompts. Raises ValueError for prompts, answers or candidates that
    do not line up, and for unknown tokens, IndexError for positions that are out of range.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> names = [" Mary", " John"]
    >>> base, source = (
    ...     "When Mary and John went to the store,{} gave a drink to".format(name)
    ...     for name in (" John", " Mary")
    ... )
    >>> giver = Location.of(model, ("resid_pre", 0), 10)
    >>> interchange_accuracy(model, base, [(giver, source)], names[1], candidates=names).mean
    tensor(1.)
    """
    tokens, sources = _runs(model, prompts, changes)
    question = InterchangeAnswers.of(model, tokens, answers, answer_positions, candidates)
    of_prompts = checked_groups(groups, len(tokens))
    right = []
    with torch.no_grad():
        for rows in torch.arange(len(tokens)).split(batch_size):
            numbers = rows.tolist()
            some = [source if len(source) == 1 else some_rows(model, source, numbers) for source in sources]
            hooks = _hooks(model, changes, some, rows)
            part = question.some(rows)
            right.append(part.right(part.logits(model, some_rows(model, tokens, numbers), hooks)))
    sites = [each.location.site for each, _ in changes]
    about = provenance(model, of="accuracy", sites=sites)
    return MetricScores(torch.cat(right).float(), {}, [True], about=about, groups=of_prompts)


def _runs(
    model: HookedRootModule, base: Prompts, changes: Sequence[tuple[Intervention, Prompts]]
) -> tuple[PromptRows, list[PromptRows]]:
    """What the model reads in the base run and in the source runs; raises ValueError if their numbers of prompts differ."""
    device = next(model.parameters()).device
    tokens = rows_of(model, base, "prompts").to(device)
    sources = [rows_of(model, source, "source").to(device) for _, source in changes]
    for source, (change, _) in zip(sources, changes, strict=True):
        if len(source) not in (1, len(tokens)):
            raise ValueError(
                f"the base run has {len(tokens)} prompts, a source run {len(source)}; give as many, or one"
            )
        check_run(model, change.location, tokens, source)
    return tokens, sources


def check_run(model: HookedRootModule, location: Location, base: PromptRows, source: PromptRows) -> None:
    """Raises ValueError or IndexError for positions that do not fit these runs."""
    n_own, n_other = (_n_positions(model, rows, location.site) for rows in (base, source))
    if location.positions is None and n_own != n_other:
        raise ValueError(
            f"all positions at '{location.site}' are exchanged, and base and source prompts differ in length: "
            f"{n_own} and {n_other} positions; give positions=... and source_positions=..."
        )
    others = location.positions if location.source_positions is None else location.source_positions
    for n, given in ((n_own, location.positions), (n_other, others)):
        if given is not None:
            check_range(given, n, f"position at '{location.site}'")
            if len(given) not in (1, len(base)):
                raise ValueError(f"positions are given for {len(given)} prompts, and there are {len(base)}")
    if location.positions is not None:
        for row in (location.positions % n_own).tolist():
            if len(set(row)) < len(row):
                raise ValueError(f"a position is given twice in {row}")


def _n_positions(model: HookedRootModule, rows: PromptRows, site: str) -> int:
    """The number of positions at a site; raises ValueError if its values are of images, and prompts have not one each."""
    n_rows, n_pos = rows_and_positions(model, rows, site)
    if is_of_images(model, site) and not has_one_image_each(model, rows, n_rows):
        raise ValueError(
            f"'{site}' has {n_rows} images: an exchange there needs one in each of the {len(rows)} prompts"
        )
    return n_pos


def _hooks(
    model: HookedRootModule,
    changes: Sequence[tuple[Intervention, Prompts]],
    sources: Sequence[PromptRows],
    rows: RowNumbers | None = None,
) -> Hooks:
    """The hooks of all changes, for some of the prompts."""
    hooks: Hooks = []
    for (change, _), tokens in zip(changes, sources, strict=True):
        location = change.location if rows is None else change.location.some(rows)
        value = values_of(model, tokens, [location.site])[location.site]
        hooks.append(hook_of(location, location.read_source(value), change.exchanged))
    return hooks


# ---- arguments -------------------------------------------------------------------------------------------------------


def check_range(indices: Int[Tensor, "*shape"], size: int, what: str) -> None:
    """Raises IndexError for an index that is out of range."""
    for index in indices.flatten().tolist():
        if not -size <= index < size:
            raise IndexError(f"{what} {index} is out of range: there are {size}, so {-size} to {size - 1}")


def _rows_of(positions: Positions, name: str) -> Int[Tensor, "row n"] | None:
    """Positions as rows: one row for all prompts, or one for each."""
    if positions is None:
        return None
    if isinstance(positions, slice):
        positions = indices_of_slice(positions)
    found = whole_numbers([positions] if isinstance(positions, int) else positions, name)
    if found.ndim == 1 and isinstance(positions, Tensor) and len(found) > 1:
        raise ValueError(
            f"{name} of shape {list(found.shape)} are either the same for all prompts or one for each: give {name}.tolist() for "
            f"the first, {name}[:, None] for the second"
        )
    return found if found.ndim == 2 else found[None]


def _in_rows(candidates: Answers) -> Any:
    """Candidates as rows; a list without nesting is the row of all prompts."""
    if isinstance(candidates, Tensor):
        return candidates[None] if candidates.ndim == 1 else candidates
    is_nested = isinstance(candidates, (list, tuple)) and any(isinstance(row, (list, tuple)) for row in candidates)
    return candidates if is_nested else [candidates]
