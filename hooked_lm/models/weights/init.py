"""Random initial weights of a new model."""

import math
import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from hooked_lm.components.axes import weights_with_axes
from hooked_lm.models.config.flat import HookedTransformerConfig

# Weight matrices, lists of them, and vectors that stand in for embeddings; other parameters have values from the start.
DRAWN = re.compile(r"(.*\.)?(W|W\.\d+|W_.*|image_newline|w_replaced)")


def init_weights(model: nn.Module, cfg: HookedTransformerConfig) -> None:
    """Initializes every weight matrix according to `cfg.init_mode`; biases stay zeros and norms ones.

    "gpt2": normal with standard deviation `cfg.initializer_range`. "xavier_uniform", "xavier_normal" (Glorot and Bengio
    2010), "kaiming_uniform", "kaiming_normal" (He et al. 2015): scaled by the widths of each matrix, with the range as
    gain. "muP" (Yang et al. 2022, arXiv:2203.03466): normal with the range for embeddings, range / sqrt(fan in) for hidden
    weights and range / fan in for the unembedding. With `cfg.seed` the weights are drawn on the CPU from a separate generator
    with that seed, so that they are the same on every device, otherwise where they are from torch's global generator.
    """
    fill = _FILLS.get(cfg.init_mode)
    if fill is None:
        raise ValueError(f"unknown init_mode '{cfg.init_mode}'; known are {', '.join(_FILLS)}")
    generator = None if cfg.seed is None else torch.Generator().manual_seed(cfg.seed)
    fans = Fans(model)
    for name, weight in drawn_weights(model):
        device = weight.device if generator is None else torch.device("cpu")
        with torch.no_grad():  # drawn contiguously, so that the numbers do not depend on the memory layout
            drawn = torch.empty(weight.shape, dtype=weight.dtype, device=device)
            fill(name, drawn, cfg.initializer_range, generator, fans)
            weight.copy_(drawn)


def drawn_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters that have no values before they are drawn or loaded, by name."""
    named = model.named_parameters()
    return ((name, weight) for name, weight in named if DRAWN.fullmatch(name) and not weight.is_meta)


@torch.no_grad()
def leave_unfilled(model: nn.Module) -> tuple[str, ...]:
    """Fills with NaN what nobody has filled, and returns the names; see `check_filled`."""
    return tuple(name for name, weight in drawn_weights(model) if weight.fill_(math.nan).numel())


def still_unfilled(model: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the parameters that nobody has filled since."""
    weights = dict(model.named_parameters()) if names else {}
    return tuple(name for name in names if name in weights and weights[name].isnan().all())


def check_filled(model: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    """Raises ValueError if some of these parameters have no values yet; else none is left."""
    if left := still_unfilled(model, names):
        raise ValueError(
            f"{len(left)} weights were never filled, such as '{left[0]}': the config has "
            "init_weights=False, as that of a loaded model has. For random weights build the model with init_weights=True, or "
            "take loaded_model.untrained(seed); for given ones call load_state_dict"
        )
    return left


class Fans:
    """The numbers of inputs of an output, and of outputs of an input, of the weights of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.axes = {name: (module, axes) for name, module, axes in weights_with_axes(model)}

    def of(self, name: str, weight: Tensor) -> tuple[int, int]:
        """Those of a weight, by its name; ValueError if its component does not state its axes."""
        if name not in self.axes:
            raise ValueError(
                f"'{name}' {[*weight.shape]} is drawn by its number of inputs, which its module does not state: give the class "
                "an attribute such as axes = {'W_in': '[d_model] d_mlp'}, see hooked_lm.components.axes; or set "
                "init_mode='gpt2'"
            )
        module, axes = self.axes[name]
        return axes.fans(weight, module)


def _gpt2(name: str, weight: Tensor, scale: float, generator: torch.Generator | None, fans: Fans) -> None:
    weight.normal_(std=scale, generator=generator)


def _mup(name: str, weight: Tensor, scale: float, generator: torch.Generator | None, fans: Fans) -> None:
    fan_in, _ = fans.of(name, weight)
    if name.startswith("unembed"):
        scale /= max(fan_in, 1)
    elif "embed" not in name and not name.endswith("W_E"):  # of embeddings
        scale /= math.sqrt(fan_in)
    weight.normal_(std=scale, generator=generator)


def _by_width(uniform: bool, xavier: bool) -> Callable[..., None]:
    def fill(name: str, weight: Tensor, scale: float, generator: torch.Generator | None, fans: Fans) -> None:
        fan_in, fan_out = fans.of(name, weight)
        std = scale * math.sqrt(2 / max(fan_in + fan_out if xavier else fan_in, 1))  # a vocabulary may be empty
        if uniform:
            weight.uniform_(-std * math.sqrt(3), std * math.sqrt(3), generator=generator)
        else:
            weight.normal_(std=std, generator=generator)

    return fill


_FILLS: dict[str, Callable[..., None]] = {
    "gpt2": _gpt2,
    "muP": _mup,
    "xavier_normal": _by_width(uniform=False, xavier=True),
    "xavier_uniform": _by_width(uniform=True, xavier=True),
    "kaiming_normal": _by_width(uniform=False, xavier=False),
    "kaiming_uniform": _by_width(uniform=True, xavier=False),
}
