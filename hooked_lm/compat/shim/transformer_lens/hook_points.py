"""Hook points, and the base class of models."""

from hooked_lm.compat.introspection import HookIntrospectionMixin
from hooked_lm.compat.types import DeviceType
from hooked_lm.hooks import HookedRootModule, HookPoint, NamesFilter, Slice, SliceInput
from hooked_lm.hooks.hook import Hook as LensHandle
from hooked_lm.hooks.hook import HookFunction
