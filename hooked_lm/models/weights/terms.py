"""The stream at a place of a model as a sum of terms: the embeddings and what each sublayer writes, times all factors that
multiply the stream from there to the place."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.blocks.wiring import Sublayer, Sum, has_part, sublayer_of, wiring_of
from hooked_lm.hooks import HookedRootModule
from hooked_lm.models.checks import check_one_stream

Factor = float | Float[Tensor, "#d_model"]  # of the numbers of a vector, or of all


def times(x: Float[Tensor, "*lead d_model"], factor: Factor) -> Float[Tensor, "*lead d_model"]:
    """A vector, or several, times a factor."""
    if isinstance(factor, Tensor):
        return (x * factor.to(x.device)).to(x.dtype)
    return x if factor == 1.0 else x * factor


def product(a: Factor, b: Factor) -> Factor:
    """The product of two factors, each of which may be on a device of its own."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.to(b.device) * b
    return b if isinstance(a, float) and a == 1.0 else a if isinstance(b, float) and b == 1.0 else a * b


def check_mlp(model: HookedRootModule, layer: int) -> None:
    """Raises ValueError unless the block of a layer has an MLP."""
    if layer == model.cfg.n_layers or not has_part(model.blocks[layer], "mlp"):
        raise ValueError(f"there is no MLP at layer {layer}")


@dataclass(frozen=True)
class Term:
    """What is written at a site of a block, and what multiplies it on the way to a place of the stream.

    `step` is the sublayer that writes it; None for what no sublayer writes, such as features of images. `rest` are the terms that
    are added to its output before the site.
    """

    layer: int
    writes: str
    step: Sublayer | None
    factor: Factor = 1.0
    rest: "tuple[Term, ...]" = ()

    @classmethod
    def of(cls, block: nn.Module, layer: int, part: str) -> "Term":
        """What a part of a block writes."""
        step = sublayer_of(block, part)
        return cls(layer, step.writes, step)

    @property
    def part(self) -> str:
        """The module of the block that writes it, "" for none."""
        return "" if self.step is None else self.step.part

    @property
    def site(self) -> str:
        return f"blocks.{self.layer}.{self.writes}"

    @property
    def label(self) -> str:
        return f"{self.layer}_{self.writes.removeprefix('hook_')}"


@dataclass(frozen=True)
class Terms:
    """The terms of the stream at a place, in the order of computation, the factor of the embeddings, and the constants that
    blocks add to the stream itself, by label, with their factors."""

    terms: tuple[Term, ...] = ()
    embeddings: Factor = 1.0
    constants: tuple[tuple[str, Float[Tensor, " d_model"]], ...] = ()

    def of(self, *parts: str) -> list[Term]:
        """The terms that these parts of blocks write."""
        return [term for term in self.terms if term.part in parts]


def terms_at(model: HookedRootModule, layer: int, mlp_input: bool = False) -> Terms:
    """The terms of the stream before a layer, or of what its MLP reads; ValueError if the stream is no sum.

    >>> from hooked_lm import HookedTransformer
    >>> [
    ...     term.label
    ...     for term in terms_at(
    ...         HookedTransformer.from_pretrained("demo"), 1, mlp_input=True
    ...     ).terms
    ... ]
    ['0_attn_out', '0_mlp_out', '1_attn_out']
    """
    if mlp_input:
        check_mlp(model, layer)
    return terms_of(model, layer, sublayer_of(model.blocks[layer], "mlp").reads if mlp_input else None)


def terms_of(model: HookedRootModule, layer: int, value: str | None) -> Terms:
    """The terms of a value of the stream in a layer, or with None of the stream before it; ValueError if it is no sum."""
    check_one_stream(model, "there is no decomposition")
    values = [*(wiring_of(block).last for block in model.blocks[:layer]), *([] if value is None else [value])]
    if no_sums := [i for i, value in enumerate(values) if wiring_of(model.blocks[i]).chain(value) is None]:
        raise ValueError(
            f"blocks {no_sums} normalise the stream itself, or their sum is not known, so it is not the sum of what sublayers "
            "wrote; accumulated_resid shows the stream, hook_attn_out and hook_mlp_out what each sublayer wrote"
        )
    terms: list[Term] = []
    constants: list[tuple[str, Tensor]] = []
    factor: Factor = 1.0
    for i in reversed(range(len(values))):
        block = model.blocks[i]
        for step in wiring_of(block).chain(values[i]) or ():
            factor = product(factor, getattr(block, step.times).detach() if step.times else 1.0)
            terms += reversed([*_terms(block, i, step, product(factor, step.weights[1]))])
            factor = product(factor, step.weights[0])
            if step.weighed is not None:
                weight, constant = _elementwise(model, block, *step.weighed)
                constants.append((f"{i}_{step.weighed[1]}_stream_bias", times(constant, factor)))
                factor = product(factor, weight)
    biases = tuple((label, constant) for label, constant in reversed(constants) if bool(constant.any()))
    return Terms(tuple(reversed(terms)), factor, biases)


def _terms(block: nn.Module, layer: int, step: Sum, factor: Factor) -> Iterator[Term]:
    """What a sum adds to the stream, each with its factor."""
    wiring = wiring_of(block)
    for value in step.terms:
        made = wiring.place(value)
        if isinstance(made, Sum):  # of the output of a sublayer and others
            assert replace(made, gives="", stream="", terms=()) == Sum("", "", ()), "no factors within"
            own = wiring.place(made.stream)
            rest = tuple(_terms(block, layer, made, factor))
        else:
            own, rest = made, ()
        yield Term(layer, value, own if isinstance(own, Sublayer) else None, factor, rest)


def _elementwise(model: HookedRootModule, block: nn.Module, method: str, part: str) -> tuple[Tensor, Tensor]:
    """The weight and the constant of a method of a block that maps each number of the stream by itself, linearly."""
    weight = next(block.parameters())
    dtype = torch.promote_types(weight.dtype, torch.float32)
    zeros = torch.zeros(1, 1, model.cfg.d_model, device=weight.device, dtype=dtype)
    with torch.no_grad():
        constant, both = (getattr(block, method)(part, x)[0, 0] for x in (zeros, zeros + 1))
    return both - constant, constant
