"""Slices of one axis."""

from hooked_lm.hooks import Slice, SliceInput
from hooked_lm.utils import to_numpy
