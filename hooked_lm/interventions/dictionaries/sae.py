"""Sparse dictionaries: encode vectors as sparse features, and decode them. Autoencoders use one site, transcoders two.

All of them compute `features = activation((x - b_dec) W_enc + b_enc)` and `x ~ features W_dec + b_dec`; the classes differ in
the activation and the training objective.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

Inputs = Float[Tensor, "*batch d_in"]
Outputs = Float[Tensor, "*batch d_out"]
Features = Float[Tensor, "*batch d_sae"]
PerFeature = Float[Tensor, " d_sae"]


class SAE(nn.Module):
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
        """

        d_in: int
        d_sae: int
        subtract_b_dec: bool = True
        d_out: int | None = None
        hook_point: str | None = None
        hook_point_out: str | None = None

        def __post_init__(self) -> None:
            for name in ("d_in", "d_sae", "d_out", "k"):
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

        @property
        def width_out(self) -> int:
            """The width of the output."""
            return self.d_in if self.d_out is None else self.d_out

        def build(self, seed: int = 0) -> "SAE":
            """A dictionary with new weights."""
            return SAE(self, seed)

    kind: ClassVar[str] = "standard"

    def __init__(self, cfg: Config, seed: int = 0) -> None:
        super().__init__()
        self.cfg = cfg
        generator = torch.Generator().manual_seed(seed)
        directions = torch.randn(cfg.d_sae, cfg.width_out, generator=generator)
        directions = directions / directions.norm(dim=1, keepdim=True)
        self.W_dec = nn.Parameter(directions)
        if cfg.width_out == cfg.d_in:
            self.W_enc = nn.Parameter(directions.T.clone(memory_format=torch.contiguous_format))
        else:
            readers = torch.randn(cfg.d_in, cfg.d_sae, generator=generator)
            self.W_enc = nn.Parameter(readers / readers.norm(dim=0))
        self.b_dec = nn.Parameter(torch.zeros(cfg.width_out))
        self._more_weights()

    def _more_weights(self) -> None:
        self.b_enc = nn.Parameter(torch.zeros(self.cfg.d_sae))

    # ---- encode and decode -------------------------------------------------------------------------------------------

    def encode(self, x: Inputs) -> Features:
        """The features of vectors: nonnegative and sparse."""
        return self.activate(self.hidden(x))

    def decode(self, features: Features) -> Outputs:
        """The reconstructed vectors."""
        return features @ self.W_dec + self.b_dec

    def forward(self, x: Inputs) -> Outputs:
        """The reconstruction."""
        return self.decode(self.encode(x))

    def hidden(self, x: Inputs) -> Features:
        """The pre-activations."""
        return self._read(x) + self.b_enc

    def activate(self, hidden: Features) -> Features:
        """The activation function: pre-activations to features."""
        return hidden.relu()

    def _read(self, x: Inputs) -> Features:
        return (x - self.b_dec if self.cfg.subtract_b_dec else x) @ self.W_enc

    # ---- training ----------------------------------------------------------------------------------------------------

    def objective(
        self, x: Float[Tensor, "row d_in"], target: Float[Tensor, "row d_out"], sparsity: float
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "row d_sae"], Float[Tensor, "row d_sae"]]:
        """The training loss (squared error plus `sparsity` times the penalty), with pre-activations and features."""
        hidden = self.hidden(x)
        features = self.activate(hidden)
        error = (target - self.decode(features)).pow(2).sum(-1).mean()
        return error + sparsity * self.penalty(hidden, features), hidden, features

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
    def scale_inputs_(self, inputs: float, outputs: float) -> "SAE":
        """Converts, in place, a dictionary of inputs and outputs that were multiplied by these numbers to the unscaled ones."""
        self.W_enc.mul_(inputs)
        self.W_dec.div_(outputs)
        self.b_dec.div_(outputs)
        return self

    # ---- description -------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The kind and sizes, from which `build` makes a dictionary of the same structure."""
        return {"kind": self.kind, **asdict(self.cfg)}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in asdict(self.cfg).items() if value is not None)


class TopK(SAE):
    """Keeps the `k` largest features of each vector, without a penalty (Gao et al. 2024, arXiv:2406.04093).

    >>> sae = TopK.Config(d_in=8, d_sae=32, k=3).build()
    >>> (sae.encode(torch.randn(100, 8)) > 0).sum(-1).max()
    tensor(3)
    """

    @dataclass(frozen=True)
    class Config(SAE.Config):
        """`k`: the largest number of active features of a vector."""

        k: int = 32

        def build(self, seed: int = 0) -> "TopK":
            return TopK(self, seed)

    kind = "topk"
    cfg: Config

    def activate(self, hidden: Features) -> Features:
        values, places = hidden.topk(self.cfg.k, dim=-1, sorted=False)
        return torch.zeros_like(hidden).scatter(-1, places, values.relu())

    def penalty(self, hidden: Float[Tensor, "row d_sae"], features: Float[Tensor, "row d_sae"]) -> Float[Tensor, ""]:
        return hidden.new_zeros(())


class BatchTopK(TopK):
    """Keeps on average `k` features of each vector (Bussmann et al. 2024, arXiv:2412.06410).

    In training mode the `k * rows` largest features of a batch are kept. In evaluation mode, so that vectors do not depend on
    the rest of the batch, features above `threshold` are kept: a moving average of the smallest kept feature of each batch.
    Before training all positive features are kept.
    """

    @dataclass(frozen=True)
    class Config(TopK.Config):
        """`k`: the average number of active features of a vector."""

        def build(self, seed: int = 0) -> "BatchTopK":
            return BatchTopK(self, seed)

    kind = "batchtopk"
    threshold: Tensor
    threshold_decay: ClassVar[float] = 0.99

    def _more_weights(self) -> None:
        super()._more_weights()
        self.register_buffer("threshold", torch.full((self.cfg.d_sae,), -1.0))

    def activate(self, hidden: Features) -> Features:
        positive = hidden.relu()
        if not self.training:
            return positive * (positive > self.threshold)
        n_kept = min(self.cfg.k * (positive.numel() // self.cfg.d_sae), positive.numel())
        values, places = positive.flatten().topk(n_kept, sorted=False)
        return torch.zeros_like(positive).flatten().scatter(0, places, values).view_as(positive)

    def objective(
        self, x: Float[Tensor, "row d_in"], target: Float[Tensor, "row d_out"], sparsity: float
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "row d_sae"], Float[Tensor, "row d_sae"]]:
        loss, hidden, features = super().objective(x, target, sparsity)
        active = features.detach()[features.detach() > 0]
        if self.training and len(active):
            smallest, known = active.min(), self.threshold >= 0
            moved = self.threshold_decay * self.threshold + (1 - self.threshold_decay) * smallest
            self.threshold.copy_(torch.where(known, moved, smallest))
        return loss, hidden, features

    def scale_features_(self, factors: PerFeature) -> "SAE":
        super().scale_features_(factors)
        self.threshold.mul_(factors)
        return self


class JumpReLU(SAE):
    """Keeps features above learned thresholds, one for each feature (Rajamanoharan et al. 2024, arXiv:2407.14435).

    The penalty is the number of active features (L0). Its gradient with respect to the thresholds is a straight-through
    estimate with a rectangular kernel of width `bandwidth`.
    """

    @dataclass(frozen=True)
    class Config(SAE.Config):
        """`threshold`: the initial value; `bandwidth`: of the gradient estimate, in units of the features."""

        threshold: float = 0.01
        bandwidth: float = 0.1

        def build(self, seed: int = 0) -> "JumpReLU":
            return JumpReLU(self, seed)

    kind = "jumprelu"
    cfg: Config

    def _more_weights(self) -> None:
        super()._more_weights()
        self.threshold = nn.Parameter(torch.full((self.cfg.d_sae,), self.cfg.threshold))

    def activate(self, hidden: Features) -> Features:
        return _Jump.apply(hidden.relu(), self.threshold, self.cfg.bandwidth)

    def penalty(self, hidden: Float[Tensor, "row d_sae"], features: Float[Tensor, "row d_sae"]) -> Float[Tensor, ""]:
        return _Step.apply(hidden, self.threshold, self.cfg.bandwidth).sum(-1).mean()

    @torch.no_grad()
    def after_step(self) -> None:
        super().after_step()
        self.threshold.clamp_(min=0)

    @torch.no_grad()
    def resample(self, which: Tensor, readers: Tensor, directions: Tensor, biases: Tensor) -> None:
        super().resample(which, readers, directions, biases)
        self.threshold[which] = self.cfg.threshold

    def per_feature(self) -> list[nn.Parameter]:
        return [self.b_enc, self.threshold]


class Gated(SAE):
    """A gate decides which features are active, and a second path their magnitudes (Rajamanoharan et al. 2024, arXiv:2404.16014).

    Both share `W_enc`: a feature is active where `x W_enc + b_gate` is positive, with the magnitude
    `relu(exp(r_mag) * x W_enc + b_mag)`. The L1 penalty applies to the gate alone, which is also trained by an auxiliary
    reconstruction loss.
    """

    @dataclass(frozen=True)
    class Config(SAE.Config):
        """The settings of `SAE.Config`."""

        def build(self, seed: int = 0) -> "Gated":
            return Gated(self, seed)

    kind = "gated"

    def _more_weights(self) -> None:
        self.b_gate = nn.Parameter(torch.zeros(self.cfg.d_sae))
        self.b_mag = nn.Parameter(torch.zeros(self.cfg.d_sae))
        self.r_mag = nn.Parameter(torch.zeros(self.cfg.d_sae))

    def hidden(self, x: Inputs) -> Features:
        return self._read(x) + self.b_gate

    def activate(self, hidden: Features) -> Features:
        sizes = self.r_mag.exp() * (hidden - self.b_gate) + self.b_mag
        return (hidden > 0) * sizes.relu()

    def objective(
        self, x: Float[Tensor, "row d_in"], target: Float[Tensor, "row d_out"], sparsity: float
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "row d_sae"], Float[Tensor, "row d_sae"]]:
        loss, hidden, features = super().objective(x, target, sparsity)
        through_gate = hidden.relu() @ self.W_dec.detach() + self.b_dec.detach()
        return loss + (target - through_gate).pow(2).sum(-1).mean(), hidden, features

    def penalty(self, hidden: Float[Tensor, "row d_sae"], features: Float[Tensor, "row d_sae"]) -> Float[Tensor, ""]:
        return (hidden.relu() * self.W_dec.detach().norm(dim=1)).sum(-1).mean()

    @torch.no_grad()
    def resample(self, which: Tensor, readers: Tensor, directions: Tensor, biases: Tensor) -> None:
        self.W_enc[:, which], self.W_dec[which], self.r_mag[which] = readers, directions, 0.0
        self.b_gate[which], self.b_mag[which] = biases, biases

    def per_feature(self) -> list[nn.Parameter]:
        return [self.b_gate, self.b_mag]


class Transcoder(SAE):
    """Maps the input of a layer, such as an MLP, to its output through sparse features (Dunefsky et al. 2024, arXiv:2406.11944).

    Its activation is a ReLU. The other classes can also be transcoders, with `subtract_b_dec=False` and the site and width of
    the output.
    """

    @dataclass(frozen=True)
    class Config(SAE.Config):
        """`hook_point` is the site of the input, `hook_point_out` that of the output."""

        subtract_b_dec: bool = False

        def build(self, seed: int = 0) -> "Transcoder":
            return Transcoder(self, seed)

    kind = "transcoder"


KINDS: dict[str, type[SAE]] = {of.kind: of for of in (SAE, TopK, BatchTopK, JumpReLU, Gated, Transcoder)}


def build(described: dict[str, Any], seed: int = 0) -> SAE:
    """A new dictionary from the output of `SAE.to_dict`; ValueError for an unknown kind.

    >>> build({"kind": "topk", "d_in": 8, "d_sae": 32, "k": 4}).cfg.k
    4
    """
    settings = dict(described)
    kind = settings.pop("kind", None)
    if kind not in KINDS:
        raise ValueError(f"there is no dictionary of kind {kind!r}; there are {', '.join(KINDS)}")
    return KINDS[kind].Config(**settings).build(seed)


@contextmanager
def mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Sets the training mode of a module inside the block, and restores it afterwards."""
    before = module.training
    module.train(training)
    try:
        yield
    finally:
        module.train(before)


class _Jump(torch.autograd.Function):
    """Values above their threshold, else 0; the threshold's gradient uses a rectangular kernel."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, threshold: Tensor, bandwidth: float) -> Tensor:
        ctx.save_for_backward(value, threshold)
        ctx.bandwidth = bandwidth
        return value * (value > threshold)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        value, threshold = ctx.saved_tensors
        near = (value - threshold).abs() < ctx.bandwidth / 2
        each = -(threshold / ctx.bandwidth) * near * gradient
        return gradient * (value > threshold), each.flatten(0, -2).sum(0), None


class _Step(torch.autograd.Function):
    """1 for values above their threshold, else 0; the threshold's gradient uses a rectangular kernel."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, threshold: Tensor, bandwidth: float) -> Tensor:
        ctx.save_for_backward(value, threshold)
        ctx.bandwidth = bandwidth
        return (value > threshold).to(value.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        value, threshold = ctx.saved_tensors
        near = (value - threshold).abs() < ctx.bandwidth / 2
        each = -near.to(value.dtype) / ctx.bandwidth * gradient
        return None, each.flatten(0, -2).sum(0), None
