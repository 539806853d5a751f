"""The token shift of RWKV: every position mixes its own input with that of the token before it."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from hooked_lm.components.ssm.convolution import Window

Stream = Float[Tensor, "batch pos d_model"]


def previous(
    x: Stream, window: Window | None = None, real: Bool[Tensor, "batch pos"] | None = None
) -> tuple[Stream, Window]:
    """The input of the token before each position, zero before the first, and the window for later tokens: the last input.

    `window` is that of earlier tokens; `real` marks tokens that are not padding, which is skipped.
    """
    inputs = torch.cat([x.new_zeros(x.shape[0], 1, x.shape[2]) if window is None else window, x], 1)
    if real is None:
        return inputs[:, :-1], inputs[:, -1:]
    places = torch.arange(1, x.shape[1] + 1, device=x.device).where(real, 0).cummax(1).values
    inputs = inputs.take_along_dim(F.pad(places, (1, 0))[..., None], 1)
    return inputs[:, :-1], inputs[:, -1:]
