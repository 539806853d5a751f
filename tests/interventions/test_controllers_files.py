"""Controllers in files, and what is said of mistakes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hooked_lm.hooks import wrap
from hooked_lm.interventions.base import HookObject, Hooks
from hooked_lm.interventions.controllers import AddDirection, Clamp, Noise, ProjectOut, Scale, SetValue, ZeroAblate
from hooked_lm.interventions.detectors import Record
from hooked_lm.interventions.gradients import ClipGradient, RecordGradient, ScaleGradient
from hooked_lm.interventions.patch import (
    FreezeAttention,
    FreezeNorm,
    MeanAblate,
    Patch,
    PatchHead,
    ResampleAblate,
)
from tests.close import assert_close
from tests.interventions.tables import (
    BATCH,
    DECODER,
    POS,
    SHORT,
    STREAM,
    VECTOR,
    D,
    Z,
    numbers,
)
from tests.models.toys import ids, toy

# ---- files -----------------------------------------------------------------------------------------------------------

OBJECTS: list[HookObject] = [
    *[
        make("blocks.1.hook_resid_post")
        for name, (make, _) in STREAM.items()
        if name != "add by a function"  # a function cannot be serialised
    ],
    *[make() for make, _, _ in DECODER.values()],
    PatchHead(source={f"blocks.{i}.attn.hook_z": Z + i for i in range(3)}, heads=1),
    ResampleAblate(("z", 1), seed=4),
    Noise("resid_post", 2, std=0.1, seed=7, positions=[0, 1]),
    FreezeNorm(),
    ClipGradient("z", 1, max_norm=0.5),
    ScaleGradient("z", 1, factor=0.5, heads=slice(1, 3)),
    RecordGradient("z", 1, most_calls=2, at_cap="oldest"),
]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return bool(one == other) and type(one) is type(other)


@pytest.mark.slow
@torch.no_grad()
def test_every_object_is_saved_and_loaded_bit_for_bit(tmp_path: Path):
    Hooks(OBJECTS).save(tmp_path / "hooks.safetensors")
    model, tokens = toy("rotary"), ids(BATCH, POS)
    loaded = Hooks.load(tmp_path / "hooks.safetensors")
    assert {type(one) for one in loaded} == {type(one) for one in OBJECTS}
    for before, after in zip(OBJECTS, loaded, strict=True):
        described = HookObject.from_dict(before.to_dict())
        assert repr(before) == repr(after) == repr(described)
        for name, value in before.settings().items():
            assert same(getattr(after, name), value), f"{name} of {before}"
        if before.direction == "fwd":
            runs = [model.run_with_hooks(tokens, fwd_hooks=[one]) for one in (before, after, described)]
            assert torch.equal(runs[0], runs[1])
            assert torch.equal(runs[0], runs[2])
    assert {type(one).__name__ for one in OBJECTS} >= {
        "ZeroAblate", "MeanAblate", "ResampleAblate", "Patch", "PatchResidual", "PatchHead", "PatchMLP", "Noise",
        "AddDirection", "ProjectOut", "Clamp", "Scale", "SetValue", "FreezeAttention", "FreezeNorm", "ClipGradient",
        "ScaleGradient", "RecordGradient",
    }  # fmt: skip


def test_a_source_is_told_by_its_shapes():
    hook = PatchHead(source={"blocks.0.attn.hook_z": Z, "blocks.2.attn.hook_z": Z}, heads=1)
    told = "source={'blocks.0.attn.hook_z': tensor[3, 6, 4, 8], 'blocks.2.attn.hook_z': tensor[3, 6, 4, 8]}"
    assert told in repr(hook)


# ---- mistakes --------------------------------------------------------------------------------------------------------

AT_ONCE: list[tuple[Callable[[], Any], str]] = [
    (lambda: FreezeNorm(layer=-1), "counts layers from 0; got -1"),
    (lambda: FreezeAttention(layer=1), "FreezeAttention needs a source"),
    (lambda: ZeroAblate(), "ZeroAblate needs a hook_point"),
    (lambda: ZeroAblate("z", 1, positions="first"), "one of all, prompt, last_prompt, generated, .* got 'first'"),
    (lambda: Patch("z", 1), "Patch needs a source"),
    (lambda: Patch("z", 1, source=Z, source_positions=[1, 2], positions=3), "goes with as many positions, got 3"),
    (lambda: Noise("z", 1), "Noise needs std or multiple"),
    (lambda: Noise("z", 1, std=1, multiple=1), "and not both"),
    (lambda: Noise("z", 1, std=-1), "not negative"),
    (lambda: Clamp("z", 1), "needs min, max or both"),
    (lambda: Clamp("z", 1, min=2, max=1), "min=2 is above max=1"),
    (lambda: AddDirection("z", 1, vector=torch.zeros(8), unit=True), "length 0"),
    (lambda: AddDirection("z", 1, vector=VECTOR, schedule=[]), "at least one factor"),
    (lambda: ProjectOut("z", 1, vectors=torch.zeros(2, 8)), "span nothing"),
    (lambda: MeanAblate("z", 1, over="head"), "over must be"),
]


@pytest.mark.parametrize(
    "where",
    [
        {"positions": torch.tensor([True, False])},
        {"heads": [True, False, True, True]},
        {"rows": torch.tensor([1.5])},
        {"features": True},
        {"rest": (None, np.array([False, True]))},
    ],
    ids=str,
)
def test_indices_are_whole_numbers(where: dict[str, Any]):
    """A mask is no list of zeros and ones."""
    [name] = where
    with pytest.raises(TypeError, match=f"{name} must be integers, got .*mask.nonzero"):
        ZeroAblate("z", 1, **where)


def test_numbers_of_any_library_are_indices():
    for head in (1, np.int64(1), torch.tensor(1)):
        assert ZeroAblate("z", 1, heads=head).heads == 1
    for heads in ((2, 0), range(2, -1, -2), np.array([2, 0]), torch.tensor([2, 0]), [torch.tensor(2), np.int8(0)]):
        assert ZeroAblate("z", 1, heads=heads).heads == [2, 0]


@torch.no_grad()
def test_no_positions_are_no_change():
    model, tokens = toy("rotary"), ids(BATCH, POS)
    for make, _ in STREAM.values():
        hook = make("blocks.1.hook_resid_post")
        if getattr(hook, "source_positions", None) is None:
            hook = HookObject.from_dict({**hook.settings(), "kind": type(hook).__name__, "positions": []})
            assert torch.equal(model.run_with_hooks(tokens, fwd_hooks=[hook]), model(tokens))


@pytest.mark.parametrize(("make", "words"), AT_ONCE)
def test_mistakes_that_show_at_once(make: Callable[[], Any], words: str):
    with pytest.raises(ValueError, match=words):
        make()


STREAM_1 = r"'blocks.1.hook_resid_post \[batch 3, pos 6, d_model 32\]'"
IN_A_RUN: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: AddDirection("resid_post", 1, vector=numbers(31)),
        ValueError,
        f"width 31 at {STREAM_1}, whose last axis is 32",
    ),
    (
        lambda: ProjectOut("resid_post", 1, vectors=numbers(2, 8)),
        ValueError,
        f"width 8 at {STREAM_1}, whose last axis is 32",
    ),
    (
        lambda: AddDirection("resid_post", 1, vector=numbers(4, D), positions=[1, 5]),
        ValueError,
        rf"\(1, 4, 32\), which does not fit {STREAM_1}: axis 1 has 4 of 6",
    ),
    (
        lambda: AddDirection("z", 1, vector=numbers(5, 8), heads=1),
        ValueError,
        r"\(1, 1, 5, 8\), which does not fit .*: axis 2 has 5 of 4",
    ),
    (lambda: AddDirection("resid_post", 1, vector=numbers(1, BATCH, POS, D)), ValueError, f"more axes than {STREAM_1}"),
    (
        lambda: SetValue("resid_post", 1, value=numbers(4, D)),
        ValueError,
        r"\(4, 32\), which does not broadcast to \(3, 6, 32\)",
    ),
    (lambda: Scale("resid_post", 1, factor=numbers(2, 1, D)), ValueError, r"\(2, 1, 32\).*\(3, 6, 32\)"),
    (
        lambda: Patch("resid_post", 1, source=SHORT),
        ValueError,
        f"the source has 4 positions, and there are 6 at {STREAM_1}",
    ),
    (
        lambda: Patch("resid_post", 1, source=SHORT, positions=[1, 4]),
        ValueError,
        "position 4 .* the source, which has only 4 positions",
    ),
    (
        lambda: Patch("resid_post", 1, source=SHORT, positions=-5),
        ValueError,
        "position 1 .* takes position -5 of the source",
    ),
    (lambda: Patch("resid_post", 1, source=numbers(2, POS, D)), ValueError, r"\(2, 6, 32\).*axis 0 has 2 and not 3"),
    (lambda: Patch("resid_post", 1, source=Z), ValueError, r"\(3, 6, 4, 8\).*\(3, 6, 32\)"),
    (
        lambda: Patch("resid_post", 1, source={"x": Z}),
        KeyError,
        r"no values for 'blocks.1.hook_resid_post'; it has \['x'\]",
    ),
    (
        lambda: ZeroAblate("resid_post", 1, positions=6),
        IndexError,
        f"position 6 is out of range at {STREAM_1}.* -6 to 5",
    ),
    (lambda: ZeroAblate("resid_post", 1, heads=0), ValueError, f"heads=0, and {STREAM_1} has no such axis"),
    (lambda: ZeroAblate("z", 1, heads=4), IndexError, "heads 4 is out of range .* there are 4, so -4 to 3"),
    (lambda: ZeroAblate("z", 1, heads=1, rest=(2,)), ValueError, r"rest\[0\]=2: this axis .* is selected twice"),
    (lambda: ZeroAblate("z", 1, rest=(1, 2, 3)), ValueError, "indexes 3 axes; .* has 2 after batch and position"),
    (lambda: ZeroAblate("resid_pst", 1), KeyError, "resid_pst"),
    (lambda: ZeroAblate("blocks.*.hook_resid_pst"), KeyError, r"did you mean 'blocks.\*.hook_resid_post'"),
]


@pytest.mark.parametrize(("make", "error", "words"), IN_A_RUN)
def test_mistakes_name_both_sides_and_leave_nothing_behind(make: Callable[[], Any], error: type[Exception], words: str):
    model, tokens = toy("rotary"), ids(BATCH, POS)
    with pytest.raises(error, match=words):
        model.run_with_hooks(tokens, fwd_hooks=[ZeroAblate("z", 0), make()])
    assert not any(point.is_listening for point in model.hook_points())


def test_sites_without_positions():
    net = wrap(nn.Linear(3, 4))
    assert not net.run_with_hooks(torch.ones(2, 3), fwd_hooks=[]).eq(0).any()
    flat = wrap(nn.Sequential(nn.Linear(3, 4)))
    assert flat.run_with_hooks(torch.ones(2, 3), fwd_hooks=[ZeroAblate("0", features=1, rows=0)])[0, 1] == 0
    with pytest.raises(ValueError, match=r"positions=1, and '0 \[2, 4\]' has no axis of positions"):
        flat.run_with_hooks(torch.ones(2, 3), fwd_hooks=[ZeroAblate("0", positions=1)])


def test_maps_of_features():
    """[batch, channel, row, column]: `rest` selects along the axes after the batch; nothing else is silently one of them."""
    torch.manual_seed(0)
    net, image = wrap(nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU())), numbers(2, 3, 8, 8)
    _, clean = net.run_with_cache(image)
    expected = clean["0"].clone()
    expected[:, 2, 1:3, -1] = 9
    found = net.run_with_hooks(image, fwd_hooks=[SetValue("0", value=9, rest=(2, [1, 2], -1))])
    assert_close(found, expected.relu())
    for part in ({"positions": 2}, {"features": 2}, {"heads": 2}):
        with pytest.raises(ValueError, match=r"'0 \[2, 5, 6, 6\]' has no .*rest=\(2,\)"):
            net.run_with_hooks(image, fwd_hooks=[ZeroAblate("0", **part)])
    for option in ({"positions": 2}, {"features": 2}):
        with pytest.raises(ValueError, match="its axes have no names"):
            net.run_with_hooks(image, fwd_hooks=[Record("0", **option)])
    with pytest.raises(ValueError, match="the position axis of '0'"):
        net.run_with_cache(image, pos_slice=-1)


def test_a_mean_over_a_single_prompt_is_refused():
    """It would change nothing, and look like a head without an effect."""
    for hook in (MeanAblate("z", 1), MeanAblate("z", 1, heads=[2], positions=-1)):
        with pytest.raises(ValueError, match="shows a single prompt, whose mean over the batch is its own value"):
            toy("rotary").run_with_hooks(ids(1, 5), fwd_hooks=[hook])
        toy("rotary").run_with_hooks(ids(2, 5), fwd_hooks=[hook])
    toy("rotary").run_with_hooks(ids(1, 5), fwd_hooks=[MeanAblate("z", 1, over="pos")])
