"""`at`: edits in one line are those of hook functions written by hand, wherever hooks are accepted."""

import copy
import inspect
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import hooked_lm.interventions
from hooked_lm import HookedTransformer, at, patching
from hooked_lm.interventions import AddValue, Hooks, Scale, SetValue, ZeroAblate
from hooked_lm.interventions.base import HookObject
from tests.close import assert_close, assert_equal
from tests.models.toys import ids, toy
from tests.unchecked import unchecked

BATCH, POS = 3, 6
TOKENS = ids(BATCH, POS)
HEADS: dict[str, int] = {"z": 4, "k": 2, "pattern": 4, "resid_post": 0, "post": 0}  # of each site; 0: without that axis
OPERATIONS = {"set": lambda old, v: v, "add": lambda old, v: old + v, "scale": lambda old, v: old * v}


@cache
def model() -> Any:
    return toy("rotary")


def along(n: int) -> st.SearchStrategy[Any]:
    """An index along an axis: an int, a slice or a list."""
    several = st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True)
    return st.one_of(st.integers(-n, n - 1), several, st.just(slice(1, None)), st.none())


@st.composite
def edits(draw: st.DrawFn) -> tuple[str, Any, Any, str, bool]:
    site = draw(st.sampled_from([*HEADS]))
    positions = draw(along(POS))
    heads = draw(along(HEADS[site])) if HEADS[site] else None
    if isinstance(positions, list) and isinstance(heads, list):
        heads = heads[0]  # two lists select pairs by hand, and a grid here
    return site, positions, heads, draw(st.sampled_from([*OPERATIONS, "zero"])), draw(st.booleans())


def index(site: str, positions: Any, heads: Any) -> tuple[Any, ...]:
    positions, heads = (slice(None) if one is None else one for one in (positions, heads))
    if site == "pattern":
        return slice(None), heads, positions
    return (slice(None), positions, heads) if HEADS[site] else (slice(None), positions)


@pytest.mark.slow
@given(edits())
def test_an_edit_in_one_line_is_the_function_by_hand(drawn: tuple[str, Any, Any, str, bool]):
    site, positions, heads, kind, is_number = drawn
    where, values = index(site, positions, heads), []

    def by_hand(value: Tensor, hook: object) -> Tensor:
        generator, part = torch.Generator().manual_seed(0), value[where]
        given = 0.0 if kind == "zero" else 0.5 if is_number else torch.randn(part.shape, generator=generator)
        values.append(given)
        value[where] = given if kind == "zero" else OPERATIONS[kind](part, given)
        return value

    with torch.no_grad():
        expected = model().run_with_hooks(TOKENS, fwd_hooks=[(f"{site}1", by_hand)])
        part = at(site, 1, positions=positions, heads=heads)
        hook = part.zero() if kind == "zero" else getattr(part, kind)(values[0])
        same = assert_close if site in ("pattern", "attn_scores") else assert_equal  # a function is given all rows
        same(model().run_with_hooks(TOKENS, fwd_hooks=hook), expected)


def test_one_spelling_wherever_hooks_are_accepted(tmp_path):
    model = HookedTransformer.from_pretrained("demo")
    prompt, edit = (
        "When Mary and John went to the store, John gave a drink to",
        at("L1H7", positions=-1).set(99 * torch.ones(16)),
    )
    with torch.no_grad():
        edited = model.run_with_hooks(prompt, fwd_hooks=edit)
        assert not torch.equal(edited, model(prompt)), "the control: it matters"
        with model.hooks(edit):
            assert_equal(model(prompt), edited)
            text = model.generate(prompt, 2, do_sample=False, verbose=False)
        assert text != model.generate(prompt, 2, do_sample=False, verbose=False)
        logits, cache = model.run_with_cache(prompt, fwd_hooks=edit)
        assert_close(logits, edited)
        assert bool((cache["z", 1][:, -1, 7] == 99).all()), "the cache has what the hook changed"
        output, early = model.run_with_cache(
            prompt, None, names_filter="resid_post0", fwd_hooks=at("resid_pre", 3).zero()
        )
        assert output is None
        assert [*early] == ["blocks.0.hook_resid_post"]
        swept = patching.run_each(model, prompt, [edit], metric=lambda logits: logits[:, -1, 5])
        assert abs(swept.mean[0] - edited[0, -1, 5]) < 1e-3
    Hooks(edit).save(tmp_path / "edit.safetensors")
    assert_equal(model.run_with_hooks(prompt, fwd_hooks=Hooks.load(tmp_path / "edit.safetensors")), edited)


def test_gradients_reach_the_value():
    vector = torch.zeros(8, requires_grad=True)
    for part in (at("L1H3", positions=2).set(vector), at("z", 1, heads=3, positions=2).add(vector)):
        vector.grad = None
        model().run_with_hooks(TOKENS, fwd_hooks=part, return_type="loss").backward()
        assert vector.grad is not None
        assert bool(vector.grad.any())


def test_prompts_of_different_lengths_take_their_own_row():
    """Padding on the left: "the last of the prompt" is another column of the values in generation."""
    rows = [ids(1, n, seed=n)[0] for n in (6, 4)]
    tokens = torch.stack([rows[0], torch.cat([torch.zeros(2, dtype=torch.long), rows[1]])])
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    values = torch.randn(2, 32, generator=torch.Generator().manual_seed(0)) * 30
    options = {"do_sample": False, "stop_at_eos": False, "verbose": False, "return_type": "tokens"}
    with model().hooks(at("resid_post", 1, positions="last_prompt").set(values)):
        together = model().generate(tokens, 1, attention_mask=mask, **options)
    for i, row in enumerate(rows):
        with model().hooks(at("resid_post", 1, positions="last_prompt").set(values[i])):
            assert_equal(model().generate(row[None], 1, **options)[0, -1], together[i, -1])


def refusals() -> list[tuple[Any, type[Exception], str]]:
    z, part = at("z", 1, heads=3), at("z", 1, heads=3, positions=[0, 2, 4])
    return [
        (
            z.set(torch.ones(5)),
            ValueError,
            r"shape \(5,\), which does not broadcast to \(3, 6, 1, 8\), or \(3, 6, 8\) without",
        ),
        (part.set(torch.ones(3, 1, 8)), ValueError, r"\(3, 1, 8\), which broadcasts in two ways to .*; give all axes"),
        (at("zz", 1).zero(), KeyError, "no hook point 'blocks.1.hook_zz'; did you mean 'blocks.1.attn.hook_z'"),
        (at("z", 5).zero(), IndexError, "layer 5 is out of range: the model has 3"),
        (at("z", 1, heads=4).zero(), IndexError, "heads 4 is out of range at 'blocks.1.attn.hook_z"),
        (at("z", 1, positions=6).zero(), IndexError, "position 6 is out of range at 'blocks.1.attn.hook_z"),
        (at("resid_post", 1, heads=0).zero(), ValueError, "'blocks.1.hook_resid_post .*' has no such axis"),
        (at("z", 1), TypeError, r"at\('z', 1\) says where, and not what happens there: end it with .set\(value\)"),
        (
            ("z1", torch.ones(8)),
            TypeError,
            r"got a Tensor as the second of the two; a value is set by hooked_lm.at\(site\)",
        ),
    ]


@pytest.mark.every_parameter
@pytest.mark.parametrize(("hook", "error", "message"), refusals(), ids=range(len(refusals())))
def test_what_does_not_fit_is_refused_by_name(hook: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        model().run_with_hooks(TOKENS, fwd_hooks=[hook])


def test_settings_are_checked_at_once():
    with (
        unchecked(),
        pytest.raises(TypeError, match=r"value of SetValue must be a number or a tensor, got a dict; .*patch"),
    ):
        SetValue("z", 1, value={})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="value of AddValue must be finite"):
        at("z", 1).add(torch.tensor(float("inf")))
    with pytest.raises(ValueError, match=r"at\('L1H3'\) is a head: leave out heads=2"):
        at("L1H3", heads=2)
    with pytest.raises(ValueError, match="head 'L0H3' is in layer 0, and layer 1 was chosen"):
        at("z", 1, heads="L0H3").zero()


def test_where_comes_first_and_all_else_by_name():
    """One order of arguments for all public classes of hooks."""
    public = [getattr(hooked_lm.interventions, name) for name in hooked_lm.interventions.__all__]
    kinds = [kind for kind in public if inspect.isclass(kind) and issubclass(kind, HookObject)]
    for kind in kinds:
        wanted = inspect.signature(kind).parameters.values()
        first = [one.name for one in wanted if one.kind is not inspect.Parameter.KEYWORD_ONLY]
        assert first in (["hook_point", "layer"], ["layer"]), kind
    assert len(kinds) > 25
    with pytest.raises(
        TypeError, match=r"ZeroAblate takes hook_point, layer by position and all else by name, got 7 as"
    ):
        ZeroAblate("z", 1, 7)  # type: ignore[misc]
    with pytest.raises(TypeError, match="Scale has no argument 'head'; did you mean 'heads'"):
        Scale("z", 1, head=7, factor=2)  # type: ignore[call-arg]
    assert repr(copy.copy(SetValue("z", 1, value=2))) == "SetValue('z', 1, value=2)"
    assert repr(at("z", 1, heads=[3]).add(1)) == repr(AddValue("z", 1, heads=[3], value=1))
