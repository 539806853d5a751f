"""Activations of a whole corpus on disk: write them with `harvest`, read them with `ActivationStore`."""

from hooked_lm.harvest.columns import Column, LabelColumn
from hooked_lm.harvest.estimate import HarvestEstimate, estimate_harvest
from hooked_lm.harvest.plan import HarvestPlan
from hooked_lm.harvest.run import harvest
from hooked_lm.harvest.store import ActivationStore
from hooked_lm.keywords import answer_keywords

__all__ = ["ActivationStore", "Column", "HarvestEstimate", "HarvestPlan", "LabelColumn", "estimate_harvest", "harvest"]

answer_keywords(__name__)
