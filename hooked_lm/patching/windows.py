"""Windows of neighbouring layers, which causal tracing and attention knock-out change together."""

from collections.abc import Sequence


def windows_of(layers: Sequence[int] | None, window: int, n_layers: int) -> list[range]:
    """The window around each of these layers; None: one of all layers. Raises ValueError for one without layers.

    An even window has one more layer before its own than after it. At the ends of the model windows are cut off.

    >>> [list(window) for window in windows_of([0, 5], 3, 12)], list(windows_of([5], 4, 12)[0])
    ([[0, 1], [4, 5, 6]], [3, 4, 5, 6])
    """
    if window < 1:
        raise ValueError(f"window must be a number of layers from 1 on, got {window}")
    if layers is None:
        return [range(n_layers)]
    return [range(max(0, layer - window // 2), min(n_layers, layer + (window + 1) // 2)) for layer in layers]
