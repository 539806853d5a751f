"""Hook objects: detectors read values, controllers change them; each knows its site.

They are accepted wherever a hook is: `model.hooks([a, b])`, `run_with_hooks(..., fwd_hooks=[a])`, `model.register(a)`.
"""

from typing import TYPE_CHECKING

from hooked_lm.interventions import dictionaries
from hooked_lm.interventions.base import Controller, Detector, HookObject, Hooks
from hooked_lm.interventions.contrast import rank_heads
from hooked_lm.interventions.controllers import (
    AddDirection,
    AddValue,
    Clamp,
    Noise,
    ProjectOut,
    Scale,
    SetValue,
    SwapDirections,
    ZeroAblate,
)
from hooked_lm.interventions.detectors import InputTokens, NanGradientGuard, NanGuard, Record, RecordOutput
from hooked_lm.interventions.gradient_report import GradientReport
from hooked_lm.interventions.gradients import ClipGradient, RecordGradient, ScaleGradient
from hooked_lm.interventions.part import Part
from hooked_lm.interventions.part_editor import PartEditor
from hooked_lm.interventions.patch import (
    FreezeAttention,
    FreezeNorm,
    MeanAblate,
    Patch,
    PatchHead,
    PatchMLP,
    PatchResidual,
    ResampleAblate,
)
from hooked_lm.interventions.site_part import SitePart, at
from hooked_lm.interventions.statistics import Statistics, Summary
from hooked_lm.interventions.steered_texts import SteeredTexts, steered_texts
from hooked_lm.interventions.steering import SteeringVectors, steering_vectors
from hooked_lm.interventions.steering_sweep import sweep_steering
from hooked_lm.interventions.store import Run, Store
from hooked_lm.interventions.top_examples import Examples, TopExamples
from hooked_lm.keywords import answer_keywords
from hooked_lm.renamed import former_names

__all__ = [
    "AddDirection",
    "AddValue",
    "Clamp",
    "ClipGradient",
    "Controller",
    "Detector",
    "Examples",
    "FreezeAttention",
    "FreezeNorm",
    "GradientReport",
    "HookObject",
    "Hooks",
    "InputTokens",
    "MeanAblate",
    "NanGradientGuard",
    "NanGuard",
    "Noise",
    "Part",
    "PartEditor",
    "Patch",
    "PatchHead",
    "PatchMLP",
    "PatchResidual",
    "ProjectOut",
    "Record",
    "RecordGradient",
    "RecordOutput",
    "ResampleAblate",
    "Run",
    "Scale",
    "ScaleGradient",
    "SetValue",
    "SitePart",
    "Statistics",
    "SteeredTexts",
    "SteeringVectors",
    "Store",
    "Summary",
    "SwapDirections",
    "TopExamples",
    "ZeroAblate",
    "at",
    "dictionaries",
    "rank_heads",
    "steered_texts",
    "steering_vectors",
    "sweep_steering",
]

answer_keywords(__name__)

if not TYPE_CHECKING:  # type checkers know the present names alone
    __getattr__ = former_names(__name__, Output="RecordOutput")
