"""The context of a decoder that reads images among its tokens."""

from hooked_lm.components.context import Context


class ImageContext(Context):
    """Positions and masks of a run whose tokens include images. The `ImageRule`s of a model set what differs from text."""
