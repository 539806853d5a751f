"""Named hook points in any PyTorch network, to read, edit and differentiate activations. Needs only torch."""

from hooked_lm.hooks.cache import Cache
from hooked_lm.hooks.hook import Hook, HookFunction
from hooked_lm.hooks.module import HookedRootModule
from hooked_lm.hooks.point import HookPoint, hook_if_listening, is_listening
from hooked_lm.hooks.select import NamesFilter, UnknownSite, site_glob
from hooked_lm.hooks.slice import Slice, SliceInput
from hooked_lm.hooks.wrap import WrappedModule, wrap
from hooked_lm.keywords import answer_keywords

__all__ = [
    "Cache", "Hook", "HookFunction", "HookPoint", "HookedRootModule", "NamesFilter", "Slice", "SliceInput",
    "UnknownSite", "WrappedModule", "hook_if_listening", "is_listening", "site_glob", "wrap",
]  # fmt: skip

answer_keywords(
    __name__, [name for name in __all__ if name not in ("hook_if_listening", "is_listening")]
)  # at each site
