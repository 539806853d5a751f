"""One grammar of indices: a list or tuple of ints is these indices, a slice is a range, wherever indices are given."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooked_lm.analysis.alignment.interchange import Location
from hooked_lm.hooks import Slice, wrap
from hooked_lm.hooks.indices import plain_indices
from hooked_lm.interventions import Noise, Patch, Record, ScaleGradient, SetValue, ZeroAblate
from hooked_lm.patching import attention_knockout, sweep
from tests.close import assert_close
from tests.models.toys import ids, toy

SPELLED: list[tuple[Any, list[int]]] = [
    ((0, 3), [0, 3]),
    ([3, 0], [0, 3]),
    (-1, [3]),
    (range(1, 3), [1, 2]),
    (slice(0, 3), [0, 1, 2]),
    (slice(None, None, 2), [0, 2]),
    (slice(-2, None), [2, 3]),
    (Slice((1, 3)), [1, 2]),  # this interface's own object: there a tuple is a range
    (torch.tensor([0, 3]), [0, 3]),
]
AXES = {"rows": 0, "heads": 1, "positions": 2, "features": 3}
SITE = "blocks.1.attn.hook_pattern"  # four heads; of four rows of four tokens all axes have length 4


def changed_by(hook: Any, axis: int) -> list[int]:
    model, tokens = toy("rotary"), ids(4, 4)
    with model.hooks([hook]):
        _, cache = model.run_with_cache(tokens, names_filter=SITE)
    is_nine = (cache[SITE] == 9).movedim(axis, 0).flatten(1)
    assert torch.equal(is_nine.all(1), is_nine.any(1))
    return is_nine.all(1).nonzero().flatten().tolist()


@pytest.mark.every_parameter
@torch.no_grad()
@pytest.mark.parametrize(("given", "expected"), SPELLED, ids=str)
@pytest.mark.parametrize("name", AXES)
def test_detectors_and_controllers_mean_the_same(name: str, given: Any, expected: list[int]) -> None:
    axis = AXES[name]
    assert changed_by(SetValue(SITE, value=9, **{name: given}), axis) == expected
    model, tokens, record = toy("rotary"), ids(4, 4), Record(SITE, **{name: given})
    with model.hooks([record]):
        _, cache = model.run_with_cache(tokens, names_filter=SITE)
    order = [i % 4 for i in given] if isinstance(given, list) else expected
    assert torch.equal(record.stacked()[0], cache[SITE].index_select(axis, torch.tensor(order)))


@torch.no_grad()
def test_a_patch_reads_the_positions_of_a_slice() -> None:
    model, tokens, source = toy("rotary"), ids(2, 6), torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))

    def left(**where: Any) -> Tensor:
        with model.hooks([Patch("resid_post", 1, source=where.pop("source", source), **where)]):
            return model.run_with_cache(tokens)[1]["resid_post", 1]

    for where in (slice(1, 4), slice(-3, None)):
        numbers = list(range(6)[where])
        assert torch.equal(left(positions=where), left(positions=numbers))
    shorter = source[:, :4]
    assert torch.equal(left(source=shorter, positions=slice(1, 3)), left(source=shorter, positions=[1, 2]))
    moved = left(source=shorter, positions=slice(3, 6), source_positions=slice(0, 3))
    assert torch.equal(moved, left(source=shorter, positions=[3, 4, 5], source_positions=[0, 1, 2]))
    with pytest.raises(
        ValueError, match=r"counts from the end of 6 positions .* give positions and source_positions as"
    ):
        left(source=shorter, positions=slice(-2, None))
    with pytest.raises(ValueError, match="goes with as many positions"):
        left(positions=slice(0, 2), source_positions=[1, 2, 3])
    with pytest.raises(ValueError, match="has no fixed length"):
        left(positions=slice(2, None), source_positions=[1, 2, 3, 4])


@torch.no_grad()
@pytest.mark.parametrize("cached", [True, False])
def test_slices_in_generation(cached: bool) -> None:
    """Without a stop a slice goes on into what is generated; negative bounds count from the end of the prompt."""
    model, tokens = toy("rotary"), ids(2, 4)
    options: dict[str, Any] = {"use_past_kv_cache": cached, "do_sample": False, "verbose": False, "stop_at_eos": False}
    for some, same in [
        (slice(None), "all"),
        (slice(4, None), "generated"),
        (slice(0, 4), "prompt"),
        (slice(-1, None), [3, 4, 5, 6, 7, 8]),
        (slice(-3, -1), [1, 2]),
        (slice(2, 6, 2), [2, 4]),
    ]:
        found = []
        for positions in (some, same):
            with model.hooks([Noise("resid_post", 1, std=3.0, positions=positions)]):
                found.append(model.generate(tokens, 4, **options))
        assert torch.equal(*found), some


@torch.no_grad()
def test_a_slice_that_contains_nothing_is_refused() -> None:
    model, tokens = toy("rotary"), ids(2, 4)
    for hook in (ZeroAblate("z", 1, heads=slice(4, 9)), Record("z", 1, heads=slice(4, 9))):
        with pytest.raises(IndexError, match=r"heads: slice\(4, 9, None\) contains none of the 4 indices at"):
            model.run_with_hooks(tokens, fwd_hooks=[hook])
    with pytest.raises(IndexError, match=r"positions=slice\(5, None, None\) contains none of the 4 positions"):
        model.run_with_hooks(tokens, fwd_hooks=[ZeroAblate("z", 1, positions=slice(5, None))])
    with pytest.raises(ValueError, match="a slice of positions has a step above 0"):
        model.run_with_hooks(tokens, fwd_hooks=[ZeroAblate("z", 1, positions=slice(None, None, -1))])


WRONG: list[tuple[Any, str]] = [
    (torch.tensor([True, False]), r"for a mask pass mask.nonzero\(\)"),
    ("0", "must be integers, got '0'"),
    (1.0, "must be integers, got 1.0"),
    (slice(0, 1.5), "a slice of ints"),
    (slice(0, 4, 0), "a step other than 0"),
]


@pytest.mark.parametrize(("given", "words"), WRONG, ids=str)
def test_what_is_no_index_is_refused(given: Any, words: str) -> None:
    with pytest.raises(TypeError, match=f"heads .*{words}"):
        plain_indices("heads", given)


GENERATING: dict[str, Any] = {"do_sample": False, "verbose": False, "stop_at_eos": False}


@torch.no_grad()
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(
    ("positions", "expected"),
    [(-1, [3]), ("last_prompt", [3]), ("prompt", range(4)), ("generated", range(4, 7)), (slice(-1, None), range(3, 7)),
     ([5, 1, 1], [5, 1, 1]), (range(2, 5), [2, 3, 4])],
    ids=str,
)  # fmt: skip
def test_a_record_of_a_generation_has_the_positions_of_controllers(positions: Any, expected: Any, cached: bool) -> None:
    """Without the cache the last step shows all positions; with it each is kept in the step that computes it."""
    model, record = toy("rotary"), Record("resid_post", 1, positions=positions)
    with model.hooks([record]):
        made = model.generate(ids(2, 4), 4, use_past_kv_cache=cached, **GENERATING)
    whole = model.run_with_cache(made[:, :-1])[1]["resid_post", 1]
    if cached:
        in_steps = sorted(expected) if isinstance(expected, list) else list(expected)
        assert_close(record.joined(axis="pos"), whole[:, in_steps])
    else:
        assert_close(record.values["blocks.1.hook_resid_post"][-1], whole[:, list(expected)])


@torch.no_grad()
def test_a_record_of_prompts_of_two_lengths_has_the_tokens_of_each_row() -> None:
    model, tokens, mask = toy("rotary"), ids(2, 4), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    second = Record("resid_post", 1, positions=1)
    with model.hooks([second]):
        model.generate(tokens, 2, attention_mask=mask, **GENERATING)
    whole = model.run_with_cache(tokens, attention_mask=mask)[1]["resid_post", 1]
    assert_close(second.stacked()[0, :, 0], torch.stack([whole[0, 2], whole[1, 1]]))
    refused = pytest.raises(ValueError, match=r"positions='prompt' selects \[3, 4\] positions in the rows at")
    with refused, model.hooks([Record("resid_post", 1, positions="prompt")]):
        model.generate(tokens, 2, attention_mask=mask, **GENERATING)


@torch.no_grad()
def test_heads_are_indices_or_labels_of_the_layer() -> None:
    model, tokens = toy("rotary"), ids(2, 4)
    labels: list[Any] = [
        ("z", 1, "L1H3", [3]),
        ("blocks.1.attn.hook_z", None, ["L1H3", 0], [3, 0]),
        (("z", 1), None, ("L1H2",), [2]),
    ]
    for site, layer, heads, expected in labels:
        record = Record(site, layer, heads=heads)
        off = ZeroAblate(site, layer, heads=heads)
        with model.hooks([off, record]):
            _, cache = model.run_with_cache(tokens, names_filter=("z", 1))
        assert record.stacked().shape[3] == len(expected)
        assert (cache["z", 1] == 0).all(-1).all(0).all(0).nonzero().flatten().tolist() == sorted(expected)
    assert repr(ZeroAblate("z", 1, heads="L1H3")) == "ZeroAblate('z', 1, heads=3)"
    with pytest.raises(ValueError, match="head 'L0H3' is in layer 0, and layer 1 was chosen"):
        ZeroAblate("z", 1, heads="L0H3")
    with pytest.raises(
        ValueError, match=r"heads=\['L0H3'\]: a label needs a site in one layer, and '\*.attn.hook_z' has none"
    ):
        Record("*.attn.hook_z", heads="L0H3")
    assert repr(ZeroAblate("z", heads=["L1H3", "L1H0"])) == "ZeroAblate('z', 1, heads=[3, 0])", (
        "the layer of the labels"
    )
    with pytest.raises(ValueError, match=r"are of layers \[0, 1\]: one hook acts on one layer"):
        ZeroAblate("z", heads=["L0H3", "L1H3"])
    with pytest.raises(ValueError, match="'3' is not the label of a head"):
        Record("z", 1, heads="3")


@torch.no_grad()
def test_sweeps_take_the_same() -> None:
    model, clean, corrupted = toy("rotary"), ids(2, 5), ids(2, 5, seed=1)

    def metric(logits: Tensor) -> Tensor:
        return logits[:, -1, 3]

    def found(**which: Any) -> Tensor:
        return sweep(model, corrupted, clean, metric=metric, sites="z", progress=False, **which).values

    for positions, heads, layers in [(slice(1, 4), (0, 3), -1), (-1, slice(None, None, 2), slice(0, 2))]:
        numbers = [
            [some] if isinstance(some, int) else list(range(n)[some]) if isinstance(some, slice) else list(some)
            for some, n in ((positions, 5), (heads, 4), (layers, model.cfg.n_layers))
        ]
        some = found(positions=positions, heads=heads, layers=layers)
        assert torch.equal(some, found(positions=numbers[0], heads=numbers[1], layers=numbers[2]))
    cut = [
        attention_knockout(model, clean, {"a": edge}, metric=metric, layers=None, progress=False).values
        for edge in ((slice(1, 3), -1), ((1, 2), [4]))
    ]
    assert torch.equal(*cut)


def test_locations_take_the_same() -> None:
    model = toy("rotary")
    for given in ((1, 2), [1, 2], slice(1, 3)):
        location = Location.of(model, ("resid_post", 1), given)
        assert location.positions is not None
        assert location.positions.tolist() == [[1, 2]]
    with pytest.raises(ValueError, match=r"the same for all prompts or one for each: give positions.tolist\(\)"):
        Location.of(model, ("resid_post", 1), torch.tensor([1, 2]))


def test_gradients_and_heads_of_mixers() -> None:
    net = wrap(nn.Sequential(nn.Identity(), nn.Identity()))
    x = torch.ones(2, 3, 4, requires_grad=True)
    with net.hooks([ScaleGradient("0", factor=0.0, features=(0, 3), positions=slice(1, None))]):
        net(x).sum().backward()
    assert x.grad is not None
    assert x.grad[:, 1:, [0, 3]].eq(0).all()
    assert x.grad.sum() == x.numel() - 2 * 2 * 2
