"""Windows of neighbouring layers, which causal tracing and attention knockout change together."""

from collections.abc import Sequence


def windows_of(layers: Sequence[int] | None, window: int, n_layers: int) -> list[range]:
    """The window of layers centred on each of `layers`; for None one window of all layers.

    An even window has one more layer before its centre than after it. Windows are truncated at the ends of the model. Raises
    ValueError for a window below 1.

    >>> (
    ...     [list(window) for window in windows_of([0, 5], 3, 12)],
    ...     list(windows_of([5], 4, 12)[0]),
    ... )
    ([[0, 1], [4, 5, 6]], [3, 4, 5, 6])
    """
    if window < 1:
        raise ValueError(f"window must be a number of layers from 1 on, got {window}")
    if layers is None:
        return [range(n_layers)]
    return [range(max(0, layer - window // 2), min(n_layers, layer + (window + 1) // 2)) for layer in layers]
