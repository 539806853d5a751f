"""What the wiring of a block says about the values at its sites in one run."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooked_lm.components import verification
from hooked_lm.components.blocks.block import Block
from hooked_lm.components.blocks.cross import CrossPart
from hooked_lm.components.blocks.wiring import InStream, Step, Sublayer, Sum, Wiring
from hooked_lm.components.verification.blocks import wired_identities
from hooked_lm.components.verification.registry import Identity, LazyTensor
from hooked_lm.families.encoder_decoders.t5gemma2.merged import MergedBlock
from hooked_lm.models.verification import verify
from tests.unchecked import unchecked


@dataclass(frozen=True)
class Recorded:
    """A block in a run: the values at its sites, also those on demand, and what all blocks are given besides the stream."""

    name: str
    block: Block
    sites: dict[str, Tensor]
    given: tuple[LazyTensor | None, ...]

    def at(self, site: str) -> Tensor:
        return self.sites[f"{self.name}.{site}"]


def recorded(model: Any) -> list[Recorded]:
    """The blocks of a model in the run of `verify`, which knows the inputs of every class."""
    found: list[Recorded] = []
    sites: dict[str, Tensor] = {}
    names = {id(module): name for name, module in model.named_modules()}
    identities_of, run_recorded = verification.identities, verify.run_recorded

    def keep(*args: Any, **masks: Any) -> Any:
        output, values, fired = run_recorded(*args, **masks)
        sites.update({name: value for name, value in values.items() if name not in sites})
        return output, values, fired

    def collect(module: nn.Module, at: Any, *given: Any) -> Iterator[Identity]:
        if not isinstance(module, Block):
            return identities_of(module, at, *given)
        found.append(Recorded(names[id(module)], module, sites, given))
        return iter(())

    with pytest.MonkeyPatch.context() as patch, unchecked():
        patch.setattr(verify, "run_recorded", keep)
        patch.setattr(verification, "identities", collect)
        model.verify()
    return found


def identities(of: Recorded, wiring: Wiring) -> Iterator[Identity]:
    """What a wiring says of the values of the run."""
    has_source = isinstance(of.block, (CrossPart, MergedBlock))
    given = {"source" if has_source else "shift": of.given[0]} if of.given else {}
    return wired_identities(of.block, of.at, wiring, **given)


def step_norm(step: Step) -> str:
    """The norm that a step reads through, "" for none."""
    return "" if isinstance(step, Sum) else step.norm


# ---- wrong wirings -----------------------------------------------------------------------------------------------------


def corrupted(block: Block, wiring: Wiring) -> Iterator[tuple[str, Wiring]]:
    """The wiring with each field of each step wrong, in turn."""
    for i, step in enumerate(wiring.steps):
        for field in fields(step):
            for wrong in _wrong(block, wiring, step, field.name):
                steps = (*wiring.steps[:i], replace(step, **{field.name: wrong}), *wiring.steps[i + 1 :])
                yield (
                    f"{type(step).__name__} of {wiring_name(step)}: {field.name}={wrong!r}",
                    replace(wiring, steps=steps),
                )


def norms_of(block: Block) -> list[str]:
    """The names of the norms in front of sublayers or in the stream."""
    modules = block._modules
    return [name for name in ("ln1", "ln2", "ln3") if not isinstance(modules.get(name, nn.Identity()), nn.Identity)]


def wiring_name(step: Step) -> str:
    return step.part if isinstance(step, Sublayer) else step.gives


def _wrong(block: Block, wiring: Wiring, step: Step, field: str) -> Iterator[Any]:
    """Wrong values of a field of a step."""
    own, norms = getattr(step, field), norms_of(block)
    values = ["hook_resid_pre", *(s.writes if isinstance(s, Sublayer) else s.gives for s in wiring.steps)]
    kinds = {other.part: type(block.get_submodule(other.part)) for other in wiring.sublayers}
    if field in ("reads", "stream", "of", "gives", "writes"):
        yield from (value for value in dict.fromkeys(values) if value != own)
    elif field == "part":
        yield from (part for part, kind in kinds.items() if kind is not kinds[own])
    elif field == "norm":
        yield from (name for name in (*norms, "") if name != own and (name or own in norms))
    elif field == "post":
        yield from [""] if own in block._modules else norms[:1]
    elif field in ("terms", "at"):
        yield from (own[:i] + own[i + 1 :] for i in range(len(own)))
        yield (*own, own[0] if field == "terms" else "hook_attn_out")
    elif field == "scale":
        yield own + 0.5
    elif field == "weights":
        yield from ((own[0] + 0.5, own[1]), (own[0], own[1] + 0.5))
    elif own and not (field == "times" and bool((getattr(block, own) == 1).all())):
        yield {"weighed": None, "times": "", "beside": ()}[field]


def problems(of: Recorded, wiring: Wiring) -> Iterator[str]:
    """What does not hold of a wiring: its structure, and its predictions."""
    block = of.block
    on_demand = {name for name, point in block._modules.items() if getattr(point, "on_demand", False)}
    named = {name for step in wiring.sublayers for name in step.at}
    if wiring.sublayers and named != {name for name in on_demand if name not in wiring.by_hand}:
        yield f"points on demand {sorted(on_demand)} are not those of the steps, {sorted(named)}"
    unused = {name for name in norms_of(block) if name not in {step_norm(step) for step in wiring.steps}}
    if wiring.sublayers and not wiring.by_hand and unused:
        yield f"{sorted(unused)} are norms of no step"
    given = [step.writes if isinstance(step, Sublayer) else step.gives for step in wiring.steps]
    if len({*given}) < len(given):
        yield f"a value is given twice: {given}"
    modules = dict(block.named_modules())
    for step in wiring.steps:
        missing = [name for name in _modules_of(step) if name not in modules]
        if missing:
            yield f"{missing} are no modules of the block"
            return
    for name, pair in identities(of, wiring):
        if not verify.error_of(pair) < 1e-4:
            yield f"{name}: off by {verify.error_of(pair):.1e}"


def _modules_of(step: Step) -> list[str]:
    """The modules that a step names; a norm after a sublayer may be missing, as none."""
    if isinstance(step, Sublayer):
        return [step.part, *([step.norm] if step.norm else [])]
    return [step.norm] if isinstance(step, InStream) and step.norm != "adapter_ln" else []


# ---- what the graph of a run adds up -------------------------------------------------------------------------------------

LINEAR = ("AddBackward0", "SubBackward0", "MulBackward0", "DivBackward0", "CloneBackward0", "ToCopyBackward0", "ViewBackward0",
          "AliasBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")  # fmt: skip


class Mark(torch.autograd.Function):
    """A node of the graph that stands for a value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def added_up(node: Any, marks: dict[Any, str]) -> set[str]:
    """The marked values that a value is a linear combination of, one by one; others are "?"."""
    found, stack = set(), [following for following, _ in node.next_functions if following is not None]
    while stack:
        some = stack.pop()
        if some in marks:
            found.add(marks[some])
        elif "AccumulateGrad" in some.name():  # a weight that multiplies the stream
            continue
        elif some.name() in LINEAR and any(follow for follow, _ in some.next_functions):
            stack += [follow for follow, _ in some.next_functions if follow is not None]
        else:
            found.add("?")
    return found
