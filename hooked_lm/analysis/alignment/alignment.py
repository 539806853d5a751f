"""Distributed alignment search: the subspace of a site in which a causal variable is represented, found by training.

Exchanging the part of the base run's value that lies in the subspace for that of a source run should make the model say what
the causal model says (Geiger et al. 2023, arXiv:2303.02536); the directions of the subspace are trained until it does. In the
boundless form (Wu et al. 2023, arXiv:2305.08809) the size of the subspace is trained as well.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from hooked_lm.analysis.alignment.interchange import Hooks, Location, Positions, Vectors, hooks_of, rewrite_of
from hooked_lm.engine.edit import Rewrite
from hooked_lm.results import stored
from hooked_lm.results.scores import Scores

if TYPE_CHECKING:
    import plotly.graph_objects as go

FORMAT = "hooked_lm.Alignment"
EXCHANGED = ("subspace", "nothing", "everything", "random subspace")  # what an alignment is compared with
Own = TypeVar("Own", bound="Alignment")


class Alignment(nn.Module):
    """A subspace of the vectors at a location, as an intervention: base + R R^T (source - base).

    R, `directions` [width, size], has orthonormal columns, whatever an optimiser does to the parameters after it. Only these
    `size` directions are kept, as Householder reflections: the rest of a rotation [width, width] would change nothing, and cost
    `width / size` times as much. The same subspace is exchanged at each position of the location. `train_alignment` makes one.

    Args:
        location: where; see `Location.of`.
        width: how long the vectors there are.
        size: how many directions; 0 exchanges nothing, `width` everything.
        seed: of the random directions to begin with.

    `history` has the course of training, a number a step ("loss", and "size" of the boundless form); `accuracy` says how well
    it does, beside what it is to be compared with; `about` has the model, versions and settings.

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
        self.accuracy: Scores | None = None
        self.about: dict[str, Any] = {}
        start = torch.randn(width, size, generator=torch.Generator().manual_seed(seed))
        self.directions = nn.Parameter(start)
        orthogonal(self, "directions", orthogonal_map="householder", use_trivialization=False)

    def exchanged(self, base: Vectors, source: Vectors) -> Vectors:
        """What the base run goes on with."""
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
        """How much of each direction is exchanged: here all."""
        return torch.ones(self.size, device=self.directions.device)

    def extent(self) -> float | Tensor:
        """How much of the width is exchanged, where that is trained; else 0: it is for nothing."""
        return 0.0

    def anneal(self, done: float) -> None:
        """Get ready for a step of training, of which this share is done."""

    # ---- as an intervention ------------------------------------------------------------------------------------------

    def at(self: Own, positions: Positions, source_positions: Positions = None) -> Own:
        """The same subspace at other positions, such as those of other prompts; training of one trains both."""
        other = self.__class__.__new__(self.__class__)
        other.__dict__.update(self.__dict__)
        other.location = self.location.at(positions, source_positions)
        return other

    def hooks(self, source: Tensor | Mapping[Any, Tensor]) -> Hooks:
        """The intervention, for `model.hooks(...)`; `source` is a cache of the source run, or the site's value there.

        ValueError, when it runs, for values of another width: the alignment is of another model.
        """
        return hooks_of(self, source)

    def rewrite(self, source: Tensor | Mapping[Any, Tensor]) -> Rewrite:
        """The intervention as a change of a cell of `patching.Experiment`."""
        return rewrite_of(self, source)

    # ---- results -----------------------------------------------------------------------------------------------------

    def to_dataframe(self) -> pd.DataFrame:
        """The course of training, a row for each step: `step`, `loss` (nats), and `size` of the boundless form."""
        return pd.DataFrame(self.history).rename_axis("step").reset_index()

    def plot(self) -> "go.Figure":
        """The loss by step."""
        import plotly.graph_objects as go

        figure = go.Figure(go.Scatter(y=self.history.get("loss", []), mode="lines", name="loss"))
        return figure.update_layout(xaxis_title="step", yaxis_title="loss (nats)", title=repr(self))

    def save(self, path: str | Path) -> None:
        """Write the directions and how they came about to one safetensors file, which appears when it is whole."""
        location = self.location
        tensors = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        for name in ("positions", "source_positions"):
            if (given := getattr(location, name)) is not None:
                tensors[name] = given.contiguous()
        if self.accuracy is not None:
            tensors["accuracy"] = self.accuracy.values
        header = {"site": location.site, "heads": location.heads, "history": self.history, "about": self.about}
        stored.write(path, FORMAT, tensors, header)

    @classmethod
    def load(cls, path: str | Path) -> "Alignment":
        """Read what `save` wrote, bit for bit. Raises ValueError for any other file."""
        tensors, header = stored.read(path, FORMAT)
        own, others, accuracy = (tensors.pop(name, None) for name in ("positions", "source_positions", "accuracy"))
        [weight] = tensors.values()
        found = Alignment(Location(header["site"], own, others, header["heads"]), *weight.shape)
        found.load_state_dict(tensors)
        found.history, found.about = header["history"], header["about"]
        found.accuracy = None if accuracy is None else Scores(accuracy, {"exchanged": EXCHANGED}, about=found.about)
        return found.requires_grad_(False)

    def __repr__(self) -> str:
        head = "" if self.location.heads is None else f", head {self.location.heads}"
        result = "untrained" if self.accuracy is None else f"accuracy {self.accuracy.mean[0]:.3g} on held-out pairs"
        name = type(self).__name__.removeprefix("Parametrized")
        return f"{name}({self.size} of {self.width} directions at '{self.location.site}'{head}, {result})"


class BoundlessAlignment(Alignment):
    """An alignment in training whose size is trained too: all directions in order, exchanged up to a soft boundary.

    The share of direction i is sigmoid((boundary * width - i) / temperature); the lower the temperature, the sharper.
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

    def shares(self) -> Float[Tensor, " size"]:
        """How much of each direction is exchanged, from 1 to 0."""
        middle = torch.arange(self.width, device=self.boundary.device) + 0.5
        return ((self.boundary * self.width - middle) / self.temperature).sigmoid()

    def extent(self) -> Tensor:
        """The boundary, as a share of the width."""
        return self.boundary

    def anneal(self, done: float) -> None:
        """Sharpen the boundary, from a tenth of the width to a tenth of a direction, and keep it inside."""
        hot, cold = max(self.width / 10, 0.1), 0.1
        self.temperature = hot * (cold / hot) ** done
        with torch.no_grad():
            self.boundary.clamp_(0, 1)

    def save(self, path: str | Path) -> None:
        """Not while it is in training: raises ValueError."""
        raise ValueError("a BoundlessAlignment is in training; hardened() gives the alignment to be saved")

    def hardened(self) -> Alignment:
        """The directions inside of the boundary, as a plain alignment."""
        size = min(max(round(self.boundary.item() * self.width), 0), self.width)
        found = Alignment(self.location, self.width, size).to(self.boundary.device)
        with torch.no_grad():
            setattr(found, "directions", self.directions[:, :size])  # noqa: B010 (set through the parametrization)
        return found
