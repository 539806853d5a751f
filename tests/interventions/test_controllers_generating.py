"""Controllers in generation: with the key/value cache as without, row by row as alone."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm.interventions.base import HookObject
from hooked_lm.interventions.controllers import AddDirection, Clamp, Noise, ProjectOut, Scale, SetValue, ZeroAblate
from hooked_lm.interventions.patch import (
    FreezeAttention,
    FreezeNorm,
    MeanAblate,
    Patch,
    PatchHead,
    PatchMLP,
    PatchResidual,
    ResampleAblate,
)
from tests.close import assert_apart, assert_close
from tests.interventions.tables import (
    BATCH,
    PATTERN,
    POS,
    TOKENS,
    VECTOR,
    D,
    Z,
    numbers,
    of_family,
)
from tests.models.toys import ids, padded, toy

# ---- generation ------------------------------------------------------------------------------------------------------

NEW = 4
LONG, SHORTER = numbers(BATCH, POS, D, seed=2), numbers(1, 3, D, seed=3)
GENERATED: dict[str, Callable[[], HookObject]] = {
    **{
        f"add to {places}": lambda places=places: AddDirection(
            "resid_post", 1, vector=VECTOR, coefficient=2, positions=places
        )
        for places in ("all", "prompt", "last_prompt", "generated", -2, [0, 3, POS + 1])
    },
    "a schedule": lambda: AddDirection(
        "resid_post", 1, vector=VECTOR, schedule=lambda position, step: position - 2 * step
    ),
    "a list": lambda: AddDirection("resid_post", 1, vector=VECTOR, schedule=[3, 2, 1], positions="generated"),
    "by position": lambda: AddDirection("resid_post", 1, vector=numbers(POS + NEW, D), positions=[0, 3, POS + 1]),
    "at inputs": lambda: AddDirection("blocks.1.mlp", vector=VECTOR, coefficient=5, when="pre", positions="generated"),
    "zero": lambda: ZeroAblate("z", 1, heads=[0, 1], positions="generated"),
    "set": lambda: SetValue("resid_post", 1, value=VECTOR, positions=[4, 1, POS]),
    "scale": lambda: Scale("mlp_out", 1, factor=-4, positions=[0, -1, POS]),
    "clamp": lambda: Clamp("resid_post", 1, max=0.1),
    "a frozen norm": lambda: FreezeNorm(layer=1, source=torch.full((1, 1, 1), 3.0)),
    "patch a residual": lambda: PatchResidual(layer=1, source=LONG, positions="prompt"),
    "patch a head": lambda: PatchHead(layer=1, source=10 * Z, heads=[1, 3], positions="last_prompt"),
    "patch an MLP": lambda: PatchMLP(layer=1, source=VECTOR, positions="generated"),
    "project out": lambda: ProjectOut("resid_post", 1, vectors=VECTOR),
    "noise": lambda: Noise("resid_post", 1, multiple=1, rows=[0, 2]),
    "patch the prompt": lambda: Patch("resid_post", 1, source=LONG),
    "patch its end": lambda: Patch("resid_post", 1, source=SHORTER, positions=[-1, -3]),
    "patch its beginning": lambda: Patch("resid_post", 1, source=SHORTER, positions=[2, 0]),
    "frozen attention": lambda: FreezeAttention(layer=1, source=PATTERN),
    "mean": lambda: MeanAblate("z", 1, heads=2),
    "resample": lambda: ResampleAblate("z", 1, positions="generated"),
}


def read(model: Any, hook: Any, tokens: Tensor, mask: Tensor | None, use_cache: bool) -> tuple[Tensor, Tensor]:
    with model.hooks([hook]):
        tokens, seen = model.generate(
            tokens, NEW, do_sample=False, stop_at_eos=False, verbose=False, use_past_kv_cache=use_cache,
            return_cache=True, names_filter="blocks.2.hook_resid_post", attention_mask=mask,
        )  # fmt: skip
    return tokens, seen["resid_post", 2]


@pytest.mark.parametrize("name", GENERATED)
def test_generation_with_a_cache_is_generation_without(name: str):
    model, hook = toy("rotary"), GENERATED[name]()
    for tokens, given in ((ids(BATCH, POS), None), ragged_prompts()):
        (text, values), (expected, wanted) = (read(model, hook, tokens, given, cached) for cached in (True, False))
        assert torch.equal(text, expected)
        real = torch.ones_like(expected, dtype=torch.bool)
        if given is not None:
            real[:, :POS] = given.bool()
        real = real[:, : values.shape[1]]
        assert_close(values[real], wanted[real])
        plain = without(given is None)
        assert (plain - values)[real].abs().max() > 1e-2, "the control: it matters"


@cache
def without(is_even: bool) -> Tensor:
    tokens, mask = (ids(BATCH, POS), None) if is_even else ragged_prompts()
    return read(toy("rotary"), ("hook_embed", lambda value, hook: None), tokens, mask, True)[1]


def ragged_prompts() -> tuple[Tensor, Tensor]:
    return padded([ids(1, n, seed=n)[0] for n in (POS, 4, 5)], "left")


def test_generation_sees_a_hook_that_acts_again_on_every_step():
    """The mistake: what is meant for the last token of the prompt hits the last of each value that is shown."""
    model, tokens = toy("rotary"), ids(BATCH, POS)

    def again(value: Tensor, hook: Any) -> Tensor:
        value[:, -1] += 2 * VECTOR
        return value

    hook = ("blocks.1.hook_resid_post", again)
    found, expected = read(model, hook, tokens, None, True)[1], read(model, hook, tokens, None, False)[1]
    assert_apart(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("places", ["all", "prompt", "last_prompt", "generated", [0, 3, POS + 1], -2])
def test_steered_generation_is_steered_runs_by_hand(places: Any):
    """Each row alone, each token from a run of all that went before, with a plain function where the row's tokens stand."""
    model = toy("rotary")
    rows = [ids(1, n, seed=n)[0] for n in (POS, 4)]
    tokens, mask = padded(rows, "left")
    hook = AddDirection("resid_post", 1, vector=VECTOR, coefficient=2, positions=places)
    found, _ = read(model, hook, tokens, mask, True)
    for i, row in enumerate(rows):
        n, text = len(row), row[None]
        for _ in range(NEW):
            where = {
                "all": range(text.shape[1]),
                "prompt": range(n),
                "last_prompt": [n - 1],
                "generated": range(n, text.shape[1]),
                "-2": [n - 2],
            }.get(str(places), [0, 3, POS + 1])
            at = torch.tensor([p in where for p in range(text.shape[1])])[:, None]
            steer = ("blocks.1.hook_resid_post", lambda value, hook, at=at: value + 2 * at * VECTOR)
            text = torch.cat([text, model.run_with_hooks(text, fwd_hooks=[steer])[:, -1:].argmax(-1)], 1)
        assert torch.equal(found[i, -NEW:], text[0, -NEW:])


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_schedule_is_told_the_position_and_the_step(use_cache: bool):
    told: set[tuple[int, int]] = set()

    def factor(position: int, step: int) -> float:
        told.add((position, step))
        return 1.0

    hook = AddDirection("resid_post", 1, vector=VECTOR, schedule=factor)
    read(toy("rotary"), hook, ids(1, 3), None, use_cache)
    assert told == {(0, 0), (1, 0), (2, 0), (3, 1), (4, 2), (5, 3), (6, 4)}


@torch.no_grad()
@pytest.mark.parametrize("places", [None, [0, -1], [2], "last_prompt"])
def test_a_padded_source_is_put_where_it_was(places: Any):
    """Patching a batch of unequal prompts with what it says itself changes nothing."""
    model, (tokens, mask) = toy("rotary"), ragged_prompts()
    _, cache = model.run_with_cache(tokens, attention_mask=mask)
    found = read(model, Patch("resid_post", 1, source=cache, positions=places), tokens, mask, True)[1]
    real = torch.cat([mask.bool(), torch.ones(len(mask), NEW, dtype=torch.bool)], 1)[:, : found.shape[1]]
    assert_close(found[real], without(False)[real])


@pytest.mark.slow
def test_an_encoder_decoder_generates_under_hooks():
    model = of_family("t5")
    options: dict[str, Any] = {"do_sample": False, "stop_at_eos": False, "verbose": False, "max_new_tokens": 6}
    for hook in (
        AddDirection("decoder.resid_post", 0, vector=VECTOR, coefficient=4),
        AddDirection("decoder.resid_post", 0, vector=VECTOR, coefficient=4, positions="generated"),
        AddDirection("decoder.resid_post", 0, vector=VECTOR, coefficient=4, positions="last_prompt"),
        AddDirection("encoder.resid_post", 0, vector=VECTOR, coefficient=9, positions=-1),
        PatchMLP(0, hook_point="decoder.mlp_out", source=VECTOR, positions="generated"),
        Noise("decoder.resid_post", 0, std=2, positions=[0, 2, 4]),
    ):
        found = []
        for use_past_kv_cache in (True, False):
            seen: list[Tensor] = []
            keep = ("decoder.1.hook_resid_post", lambda value, hook, seen=seen: seen.append(value[:, -1].clone()))
            with model.hooks([hook, keep]):
                model.generate(TOKENS, use_past_kv_cache=use_past_kv_cache, **options)
            found.append(torch.stack(seen))
        assert_close(found[0], found[1])
