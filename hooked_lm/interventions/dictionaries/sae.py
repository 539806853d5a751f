"""Sparse dictionaries: encode vectors as sparse features, and decode them. Autoencoders use one site, transcoders two.

All of them compute `features = activation((x - b_dec) W_enc + b_enc)` and `x ~ features W_dec + b_dec`; the classes differ in
the activation and the training objective. A transcoder may add a linear skip connection, `x W_skip`.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooked_lm.keywords import check_keywords
from hooked_lm.notebook_repr import NotebookRepr, Table
from hooked_lm.results import stored

FORMAT = "hooked_lm.dictionary"
USUAL = {"skip_connection": False, "n_outputs": 1}  # settings that are not mentioned at these values
Kind = TypeVar("Kind", bound="SAE")
Module = TypeVar("Module", bound=nn.Module)
Inputs = Float[Tensor, "*batch d_in"]
Outputs = Float[Tensor, "*batch d_out"]
FeatureValues = Float[Tensor, "*batch d_sae"]
PerFeature = Float[Tensor, " d_sae"]


class SAE(NotebookRepr, nn.Module):
    """A sparse autoencoder with a ReLU and an L1 penalty (Bricken et al. 2023; Cunningham et al. 2023, arXiv:2309.08600).

    `W_enc` is [d_in, d_sae], `W_dec` [d_sae, d_out]. New weights come from `seed`: the rows of `W_dec` are random unit vectors,
    `W_enc` is its transpose, biases are zero.

    >>> sae = SAE.Config(d_in=8, d_sae=32).build()
    >>> features = sae.encode(torch.randn(2, 5, 8))
    >>> features.shape, sae.decode(features).shape
    (torch.Size([2, 5, 32]), torch.Size([2, 5, 8]))
    """

    @dataclass(frozen=True)
    class Config:
        """Sizes and sites of a dictionary.

        `subtract_b_dec`: whether `b_dec` is subtracted from the input (most autoencoders, no transcoders). `d_out`: the width
        of the output, None for that of the input. `hook_point`, `hook_point_out`: the sites of input and output, if known.
        `skip_connection`: whether a transcoder of any kind adds a linear map of its input to its output (Paulo et al. 2025,
        arXiv:2501.18823); an autoencoder would copy its input through it, so there it is refused. `n_outputs`: the number of
        sites to which the features write, each of width `d_out`, whose directions are side by side in `W_dec`; more than one
        only in a `CrossLayerTranscoder`.
        """

        d_in: int
        d_sae: int
        subtract_b_dec: bool = True
        d_out: int | None = None
        hook_point: str | None = None
        hook_point_out: str | None = None
        skip_connection: bool = False
        n_outputs: int = 1

        def __post_init__(self) -> None:
            for name in ("d_in", "d_sae", "d_out", "k", "n_outputs"):
                size = getattr(self, name, None)
                if size is not None and (not isinstance(size, int) or isinstance(size, bool)):
                    raise ValueError(f"{name} must be a whole number, got {size!r}")
                if size is not None and size < 1:
                    raise ValueError(f"{name} must be at least 1, got {size}")
            if getattr(self, "k", 0) > self.d_sae:
                raise ValueError(f"k={getattr(self, 'k')} features of d_sae={self.d_sae} cannot be active")  # noqa: B009
            if self.subtract_b_dec and self.width_out != self.d_in:
                raise ValueError(
                    f"b_dec has the width of the output, {self.width_out}, and cannot be taken from inputs of width {self.d_in}: "
                    "give subtract_b_dec=False"
                )
            if self.skip_connection and (self.subtract_b_dec or self.hook_point_out == (self.hook_point or "")):
                raise ValueError(
                    "skip_connection is for transcoders: an autoencoder would copy its input; a transcoder has another "
                    "site as hook_point_out, and subtract_b_dec=False"
                )

        @property
        def width_out(self) -> int:
            """The width of the output."""
            return self.d_in if self.d_out is None else self.d_out

        def build(self, seed: int = 0) -> "SAE":
            """A dictionary with new weights."""
            return SAE(self, seed)

    kind: ClassVar[str] = "standard"

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        KINDS.setdefault(cls.kind, cls)

    def __init__(self, cfg: Config, seed: int = 0) -> None:
        super().__init__()
        self.cfg = cfg
        generator = torch.Generator().manual_seed(seed)
        directions = torch.randn(cfg.d_sae, cfg.n_outputs * cfg.width_out, generator=generator)
        directions = directions / directions.norm(dim=1, keepdim=True)
        self.W_dec = nn.Parameter(directions)
        if directions.shape[1] == cfg.d_in:
            self.W_enc = nn.Parameter(directions.T.clone(memory_format=torch.contiguous_format))
        else:
            readers = torch.randn(cfg.d_in, cfg.d_sae, generator=generator)
            self.W_enc = nn.Parameter(readers / readers.norm(dim=0))
        self.b_dec = nn.Parameter(torch.zeros(cfg.width_out))
        self.W_skip = nn.Parameter(torch.zeros(cfg.d_in, cfg.width_out)) if cfg.skip_connection else None
        self._more_weights()

    def _more_weights(self) -> None:
        self.b_enc = nn.Parameter(torch.zeros(self.cfg.d_sae))

    # ---- encode and decode -------------------------------------------------------------------------------------------

    def encode(self, x: Inputs) -> FeatureValues:
        """The features of vectors: nonnegative and sparse."""
        return self.activate(self.hidden(x))

    def decode(self, features: FeatureValues, of: Inputs | None = None) -> Outputs:
        """The reconstructed vectors. A skip connection needs the vectors `of` which the features are, else ValueError."""
        return self.read_out(features @ self.directions(), of)

    def read_out(self, made: Outputs, of: Inputs | None = None) -> Outputs:
        """What features write to the output site, with the bias and the skip connection of the vectors `of`."""
        made = made + self.b_dec
        if self.W_skip is None:
            return made
        if of is None:
            raise ValueError(
                "a transcoder with a skip connection decodes features together with the vectors that they are of: give "
                "decode(features, of=x)"
            )
        return made + of @ self.W_skip

    def directions(self, output: int = 0) -> Float[Tensor, "d_sae d_out"]:
        """What each feature writes to one of the output sites, a view of `W_dec`; a dictionary has one such site, number 0."""
        width = self.cfg.width_out
        return self.W_dec if self.cfg.n_outputs == 1 else self.W_dec[:, output * width : (output + 1) * width]

    def forward(self, x: Inputs) -> Outputs:
        """The reconstruction."""
        return self.decode(self.encode(x), x)

    def hidden(self, x: Inputs) -> FeatureValues:
        """The pre-activations."""
        return self._read(x) + self.b_enc

    def activate(self, hidden: FeatureValues) -> FeatureValues:
        """The activation function: pre-activations to features."""
        return hidden.relu()

    def _read(self, x: Inputs) -> FeatureValues:
        return (x - self.b_dec if self.cfg.subtract_b_dec else x) @ self.W_enc

    # ---- training ----------------------------------------------------------------------------------------------------

    def objective(
        self, x: Float[Tensor, "row d_in"], target: Float[Tensor, "row d_out"], sparsity: float
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "row d_sae"], Float[Tensor, "row d_sae"]]:
        """The training loss (squared error plus `sparsity` times the penalty), with pre-activations and features."""
        hidden = self.hidden(x)
        features = self.activate(hidden)
        error = (target - self.decode(features, x)).pow(2).sum(-1).mean()
        self.observe(features.detach())
        return error + sparsity * self.penalty(hidden, features), hidden, features

    def observe(self, features: Float[Tensor, "row d_sae"]) -> None:
        """Takes note of the features of a training step: nothing here."""

    def penalty(self, hidden: Float[Tensor, "row d_sae"], features: Float[Tensor, "row d_sae"]) -> Float[Tensor, ""]:
        """The sparsity penalty: here the L1 norm of the features, weighted by the norms of their directions."""
        return (features * self.W_dec.norm(dim=1)).sum(-1).mean()

    @torch.no_grad()
    def after_step(self) -> None:
        """Restores the constraints on the weights after an optimiser step: directions of unit norm."""
        self.W_dec.div_(self.W_dec.norm(dim=1, keepdim=True).clamp_min(1e-8))

    @torch.no_grad()
    def resample(
        self,
        which: Bool[Tensor, " d_sae"],
        readers: Float[Tensor, "d_in some"],
        directions: Float[Tensor, "some d_out"],
        biases: Float[Tensor, " some"],
    ) -> None:
        """Gives some features new encoder weights, directions and biases, and resets their other weights."""
        self.W_enc[:, which], self.W_dec[which], self.b_enc[which] = readers, directions, biases

    # ---- units -------------------------------------------------------------------------------------------------------

    def per_feature(self) -> list[nn.Parameter]:
        """The weights, other than `W_enc` and `W_dec`, that scale with the features."""
        return [self.b_enc]

    @torch.no_grad()
    def scale_features_(self, factors: PerFeature) -> "SAE":
        """Multiplies the features by these factors, in place, without changing reconstructions."""
        self.W_enc.mul_(factors)
        self.W_dec.div_(factors[:, None])
        for weight in self.per_feature():
            weight.mul_(factors)
        return self

    @torch.no_grad()
    def scale_inputs_(self, inputs: float, *outputs: float) -> "SAE":
        """Converts, in place, a dictionary of inputs and outputs that were multiplied by these numbers to the unscaled ones.

        `outputs`: the number of each output site.
        """
        self.W_enc.mul_(inputs)
        for number, factor in enumerate(outputs):
            self.directions(number).div_(factor)
        self.b_dec.div_(outputs[0])
        if self.W_skip is not None:
            self.W_skip.mul_(inputs / outputs[0])
        return self

    # ---- description -------------------------------------------------------------------------------------------------

    def at(self: Kind, site: str | None, site_out: str | None = None) -> Kind:
        """This dictionary, with the same weights, for another site; of a transcoder, `site_out` is that of the output. None: for
        any site.

        A dictionary that is used elsewhere than at its site warns.

        >>> sae = SAE.Config(d_in=8, d_sae=32, hook_point="blocks.1.hook_mlp_out").build()
        >>> sae.at("blocks.2.hook_mlp_out").cfg.hook_point
        'blocks.2.hook_mlp_out'
        """
        moved = copy(self)
        moved.cfg = replace(self.cfg, hook_point=site, hook_point_out=site_out)
        return moved

    def to_dict(self) -> dict[str, Any]:
        """The kind and sizes, from which `build` makes a dictionary of the same structure."""
        return {"kind": self.kind, **self._settings()}

    def _settings(self) -> dict[str, Any]:
        """The sizes and sites; without settings that few dictionaries have, where they are as in all others."""
        return {name: value for name, value in asdict(self.cfg).items() if USUAL.get(name, ...) != value}

    def repr_table(self) -> Table:
        """The sizes and sites, and the shapes of the weights."""
        config = [(name, value) for name, value in self._settings().items() if value is not None]
        return Table(
            ("", "value"), [*config, *((name, f"{[*w.shape]} {w.dtype}") for name, w in self.state_dict().items())]
        )

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self._settings().items() if value is not None)

    # ---- files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Writes the dictionary to one safetensors file, bit for bit and atomically."""
        write_dictionary(self, path)

    @classmethod
    @stored.names_the_file
    def load(cls: type[Kind], path: str | Path) -> Kind:
        """The dictionary of a file that `save` wrote, in evaluation mode; its weights require no gradient.

        Raises ValueError for other files, and for a dictionary of another class.
        """
        sae, normalization = read_dictionary(path)
        if normalization is not None or not isinstance(sae, cls):
            found = type(sae).__name__ if normalization is None else "Normalized"
            raise ValueError(f"{path} holds a {found}, not a {cls.__name__}: use {found}.load")
        return sae


KINDS: dict[str, type[SAE]] = {SAE.kind: SAE}  # subclasses register themselves


def build(described: Mapping[str, Any], seed: int = 0) -> SAE:
    """A new dictionary from the output of `SAE.to_dict`; ValueError for an unknown kind, TypeError for an unknown setting.

    >>> build({"kind": "topk", "d_in": 8, "d_sae": 32, "k": 4}).cfg.k
    4
    """
    settings = dict(described)
    config = config_of(settings.pop("kind", None))
    check_keywords(f"{config.__qualname__}", settings, [of.name for of in fields(config)])
    return config(**settings).build(seed)


def config_of(kind: object) -> type[SAE.Config]:
    """The Config of a kind of dictionary; ValueError for an unknown kind."""
    if kind not in KINDS:
        raise ValueError(f"there is no dictionary of kind {kind!r}; there are {', '.join(KINDS)}")
    return KINDS[kind].Config


def frozen(sae: Module) -> Module:
    """The module in evaluation mode, with weights that require no gradient."""
    return sae.eval().requires_grad_(False)


def write_dictionary(sae: SAE, path: str | Path, normalization: str | None = None) -> None:
    """Writes a dictionary and the normalisation of its input."""
    stored.write(path, FORMAT, sae.state_dict(), {"dictionary": sae.to_dict(), "normalized": normalization})


@stored.names_the_file
def read_dictionary(path: str | Path) -> tuple[SAE, str | None]:
    """The dictionary of a file that `save` wrote, and the normalisation of its input (None: it is not normalised)."""
    tensors, header = stored.read(path, FORMAT)
    weights = {name: weight.clone() for name, weight in tensors.items()}  # not views of the file
    return frozen(filled(header.get("dictionary"), weights, str(path))), header.get("normalized")


def filled(described: object, tensors: Mapping[str, Tensor], where: str) -> SAE:
    """A dictionary with these weights, in their dtypes.

    Raises ValueError for an invalid description, and for weights that are missing, unexpected, or of the wrong shape. Shapes
    are checked first, so that nothing larger than the tensors is allocated.
    """
    sizes = {"W_enc": ("d_in", "d_sae"), "W_dec": ("d_sae", "d_out")}
    if not isinstance(described, dict):
        raise ValueError(f"{where} does not describe a dictionary: {repr(described)[:80]}")
    for name, axes in sizes.items():
        expected = [described.get(axis) or described.get("d_in") for axis in axes]
        if name == "W_dec" and isinstance(n_outputs := described.get("n_outputs", 1), int):
            expected[1] = n_outputs * expected[1] if isinstance(expected[1], int) else expected[1]
        found = list(tensors[name].shape) if name in tensors else "missing"
        if found != expected:
            raise ValueError(f"{where}: {name} is {found}, expected {expected} ({', '.join(axes)})")
    try:
        sae = build(described)
    except TypeError as error:
        raise ValueError(f"{where} does not describe a dictionary: {error}") from None
    wanted = sae.state_dict()
    wrong = [f"{name} is missing" for name in wanted if name not in tensors]
    wrong += [f"{name} is not understood" for name in tensors if name not in wanted]
    wrong += [
        f"{name} is {list(tensors[name].shape)}, expected {list(weight.shape)}"
        for name, weight in wanted.items()
        if name in tensors and tensors[name].shape != weight.shape
    ]
    if wrong:
        what = f"a dictionary of kind {sae.kind!r} from {sae.cfg.d_in} to {sae.cfg.d_sae}"
        raise ValueError(f"{where}, {what}: {'; '.join(wrong)}")
    sae.load_state_dict(dict(tensors), assign=True)  # keeps their dtypes
    return sae
