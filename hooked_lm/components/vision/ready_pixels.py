"""Pixels that are ready for a tower: floating point, scaled and normalised."""

import numpy as np
import torch
from torch import Tensor

READY = (
    "pixels that are ready are floating-point tensors or arrays, scaled and normalised; pictures go through the "
    "checkpoint's processor, as model.prepare does"
)


def is_ready(image: object) -> bool:
    """Whether this is a floating-point tensor or array."""
    if isinstance(image, np.ndarray):
        return np.issubdtype(image.dtype, np.floating)
    return isinstance(image, Tensor) and image.is_floating_point()


def ready_pixels(given: object, name: str = "pixel_values") -> Tensor:
    """Pixels that are ready, as a tensor. Raises TypeError for anything else, such as integers and pictures.

    >>> ready_pixels(torch.zeros(3, 2, 2, dtype=torch.uint8))
    Traceback (most recent call last):
    ...
    TypeError: pixel_values: got torch.uint8 [3, 2, 2]; pixels that are ready are floating-point tensors or arrays, scaled and \
normalised; pictures go through the checkpoint's processor, as model.prepare does
    """
    if not is_ready(given):
        raise TypeError(f"{name}: got {described(given)}; {READY}")
    return given if isinstance(given, Tensor) else torch.tensor(given)


def described(given: object) -> str:
    """A value in an error: the type and shape of a tensor, otherwise its type and beginning.

    >>> described("a.png"), described(torch.zeros(3, 2))
    ("str 'a.png'", 'torch.float32 [3, 2]')
    """
    if isinstance(given, (Tensor, np.ndarray)):
        return f"{given.dtype} {list(given.shape)}"
    text = repr(given)
    return f"{type(given).__name__} {text if len(text) < 40 else text[:37] + '...'}"
