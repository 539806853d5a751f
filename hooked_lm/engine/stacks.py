"""Models with more than one stack in sweeps and attribution: sources with their targets, the stack of a site."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.hooks import HookedRootModule
from hooked_lm.models.text.source_and_target import SourceAndTarget
from hooked_lm.models.vision.dual_encoder import DualEncoder
from hooked_lm.models.vision.encoder import VisionEncoder
from hooked_lm.models.vision.inputs import Rows, VisionInputs

Target = str | Sequence[str] | Int[Tensor, "..."] | None


def joined(model: HookedRootModule, source: Int[Tensor, "batch pos"], target: Target) -> SourceAndTarget:
    """The rows of a run: sources, and the target of each.

    The target is ids or texts (without an end token), one for all prompts or one for each; None: the start token. Raises
    ValueError for targets of different lengths, or a number of targets that differs from that of prompts.
    """
    rows = _rows(model, target, len(source))
    return SourceAndTarget(source.to(rows), rows)


def _rows(model: HookedRootModule, target: Target, batch: int) -> Int[Tensor, "batch target_pos"]:
    """The target of each prompt."""
    if target is None:
        return torch.full((batch, 1), model.start_id())
    if isinstance(target, Tensor):
        rows = target if target.ndim == 2 else target[None]
    else:
        rows, real = model.to_decoder_tokens(target, end=False)
        if not bool(real.all()):
            raise ValueError(f"all targets must have the same number of tokens; these have {real.sum(1).tolist()}")
    if rows.ndim != 2 or len(rows) not in (1, batch) or rows.shape[1] == 0:
        raise ValueError(
            f"decoder_input must be one target, or one for each of {batch} prompts; got {tuple(rows.shape)}"
        )
    return rows.cpu().expand(batch, -1)


def has_two_stacks(model: HookedRootModule) -> bool:
    """Whether a model reads a source and a target."""
    return len(getattr(model, "stacks", ())) > 1  # a wrapped module has none


def refuse_two_stacks(model: HookedRootModule, what: str) -> None:
    """Raises TypeError for an encoder-decoder, a dual encoder or a vision encoder, which `what` does not support."""
    refuse_dual_encoder(model, what)
    refuse_vision_encoder(model, what)
    if has_two_stacks(model):
        raise TypeError(
            f"{what} supports models with one stack of layers, and a HookedEncoderDecoder has two; patching.sweep, "
            "analysis.attribute and analysis.attribute_nodes support it, with decoder_input=... and sites "
            "such as 'encoder.resid_pre' and 'decoder.cross_attn.z'"
        )


def refuse_dual_encoder(model: HookedRootModule, what: str) -> None:
    """Raises TypeError for a dual encoder, which `what` does not support."""
    if isinstance(model, DualEncoder):
        raise TypeError(
            f"{what} supports models with one stack of layers, and a {type(model).__name__} has two towers; patching.sweep and "
            "patching.run_each support it, with VisionInputs(texts, {'pixel_values': images}) and sites such as 'vision.z'"
        )


def refuse_vision_encoder(model: HookedRootModule, what: str) -> None:
    """Raises TypeError for a vision encoder, which no study supports."""
    if isinstance(model, VisionEncoder):
        raise TypeError(
            f"{what} reads token ids, and a {type(model).__name__} reads images alone: call model.run_with_hooks for each "
            "change, or load a checkpoint that reads text too as HookedVisionLanguage or HookedDualEncoder (sites 'vision.z')"
        )


def tokens_at(model: HookedRootModule, rows: Rows, site: str) -> Int[Tensor, "batch pos"] | VisionInputs:
    """The tokens at the positions of a site: in an encoder-decoder, those of the source or of the target."""
    return rows.tokens_at(model.hook_dict[site]) if isinstance(rows, SourceAndTarget) else rows
