"""Numbers with named axes: the results of experiments and analyses."""

from hooked_lm.results.scores import Label, Scores

__all__ = ["Label", "Scores"]
