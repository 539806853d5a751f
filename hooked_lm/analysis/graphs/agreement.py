"""What interventions on the nodes of a graph do in the model itself, beside what the graph predicts, and a placebo."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.extras import lazy_import
from hooked_lm.results import stored
from hooked_lm.results.tabular import Tabular

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
else:
    pd = lazy_import("pandas", "viz")

FORMAT = "hooked_lm.GraphInterventions"
RESAMPLES, LEVEL, FEWEST = 1000, 0.95, 4  # the bootstrap over nodes; of fewer there is no interval


@dataclass(frozen=True, eq=False, repr=False)
class GraphInterventions(Tabular):
    """The changes of the targets of a graph by interventions: predicted, measured in the model, and by a placebo.

    Args:
        nodes: what was changed, one node or supernode for each row.
        targets: the targets of the graph.
        predicted: [node, target], the sum over all paths of the graph, with the activations of features linear in what they read.
        measured: [node, target], the exact change in the model, where attention, norms and MLPs respond.
        placebo: [draw, node, target], the same for random directions of the same norms in place of what the nodes write.
        about: the origin: what was changed to what, seeds.
    """

    nodes: Sequence[str]
    targets: Sequence[str]
    predicted: Float[Tensor, "node target"]
    measured: Float[Tensor, "node target"]
    placebo: Float[Tensor, "draw node target"]
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def correlation(self) -> dict[str, float]:
        """The correlation of predicted and measured changes, over nodes and targets, with its interval: `correlation`, `low`,
        `high`, at a level of 0.95, by resampling nodes (Efron 1979, doi:10.1214/aos/1176344552)."""
        return _with_interval(self.predicted, self.measured[None])

    @property
    def placebo_correlation(self) -> dict[str, float]:
        """The same of predicted changes with those of the placebo, on average over its draws."""
        return _with_interval(self.predicted, self.placebo)

    @property
    def slope(self) -> float:
        """The measured change for each unit of predicted change, by least squares through 0."""
        squares = float(self.predicted.square().sum())
        return float((self.predicted * self.measured).sum()) / squares if squares else math.nan

    def predicted_by(
        self,
        names: Sequence[str],
        adjacency: Float[Tensor, "node node"],
        totals: Float[Tensor, " node"],
        n_features: int,
    ) -> "GraphInterventions":
        """The same interventions on single features, as far as these are nodes of another graph, with its predictions."""
        kept = [row for row, name in enumerate(self.nodes) if name in names[:n_features]]
        changes = torch.zeros(len(kept), len(names))
        for place, row in enumerate(kept):
            changes[place, names.index(self.nodes[row])] = float(self.about["times"]) - 1
        predicted = predicted_changes(adjacency, totals, changes, n_features, len(self.targets))
        nodes = [self.nodes[row] for row in kept]
        measured, placebo = self.measured[kept], self.placebo[:, kept]
        return replace(self, nodes=nodes, predicted=predicted, measured=measured, placebo=placebo)

    def to_dataframe(self) -> "pd.DataFrame":
        """A row for each node and target: `node`, `target`, `predicted`, `measured`, `placebo`, of which it is the first draw."""
        places = [(node, target) for node in self.nodes for target in self.targets]
        table = pd.DataFrame(places, columns=["node", "target"])
        return table.assign(
            **{name: values.flatten().numpy() for name, values in (self.tensors | {"placebo": self.placebo[0]}).items()}
        )

    def plot(self, title: str = "") -> "go.Figure":
        """Plot the measured change of each node and target against the predicted one."""
        from hooked_lm.viz.points import points

        several = len(self.targets) > 1
        labels = [f"{node}: {target}" if several else node for node in self.nodes for target in self.targets]
        return points(
            self.predicted.flatten(),
            self.measured.flatten(),
            labels,
            title=title or "Interventions on the nodes of a graph",
            x_title="predicted change",
            y_title="measured change",
            subtitle=self.in_words(),
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The three tables by name."""
        return {name: getattr(self, name) for name in ("predicted", "measured", "placebo")}

    @property
    def header(self) -> dict[str, Any]:
        """What is no tensor."""
        return {"nodes": list(self.nodes), "targets": list(self.targets), "about": dict(self.about)}

    def save(self, path: str | Path) -> None:
        """Write everything to one safetensors file; `load` restores it exactly."""
        stored.write(path, FORMAT, self.tensors, self.header)

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "GraphInterventions":
        """Read what `save` wrote. Raises ValueError for any other file."""
        tensors, header = stored.read(path, FORMAT)
        fields: dict[str, Any] = {**tensors, **header}
        return cls(**fields)

    def in_words(self) -> str:
        """The correlation with its interval, and that of the placebo, in a line."""
        own, other = self.correlation, self.placebo_correlation
        return f"correlation {_shown(own)} with the model over {len(self.nodes)} nodes, a placebo's {_shown(other)}"

    def __repr__(self) -> str:
        return f"GraphInterventions({self.in_words()}; slope {self.slope:.2f})"


def _shown(found: Mapping[str, float]) -> str:
    return f"{found['correlation']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def _with_interval(one: Float[Tensor, "node target"], others: Float[Tensor, "draw node target"]) -> dict[str, float]:
    """The mean correlation with each of the others."""
    n = len(one)
    value = float(correlation(one.flatten().expand(len(others), -1), others.flatten(1)).mean())
    if n < FEWEST:
        return {"correlation": value, "low": math.nan, "high": math.nan}
    drawn = torch.randint(n, (RESAMPLES, n), generator=torch.Generator().manual_seed(0))
    each = [correlation(one[drawn].flatten(1), other[drawn].flatten(1)).nan_to_num(0.0) for other in others]
    many = torch.stack(each).mean(0)
    low, high = torch.quantile(many, torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=many.dtype)).tolist()
    return {"correlation": value, "low": low, "high": high}


def correlation(one: Float[Tensor, "row cell"], other: Float[Tensor, "row cell"]) -> Float[Tensor, " row"]:
    """The correlation of each row; NaN for a constant one."""
    one, other = (each.double() - each.double().mean(1, keepdim=True) for each in (one, other))
    sizes = one.square().sum(1).sqrt() * other.square().sum(1).sqrt()
    return (one * other).sum(1) / torch.where(sizes == 0, torch.nan, sizes)


def predicted_changes(
    adjacency: Float[Tensor, "node node"],
    totals: Float[Tensor, " node"],
    changes: Float[Tensor, "intervention node"],
    n_features: int,
    n_targets: int,
) -> Float[Tensor, "intervention target"]:
    """What interventions change at the targets, by the edges of a graph.

    `changes` are relative changes of what nodes write: -1 removes it. Each feature that reads a changed node changes in
    proportion to its total, so the changes of later nodes follow from those of earlier ones.

    >>> edges = torch.tensor([[0.0, 0.0, 0.0], [2.0, 0.0, 0.0], [1.0, 3.0, 0.0]])
    >>> predicted_changes(
    ...     edges, torch.tensor([1.0, 4.0, 9.0]), torch.tensor([[-1.0, 0.0, 0.0]]), 2, 1
    ... )
    tensor([[-2.5000]])
    """
    shares = adjacency[:n_features] / torch.where(totals[:n_features] == 0, torch.inf, totals[:n_features])[:, None]
    step = total = changes.to(adjacency)
    for _ in range(n_features):
        step = torch.cat([step @ shares.T, torch.zeros_like(step[:, n_features:])], 1)
        if not bool(step.any()):
            break
        total = total + step
    return total @ adjacency[len(adjacency) - n_targets :].T
