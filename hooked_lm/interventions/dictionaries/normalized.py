"""Dictionaries that normalise each input vector."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from hooked_lm.interventions.dictionaries.sae import (
    SAE,
    FeatureValues,
    Inputs,
    Outputs,
    frozen,
    read_dictionary,
    write_dictionary,
)
from hooked_lm.notebook_repr import NotebookRepr, Table

Norm = Callable[[Tensor], tuple[Tensor, Tensor | float]]  # the divisor and the offset


def layer_norm(x: Tensor) -> tuple[Tensor, Tensor | float]:
    """The standard deviation and the mean of each vector's entries."""
    return x.std(-1, keepdim=True), x.mean(-1, keepdim=True)


def constant_norm(x: Tensor) -> tuple[Tensor, Tensor | float]:
    """The divisor that scales each vector to the norm sqrt(d_in), and offset 0."""
    return x.norm(dim=-1, keepdim=True) / x.shape[-1] ** 0.5, 0.0


NORMS: dict[str, Norm] = {"layer_norm": layer_norm, "constant_norm_rescale": constant_norm}
CARRIED = "_norms_of_vectors"  # the attribute of features that holds the norms
EPS = {"layer_norm": 1e-5, "constant_norm_rescale": 0.0}  # added to the divisor of the input, not to that of the output


class Normalized(NotebookRepr, nn.Module):
    """A dictionary that was trained on normalised vectors: `encode` normalises them, `decode` reverses that.

    `how` is "layer_norm" (mean zero, standard deviation one) or "constant_norm_rescale" (norm sqrt(d_in)). The module has no
    state: the tensor that `encode` returns carries the norms of its vectors.

    >>> sae = Normalized(SAE.Config(d_in=8, d_sae=32).build(), "layer_norm")
    >>> import torch
    >>> x = torch.randn(5, 8)
    >>> torch.allclose(sae.encode(10 * x + 3), sae.encode(x), atol=1e-3)
    True
    >>> edited = 2 * sae.encode(x)
    >>> sae.decode(edited, of=x).shape
    torch.Size([5, 8])
    """

    def __init__(self, sae: SAE, how: str) -> None:
        super().__init__()
        if how not in NORMS:
            raise ValueError(f"vectors are normalised by {' or '.join(NORMS)}, not by {how!r}")
        self.sae, self.how, self.cfg = sae, how, sae.cfg

    def encode(self, x: Inputs) -> FeatureValues:
        """The features of normalised vectors."""
        divisor, offset = norms = NORMS[self.how](x)
        features = self.sae.encode((x - offset) / (divisor + EPS[self.how]))
        setattr(features, CARRIED, norms)
        return features

    def decode(self, features: FeatureValues, of: Inputs | None = None) -> Outputs:
        """The decoded features, rescaled with the norms of the encoded vectors `of`.

        `of` may be omitted for the tensor that `encode` returned, also after edits in place. Raises ValueError for any other
        tensor without `of`, and for a different number of vectors.
        """
        norms = getattr(features, CARRIED, None) if of is None else NORMS[self.how](of)
        if norms is None:
            raise ValueError(
                f"features {list(features.shape[:-1])} cannot be scaled back: they are not the tensor that encode returned, so "
                "the norms of their vectors are unknown; give the vectors, decode(features, of=x)"
            )
        divisor, offset = norms
        if divisor.shape[:-1] != features.shape[:-1]:
            raise ValueError(
                f"features {list(features.shape[:-1])} cannot be those of vectors {list(divisor.shape[:-1])}"
            )
        return self.sae.decode(features) * divisor + offset

    def forward(self, x: Inputs) -> Outputs:
        """The reconstruction."""
        return self.decode(self.encode(x))

    def at(self, site: str | None) -> "Normalized":
        """As `SAE.at`."""
        return Normalized(self.sae.at(site), self.how)

    def save(self, path: str | Path) -> None:
        """Writes the dictionary to one safetensors file, bit for bit and atomically."""
        write_dictionary(self.sae, path, self.how)

    @classmethod
    def load(cls, path: str | Path) -> "Normalized":
        """The dictionary of a file that `save` wrote, in evaluation mode; ValueError for any other file."""
        sae, normalization = read_dictionary(path)
        if normalization is None:
            raise ValueError(f"{path} holds a {type(sae).__name__}, not a Normalized: use {type(sae).__name__}.load")
        return frozen(cls(sae, normalization))

    def repr_table(self) -> Table:
        """The normalisation, and the dictionary."""
        columns, rows = self.sae.repr_table()
        return Table(columns, [("how", self.how), *rows])

    def __repr__(self) -> str:
        return f"Normalized({self.sae!r}, how={self.how!r})"
