"""Every sweep equals a loop written by hand: a whole forward pass for every cell."""

import inspect
from collections.abc import Callable
from itertools import product

import pandas as pd
import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, HookedTransformerConfig, patching
from hooked_lm.engine.edit import Edit
from hooked_lm.patching.setters import PATCH_SETTERS, PatchSetter, change
from tests.close import assert_close
from tests.core import thinned

BATCH, POS, LAYERS, HEADS, KV_HEADS = 2, 4, 2, 4, 2

MODELS = {
    "plain": {},
    "grouped": {
        "n_key_value_heads": KV_HEADS,
        "positional_embedding_type": "rotary",
        "normalization_type": "RMS",
        "gated_mlp": True,
    },
    "parallel": {"parallel_attn_mlp": True, "positional_embedding_type": "rotary"},
    "shortformer": {"positional_embedding_type": "shortformer"},
}

VECTOR_BY_POS = (lambda _, pos, head: (pos, head)), ("layer", "pos", "head")
VECTOR_ALL_POS = (lambda _, head: (slice(None), head)), ("layer", "head")
PATTERN = "blocks.{}.attn.hook_pattern"
# public name -> the site, which part of it a cell replaces (without the batch), and the axes of the result
SWEEPS: dict[str, tuple[str, Callable[..., tuple], tuple[str, ...]]] = {
    **{
        name: (f"blocks.{{}}.hook_{name}", lambda _, pos: (pos,), ("layer", "pos"))
        for name in ("resid_pre", "resid_mid", "attn_out", "mlp_out")
    },
    **{
        f"attn_head_{name}_by_pos": (f"blocks.{{}}.attn.hook_{site}", *VECTOR_BY_POS)
        for name, site in (("out", "z"), ("q", "q"), ("k", "k"), ("v", "v"))
    },
    **{
        f"attn_head_{name}_all_pos": (f"blocks.{{}}.attn.hook_{site}", *VECTOR_ALL_POS)
        for name, site in (("out", "z"), ("q", "q"), ("k", "k"), ("v", "v"))
    },
    "attn_head_pattern_all_pos": (PATTERN, lambda _, head: (head,), ("layer", "head")),
    "attn_head_pattern_by_pos": (PATTERN, lambda _, head, pos: (head, pos), ("layer", "head", "pos")),
    "attn_head_pattern_dest_src_pos": (
        PATTERN,
        lambda _, head, query, key: (head, query, key),
        ("layer", "head", "pos", "pos"),
    ),
}


def build(**flat: object) -> HookedTransformer:
    sizes = {"n_layers": LAYERS, "d_model": 16, "n_heads": HEADS, "n_ctx": 8, "d_vocab": 11, "act_fn": "gelu"}
    return HookedTransformer(HookedTransformerConfig(**{**sizes, "seed": 0, "initializer_range": 0.5, **flat}))


def prompts(n_pos: int = POS, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    clean, corrupted = torch.randint(0, 11, (2, batch, n_pos), generator=generator)
    return clean, corrupted


def metric(logits: Tensor) -> Tensor:
    return logits[:, -1, 3].mean() - 2 * logits[:, 1, 5].mean()


def clean_run(model: HookedTransformer, clean: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        return model.run_with_cache(clean, names_filter="*")[1]


def by_hand(model: HookedTransformer, corrupted: Tensor, cache: dict, site: str, part: Callable, *axes: str) -> Tensor:
    n_heads = KV_HEADS if model.cfg.n_key_value_heads and site[-1] in "kv" else HEADS
    sizes = [{"layer": LAYERS, "pos": POS, "head": n_heads}[axis] for axis in axes]
    result = torch.full(sizes, torch.nan)
    for cell in product(*map(range, sizes)):
        name = site.format(cell[0])
        where = (slice(None), *part(*cell))

        def put_in(value: Tensor, hook: object, name: str = name, where: tuple = where) -> Tensor:
            value = value.clone()
            value[where] = cache[name][where]
            return value

        with torch.no_grad():
            result[cell] = metric(model.run_with_hooks(corrupted, fwd_hooks=[(name, put_in)]))
    return result


def cases() -> list[tuple[str, str]]:
    """Every sweep on the plain and the grouped model, and on the others those that they could get wrong."""
    others = [
        ("parallel", "resid_pre"),
        ("parallel", "attn_out"),
        ("parallel", "mlp_out"),
        ("shortformer", "resid_mid"),
    ]
    return [*product(("plain", "grouped"), SWEEPS), *others, ("shortformer", "attn_head_q_by_pos")]


@pytest.mark.every_parameter
@pytest.mark.parametrize(("kind", "name"), thinned(cases(), keep=[case for case in cases() if case[0] != "plain"]))
def test_a_sweep_is_the_loop_written_by_hand(kind: str, name: str):
    model, (clean, corrupted) = build(**MODELS[kind]), prompts()
    cache = clean_run(model, clean)
    site, part, axes = SWEEPS[name]
    result = getattr(patching, f"get_act_patch_{name}")(model, corrupted, cache, metric)
    expected = by_hand(model, corrupted, cache, site, part, *axes)
    assert result.shape == expected.shape
    assert_close(result, expected)
    assert result.std() > 1e-3, "nothing was patched"


@pytest.mark.every_parameter
@pytest.mark.parametrize("setter", PATCH_SETTERS, ids=lambda setter: setter.__name__)
def test_a_setter_called_by_itself_does_what_sweeps_do(setter: PatchSetter) -> None:
    axes = PATCH_SETTERS[setter].axes
    by_head = "head_index" in axes
    dims = ("batch", "head", "query_pos", "key_pos") if by_head else ("batch", "pos", "head", "d_head")
    index, value, clean = range(len(axes)), torch.zeros(2, 4, 4, 4), torch.randn(2, 4, 4, 4)
    edit, expected = change(setter, "site", index, clean, n_pos=4), value.clone()
    assert isinstance(edit, Edit)
    edit.write(expected, dims, 0, 4)
    assert expected.any()
    assert torch.equal(setter(value, index, clean), expected)


def test_every_public_sweep_is_compared():
    public = {name for name, value in vars(patching).items() if name.startswith("get_act") and callable(value)}
    every = {"attn_head_all_pos_every", "attn_head_by_pos_every", "block_every"}
    assert public == {f"get_act_patch_{name}" for name in {*SWEEPS, *every}}


def test_sweeps_are_documented_functions():
    sweep = patching.get_act_patch_attn_head_k_by_pos
    assert sweep.__name__ == "get_act_patch_attn_head_k_by_pos"
    assert "[layer, pos, head]" in sweep.__doc__
    expected = ["model", "corrupted_tokens", "clean_cache", "patching_metric"]
    assert list(inspect.signature(sweep).parameters)[:4] == expected


def test_a_clean_stream_brings_the_clean_metric_back():
    model, (clean, corrupted) = build(), prompts(n_pos=1)
    cache = clean_run(model, clean)
    last = lambda logits: logits[:, -1, 3].mean()  # noqa: E731
    result, logits = patching.get_act_patch_resid_pre(model, corrupted, cache, last), model(clean).detach()
    assert_close(result, last(logits).expand(LAYERS, 1), scale=logits)


@pytest.mark.every_parameter
@pytest.mark.parametrize("kind", ["plain", "grouped"])
def test_all_heads_in_one_tensor(kind: str):
    model, (clean, corrupted) = build(**MODELS[kind]), prompts()
    cache = clean_run(model, clean)
    every = patching.get_act_patch_attn_head_all_pos_every(model, corrupted, cache, metric)
    assert every.shape == (5, LAYERS, HEADS)
    for i, name in enumerate(("out", "q", "k", "v", "pattern")):
        alone = getattr(patching, f"get_act_patch_attn_head_{name}_all_pos")(model, corrupted, cache, metric)
        assert_close(every[i, :, : alone.shape[-1]], alone)
        assert every[i, :, alone.shape[-1] :].isnan().all()
    assert not every[[0, 1, 4]].isnan().any()


def test_all_heads_by_position_in_one_tensor():
    model, (clean, corrupted) = build(**MODELS["grouped"]), prompts()
    cache = clean_run(model, clean)
    every = patching.get_act_patch_attn_head_by_pos_every(model, corrupted, cache, metric)
    assert every.shape == (5, LAYERS, POS, HEADS)
    for i, name in enumerate(("out", "q", "k", "v")):
        alone = getattr(patching, f"get_act_patch_attn_head_{name}_by_pos")(model, corrupted, cache, metric)
        assert_close(every[i, ..., : alone.shape[-1]], alone)
    pattern = patching.get_act_patch_attn_head_pattern_by_pos(model, corrupted, cache, metric)
    assert_close(every[4], pattern.transpose(1, 2))


def test_all_of_a_block_in_one_tensor():
    model, (clean, corrupted) = build(**MODELS["parallel"]), prompts()
    cache = clean_run(model, clean)
    every = patching.get_act_patch_block_every(model, corrupted, cache, metric)
    parts = ("resid_pre", "attn_out", "mlp_out")
    alone = [getattr(patching, f"get_act_patch_{part}")(model, corrupted, cache, metric) for part in parts]
    assert_close(every, torch.stack(alone))


# ---- the general sweep -----------------------------------------------------------------------------------------------


def test_a_user_setter_gets_copies():
    model, (clean, corrupted) = build(), prompts()
    cache, seen = clean_run(model, clean), []

    def silence(value: Tensor, index: list[int], clean_value: Tensor) -> Tensor:
        seen.append(tuple(index))
        value[:, :, index[1]] = 0
        return value

    def sweep() -> Tensor:
        with pytest.warns(UserWarning, match=r"a function of a whole value changes at .*: 8 cells run as whole"):
            return patching.generic_activation_patch(model, corrupted, cache, metric, silence, "z", ("layer", "head"))

    first = sweep()
    assert seen == list(product(range(LAYERS), range(HEADS)))
    assert torch.equal(first, sweep())
    hook = lambda value, hook: silence(value.clone(), [1, 2], value)  # noqa: E731
    expected = metric(model.run_with_hooks(corrupted, fwd_hooks=[("blocks.1.attn.hook_z", hook)]))
    assert_close(first[1, 2], expected.detach())


def test_chosen_cells_come_back_in_their_order():
    model, (clean, corrupted) = build(), prompts()
    cache = clean_run(model, clean)
    grid, table = patching.get_act_patch_resid_pre(model, corrupted, cache, metric, return_index_df=True)
    assert table.equals(patching.make_df_from_ranges([LAYERS, POS], ["layer", "pos"]))
    assert torch.equal(grid.flatten(), torch.tensor([grid[layer, pos] for layer, pos in table.to_numpy()]))
    chosen = pd.DataFrame({"layer": [1, 0, -1], "pos": [2, -1, 0]})
    some = patching.get_act_patch_resid_pre(model, corrupted, cache, metric, index_df=chosen)
    assert_close(some, torch.stack([grid[1, 2], grid[0, -1], grid[-1, 0]]))


def test_hooks_left_on_the_model_act_once():
    """An ablation opened around a sweep is part of every run of it, also where runs resume in the middle."""
    model, (clean, corrupted) = build(), prompts()
    cache = clean_run(model, clean)
    hooks = [("blocks.*.hook_resid_pre", lambda value, hook: value.mul_(1.5))]
    site, part, axes = SWEEPS["attn_out"]
    with model.hooks(hooks):
        with pytest.warns(UserWarning, match="a hook is open at 'blocks.0.hook_resid_pre': 8 cells run as whole"):
            result = patching.get_act_patch_attn_out(model, corrupted, cache, metric)
        expected = by_hand(model, corrupted, cache, site, part, *axes)
    assert_close(result, expected)


def test_no_gradients_are_computed():
    model, (clean, corrupted) = build(), prompts()
    cache = model.run_with_cache(clean)[1]
    recorded = []

    def watched(logits: Tensor) -> Tensor:
        recorded.append(logits.requires_grad)
        return metric(logits)

    result = patching.get_act_patch_attn_out(model, corrupted, cache, watched)
    assert not any(recorded)
    assert not result.requires_grad


def test_a_cache_on_the_way_stays_as_it_was():
    model, (clean, corrupted) = build(), prompts()
    cache = clean_run(model, clean)
    before = {name: value.clone() for name, value in cache.items()}
    patching.get_act_patch_block_every(model, corrupted, cache, metric)
    assert all(torch.equal(cache[name], value) for name, value in before.items())


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.fixture
def never_run(monkeypatch: pytest.MonkeyPatch) -> tuple[HookedTransformer, dict[str, Tensor], Tensor]:
    """Model, clean run and corrupted tokens; a forward pass after this point fails the test."""
    model, (clean, corrupted) = build(), prompts()
    cache = clean_run(model, clean)
    monkeypatch.setattr(model, "forward", lambda *args, **kwargs: pytest.fail("the model ran"))
    return model, cache, corrupted


def test_prompts_of_unequal_length(never_run):
    model, cache, corrupted = never_run
    with pytest.raises(ValueError, match=r"differ in length.*4 positions.*have 3"):
        patching.get_act_patch_resid_pre(model, corrupted[:, :3], cache, metric)
    with pytest.raises(ValueError, match=r"differ in length"):
        patching.get_act_patch_attn_head_pattern_all_pos(model, corrupted[:, :3], cache, metric)


@pytest.mark.parametrize("tokens", ["some text", ["two", "texts"], [[1, 2]]])
def test_prompts_that_are_no_tensor(never_run, tokens: object):
    model, cache, _ = never_run
    sweep = inspect.unwrap(patching.generic_activation_patch)  # without the annotations' checks, as users call it
    with pytest.raises(TypeError, match=r"got (str|list): model.to_tokens"):
        sweep(model, tokens, cache, metric, patching.layer_pos_patch_setter, "resid_pre", ("layer", "pos"))


def test_another_number_of_prompts(never_run):
    model, cache, corrupted = never_run
    with pytest.raises(ValueError, match=r"clean run has 2 prompts, the corrupted run 4"):
        patching.get_act_patch_resid_pre(model, corrupted.repeat(2, 1), cache, metric)


def test_a_cache_without_batch(never_run):
    model, cache, corrupted = never_run
    with pytest.raises(ValueError, match="keep the batch dimension"):
        patching.get_act_patch_resid_pre(model, corrupted, cache.apply_slice_to_batch_dim(0), metric)


def test_a_clean_cache_without_the_site(never_run):
    model, cache, corrupted = never_run
    with pytest.raises(KeyError, match=r"no 'blocks.0.attn.hook_z'.*names_filter='blocks.\*.attn.hook_z'"):
        patching.get_act_patch_attn_head_out_all_pos(model, corrupted, cache.select("*hook_resid*"), metric)


def test_a_model_without_the_site():
    model, (clean, corrupted) = build(**MODELS["parallel"]), prompts()
    with pytest.raises(KeyError, match=r"no hook point 'blocks.0.hook_resid_mid'; did you mean"):
        patching.get_act_patch_resid_mid(model, corrupted, clean_run(model, clean), metric)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"layer": [2], "pos": [0]}, r"layer 2 is out of range: there are 2, so -2 to 1"),
        ({"layer": [0], "pos": [4]}, r"pos 4 is out of range: there are 4, so -4 to 3"),
        ({"layer": [0], "head": [-5]}, r"head -5 is out of range: there are 4"),
    ],
)
def test_cells_out_of_range(never_run, cells: dict, message: str):
    model, cache, corrupted = never_run
    with pytest.raises(IndexError, match=message):
        patching.get_act_patch_resid_pre(model, corrupted, cache, metric, index_df=pd.DataFrame(cells))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give the cells of the sweep either"),
        (
            {"index_axis_names": ("layer",), "index_df": pd.DataFrame({"layer": [0]})},
            "give the cells of the sweep either",
        ),
        ({"index_axis_names": ("pos", "layer")}, "first axis of a sweep is 'layer'"),
        ({"index_axis_names": ("layer", "neuron")}, "unknown axis 'neuron'"),
    ],
)
def test_unclear_grids(never_run, arguments: dict, message: str):
    model, cache, corrupted = never_run
    setter = patching.layer_pos_patch_setter
    with pytest.raises(ValueError, match=message):
        patching.generic_activation_patch(model, corrupted, cache, metric, setter, "resid_pre", **arguments)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            lambda logits: logits[:, -1, 3],
            r"must give one number for logits \(2, 4, 11\), but returned a tensor \(2,\)",
        ),
        (lambda logits: None, "but returned a NoneType"),
        (lambda logits: logits.mean() * torch.nan, "is NaN"),
    ],
)
def test_metrics_that_are_not_one_number(bad: Callable, message: str):
    model, (clean, corrupted) = build(), prompts()
    calls = []

    def counted(logits: Tensor) -> object:
        calls.append(1)
        return bad(logits)

    with pytest.raises(ValueError, match=message):
        patching.get_act_patch_resid_pre(model, corrupted, clean_run(model, clean), counted)
    assert len(calls) == 2, "the base run is shown twice: to find out what is read, and to measure; the sweep went on"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_sweep_leaves_no_hook(error: type[BaseException]):
    model, (clean, corrupted) = build(), prompts()
    cache, before = clean_run(model, clean), metric(model(corrupted))
    calls = []

    def breaks_off(value: Tensor, index: list[int], clean_value: Tensor) -> Tensor:
        calls.append(index)
        if len(calls) == 3:
            raise error
        return clean_value

    with pytest.raises(error), pytest.warns(UserWarning, match="whole forward passes"):
        patching.generic_activation_patch(model, corrupted, cache, metric, breaks_off, "z", ("layer", "head"))
    assert not model.list_hooks()
    assert all(not point._hooks for point in model.hook_points())
    assert torch.equal(metric(model(corrupted)), before)
