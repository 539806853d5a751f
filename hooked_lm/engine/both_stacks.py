"""Encoder-decoders in sweeps and attribution: source and target are concatenated into one row of tokens.

Prompts can then be indexed, repeated and compared as for other models; a view of the model splits the rows again.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.hooks import HookedRootModule, scope
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.encoder_decoder import EncoderDecoder
from hooked_lm.models.vision.dual_encoder import DualEncoder
from hooked_lm.models.vision.encoder import VisionEncoder
from hooked_lm.models.vision.inputs import Rows, VisionInputs
from hooked_lm.models.vision.vision_language import VisionLanguage

Target = str | Sequence[str] | Int[Tensor, "..."] | None
SIDES = ("encoder", "decoder")


class SourceAndTarget(EncoderDecoder):
    """A view of an encoder-decoder, with the same modules and points, whose input is source and target concatenated."""

    whole: ClassVar[EncoderDecoder]
    n_source: ClassVar[int]

    def forward(self, input: Int[Tensor, "batch pos"], **settings: Any) -> Any:  # type: ignore[override]
        """The forward pass of the source and target in each row."""
        return super().forward(input[:, : self.n_source], input[:, self.n_source :], **settings)

    @property
    def context_level(self) -> int:
        """The number of nested hook contexts, of the view and of the model."""
        return scope.depth(self) + self.whole.context_level

    @context_level.setter
    def context_level(self, level: int) -> None:
        self.whole.context_level = level - scope.depth(self)


def joined(
    model: EncoderDecoder, source: Tensor, other: Tensor | None, target: Target
) -> tuple[SourceAndTarget, Tensor, Tensor | None]:
    """The view of a model, and the rows of one or two runs: sources [batch, pos] followed by the target.

    The target is ids or texts (without an end token), one for all prompts or one for each, the same in both runs; None: the
    start token. Raises ValueError for targets of different lengths, or a number of targets that differs from that of prompts.
    """
    batch, n_source = source.shape
    kind = type(model)
    kinds = (SourceAndTarget,) if kind is EncoderDecoder else (SourceAndTarget, kind)
    attributes = {
        "whole": model,
        "n_source": n_source,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    view: Any = object.__new__(type(kind.__name__, kinds, attributes))
    object.__setattr__(view, "__dict__", model.__dict__)  # shared state
    rows = _rows(model, target, batch)
    both = [None if each is None else torch.cat([each.to(rows), rows], 1) for each in (source, other)]
    assert both[0] is not None, "the first run"
    return view, both[0], both[1]


def _rows(model: EncoderDecoder, target: Target, batch: int) -> Int[Tensor, "batch target_pos"]:
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


def refuse_two_stacks(model: HookedRootModule, what: str) -> None:
    """Raises TypeError for an encoder-decoder, a dual encoder or a vision encoder, which `what` does not support."""
    refuse_dual_encoder(model, what)
    refuse_vision_encoder(model, what)
    if isinstance(model, EncoderDecoder):
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


def stack_of(model: Any, name: str) -> tuple[str, int]:
    """The stack of a site with this short name ("" in a model with one stack), and its number of layers; 0 if the name is that
    of a site outside all layers."""
    if isinstance(model, (Decoder, DualEncoder)) and name in model.hook_dict and ".blocks." not in f".{name}":
        return name, 0
    if isinstance(model, (VisionLanguage, DualEncoder)) and name.startswith("vision."):
        return "vision", len(model.vision.blocks)
    if isinstance(model, DualEncoder):
        if not name.startswith("text."):
            raise KeyError(f"a site of a dual encoder is named with its side: 'vision.{name}' or 'text.{name}'")
        return "text", len(model.tree.blocks)
    if not isinstance(model, EncoderDecoder):
        return "", model.cfg.n_layers
    side = name.partition(".")[0]
    if side not in SIDES:
        raise KeyError(f"a site of an encoder-decoder is named with its stack: 'encoder.{name}' or 'decoder.{name}'")
    return side, len(getattr(model, side))


def tokens_at(model: Any, tokens: Rows, site: str) -> Rows:
    """The tokens at the positions of a site: in an encoder-decoder, those of the source or of the target."""
    if not isinstance(model, SourceAndTarget) or isinstance(tokens, VisionInputs):
        return tokens
    dims, of_source = model.hook_dict[site].dims, not model.hook_dict[site].grows
    if dims[1:2] == ("key_pos",):  # keys of cross-attention are positions of the encoder
        of_source = True
    return tokens[:, : model.n_source] if of_source else tokens[:, model.n_source :]
