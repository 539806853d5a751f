"""Blocks: what their wiring says of the values at their sites, and of the weights after their norms.

What a block computes besides its wiring is stated in the file of that mechanism.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from hooked_lm.components.blocks.block import Block
from hooked_lm.components.blocks.cross import CrossPart
from hooked_lm.components.blocks.mixer import MixerPart
from hooked_lm.components.blocks.wiring import InStream, Step, Sublayer, Sum, Wiring
from hooked_lm.components.experts.moe import AbstractMoE
from hooked_lm.components.norms.norm import norm_of, norm_unhooked
from hooked_lm.components.verification.moe import with_identity
from hooked_lm.components.verification.registry import (
    Identity,
    InputWeight,
    LazyTensor,
    Sites,
    common_input_weights,
    identities,
    is_known,
    norm_identity,
    norm_output,
    output_from_sites,
    weights_after_norms,
    within,
)


@identities.register
def _(block: Block, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Those of its wiring; `shift()` is added to the input of queries and keys (the position embedding of a shortformer)."""
    yield from wired_identities(block, at, block.wiring(), shift)


@identities.register
def _(block: CrossPart, at: Sites, source: LazyTensor | None = None) -> Iterator[Identity]:
    """Those of its wiring, with encoder output `source()`."""
    yield from wired_identities(block, at, block.wiring(), source=source)


def wired_identities(
    block: Block, at: Sites, wiring: Wiring, shift: LazyTensor | None = None, source: LazyTensor | None = None
) -> Iterator[Identity]:
    """What a wiring says of a block in a run: how each value is made, and the identities of norms and sublayers."""
    yield from _Wired(block, at, wiring).identities(shift, source)


@weights_after_norms.register
def _(block: Block) -> list[tuple[str, list[InputWeight]]]:
    """Those of its wiring."""
    return weights_of(block, block.wiring())


def weights_of(block: Block, wiring: Wiring) -> list[tuple[str, list[InputWeight]]]:
    """Each norm in front of sublayers, with the weights after it; none if norms are in the stream, which outputs are added to."""
    if any(isinstance(step, InStream) for step in wiring.steps):
        return []
    norms = dict.fromkeys(step.norm for step in wiring.sublayers if step.norm)
    return [(norm, _weights_after(block, wiring.readers_of(norm))) for norm in norms]


def _weights_after(block: Block, readers: tuple[Sublayer, ...]) -> list[InputWeight]:
    """The weights of sublayers with a common input; none for identity experts, which give the input back."""
    parts = [block.get_submodule(step.part) for step in readers]
    return [] if any(map(_has_identity, parts)) else common_input_weights(*parts)


def _has_identity(part: Any) -> bool:
    return isinstance(part, AbstractMoE) and part.cfg.n_identity > 0


@dataclass(frozen=True)
class _Wired:
    """A block in a run, as a wiring says it; `at(site)` is the value at a site."""

    block: Block
    at: Sites
    wiring: Wiring

    def identities(self, shift: LazyTensor | None, source: LazyTensor | None) -> Iterator[Identity]:
        for step in self.wiring.steps:
            made = step.writes if isinstance(step, Sublayer) else step.gives
            if self._is_site(made) and self._has_formula(step):
                yield f"{self._formula(step)} == {_said(made)}", partial(self._made_and_seen, step, made)
            if not isinstance(step, Sum) and step is self._last_use(step.norm):
                owner, leaf, at = self._place_of(step.norm)
                x = partial(self._value, _read_by(step))
                yield from norm_identity(owner, leaf, at, x, step.norm)
            if isinstance(step, Sublayer):
                yield from self._of_copies(step)
                yield from self._of_part(step, shift, source)

    # ---- values --------------------------------------------------------------------------------------------

    def _is_site(self, name: str) -> bool:
        """Whether a value has a site, and is not only a word of the wiring."""
        owner, _, leaf = name.rpartition(".")
        return leaf in self.block.get_submodule(owner)._modules

    def _value(self, name: str) -> Tensor:
        """The value at a site, or that of a word, which a step gives."""
        step = None if self._is_site(name) else self.wiring.place(name)
        return self.at(name) if step is None else self._made(step)

    def _made(self, step: Step) -> Tensor:
        """What a step makes of the values before it."""
        if isinstance(step, InStream):
            return self._normalized(step)
        if isinstance(step, Sublayer):
            return norm_output(self.block, step.post, self.at, partial(self._output, step)) * step.scale
        total = self._value(step.stream)
        if step.weighed is not None:
            method, part_name = step.weighed
            total = getattr(self.block, method)(part_name, total)
        total = step.weights[0] * total
        for term in step.terms:
            total = total + step.weights[1] * self._value(term)
        return total * getattr(self.block, step.times) if step.times else total

    def _output(self, step: Sublayer) -> Tensor:
        """The output of a sublayer's module, from its sites."""
        part: Any = self.block.get_submodule(step.part)
        at = within(self.at, step.part)
        return (
            with_identity(part, at, partial(self._normalized, step))
            if _has_identity(part)
            else output_from_sites(part, at)
        )

    def _made_and_seen(self, step: Step, made: str) -> tuple[Tensor, Tensor]:
        return self._made(step), self.at(made)

    def _normalized(self, step: Sublayer | InStream) -> Tensor:
        """What a step reads, after its norm: from the norm's site, which shows its last use."""
        (owner, leaf, at), x = self._place_of(step.norm), partial(self._value, _read_by(step))
        last = self._last_use(step.norm)
        if last is None or _read_by(last) == _read_by(step):
            return norm_output(owner, leaf, at, x)
        return norm_unhooked(norm_of(owner, leaf), x())

    def _place_of(self, norm: str) -> tuple[Any, str, Sites]:
        """The module that a norm belongs to, the block or a part of it, the norm's name there, and the sites there."""
        owner, _, leaf = norm.rpartition(".")
        return self.block.get_submodule(owner), leaf, within(self.at, owner) if owner else self.at

    def _last_use(self, norm: str) -> Sublayer | InStream | None:
        """The last step that reads the stream through a norm."""
        uses = [step for step in self.wiring.steps if not isinstance(step, Sum) and norm and step.norm == norm]
        return uses[-1] if uses else None

    # ---- sublayers -----------------------------------------------------------------------------------------

    def _has_formula(self, step: Step) -> bool:
        """Whether what a step makes can be computed; the output of a foreign module cannot."""
        return not isinstance(step, Sublayer) or is_known(self.block.get_submodule(step.part))

    def _of_part(self, step: Sublayer, shift: LazyTensor | None, source: LazyTensor | None) -> Iterator[Identity]:
        """The identities of a sublayer's own sites, for what it reads."""
        module = self.block.get_submodule(step.part)
        if not is_known(module):
            return

        def read() -> Tensor:
            x = self._normalized(step)
            casts = step.part == "mixer" and isinstance(self.block, MixerPart)
            return x.to(self.block.mixer_dtype(x)) if casts else x  # type: ignore[operator]

        inputs: list[Any] = [read]
        inputs += [source if name == "source" else partial(self._value, name) for name in step.beside]
        if step.part == "attn":
            inputs = [read if shift is None else lambda: read() + shift(), *(inputs[1:] or [read])]
        for name, pair in identities(module, within(self.at, step.part), *inputs):
            yield f"{step.part}: {name}", pair
        yield from norm_identity(self.block, step.post, self.at, partial(self._output, step))

    def _of_copies(self, step: Sublayer) -> Iterator[Identity]:
        """The points on demand between the stream and the norm, where they are recorded."""
        for point in step.at:
            try:
                copies = self.at(point)
            except KeyError:
                continue
            yield f"{_said(step.reads)} == {_said(point)}", partial(self._copied, copies, step.reads)

    def _copied(self, copies: Tensor, reads: str) -> tuple[Tensor, Tensor]:
        stream = self._value(reads)
        return stream if copies.ndim == stream.ndim else stream[:, :, None].expand_as(copies), copies

    # ---- in words ------------------------------------------------------------------------------------------

    def _named(self, value: str) -> str:
        """A site by its name, a word by the formula of its step."""
        step = None if self._is_site(value) else self.wiring.place(value)
        return _said(value) if step is None else self._formula(step)

    def _formula(self, step: Step) -> str:
        """How a value is made, without norms that are none."""
        if isinstance(step, InStream):
            return self._after(step.norm, self._named(step.of))
        if isinstance(step, Sublayer):
            read = self._after(step.norm, self._named(step.reads))
            out = self._after(step.post, f"{step.part}({', '.join([read, *map(_said, step.beside)])})")
            return out if step.scale == 1.0 else f"{out} * {step.scale:g}"
        stream = self._named(step.stream)
        if step.weighed is not None:
            stream = f"{step.weighed[0]}({step.weighed[1]}, {stream})"
        of_stream, of_terms = ("" if weight == 1.0 else f"{weight:g} * " for weight in step.weights)
        whole = " + ".join([of_stream + stream, *(of_terms + self._named(term) for term in step.terms)])
        return f"({whole}) * {step.times}" if step.times else whole

    def _after(self, norm: str, value: str) -> str:
        owner, leaf, _ = self._place_of(norm)
        return value if isinstance(norm_of(owner, leaf), nn.Identity) else f"{norm}({value})"


def _said(value: str) -> str:
    return value.replace("hook_", "")


def _read_by(step: Sublayer | InStream) -> str:
    return step.of if isinstance(step, InStream) else step.reads
