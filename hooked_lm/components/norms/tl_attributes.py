"""What other code reads of a norm: attributes of the HookedTransformer interface, which no forward pass uses."""

from typing import Any


class NormTLAttributes:
    """The facts of a norm under their public names."""

    cfg: Any
    kind = ""  # "LN" or "RMS"

    @property
    def eps(self) -> float:
        """The number that is added to the mean square."""
        return self.cfg.eps

    @property
    def length(self) -> int:
        """The width of the vectors that it normalises."""
        return self.cfg.d_model

    @property
    def normalization_type(self) -> str:
        """Its public name: "LN" or "RMS", "LNPre" or "RMSPre" without a weight."""
        return self.kind if self.cfg.weight else self.kind + "Pre"
