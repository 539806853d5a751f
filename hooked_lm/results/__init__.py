"""Numbers with named axes: the results of experiments and analyses."""

from hooked_lm.keywords import answer_keywords
from hooked_lm.results.bootstrap import SkewWarning
from hooked_lm.results.control import Control
from hooked_lm.results.labels import Label
from hooked_lm.results.scores import Scores
from hooked_lm.results.significance import Significance

__all__ = ["Control", "Label", "Scores", "Significance", "SkewWarning"]

answer_keywords(__name__)
