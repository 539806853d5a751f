"""The base of all models."""

from hooked_lm.hooks import HookedRootModule, HookPoint, NamesFilter, Slice, SliceInput
from hooked_lm.hooks.point import HookFunction
