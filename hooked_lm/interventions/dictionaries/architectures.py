"""Kinds of dictionaries: TopK, BatchTopK, JumpReLU, gated, transcoder."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.interventions.dictionaries.sae import SAE, FeatureValues, Inputs, PerFeature


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

    def activate(self, hidden: FeatureValues) -> FeatureValues:
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

    def activate(self, hidden: FeatureValues) -> FeatureValues:
        positive = hidden.relu()
        if not self.training:
            return positive * (positive > self.threshold)
        n_kept = min(self.cfg.k * (positive.numel() // self.cfg.d_sae), positive.numel())
        values, places = positive.flatten().topk(n_kept, sorted=False)
        return torch.zeros_like(positive).flatten().scatter(0, places, values).view_as(positive)

    def observe(self, features: Float[Tensor, "row d_sae"]) -> None:
        """Moves the thresholds towards the smallest active feature of a training step."""
        active = features[features > 0]
        if self.training and len(active):
            smallest, known = active.min(), self.threshold >= 0
            moved = self.threshold_decay * self.threshold + (1 - self.threshold_decay) * smallest
            self.threshold.copy_(torch.where(known, moved, smallest))

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

    def activate(self, hidden: FeatureValues) -> FeatureValues:
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

    def hidden(self, x: Inputs) -> FeatureValues:
        return self._read(x) + self.b_gate

    def activate(self, hidden: FeatureValues) -> FeatureValues:
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
