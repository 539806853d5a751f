"""Checkpoints of quantised weights, which are dequantised as they are read.

`quantization` reads the `quantization_config` of a checkpoint and refuses what it does not understand, before any weight is read.
`Dequantized` then shows the checkpoint as one of ordinary weights: each look-up reads the tensors of one weight and returns their
values. Which weights are quantised is read off the file, so lists of modules that were left out need no interpretation.
"""

from hooked_lm.hub.quantized.dequantized import Dequantized
from hooked_lm.hub.quantized.methods import METHODS, Quantization, quantization

__all__ = ["METHODS", "Dequantized", "Quantization", "quantization"]
