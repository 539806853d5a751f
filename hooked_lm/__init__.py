"""hooked_lm: transformer language models in which every intermediate value has a name.

`HookedTransformer` runs a decoder, `HookedEncoder` an encoder, `HookedEncoderDecoder` both; `HookedVisionEncoder` reads images,
`HookedVisionLanguage` images and text, `HookedDualEncoder` compares both. `run_with_cache` reads what happened inside,
`run_with_hooks` changes it, `patching` measures what a change causes. Names load when they are first used: importing the package
loads neither torch nor the models.
"""

import logging
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hooked_lm.components.kv_cache import HookedTransformerKeyValueCache as HookedTransformerKeyValueCache
    from hooked_lm.engine.pairs import Pairs as Pairs
    from hooked_lm.factored_matrix import FactoredMatrix as FactoredMatrix
    from hooked_lm.hooks import HookedRootModule as HookedRootModule
    from hooked_lm.hooks import HookPoint as HookPoint
    from hooked_lm.hooks import wrap as wrap
    from hooked_lm.interventions.site_part import at as at
    from hooked_lm.models.caches.activation_cache import ActivationCache as ActivationCache
    from hooked_lm.models.config.flat import HookedEncoderConfig as HookedEncoderConfig
    from hooked_lm.models.config.flat import HookedEncoderDecoderConfig as HookedEncoderDecoderConfig
    from hooked_lm.models.config.flat import HookedTransformerConfig as HookedTransformerConfig
    from hooked_lm.models.config.flat_vision import HookedDualEncoderConfig as HookedDualEncoderConfig
    from hooked_lm.models.config.flat_vision import HookedVisionConfig as HookedVisionConfig
    from hooked_lm.models.next_sentence import BertNextSentencePrediction as BertNextSentencePrediction
    from hooked_lm.models.text.chat import Chat as Chat
    from hooked_lm.models.vision.inputs import VisionInputs as VisionInputs
    from hooked_lm.pretrained import HookedDualEncoder as HookedDualEncoder
    from hooked_lm.pretrained import HookedEncoder as HookedEncoder
    from hooked_lm.pretrained import HookedEncoderDecoder as HookedEncoderDecoder
    from hooked_lm.pretrained import HookedTransformer as HookedTransformer
    from hooked_lm.pretrained import HookedVisionEncoder as HookedVisionEncoder
    from hooked_lm.pretrained import HookedVisionLanguage as HookedVisionLanguage
    from hooked_lm.pretrained import HookedVLM as HookedVLM
    from hooked_lm.saved import load as load

_HOMES = {
    "ActivationCache": "hooked_lm.models.caches.activation_cache",
    "BertNextSentencePrediction": "hooked_lm.models.next_sentence",
    "Chat": "hooked_lm.models.text.chat",
    "FactoredMatrix": "hooked_lm.factored_matrix",
    "HookPoint": "hooked_lm.hooks",
    "HookedDualEncoder": "hooked_lm.pretrained",
    "HookedDualEncoderConfig": "hooked_lm.models.config.flat_vision",
    "HookedEncoder": "hooked_lm.pretrained",
    "HookedEncoderConfig": "hooked_lm.models.config.flat",
    "HookedEncoderDecoder": "hooked_lm.pretrained",
    "HookedEncoderDecoderConfig": "hooked_lm.models.config.flat",
    "HookedRootModule": "hooked_lm.hooks",
    "HookedTransformer": "hooked_lm.pretrained",
    "HookedTransformerConfig": "hooked_lm.models.config.flat",
    "HookedTransformerKeyValueCache": "hooked_lm.components.kv_cache",
    "HookedVLM": "hooked_lm.pretrained",
    "HookedVisionConfig": "hooked_lm.models.config.flat_vision",
    "HookedVisionEncoder": "hooked_lm.pretrained",
    "HookedVisionLanguage": "hooked_lm.pretrained",
    "Pairs": "hooked_lm.engine.pairs",
    "VisionInputs": "hooked_lm.models.vision.inputs",
    "at": "hooked_lm.interventions.site_part",
    "load": "hooked_lm.saved",
    "wrap": "hooked_lm.hooks",
}
_MODULES: tuple[str, ...] = ("analysis", "harvest", "hooks", "hub", "interventions", "parallel")
_MODULES += ("patching", "planted", "pretrained", "results", "studies", "utils", "viz")  # that load when they are used

logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless the program configures logging

__version__ = version("hooked-lm")
__all__ = [*_HOMES, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        home = import_module(_HOMES[name])
        import_module("hooked_lm.keywords").answer_keywords(home.__name__, [name])
        return getattr(home, name)
    if name in _MODULES:
        return import_module(f"hooked_lm.{name}")
    raise AttributeError(f"module 'hooked_lm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
