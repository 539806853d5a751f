"""What stands where a block has its MLP: any module from the stream to the stream."""

from torch.nn import Module as CanBeUsedAsMLP

__all__ = ["CanBeUsedAsMLP"]
