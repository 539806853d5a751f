"""Singular vectors of a model's weights."""

from hooked_lm.analysis.reading.svd_interpreter import SVDInterpreter
