"""What controllers do, and the same by hand; models of every class to do it in."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hooked_lm.hooks import Cache, wrap
from hooked_lm.interventions.base import HookObject
from hooked_lm.interventions.controllers import (
    AddDirection,
    Clamp,
    ProjectOut,
    Scale,
    SetValue,
    SwapDirections,
    ZeroAblate,
)
from hooked_lm.interventions.patch import (
    FreezeAttention,
    FreezeNorm,
    MeanAblate,
    Patch,
    PatchHead,
    PatchMLP,
    PatchResidual,
)
from tests.families import ENCODER_CASES, ENCODER_DECODER_CASES
from tests.families._models import hooked
from tests.models.toys import ids, toy

BATCH, POS, D = 3, 6, 32
ByHand = Callable[[Tensor], Any]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def of_family(family: str) -> Any:
    return hooked(next(case for case in (*ENCODER_CASES, *ENCODER_DECODER_CASES) if case.family == family))


def module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 5)).requires_grad_(False)


TOKENS = ids(BATCH, POS) + 3
KINDS: dict[str, tuple[Callable[[], Any], tuple[Tensor, ...], str]] = {
    "decoder": (lambda: toy("rotary"), (TOKENS % 50,), "blocks.1.hook_resid_post"),
    "encoder": (lambda: of_family("bert"), (TOKENS,), "blocks.0.hook_resid_post"),
    "encoder-decoder": (lambda: of_family("t5"), (TOKENS, TOKENS + 1), "decoder.0.hook_resid_post"),
    "module": (lambda: wrap(module()), (numbers(BATCH, POS, D),), "2"),
}
VECTOR, SOURCE, SHORT, MANY = (
    numbers(D, seed=1),
    numbers(BATCH, POS, D, seed=2),
    numbers(4, D, seed=3),
    numbers(9, POS, D),
)
BASIS = torch.linalg.qr(numbers(D, 2, seed=5)).Q.T
DEPENDENT = torch.stack([3 * BASIS[0], BASIS[0] + 0.01 * BASIS[1], BASIS[0] - BASIS[1]])  # three that span two
PAIR = torch.stack([BASIS[0], BASIS[0] + 2 * BASIS[1]])


def put(*index: Any, to: Any) -> ByHand:
    """By hand: write at an index."""

    def write(value: Tensor) -> Tensor:
        value[index] = to(value) if callable(to) else to
        return value

    return write


def chosen(rows: list[int], positions: list[int], features: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor(rows)[:, None, None], torch.tensor(positions)[:, None], torch.tensor(features)


def swapped(value: Tensor) -> Tensor:
    """With the coordinates along both vectors of PAIR, by least squares, exchanged."""
    solved = torch.linalg.lstsq(PAIR.T, value.flatten(0, 1).T).solution.T.view(*value.shape[:2], 2)
    return value + (solved.flip(-1) - solved) @ PAIR


EVERYWHERE = slice(None)
# What a controller does at [batch, pos, d_model], and the same by hand.
STREAM: dict[str, tuple[Callable[[str], HookObject], ByHand]] = {
    "zero": (lambda s: ZeroAblate(s), lambda v: torch.zeros_like(v)),
    "zero a position": (lambda s: ZeroAblate(s, positions=-2), put(EVERYWHERE, 4, to=0)),
    "zero a row": (lambda s: ZeroAblate(s, rows=[2, 0]), put([0, 2], to=0)),
    "zero features": (lambda s: ZeroAblate(s, features=[-1, 3]), put(..., [3, 31], to=0)),
    "zero a block": (
        lambda s: ZeroAblate(s, rows=[0, 1], positions=range(1, 4), rest=([2, 7, 9],)),
        put(*chosen([0, 1], [1, 2, 3], [2, 7, 9]), to=0),
    ),
    "set": (lambda s: SetValue(s, value=2.5, positions="last_prompt"), put(EVERYWHERE, 5, to=2.5)),
    "set a tensor": (lambda s: SetValue(s, value=VECTOR, positions=[1, 4]), put(EVERYWHERE, [1, 4], to=VECTOR)),
    "set a tensor by place": (
        lambda s: SetValue(s, value=SHORT[:2], positions=[4, 1]),
        put(EVERYWHERE, [4, 1], to=SHORT[:2]),
    ),
    "scale": (lambda s: Scale(s, factor=-2), lambda v: -2 * v),
    "scale by a tensor": (lambda s: Scale(s, factor=VECTOR, rows=1), put(1, to=lambda v: v[1] * VECTOR)),
    "clamp": (lambda s: Clamp(s, min=-0.1, max=0.2, features=5), put(..., 5, to=lambda v: v[..., 5].clip(-0.1, 0.2))),
    "clamp below": (lambda s: Clamp(s, min=0.3), lambda v: torch.where(v < 0.3, torch.tensor(0.3), v)),
    "add": (lambda s: AddDirection(s, vector=VECTOR, coefficient=3), lambda v: v + 3 * VECTOR),
    "add a unit": (
        lambda s: AddDirection(s, vector=VECTOR, unit=True, positions="prompt"),
        lambda v: v + VECTOR / VECTOR.square().sum().sqrt(),
    ),
    "add by a list": (
        lambda s: AddDirection(s, vector=VECTOR, schedule=[1, 2, 0.5]),
        lambda v: v + torch.tensor([1, 2, 0.5, 0.5, 0.5, 0.5])[:, None] * VECTOR,
    ),
    "add by a list of places": (
        lambda s: AddDirection(s, vector=VECTOR, schedule=[1, 2], positions=[4, 0]),
        lambda v: v + torch.tensor([2.0, 0, 0, 0, 1, 0])[:, None] * VECTOR,
    ),
    "add by a function": (
        lambda s: AddDirection(s, vector=VECTOR, schedule=lambda position, step: position**2 + step, features=range(8)),
        put(..., slice(8), to=lambda v: v[..., :8] + (torch.arange(6.0) ** 2)[:, None] * VECTOR[:8]),
    ),
    "add by position": (
        lambda s: AddDirection(s, vector=MANY[0], positions=[4, 0], coefficient=2),
        put(EVERYWHERE, [4, 0], to=lambda v: v[:, [4, 0]] + 2 * MANY[0, [4, 0]]),
    ),
    "project out": (
        lambda s: ProjectOut(s, vectors=VECTOR, rows=0),
        put(0, to=lambda v: v[0] - (v[0] @ VECTOR)[:, None] * VECTOR / (VECTOR @ VECTOR)),
    ),
    "project out a plane": (
        lambda s: ProjectOut(s, vectors=DEPENDENT),
        lambda v: v - sum((v @ one)[..., None] * one for one in BASIS),
    ),
    "project out half": (
        lambda s: ProjectOut(s, vectors=VECTOR, strength=0.5),
        lambda v: v - 0.5 * (v @ VECTOR)[..., None] * VECTOR / (VECTOR @ VECTOR),
    ),
    "swap": (lambda s: SwapDirections(s, vectors=PAIR, strength=0.5), lambda v: (v + swapped(v)) / 2),
    "patch": (lambda s: Patch(s, source=SOURCE), lambda v: SOURCE),
    "patch from a cache": (lambda s: Patch(s, source=Cache({s: SOURCE, "x": VECTOR})), lambda v: SOURCE),
    "patch places": (
        lambda s: Patch(s, source=SOURCE, positions=[5, 2]),
        put(EVERYWHERE, [5, 2], to=SOURCE[:, [5, 2]]),
    ),
    "patch the end of a shorter one": (
        lambda s: Patch(s, source=SHORT, positions=[1, -1, -2]),
        put(EVERYWHERE, [1, 5, 4], to=SHORT[[1, 3, 2]]),
    ),
    "patch elsewhere": (
        lambda s: Patch(s, source=SHORT, positions=[5, 0], source_positions=[0, 2]),
        put(EVERYWHERE, [5, 0], to=SHORT[[0, 2]]),
    ),
    "patch a block": (
        lambda s: Patch(s, source=SOURCE, rows=2, positions=3, features=[1, 4]),
        put(2, 3, [1, 4], to=SOURCE[2, 3, [1, 4]]),
    ),
    "mean": (lambda s: MeanAblate(s), lambda v: sum(v) / 3),
    "mean over positions": (
        lambda s: MeanAblate(s, over="pos", positions=0),
        put(EVERYWHERE, 0, to=lambda v: sum(v.unbind(1)) / 6),
    ),
    "mean of all": (lambda s: MeanAblate(s, over="batch pos"), lambda v: v.reshape(18, D).mean(0)),
    "mean of others": (
        lambda s: MeanAblate(s, source=MANY, positions=[1, 3]),
        put(EVERYWHERE, [1, 3], to=MANY.mean(0)[[1, 3]]),
    ),
}


Z, K = numbers(BATCH, POS, 4, 8, seed=6), numbers(BATCH, POS, 2, 8, seed=7)
PATTERN = numbers(BATCH, 4, POS, POS, seed=8).tril().softmax(-1)
OTHERS = (ids(BATCH, POS, seed=4),)
DECODER: dict[str, tuple[Callable[[], HookObject], str, ByHand]] = {
    "heads": (lambda: ZeroAblate("z", 1, heads=[0, 2]), "blocks.1.attn.hook_z", put(..., [0, 2], EVERYWHERE, to=0)),
    "a head's direction": (
        lambda: AddDirection("z", 1, vector=Z[0, 0], heads=-1),
        "blocks.1.attn.hook_z",
        put(..., 3, EVERYWHERE, to=lambda v: v[:, :, 3] + Z[0, 0, 3]),
    ),
    "key/value heads": (
        lambda: Patch("k", 1, source=K, heads=1, positions=[0, 2], features=[3, 4]),
        "blocks.1.attn.hook_k",
        put(EVERYWHERE, torch.tensor([0, 2])[:, None], 1, torch.tensor([3, 4]), to=K[:, [0, 2], 1, 3:5]),
    ),
    "a head's row of the pattern": (
        lambda: SetValue("pattern", 1, value=0.25, positions=3, rest=(2, [0, 1])),
        "blocks.1.attn.hook_pattern",
        put(EVERYWHERE, 2, 3, slice(2), to=0.25),
    ),
    "frozen attention": (
        lambda: FreezeAttention(layer=1, source=PATTERN, heads=[1, 3]),
        "blocks.1.attn.hook_pattern",
        put(EVERYWHERE, [1, 3], to=PATTERN[:, [1, 3]]),
    ),
    "a residual": (
        lambda: PatchResidual(1, positions=2, source=SOURCE),
        "blocks.1.hook_resid_post",
        put(EVERYWHERE, 2, to=SOURCE[:, 2]),
    ),
    "head": (
        lambda: PatchHead(1, source={"blocks.1.attn.hook_z": Z}, heads=3),
        "blocks.1.attn.hook_z",
        put(..., 3, EVERYWHERE, to=Z[:, :, 3]),
    ),
    "an MLP": (lambda: PatchMLP(layer=1, source=SOURCE[0]), "blocks.1.hook_mlp_out", lambda v: SOURCE[0]),
    "a frozen norm": (
        lambda: FreezeNorm(hook_point="blocks.1.ln1.hook_scale", source=SOURCE[..., :1].abs() + 1),
        "blocks.1.ln1.hook_scale",
        lambda v: SOURCE[..., :1].abs() + 1,
    ),
}
