"""A task for rankings of edges: a model, pairs of prompts to search and to judge on, and the true circuit if it is known."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.analysis.circuits.circuit import Circuit
from hooked_lm.callers import warn_caller
from hooked_lm.engine.identity import identities
from hooked_lm.engine.pairs import Pairs
from hooked_lm.engine.prompts import rows_of
from hooked_lm.models.decoder import Decoder
from hooked_lm.notebook_repr import NotebookRepr, Table


@runtime_checkable
class HasCircuitTask(Protocol):
    """What `leaderboard` reads of a task: that of a `CircuitTask`, or of a model with a planted circuit."""

    @property
    def name(self) -> str: ...

    @property
    def model(self) -> Decoder: ...

    @property
    def pairs(self) -> Pairs: ...

    @property
    def held_out(self) -> Pairs | None: ...

    @property
    def truth(self) -> Circuit | None: ...


@dataclass(frozen=True, repr=False)
class CircuitTask(NotebookRepr):
    """A task of a model whose circuit methods look for.

    Args:
        name: the name in tables.
        model: a decoder.
        pairs: clean and corrupted prompts with answers, which the methods see. All have as many tokens each.
        held_out: other pairs of the task, on which circuits are judged. None: the second half of the pairs, which the methods
            then do not see.
        truth: the circuit that the model has, if it is known.

    Warns if some held-out clean prompts are searched ones. Raises ValueError if all are, for pairs without answers, for one pair
    without held-out ones, and for a truth of another graph.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.demo.tasks import pairs
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> task = CircuitTask("capitals", model, pairs("capitals", 6))
    >>> len(task.pairs), len(task.held_out)
    (3, 3)
    """

    name: str
    model: Decoder
    pairs: Pairs
    held_out: Pairs | None = None
    truth: Circuit | None = None

    def __post_init__(self) -> None:
        for pairs in filter(None, (self.pairs, self.held_out)):
            if pairs.answers is None or pairs.wrong_answers is None:
                raise ValueError(
                    f"the pairs of task {self.name!r} need answers and wrong_answers, which circuits are judged by"
                )
        if self.held_out is None:
            if (n := len(self.pairs)) < 2:
                raise ValueError(f"task {self.name!r} has one pair: give held_out=, other pairs to judge circuits on")
            object.__setattr__(self, "held_out", self.pairs[n // 2 :])
            object.__setattr__(self, "pairs", self.pairs[: n // 2])
        if self.truth is not None:
            self.truth.check(Graph.of(self.model))
        self._compare_prompts()

    def _compare_prompts(self) -> None:
        """Warns of clean prompts that are both searched and held out; raises ValueError if all held-out ones are."""
        assert self.held_out is not None
        seen, judged = (identities(self.model, rows_of(self.model, each.clean)) for each in (self.pairs, self.held_out))
        n_seen = sum(one in {*seen} for one in judged)
        if n_seen == len(judged):
            raise ValueError(
                f"all {n_seen} held-out clean prompts of task {self.name!r} are among those that are searched: circuits are "
                "judged on others, so give held_out=, pairs with other clean prompts"
            )
        if n_seen:
            warn_caller(
                f"{n_seen} of {len(judged)} held-out clean prompts of task {self.name!r} are among those that are searched: "
                "on these, circuits look better than on others"
            )

    def repr_table(self) -> Table:
        """The pairs in a line each."""
        rows = [(name, repr(getattr(self, name))) for name in ("pairs", "held_out", "truth")]
        return Table(("", "value"), rows)

    def __repr__(self) -> str:
        n_held_out = 0 if self.held_out is None else len(self.held_out)
        truth = "" if self.truth is None else f"; truth of {self.truth.n_edges} edges"
        return f"CircuitTask({self.name}: {len(self.pairs)} pairs, {n_held_out} held out{truth})"

    @classmethod
    def of(cls, task: HasCircuitTask) -> "CircuitTask":
        """The same task as a CircuitTask, checked."""
        return cls(task.name, task.model, task.pairs, task.held_out, task.truth)
