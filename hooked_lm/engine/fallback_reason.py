"""Why the effect of changes cannot be localised in a model, so that each cell needs a whole forward pass."""

from torch import nn

from hooked_lm.components.attention.multihead import AbstractAttention
from hooked_lm.components.readable import is_readable
from hooked_lm.engine.context import BASE_CONTEXTS
from hooked_lm.engine.decoders import runs_as_written
from hooked_lm.hooks import HookedRootModule, HookPoint, is_listening
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.placement import is_mover
from hooked_lm.models.vision.inputs import Rows, VisionInputs, ids_of


def fallback_reason(model: HookedRootModule, tokens: Rows) -> str | None:
    """The reason why the effect of changes cannot be localised in this model; None if it can."""
    if not isinstance(model, Decoder):
        return f"a {type(model).__name__} is not a causal decoder"
    if not runs_as_written(model):
        return f"{type(model).__name__} overrides the forward pass of its base class"
    if model.context_class not in BASE_CONTEXTS:
        return f"its runs have a {model.context_class.__name__}, of which a base run keeps nothing"
    listening = next((point.name for point in model.hook_points() if is_listening(point)), None)
    if listening is not None:
        return f"a hook is open at '{listening}'"
    foreign = next((name for name, module in model.named_modules() if not is_ours(module)), None)
    if foreign is not None:
        return f"'{foreign}' is a foreign module"
    if not all(module.causal for module in model.blocks.modules() if isinstance(module, AbstractAttention)):
        return "its attention is not causal"
    return "the prompts are padded" if _are_padded(model, tokens) else None


def _are_padded(model: Decoder, rows: Rows) -> bool:
    mask = rows.attention_mask if isinstance(rows, VisionInputs) else None
    ids, mask = model._tokens_and_mask(ids_of(rows), None, None, mask)
    real = model.stack.real(model, mask, ids)
    return real is not None and not (
        is_readable(real) and bool(real.all())
    )  # for a GPU it waits, once in an experiment


def is_ours(module: nn.Module) -> bool:
    """Whether a module is one of this package (or a container), without foreign hooks, so that its mixing of tokens is known."""
    kind = type(module)
    known = kind.__module__.startswith("hooked_lm.") or kind in (nn.Identity, nn.ModuleList, nn.ParameterList)
    return known and "forward" not in vars(module) and (isinstance(module, HookPoint) or not _has_torch_hooks(module))


def _has_torch_hooks(module: nn.Module) -> bool:
    return not all(map(is_mover, (*module._forward_hooks.values(), *module._forward_pre_hooks.values())))
