"""Cells of hook objects: shared passes equal a loop of `run_with_hooks`."""

import copy
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hooked_lm import HookedTransformer, patching
from hooked_lm.engine.edit import Edit, Rewrite
from hooked_lm.hooks import HookPoint
from hooked_lm.interventions import (
    AddDirection,
    Clamp,
    ClipGradient,
    FreezeNorm,
    MeanAblate,
    Noise,
    Patch,
    ProjectOut,
    Record,
    ResampleAblate,
    Scale,
    SetValue,
    ZeroAblate,
)
from hooked_lm.interventions.changes import changes_of, label_of
from hooked_lm.interventions.dictionaries import Dictionary, TopK
from hooked_lm.interventions.part_editor import PartEditor
from tests.close import assert_close
from tests.engine.exactness import Spy, far
from tests.engine.small import ids, run, score
from tests.engine.test_properties import EXACT, MAY_FALL_BACK, NEARLY, OTHERS, SEEDS, World, random_world, world
from tests.families import ENCODER_DECODER_CASES
from tests.families._models import hooked
from tests.models.toys import toy, words
from tests.unchecked import unchecked

HEADS = ("head", "kv_head", "ssm_head")


# ---- random cells ----------------------------------------------------------------------------------------------------


def some_indices(pick: random.Random, size: int) -> Any:
    """Indices of an axis in every accepted form."""
    two = pick.sample(range(size), min(2, size))
    return pick.choice([None, None, pick.randrange(-size, size), two, [two[0], two[0] - size], slice(size // 2, None)])


def random_part(world: World, site: str) -> dict[str, Any]:
    """Positions, heads, features and rows."""
    pick, shape, dims = world.pick, world.cache[site].shape, world.known[site].dims
    by_name = ["all", "prompt", "last_prompt", "generated"]
    found = {"positions": pick.choice([some_indices(pick, world.n_pos), pick.choice(by_name), [4, 1, 2]])}
    if axis := next((dims.index(name) for name in HEADS if name in dims[:-1]), 0):
        found["heads"] = some_indices(pick, shape[axis])
    if pick.random() < 0.3 and dims[-1] not in HEADS:
        found["features"] = some_indices(pick, shape[-1])
    if pick.random() < 0.3:
        found["rows"] = some_indices(pick, len(world.tokens))
    return found


def random_controller(world: World, site: str) -> Any:
    """A controller of any kind at a site, or a function."""
    pick, part, value = world.pick, random_part(world, site), world.cache[site]
    dims, width, batch = world.known[site].dims, value.shape[-1], len(world.tokens)
    pos = next(dims.index(name) for name in ("query_pos", "pos") if name in dims)
    whole = {name: given for name, given in part.items() if name != "features"}
    no_positions = {name: given for name, given in whole.items() if name != "positions"}
    vector = torch.randn(width, generator=torch.Generator().manual_seed(pick.randrange(100)))
    kinds: list[Callable[[], Any]] = [
        lambda: ZeroAblate(site, **part),
        lambda: SetValue(site, value=0.3, **part),
        lambda: SetValue(site, value=vector, **whole),
        lambda: SetValue(site, value=value.narrow(0, 0, 1)),
        lambda: Scale(site, factor=pick.choice([0.5, -2]), **part),
        lambda: Scale(site, factor=vector, **whole),
        lambda: Clamp(site, max=0.1, **part),
        lambda: Noise(site, std=0.5, seed=pick.randrange(9), **part),
        lambda: AddDirection(
            site, vector=vector, coefficient=0.5, schedule=pick.choice([None, [1.0, 2.0], _rising]), **part
        ),
        lambda: ProjectOut(site, vectors=vector, **whole),
        lambda: Patch(site, source=value[:batch], **part),
        lambda: Patch(site, source=value.narrow(pos, 1, 1), **part),
        lambda: Patch(
            site, source=value.narrow(pos, 2, 3), **{**part, "positions": [5, 0], "source_positions": [1, 2]}
        ),
        lambda: MeanAblate(site, source=value, over=pick.choice(["batch", "pos", "batch pos"]), **part),
        lambda: ResampleAblate(site, source=value, seed=pick.randrange(9), **part),
        lambda: FreezeNorm(hook_point=site, **no_positions),
        lambda: (site, lambda there, hook: 0.5 * there),
    ]
    # the mean over positions of states that follow from it is refused
    if over := ["batch"] * (batch > 1) + ["pos"] * ("state" not in site):
        kinds.append(lambda: MeanAblate(site, over=pick.choice(over), **part))
    if "scores" in site:  # masked: no arithmetic with infinities
        kinds = [kinds[1], *kinds[10:11], kinds[16]]
    if "scale" in site:  # nothing is divided by zero
        kinds = [kinds[1], kinds[4], kinds[10], kinds[13]]
    if batch > 1:
        kinds.append(lambda: ResampleAblate(site, seed=3, **part))
    return pick.choice(kinds)()


def _rising(position: int, step: int) -> float:
    return 0.1 * position


def random_hooks(world: World, on_demand: bool) -> list[Any]:
    """Some hooks; sites on demand make copies of the stream, at whose norms a controller finds other axes than the site's."""
    sites = [site for site in world.known if world.cache[site].is_floating_point()]
    sites = [site for site in sites if (".ln1.hook_" not in site if on_demand else not world.known[site].on_demand)]
    return [random_controller(world, world.pick.choice(sites)) for _ in range(world.pick.randint(1, 3))]


@torch.no_grad()
def loop(world: World, hooks: list[Any]) -> Tensor:
    with unchecked():
        return world.model.run_with_hooks(world.tokens, fwd_hooks=hooks)


def check(world: World, exact: float) -> None:
    """All logits of all cells."""
    on_demand = world.pick.random() < 0.5
    cells = [random_hooks(world, on_demand) for _ in range(world.pick.randint(1, 6))]
    base = random_hooks(world, on_demand) if world.pick.random() < 0.3 else []
    with unchecked():
        first, *changes = changes_of(world.model, world.tokens, [base, *cells])
        spy = Spy()
        experiment = patching.Experiment(world.model, world.tokens, [spy], first, compare=list(world.known))
        untouched, spy.seen = spy.seen, None
        for index, _ in experiment.run(changes, progress=False):
            logits, expected = untouched if spy.seen is None else spy.seen, loop(world, [*base, *cells[index]])
            assert logits is not None
            assert far(logits, expected) <= exact * max(1.0, expected.abs().max().item()), (base, cells[index])
            spy.seen = None


FUNCTIONS = pytest.mark.filterwarnings("ignore:the positions that a function of a whole value changes")


@pytest.mark.slow
@MAY_FALL_BACK
@FUNCTIONS
@given(seed=SEEDS)
@settings(max_examples=40)
def test_cells_of_hooks_are_the_plain_loop(seed: int) -> None:
    check(random_world(seed), EXACT)


@pytest.mark.slow
@MAY_FALL_BACK
@FUNCTIONS
@given(seed=SEEDS, case=st.sampled_from(OTHERS))
@settings(max_examples=10)
def test_also_with_experts_states_and_shared_keys(seed: int, case: Any) -> None:
    with unchecked():
        model = copy.deepcopy(hooked(case)).double()
        check(world(model, model.cfg.d_vocab, case.n_prompt, seed), NEARLY)


@pytest.mark.filterwarnings("ignore:the prompts are padded")
@given(seed=SEEDS)
@settings(max_examples=8)
def test_padded_prompts_as_well(seed: int) -> None:
    here = padded(seed)
    assert here.model.embedded(here.tokens)[2].real is not None, "the padding is not seen"
    check(here, NEARLY)


def padded(seed: int) -> World:
    """A toy with a tokenizer, and prompts of which one is padded on the left."""
    model = toy(tokenizer=words()).double()
    model.tokenizer.padding_side = "left"
    model.cfg.default_padding_side = "left"
    here = world(model, model.cfg.d_vocab, 6, seed)
    here.tokens.clamp_(min=5)
    here.tokens[0, :2] = model.tokenizer.pad_token_id
    return here


def test_a_controller_that_acts_elsewhere_is_not_the_plain_loop() -> None:
    """The comparison above can fail: the next position, head or factor gives other logits."""
    here = random_world(1)
    site = next(site for site in here.known if site.endswith("attn.hook_z"))
    right = loop(here, [Scale(site, factor=0.5, positions=2, heads=1)])
    for wrong in ({"positions": 3, "heads": 1}, {"positions": 2, "heads": 0}, {"positions": 2}):
        assert far(loop(here, [Scale(site, factor=0.5, **wrong)]), right) > 1e3 * EXACT


# ---- which controllers are edits -------------------------------------------------------------------------------------


class Backwards(PartEditor):
    """A user's controller, which mixes positions."""

    def edit(self, value: Tensor, part: Any) -> Tensor:
        return value.flip(1)


class Doubled(AddDirection):
    """A user's subclass of a controller."""

    def edit(self, value: Tensor, part: Any) -> Tensor:
        return value + value.sum(1, keepdim=True)


VALUE, SITE = torch.randn(2, 6, 32), "blocks.1.hook_resid_post"
AS: dict[str, tuple[list[Any], Callable[[Any], bool]]] = {
    "an edit with values": (
        [
            ZeroAblate(SITE),
            SetValue(SITE, value=2.0, features=[1, 2]),
            SetValue(SITE, value=VALUE[0, 0], positions=[1, 3]),
            Patch(SITE, source=VALUE, positions=-1, rows=[1]),
            MeanAblate(SITE, source=VALUE, over="batch pos"),
            ResampleAblate(SITE, source=VALUE),
        ],
        lambda change: isinstance(change, Edit) and isinstance(change.value, Tensor),
    ),
    "an edit with a function": (
        [
            Scale(SITE, factor=2.0),
            Clamp(SITE, min=0.0),
            Noise(SITE, multiple=1.0),
            AddDirection(SITE, vector=VALUE[0, 0]),
            ProjectOut(SITE, vectors=VALUE[0, 0]),
            MeanAblate(SITE),
            ResampleAblate(SITE),
            Patch(SITE, source=VALUE, positions=[0], source_positions=[3]),
            ZeroAblate(SITE, rows=[1, 0], features=[5, 3]),
        ],
        lambda change: isinstance(change, Edit) and not isinstance(change.value, Tensor),
    ),
    "a rewrite": (
        [
            SetValue(SITE, value=VALUE[0]),
            MeanAblate(SITE, over="pos"),
            Backwards(SITE),
            Doubled(SITE, vector=VALUE[0, 0]),
            (SITE, lambda value, hook: -value),
        ],
        lambda change: isinstance(change, Rewrite),
    ),
}


@pytest.mark.parametrize("kind", AS)
def test_controllers_become_edits(kind: str) -> None:
    hooks, is_one = AS[kind]
    for hook, [change] in zip(hooks, changes_of(toy(), ids(2, 6), hooks), strict=True):
        assert is_one(change), hook


# ---- run_each --------------------------------------------------------------------------------------------------------


CELLS: list[Any] = [
    ZeroAblate("z", 1, heads=[2]),
    [Scale("mlp_out", 0, factor=0.5), AddDirection("resid_post", 1, vector=torch.ones(32), positions=[-1])],
    [[ZeroAblate("attn_out", 0, positions=slice(2, 4))], Edit("blocks.0.hook_mlp_out", torch.zeros(1, 1, 1), (2,))],
    [],
]


def by_loop(model: HookedTransformer, tokens: Tensor, hooks: list[Any]) -> Tensor:
    return score(model.run_with_hooks(tokens, fwd_hooks=hooks))


def test_cells_in_one_call() -> None:
    model, tokens = toy(), ids()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no whole forward pass
        result = patching.run_each(model, tokens, CELLS, metric=score, clean=ids(seed=1), progress=False)
    quiet = (CELLS[2][1].site, lambda value, hook: value.index_fill(1, torch.tensor(2), 0.0))
    expected = [by_loop(model, tokens, hooks) for hooks in ([CELLS[0]], CELLS[1], [*CELLS[2][0], quiet], [])]
    assert_close(result.values, torch.stack(expected))
    assert_close(result.corrupted, run(model, tokens))
    assert_close(result.clean, run(model, ids(seed=1)))
    assert result.axes["cell"] == (
        "ZeroAblate z L1H2",
        "Scale mlp_out L0 + AddDirection resid_post L1 pos -1",
        "ZeroAblate attn_out L0 pos slice(2, 4, None) + Edit blocks.0.hook_mlp_out",
        "unchanged",
    )


def test_names_and_a_base() -> None:
    model, tokens, base = toy(), ids(), Noise("hook_embed", std=0.5, positions=[1])
    cells = {"first": ZeroAblate("z", 1), "second": ZeroAblate("z", 0)}
    result = patching.run_each(model, tokens, cells, metric=score, base=base, progress=False)
    assert result.axes["cell"] == ("first", "second")
    assert_close(result.corrupted, by_loop(model, tokens, [base]))
    assert_close(result.values, torch.stack([by_loop(model, tokens, [base, cell]) for cell in cells.values()]))


def test_equal_labels_are_numbered() -> None:
    cells = [Scale("z", 0, factor=factor) for factor in (0.0, 1.0, 2.0)]
    result = patching.run_each(toy(), ids(), cells, metric=score, progress=False)
    assert result.axes["cell"] == ("Scale z L0", "Scale z L0 (2)", "Scale z L0 (3)")


def test_functions_run_as_whole_forward_passes() -> None:
    model, tokens = toy(), ids()

    def negated(value: Tensor, hook: HookPoint) -> Tensor:
        return -value

    def in_place(value: Tensor, hook: HookPoint) -> None:
        value[:, 2] = len(hook.name or "")

    cells = [("blocks.0.hook_mlp_out", negated), [("blocks.1.hook_resid_pre", in_place), ZeroAblate("z", 1)]]
    with pytest.warns(
        UserWarning, match=r"function of a whole value changes at 'blocks.0.hook_mlp_out' are not known .*: 2 cells"
    ):
        result = patching.run_each(model, tokens, cells, metric=score, progress=False)
    assert_close(result.values, torch.stack([by_loop(model, tokens, hooks) for hooks in ([cells[0]], cells[1])]))
    assert result.axes["cell"][0] == "negated blocks.0.hook_mlp_out"


def test_a_function_that_changes_the_shape_is_refused() -> None:
    cell = ("blocks.0.hook_mlp_out", lambda value, hook: value[..., 0])
    with pytest.raises(ValueError, match=r"by \(2, 6\)"), pytest.warns(UserWarning, match="whole forward pass"):
        patching.run_each(toy(), ids(), [cell], metric=score, progress=False)


def test_disabled_hooks_change_nothing() -> None:
    off = ZeroAblate("z", 1)
    off.disable()
    result = patching.run_each(toy(), ids(), [off], metric=score, progress=False)
    assert torch.equal(result.values[0], result.corrupted)


@pytest.mark.parametrize(
    ("hook", "error", "says"),
    [
        (ZeroAblate("zz", 1), KeyError, "cell 'ZeroAblate zz L1', ZeroAblate.*did you mean"),
        (ZeroAblate("z", 1, heads=[99]), IndexError, "cell 'ZeroAblate z L1H99'.*there are 4, so -4 to 3"),
        (ZeroAblate("z", 1, positions=[0, 6]), IndexError, "position 6 is out of range.*there are 6 positions"),
        (ZeroAblate("resid_pre", 1, heads=[0]), ValueError, "has no such axis"),
        (AddDirection("z", 1, vector=torch.ones(7)), ValueError, "a direction of width 7"),
        (Patch("z", 1, source=torch.ones(2, 9, 4, 8)), ValueError, "the source has 9 positions, and there are 6"),
        (Record("z", 1), TypeError, "it only reads values"),
        (ClipGradient("z", 1, max_norm=1.0), TypeError, "it changes gradients"),
        ("z", TypeError, "a hook is a pair"),
    ],
)
def test_errors_name_the_cell_and_the_hook(hook: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        patching.run_each(toy(), ids(), [ZeroAblate("z", 0), hook], metric=score, progress=False)


def test_nothing_to_run() -> None:
    with pytest.raises(ValueError, match="there is nothing to run"):
        patching.run_each(toy(), ids(), [], metric=score, progress=False)
    with pytest.raises(ValueError, match="prompts is empty"):
        patching.run_each(toy(), [], [ZeroAblate("z", 0)], metric=score, progress=False)


def test_an_interrupted_run_resumes(tmp_path: Path) -> None:
    """It resumes with new equal hooks, not with hooks of other settings."""
    model, tokens, file = toy(), ids(), tmp_path / "cells.safetensors"
    calls = 0

    def cells(factor: float = 0.5) -> list[Any]:
        vector = torch.arange(32.0)
        adding = [AddDirection("resid_post", 1, vector=vector, positions=[pos]) for pos in range(3)]
        return [
            *adding,
            Scale("z", 0, factor=factor, heads=[1]),
            Patch("z", 1, source=torch.ones(2, 6, 4, 8), rows=[1]),
        ]

    def stops(logits: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return score(logits)

    with pytest.raises(patching.SweepInterrupted):
        patching.run_each(model, tokens, cells(), metric={"score": stops}, progress=False, resume_file=file)
    assert 0 < (~patching.SweepResult.load(file).values.isnan()).all(-1).sum() < len(cells())


@pytest.mark.parametrize(("change", "is_refused"), [(0.5, False), (0.25, True)])
def test_a_file_belongs_to_its_cells(change: float, is_refused: bool, tmp_path: Path) -> None:
    model, tokens, file = toy(), ids(), tmp_path / "cells.safetensors"

    def measured(factor: float) -> patching.SweepResult:
        cells = [Scale("z", 0, factor=factor, heads=[1]), AddDirection("z", 1, vector=torch.ones(8))]
        return patching.run_each(model, tokens, cells, metric=score, progress=False, resume_file=file)

    first = measured(0.5)
    if is_refused:
        with pytest.raises(ValueError, match="holds another sweep"):
            measured(change)
    else:
        assert torch.equal(measured(change).values, first.values)


def test_encoder_decoders_run_in_whole_passes() -> None:
    model = hooked(next(case for case in ENCODER_DECODER_CASES if case.family == "t5"))
    tokens, cell = ids(2, 5) + 3, ZeroAblate("decoder.z", 1, heads=[0])
    result = patching.run_each(model, tokens, [cell], metric=lambda logits: logits[:, -1, 3], progress=False)
    start = torch.full((2, 1), model.start_id())
    assert_close(result.values[0], model.run_with_hooks(tokens, start, fwd_hooks=[cell])[:, -1, 3])


def test_a_label_says_what_and_where() -> None:
    assert label_of(ZeroAblate("z", 5, heads=3, positions=[1, 2])) == "ZeroAblate z L5H3 pos [1, 2]"
    assert label_of(ZeroAblate("blocks.*.hook_mlp_out", rows=0)) == "ZeroAblate blocks.*.hook_mlp_out row 0"


def test_features_of_a_dictionary_are_cells() -> None:
    model = toy()
    sae = TopK.Config(d_in=model.cfg.d_model, d_sae=32, k=4).build().eval()
    cells = [Dictionary("resid_post", 0, sae=sae, feature=i, coefficient=4.0) for i in (3, 5)]
    tokens = torch.arange(6).view(2, 3)
    with pytest.warns(UserWarning, match="2 cells run as whole forward passes"):
        result = patching.run_each(model, tokens, cells, metric=lambda logits: logits[:, -1, 1], progress=False)
    assert result.axes["cell"] == ("Dictionary resid_post L0 feature 3", "Dictionary resid_post L0 feature 5")
    for cell, found in zip(cells, result.values, strict=True):
        assert_close(found, model.run_with_hooks(tokens, fwd_hooks=[cell])[:, -1, 1])


@pytest.mark.parametrize(("progress", "is_shown"), [(None, False), (False, False), (True, True)])
def test_a_bar_is_for_long_work(progress: bool | None, is_shown: bool, capsys: pytest.CaptureFixture[str]) -> None:
    patching.run_each(toy(), ids(), [ZeroAblate("z", 0)], metric=score, progress=progress)
    assert ("running cells" in capsys.readouterr().err) == is_shown
