"""What models of every class share: where their weights are, and the way to and from checkpoints."""

from typing import Any, TypeVar

import torch

from hooked_lm.models.init import init_weights

Placed = TypeVar("Placed", bound="PlacedModel")


class PlacedModel:
    """Moving a model, filling it with random weights, and writing it back; mixed in before `HookedRootModule`."""

    cfg: Any
    embed: Any
    hf_config: dict[str, Any] | None = None  # of the checkpoint that it was loaded from

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed.W_E.device

    def to(self: Placed, *args: Any, print_details: bool = True, **kwargs: Any) -> Placed:
        """Move the model, as `nn.Module.to` does; `cfg.device` and `cfg.dtype` follow."""
        super().to(*args, **kwargs)  # type: ignore[misc]
        self.cfg.device, self.cfg.dtype = str(self.device), self.embed.W_E.dtype
        return self

    def cuda(self: Placed, device: Any = None) -> Placed:
        """Move the model to a CUDA device."""
        return self.to("cuda" if device is None else torch.device("cuda", device))

    def cpu(self: Placed) -> Placed:
        """Move the model to the CPU."""
        return self.to("cpu")

    def mps(self: Placed) -> Placed:
        """Move the model to an Apple GPU."""
        return self.to("mps")

    def move_model_modules_to_device(self) -> None:
        """Move the weights to where `cfg.device` says."""
        self.to(self.cfg.device)

    def init_weights(self) -> None:
        """Fill the weights with random numbers as `cfg.init_mode` says, from `cfg.seed` if there is one."""
        init_weights(self, self.cfg)  # type: ignore[arg-type]

    def to_hf(self) -> Any:
        """This model as a transformers model, bit for bit; see `hooked_lm.hub.to_hf`."""
        from hooked_lm import hub

        return hub.to_hf(self)  # type: ignore[arg-type]

    def save_pretrained(self, path: Any) -> None:
        """Write this model to a directory in HF format; see `hooked_lm.hub.save_pretrained`."""
        from hooked_lm import hub

        hub.save_pretrained(self, path)  # type: ignore[arg-type]
