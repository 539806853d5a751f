"""The base of all models."""

from hooked_lm.compat.introspection import HookIntrospectionMixin
from hooked_lm.compat.types import DeviceType
from hooked_lm.hooks import HookedRootModule, HookPoint, NamesFilter, Slice, SliceInput
from hooked_lm.hooks.hook import HookFunction
from transformer_lens.utilities import warn_if_mps
