"""Grouped linear maps: each group of outputs reads its own group of inputs, so that the matrix is block-diagonal."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.mlp import MLP, AbstractMLP, Stream, hooked_input
from hooked_lm.components.norms.norm import norm_of

Groups = Float[Tensor, "group d_in d_out"]


def grouped_linear(
    x: Float[Tensor, "*batch width"], W: Groups, b: Float[Tensor, " out_width"] | None = None
) -> Float[Tensor, "*batch out_width"]:
    """`x W + b` for the block-diagonal matrix of these groups."""
    rows = x.flatten(0, -2).unflatten(-1, (len(W), -1)).transpose(0, 1)
    out = torch.bmm(rows, W).transpose(0, 1).reshape(*x.shape[:-1], -1)
    return out if b is None else out + b


def block_diagonal(W: Groups) -> Float[Tensor, "width out_width"]:
    """The whole matrix of a grouped map, with zeros between groups."""
    return torch.block_diag(*W)


def groups_of(n_groups: int, d_in: int, d_out: int) -> nn.Parameter:
    """A new weight of a grouped map, without values; ValueError if the groups do not divide both widths."""
    if d_in % n_groups or d_out % n_groups:
        raise ValueError(f"{n_groups} groups do not divide a map from {d_in} to {d_out} features")
    return nn.Parameter(torch.empty(n_groups, d_in // n_groups, d_out // n_groups))


class GroupedMLP(AbstractMLP):
    """An MLP whose maps are grouped: `W_in_groups` is [group, d_model / groups, d_mlp / groups], `W_out_groups` [group, d_mlp /
    groups, d_model / groups].

    `W_in` and `W_out` are the whole matrices, computed at each access; they cannot be changed in place.
    """

    axes = dict.fromkeys(("W_in_groups", "W_out_groups"), "group [d_in] d_out; it is block-diagonal")

    @dataclass(frozen=True)
    class Config(MLP.Config):
        n_groups_in: int = 1
        n_groups_out: int = 1

        def build(self) -> "GroupedMLP":
            return GroupedMLP(self)

    cfg: Config
    W_in_groups: Tensor
    W_out_groups: Tensor

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        for name, n_groups in {"W_in": cfg.n_groups_in, "W_out": cfg.n_groups_out}.items():
            d_in, d_out = self._parameters.pop(name).shape  # type: ignore[union-attr]
            self.register_parameter(f"{name}_groups", groups_of(n_groups, d_in, d_out))

    @property
    def W_in(self) -> Float[Tensor, "d_model d_mlp"]:  # type: ignore[override]
        """The whole input weight."""
        return block_diagonal(self.W_in_groups)

    @property
    def W_out(self) -> Float[Tensor, "d_mlp d_model"]:  # type: ignore[override]
        """The whole output weight."""
        return block_diagonal(self.W_out_groups)

    def forward(self, x: Stream) -> Stream:
        x = hooked_input(self, x)
        post = self.act_fn(self.hook_pre(grouped_linear(x, self.W_in_groups, self.b_in)))
        if self.cfg.mid_norm is not None:
            post = norm_of(self, "ln")(self.hook_mid(post))
        return self.hook_out(grouped_linear(self.hook_post(post), self.W_out_groups, self.b_out))
