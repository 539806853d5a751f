"""Distributed alignment search: the subspace of a site in which a causal variable is represented, found by training.

The base run's component in the subspace is replaced by that of a source run, and the directions of the subspace are trained so
that the model then gives the answer of the causal model (Geiger et al. 2023, arXiv:2303.02536). In the boundless form (Wu et
al. 2023, arXiv:2305.08809) the size of the subspace is trained too.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from hooked_lm.analysis.alignment.interchange import Hooks, Location, Positions, Vectors, hooks_of, rewrite_of
from hooked_lm.engine.edit import Rewrite
from hooked_lm.extras import lazy_import
from hooked_lm.results import stored
from hooked_lm.results.control import Control
from hooked_lm.results.measures import MetricScores
from hooked_lm.results.tabular import Tabular

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
else:
    pd = lazy_import("pandas", "viz")

FORMAT = "hooked_lm.Alignment"
EXCHANGED = ("subspace", "nothing", "everything", "random subspace")  # the alignment, and what it is compared with
Own = TypeVar("Own", bound="Alignment")


class Alignment(Tabular, nn.Module):
    """A subspace of the vectors at a location, as an intervention: base + R R^T (source - base).

    R, `directions` [width, size], has orthonormal columns, also after steps of an optimiser. Only these `size` directions are
    stored, as Householder reflections: the other columns of a rotation [width, width] would have no effect, and cost
    `width / size` times as much. The same subspace is exchanged at each position of the location. `train_alignment` trains one.

    Args:
        location: the site, positions and head; see `Location.of`.
        width: the length of the vectors there.
        size: the number of directions; 0 exchanges nothing, `width` everything.
        seed: the seed of the initial random directions.

    `history` has a number for each step of training ("loss", and "size" of the boundless form); `accuracy` is that on held-out
    pairs, with its baselines; `about` has the model, versions and settings.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> alignment = Alignment(Location.of(model, ("resid_pre", 2), -1), width=128, size=4)
    >>> _, source = model.run_with_cache("When Mary and John left, John")
    >>> with model.hooks(alignment.hooks(source)):
    ...     logits = model("When Mary and John left, Mary")
    >>> alignment
    Alignment(4 of 128 directions at 'blocks.2.hook_resid_pre', untrained)
    """

    def __init__(self, location: Location, width: int, size: int, seed: int = 0) -> None:
        if not 0 <= size <= width:
            raise ValueError(f"a subspace of '{location.site}' has 0 to {width} directions, got size={size}")
        super().__init__()
        self.location, self.width, self.size = location, width, size
        self.history: dict[str, list[float]] = {}
        self.accuracy: MetricScores | None = None
        self.about: dict[str, Any] = {}
        start = torch.randn(width, size, generator=torch.Generator().manual_seed(seed))
        self.directions = nn.Parameter(start)
        orthogonal(self, "directions", orthogonal_map="householder", use_trivialization=False)

    def exchanged(self, base: Vectors, source: Vectors) -> Vectors:
        """The vectors with which the base run continues; ValueError for vectors of another width."""
        if base.shape[-1] != self.width:
            raise ValueError(
                f"the alignment was made for vectors of width {self.width}, and those at '{self.location.site}' have "
                f"{base.shape[-1]}: it is of another model"
            )
        own = base.to(torch.promote_types(base.dtype, torch.float32))
        directions = self.directions.to(own)
        moved = ((source.to(own) - own) @ directions) * self.shares().to(own)
        return (own + moved @ directions.T).to(base)

    def shares(self) -> Float[Tensor, " size"]:
        """The share of each direction that is exchanged, from 0 to 1; 1 if it is not trained."""
        trained = self._trained_shares()
        return torch.ones(self.size, device=self.directions.device) if trained is None else trained

    def _trained_shares(self) -> Float[Tensor, " size"] | None:
        """The shares, if they are trained."""
        return None

    def extent(self) -> float | Tensor:
        """The trained share of the width that is exchanged, whose cost is added to the loss; 0 if it is not trained."""
        return 0.0

    def anneal(self, done: float) -> None:
        """Called before each step of training; `done` is the share of the steps that are done."""

    # ---- as an intervention ------------------------------------------------------------------------------------------

    def at(self: Own, positions: Positions, source_positions: Positions = None) -> Own:
        """The same subspace at other positions, e.g. of other prompts; both share their parameters."""
        other = self.__class__.__new__(self.__class__)
        other.__dict__.update(self.__dict__)
        other.location = self.location.at(positions, source_positions)
        return other

    def hooks(self, source: Tensor | Mapping[Any, Tensor]) -> Hooks:
        """The intervention, for `model.hooks(...)`; `source` is a cache of the source run, or the value of the site in it.

        The hooks raise ValueError for values of another width, which are those of another model.
        """
        return hooks_of(self, source)

    def rewrite(self, source: Tensor | Mapping[Any, Tensor]) -> Rewrite:
        """The intervention as a change in a cell of `patching.Experiment`."""
        return rewrite_of(self, source)

    @property
    def control(self) -> Control | None:
        """What the subspace adds to the accuracy on held-out pairs, beside what a random one of the same size adds; None before
        training, and for no direction or all."""
        if self.accuracy is None or self.size in (0, self.width):
            return None
        of = dict(zip(EXCHANGED, self.accuracy.mean.tolist(), strict=True))
        added = [of[name] - of["nothing"] for name in ("subspace", "random subspace")]
        return Control.compared("random subspace", "accuracy added", added[0], added[1], "training")

    # ---- results -----------------------------------------------------------------------------------------------------

    def to_dataframe(self) -> "pd.DataFrame":
        """The history of training, a row for each step: `step`, `loss` (nats), and `size` of the boundless form."""
        return pd.DataFrame(self.history).rename_axis("step").reset_index()

    def plot(self, title: str = "") -> "go.Figure":
        """The loss by step, as a line."""
        from hooked_lm import viz

        loss = torch.tensor(self.history.get("loss", []))
        return viz.lines(
            range(len(loss)), {"loss": loss}, title=title or repr(self), x_title="step", y_title="loss (nats)"
        )

    def save(self, path: str | Path) -> None:
        """Writes the directions, history and settings to one safetensors file, atomically."""
        self._check_trained()
        location = self.location
        tensors = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        for name in ("positions", "source_positions"):
            if (given := getattr(location, name)) is not None:
                tensors[name] = given.contiguous()
        if self.accuracy is not None:
            tensors["accuracy"] = self.accuracy.values
        header = {"site": location.site, "heads": location.heads, "history": self.history, "about": self.about}
        stored.write(path, FORMAT, tensors, header)

    def _check_trained(self) -> None:
        """Raises ValueError for a form that is not saved."""

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "Alignment":
        """The alignment that `save` wrote, bit for bit. Raises ValueError for any other file."""
        tensors, header = stored.read(path, FORMAT)
        own, others, accuracy = (tensors.pop(name, None) for name in ("positions", "source_positions", "accuracy"))
        [weight] = tensors.values()
        found = Alignment(Location(header["site"], own, others, header["heads"]), *weight.shape)
        found.load_state_dict(tensors)
        found.history, found.about = header["history"], header["about"]
        if accuracy is not None:
            found.accuracy = MetricScores(accuracy, {"exchanged": EXCHANGED}, [True], about=found.about)
        return found.requires_grad_(False)

    def __repr__(self) -> str:
        head = "" if self.location.heads is None else f", head {self.location.heads}"
        result = "untrained" if self.accuracy is None else f"accuracy {self.accuracy.mean[0]:.3g} on held-out pairs"
        if self.control is not None:
            result += f", {self.control}"
        name = type(self).__name__.removeprefix("Parametrized")
        return f"{name}({self.size} of {self.width} directions at '{self.location.site}'{head}, {result})"


class BoundlessAlignment(Alignment):
    """An alignment in training whose size is trained too: ordered directions, exchanged up to a soft boundary.

    The share of direction i is sigmoid((boundary * width - i - 1/2) / temperature), which is sharper for lower temperatures.
    `hardened` cuts at the boundary.

    >>> boundless = BoundlessAlignment(Location("blocks.0.hook_resid_pre"), width=8)
    >>> [round(share, 2) for share in boundless.shares().tolist()][2:6]
    [0.82, 0.62, 0.38, 0.18]
    >>> boundless.hardened()
    Alignment(4 of 8 directions at 'blocks.0.hook_resid_pre', untrained)
    """

    def __init__(self, location: Location, width: int, seed: int = 0) -> None:
        super().__init__(location, width, width, seed)
        self.boundary = nn.Parameter(torch.tensor(0.5))
        self.temperature = 1.0

    def _trained_shares(self) -> Float[Tensor, " size"]:
        middle = torch.arange(self.width, device=self.boundary.device) + 0.5
        return ((self.boundary * self.width - middle) / self.temperature).sigmoid()

    def extent(self) -> Tensor:
        """The boundary, as a share of the width."""
        return self.boundary

    def anneal(self, done: float) -> None:
        """Lowers the temperature, from a tenth of the width to a tenth of a direction, and clamps the boundary to [0, 1]."""
        hot, cold = max(self.width / 10, 0.1), 0.1
        self.temperature = hot * (cold / hot) ** done
        with torch.no_grad():
            self.boundary.clamp_(0, 1)

    def _check_trained(self) -> None:
        raise ValueError("a BoundlessAlignment is in training; hardened() gives the alignment to be saved")

    def hardened(self) -> Alignment:
        """The directions within the boundary, as an `Alignment`."""
        size = min(max(round(self.boundary.item() * self.width), 0), self.width)
        found = Alignment(self.location, self.width, size).to(self.boundary.device)
        with torch.no_grad():
            setattr(found, "directions", self.directions[:, :size])  # noqa: B010 (set through the parametrization)
        return found
