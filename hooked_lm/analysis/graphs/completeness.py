"""Whether a graph is exact: sums of edges against the values of nodes, with independent biases; edges against differences."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.graphs.frozen import FIRST
from hooked_lm.analysis.graphs.sources import Rows, Sources
from hooked_lm.analysis.graphs.targets import TargetReads

LARGEST = (
    1e-3  # an error of a sum, relative to the sum of its terms' sizes, that rounding in single precision never reaches
)
FAR = 1e-2  # the same of a finite difference, relative to the largest edge out of the feature


@torch.no_grad()
def biases_of(sources: Sources, targets: TargetReads, rows: Rows) -> Float[Tensor, " read"]:
    """What features (those in `rows`) and targets read if no token and no feature writes anything: biases alone."""
    frozen = sources.frozen
    values = frozen.run(torch.zeros_like(frozen.values[FIRST]), sources.biases())
    return torch.cat([sources.reads(values, rows), targets.reads(values)])


def error_of_sums(
    adjacency: Float[Tensor, "read source"], biases: Tensor, others: Tensor, totals: Float[Tensor, " read"]
) -> Float[Tensor, " read"]:
    """How far edges, biases and others are from the totals, relative to the sum of their sizes."""
    rest = [biases.double(), others.double(), -totals.double()]
    found = adjacency.sum(1, dtype=torch.float64) + sum(rest)
    sizes = adjacency.abs().sum(1, dtype=torch.float64) + sum(each.abs() for each in rest)
    return (found.abs() / sizes.clamp(min=torch.finfo(torch.float32).tiny)).float()


@torch.no_grad()
def error_of_differences(
    sources: Sources, targets: TargetReads, rows: Rows, columns: Sequence[int], adjacency: Float[Tensor, "read source"]
) -> float:
    """The largest difference between edges and what removing a feature changes in the frozen model, relative to the largest
    edge out of the feature.

    `columns` are the places, in `rows`, of the features that are removed; `adjacency` holds the edges into features and targets.
    Raises ValueError for a difference that is no rounding, in single and double precision; below, differences say little.
    """
    frozen, worst = sources.frozen, 0.0
    before = frozen.run(frozen.values[FIRST], frozen.given)
    base = torch.cat([sources.reads(before, rows), targets.reads(before)]).double()
    is_exact = sources.eps <= torch.finfo(torch.float32).eps
    for column in columns:
        given = dict(frozen.given)
        for site, (position, vector) in sources.written(int(rows[column])).items():
            given[site] = given[site].clone()
            given[site][0, position] -= vector.to(given[site])
        after = frozen.run(frozen.values[FIRST], given)
        changes = base - torch.cat([sources.reads(after, rows), targets.reads(after)]).double()
        edges = adjacency[:, column].double()
        rounding = torch.finfo(torch.float32).eps * base.abs().max()
        error = (changes - edges).abs().max()
        if is_exact and not bool(error <= FAR * edges.abs().max() + 64 * rounding):
            layer, position, index = sources.features[int(rows[column])].tolist()
            raise ValueError(
                f"the edges out of {sources.unit} {index} of layer {layer} at position {position} differ by {float(error):.1e} "
                f"from what its removal changes, and the largest is {float(edges.abs().max()):.1e}: some part of the model is "
                "not linear with constant patterns and norms, so an attribution graph of it would be wrong"
            )
        worst = max(worst, float(error / (edges.abs().max() + rounding)))
    return worst


def check_sums(errors: Float[Tensor, " read"], names: Sequence[str], eps: float) -> None:
    """Raises ValueError if the edges into a node do not sum to what it is: the model has parts that are not linear.

    `eps` is the rounding of the numbers that are computed with.
    """
    allowed = max(LARGEST, 4 * eps)
    worst = int(errors.argmax())
    if not float(errors[worst]) <= allowed:
        raise ValueError(
            f"the edges into {names[worst]!r} and its bias miss its value by {float(errors[worst]):.1e} of their sizes, and "
            f"rounding explains {allowed:.0e}: some part of the model is not linear with constant patterns and norms, as "
            "values that are clipped, so an attribution graph of it would be wrong"
        )
