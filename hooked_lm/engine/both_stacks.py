"""Encoder-decoders in sweeps and attribution: a run reads a source and a target, here as one row of tokens, source first.

So prompts are cut, repeated and compared as those of any other model; the model is seen through a view that takes them apart.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.hooks import HookedRootModule, scope
from hooked_lm.models.encoder_decoder import EncoderDecoder

Target = str | Sequence[str] | Int[Tensor, "..."] | None
SIDES = ("encoder", "decoder")


class SourceAndTarget(EncoderDecoder):
    """A view of an encoder-decoder, of the same modules and points, whose input is a source and a target side by side."""

    whole: ClassVar[EncoderDecoder]
    n_source: ClassVar[int]

    def forward(self, input: Int[Tensor, "batch pos"], **settings: Any) -> Any:  # type: ignore[override]
        """The run of the source and target in each row."""
        return super().forward(input[:, : self.n_source], input[:, self.n_source :], **settings)

    @property
    def context_level(self) -> int:
        """How many blocks of hooks are open, on the view or on the model."""
        return scope.depth(self) + self.whole.context_level

    @context_level.setter
    def context_level(self, level: int) -> None:
        self.whole.context_level = level - scope.depth(self)


def joined(
    model: EncoderDecoder, source: Tensor, other: Tensor | None, target: Target
) -> tuple[SourceAndTarget, Tensor, Tensor | None]:
    """The view of a model, and the rows of two runs, or of one: sources [batch, pos] followed by the target.

    The target is ids or texts that go on (without an end token), one for all prompts or one for each, the same in both runs;
    None: the start token. Raises ValueError for targets of different lengths, or of another number than there are prompts.
    """
    batch, n_source = source.shape
    kind = type(model)
    kinds = (SourceAndTarget,) if kind is EncoderDecoder else (SourceAndTarget, kind)
    made = {"whole": model, "n_source": n_source, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    view: Any = object.__new__(type(kind.__name__, kinds, made))
    object.__setattr__(view, "__dict__", model.__dict__)  # whatever becomes of the one becomes of the other
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
            raise ValueError(f"targets must have as many tokens each, these have {real.sum(1).tolist()}")
    if rows.ndim != 2 or len(rows) not in (1, batch) or rows.shape[1] == 0:
        raise ValueError(
            f"decoder_input must be one target, or one for each of {batch} prompts; got {tuple(rows.shape)}"
        )
    return rows.cpu().expand(batch, -1)


def refuse_two_stacks(model: HookedRootModule, what: str) -> None:
    """Raises TypeError for an encoder-decoder, of which `what` makes no sense or is not known."""
    if isinstance(model, EncoderDecoder):
        raise TypeError(
            f"{what} is made for one stack of layers, and a HookedEncoderDecoder has two; patching.sweep, analysis.attribute and "
            "analysis.attribute_nodes take it, with decoder_input=... and sites such as 'encoder.resid_pre' and "
            "'decoder.cross_attn.z'"
        )


def stack_of(model: Any, name: str) -> tuple[str, int]:
    """The stack to which a site with this short name belongs ("" where there is but one), and how many layers that has."""
    if not isinstance(model, EncoderDecoder):
        return "", model.cfg.n_layers
    side = name.partition(".")[0]
    if side not in SIDES:
        raise KeyError(f"of an encoder-decoder a site is named with its stack, 'encoder.{name}' or 'decoder.{name}'")
    return side, len(getattr(model, side))


def tokens_at(model: Any, tokens: Int[Tensor, "batch pos"], site: str) -> Int[Tensor, "batch site_pos"]:
    """The tokens at the positions of a site: of source or target, where there are both."""
    if not isinstance(model, SourceAndTarget):
        return tokens
    dims, of_source = model.hook_dict[site].dims, not model.hook_dict[site].grows
    if dims[1:2] == ("key_pos",):  # what cross attention reads is the encoder's
        of_source = True
    return tokens[:, : model.n_source] if of_source else tokens[:, model.n_source :]
