"""If the positions that a change affects are not known, each cell is a whole forward pass, with one warning."""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooked_lm import HookedEncoder, HookedTransformer
from hooked_lm.components.context import Context
from hooked_lm.engine.full_forward import writer
from hooked_lm.engine.site_info import site_infos
from hooked_lm.hooks import HookedRootModule
from hooked_lm.models import stack
from hooked_lm.patching import Edit, Experiment, Rewrite
from tests.close import assert_close
from tests.engine.exactness import Spy, far
from tests.engine.naive import Change, naive
from tests.families import CASES
from tests.families._models import hooked
from tests.models.toys import BOTH_WAYS, D_VOCAB, ids, toy, words
from tests.unchecked import unchecked

POS = 6


def cells_of(model: HookedRootModule, tokens: Tensor, names: Sequence[str] = ()) -> list[list[Change]]:
    """A cell for some positions of some sites of each layer."""
    names = names or ("hook_resid_pre", "attn.hook_z", "attn.hook_v", "hook_mlp_out")
    sites = [f"blocks.{layer}.{name}" for layer in range(2) for name in names]
    _, cache = model.run_with_cache(tokens.flip(1), names_filter=sites)
    return [[Edit(site, cache[site], (pos,))] for site in sites for pos in (1, tokens.shape[1] - 1)]


@torch.no_grad()
def check(
    model: HookedRootModule,
    cells: Sequence[Sequence[Change]],
    tokens: Tensor,
    why: str | None,
    base: Sequence[Change] = (),
) -> None:
    """Compares all logits, and checks that there is one warning with this reason, or none."""
    spy = Spy()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        experiment = Experiment(model, tokens, [spy], base=base)
        seen = {index: spy.seen for index, _ in experiment.run(cells, progress=False)}
    assert sorted(seen) == list(range(len(cells)))
    plain, largest = naive(model, tokens, base), 0.0
    for index, cell in enumerate(cells):
        expected = naive(model, tokens, cell, base)
        largest = max(largest, far(expected, plain))
        assert_close(seen[index], expected, msg=str(cell))
    assert largest > 0.01, "nothing was exchanged"
    if why is None:
        assert experiment.fallback_reason is None
        assert caught == []
        return
    if "is not a causal decoder" in why:  # which nobody can change
        assert (experiment.fallback_reason, caught) == (why, [])
        return
    [warning] = caught
    assert why in str(warning.message)
    assert f"{len(cells)} cells run as whole forward passes" in str(warning.message)
    assert warning.filename == __file__, "the warning points at another file"


# ---- models ----------------------------------------------------------------------------------------------------------


class NearContext(Context):
    """A context of a kind that the engine does not know: tokens see their neighbours alone, later ones too."""

    def mask(self, causal: bool, window: int | None) -> Tensor:
        return self.full_mask(causal, window)

    def _full_mask(self, causal: bool, window: int | None) -> Tensor:
        return super()._full_mask(False, 2)


def test_runs_with_a_context_of_their_own() -> None:
    model, tokens = toy(), ids(2, POS)
    causal = model(tokens)
    model.context_class = NearContext
    assert not torch.equal(model(tokens), causal)
    check(model, cells_of(model, tokens), tokens, "its runs have a NearContext, of which a base run keeps nothing")


def test_an_encoder() -> None:
    sizes = {"n_layers": 2, "d_model": 16, "n_heads": 2, "n_ctx": 16, "d_vocab": 20, "act_fn": "gelu"}
    model = HookedEncoder({**sizes, "initializer_range": 0.4, "seed": 0})
    tokens = ids(2, POS) % 20
    check(model, cells_of(model, tokens), tokens, "a HookedEncoder is not a causal decoder")


def test_a_decoder_with_bidirectional_attention() -> None:
    model, tokens = toy(BOTH_WAYS), ids(2, POS)
    check(model, cells_of(model, tokens), tokens, "its attention is not causal")


def test_padded_prompts() -> None:
    """A tokenizer that pads on the left: the model finds the padding in the ids, and masks it."""
    model = toy(tokenizer=words())
    model.tokenizer.padding_side = "left"
    model.cfg.default_padding_side = "left"
    tokens = ids(2, POS).clamp(min=5)
    tokens[1, :3] = model.tokenizer.pad_token_id
    assert model.embedded(tokens)[2].real is not None, "the padding is not seen"
    check(model, cells_of(model, ids(2, POS).clamp(min=5)), tokens, "the prompts are padded")


@pytest.mark.parametrize("kind", ["standard", "rotary", "windowed", "sinks"])
def test_a_mask_of_ones_is_no_padding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, whose values a run does not wait for: such a run has a mask, but an experiment knows that it hides nothing."""
    model = toy(kind, tokenizer=words())
    model.tokenizer.padding_side = model.cfg.default_padding_side = "left"
    monkeypatch.setattr(stack, "is_on_host", lambda x: False)
    tokens = ids(2, POS).clamp(min=5)
    assert model.embedded(tokens)[2].real is not None, "a run knows the mask"
    check(model, cells_of(model, tokens), tokens, None)


@pytest.mark.parametrize("kind", ["shortformer", "rotary", "alibi", "sinks", "parallel", "windowed"])
def test_decoders_with_shared_passes(kind: str) -> None:
    model, tokens = toy(kind), ids(2, POS)
    check(model, cells_of(model, tokens), tokens, None)


@pytest.mark.parametrize("site", ["attn.hook_k", "attn.hook_v", "attn.hook_q"])
def test_keys_for_each_query_head(site: str) -> None:
    model, tokens = toy("rotary"), ids(2, POS)
    model.set_ungroup_grouped_query_attention(True)
    check(model, cells_of(model, tokens, [site, "hook_resid_pre"]), tokens, None)


class Doubled(HookedTransformer):
    """A model that overrides `forward`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().forward(*args, **kwargs)


def test_an_overridden_forward_pass() -> None:
    model, tokens = toy(), ids(2, POS)
    model.__class__ = Doubled
    check(model, cells_of(model, tokens), tokens, "Doubled overrides the forward pass of its base class")


# ---- modules of others -----------------------------------------------------------------------------------------------


class Shifted(nn.Module):
    """A foreign MLP that reads the previous token."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.roll(1, 1))


@pytest.mark.parametrize("name", ["blocks.1.mlp", "blocks.0.ln1", "blocks.1.hook_mlp_out", "ln_final"])
def test_a_foreign_module(name: str) -> None:
    model, tokens = toy(), ids(2, POS)
    cells = cells_of(model, tokens, ["hook_resid_pre", "attn.hook_z"])
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, Shifted())
    model.setup()
    check(model, cells, tokens, f"'{name}' is ")


def test_a_foreign_module_outside_layers() -> None:
    model, tokens = toy(), ids(2, POS)
    cells = cells_of(model, tokens, ["hook_resid_pre", "attn.hook_z"])
    model.blocks[1].mlp = nn.Softmax(dim=1)
    model.setup()
    check(model, cells, tokens, "'blocks.1.mlp' is ")


def test_a_replaced_method() -> None:
    model, tokens = toy(), ids(2, POS)
    cells, before = cells_of(model, tokens), model.blocks[1].mlp.forward
    model.blocks[1].mlp.forward = lambda x: before(x).roll(1, 1)
    check(model, cells, tokens, "'blocks.1.mlp'")


# ---- hooks of others -------------------------------------------------------------------------------------------------


def halves(value: Tensor, hook: Any) -> Tensor:
    return 0.5 * value


def less_than_others(value: Tensor, hook: Any) -> Tensor:
    """A hook whose result depends on the other rows of the batch and on their number."""
    return value - value.mean(0, keepdim=True) / len(value)


def first_token(value: Tensor, hook: Any) -> None:
    value[:, 0] = 0


HOOKS: list[Callable[..., Tensor | None]] = [halves, less_than_others, first_token]


@pytest.mark.parametrize("hook", HOOKS)
def test_an_open_hook(hook: Callable[..., Tensor | None]) -> None:
    model, tokens = toy(), ids(2, POS)
    cells = cells_of(model, tokens)
    with model.hooks([("blocks.1.hook_resid_mid", hook)]):
        check(model, cells, tokens, "a hook is open at 'blocks.1.hook_resid_mid'")
    check(model, cells, tokens, None)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("is_permanent", [False, True])
def test_a_hook_added_by_hand(hook: Callable[..., Tensor | None], is_permanent: bool) -> None:
    model, tokens = toy(), ids(2, POS)
    cells = cells_of(model, tokens)
    model.add_hook("blocks.0.mlp.hook_post", hook, is_permanent=is_permanent)
    check(model, cells, tokens, "a hook is open at 'blocks.0.mlp.hook_post'")


@pytest.mark.parametrize("name", ["blocks.1.mlp", "blocks.1", "blocks.0.hook_mlp_out", ""])
@pytest.mark.parametrize("pre", [False, True])
def test_a_hook_of_torch(name: str, pre: bool) -> None:
    """It may depend on the number of rows, and on how many tokens a row has."""
    model, tokens = toy(), ids(2, POS)
    cells, module = cells_of(model, tokens), model.get_submodule(name)

    def before(module: nn.Module, inputs: tuple) -> tuple:
        value = inputs[0]
        return inputs if name == "" else (value - value.mean((0, 1), keepdim=True) / len(value), *inputs[1:])

    def after(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        return output - output.mean((0, 1), keepdim=True) / len(output)

    module.register_forward_pre_hook(before) if pre else module.register_forward_hook(after)
    check(model, cells, tokens, "a hook is open at" if isinstance(module, type(model.hook_embed)) else f"'{name}' ")


@contextmanager
def opened(model: HookedTransformer) -> Iterator[None]:
    with model.hooks([("blocks.1.hook_resid_pre", halves)]):
        yield


@pytest.mark.parametrize("scopes", [(opened, nullcontext), (nullcontext, opened)])
def test_hooks_that_come_or_go_after_the_base_run(scopes: tuple) -> None:
    """A cell has the hooks that are active when it runs."""
    model, tokens = toy(), ids(2, POS)
    cells, spy = cells_of(model, tokens), Spy()
    with scopes[0](model) if scopes[0] is opened else nullcontext():
        experiment = Experiment(model, tokens, [spy])
    with scopes[1](model) if scopes[1] is opened else nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, _ in experiment.run(cells, progress=False):
            assert_close(spy.seen, naive(model, tokens, cells[index]))


# ---- functions of a whole value --------------------------------------------------------------------------------------


def test_functions_of_whole_values() -> None:
    model, tokens = toy(), ids(2, POS)
    functions = [lambda x: x.roll(1, 1), lambda x: x - x.mean((0, 1), keepdim=True), lambda x: x.mul_(2.0)]
    cells = [[Rewrite(f"blocks.{layer}.hook_resid_pre", f)] for layer in range(2) for f in functions]
    check(model, cells, tokens, "the positions that a function of a whole value changes")


def test_functions_with_edits_and_in_the_base_run() -> None:
    model, tokens = toy(), ids(2, POS)
    edits, rewrite = cells_of(model, tokens), Rewrite("blocks.1.hook_resid_pre", lambda x: x.roll(1, 1))
    check(model, [[*edit, rewrite] for edit in edits], tokens, "a function of a whole value")
    check(model, edits, tokens, "a function of a whole value", base=[rewrite])
    check(model, edits, tokens, None, base=edits[0])


# ---- what cannot be run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [(POS,), (0, -POS - 1)])
def test_positions_out_of_range(positions: tuple[int, ...]) -> None:
    model, tokens = toy(), ids(2, POS)
    experiment = Experiment(model, tokens, [lambda logits: logits[:, -1, 3]])
    cells = [[Edit("blocks.0.hook_resid_pre", torch.zeros(1, 1, 1), positions)]]
    with pytest.raises(IndexError, match=rf"{positions[-1]}.*{POS}"):
        list(experiment.run(cells, progress=False))


def test_positions_from_the_end() -> None:
    model, tokens = toy(), ids(2, POS)
    cells = [[Edit(f"blocks.{layer}.hook_resid_pre", torch.zeros(1, 1, 1), (-2,))] for layer in range(3)]
    check(model, cells, tokens, None)


def test_a_site_that_the_model_lacks() -> None:
    model, tokens = toy(), ids(2, POS)
    experiment = Experiment(model, tokens, [lambda logits: logits[:, -1, 3]])
    with pytest.raises(KeyError, match="did you mean"):
        list(experiment.run([[Edit("blocks.0.hook_resid_prae", torch.zeros(1, 1, 1))]], progress=False))


def test_no_cells_and_cells_without_changes() -> None:
    model, tokens = toy(), ids(2, POS) % D_VOCAB
    experiment = Experiment(model, tokens, [lambda logits: logits[:, -1, 3]])
    assert list(experiment.run([], progress=False)) == []
    [(_, scores)] = experiment.run([[]], progress=False)
    assert torch.equal(scores, experiment.scores)
    [(_, scores)] = experiment.run([[Edit("blocks.0.hook_resid_pre", torch.zeros(1, 1, 1), ())]], progress=False)
    assert torch.equal(scores, experiment.scores)
    assert site_infos(model).keys() < model.all_points().keys()


@torch.no_grad()
def test_a_cell_does_not_depend_on_copies_of_the_stream_that_another_cell_changes() -> None:
    """With a hook at `hook_v_input`, values do not pass the latent of keys, in any row of the pass."""
    case = next(case for case in CASES if case.family == "deepseek_v3")
    with unchecked():
        model = copy.deepcopy(hooked(case)).double()
        tokens = torch.arange(16).view(2, 8) % model.cfg.d_vocab
        _, cache = model.run_with_cache(tokens.flip(1), names_filter=lambda name: True)
        norm, latent, copies = "blocks.1.ln1.hook_normalized", "blocks.1.attn.hook_kv_latent", "blocks.1.hook_v_input"
        values = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
        of_layer_0 = [Edit("blocks.0.ln1.hook_normalized", cache[norm]), Edit("blocks.0.hook_k_input", values, (1,))]
        cells = [[Edit(norm, cache[norm]), Edit(copies, values, (2,))], [*of_layer_0, Edit(latent, cache[latent])]]
        check(model, cells, tokens, "a norm is changed together with copies")


@torch.no_grad()
@pytest.mark.parametrize("n_cells", [1, 2])
def test_what_a_function_returns_is_not_written_into(n_cells: int) -> None:
    """It may be a view of one number, or a tensor that the function keeps."""
    model, tokens, site = toy(), ids(1), "blocks.0.attn.hook_z"
    kept = torch.full((1, 1, 1, 1), 2.0)
    _, cache = model.run_with_cache(tokens, names_filter=site)
    stored = cache[site] + 1
    for given in (kept.expand_as(stored), stored):
        before = given.clone()
        cell = [Rewrite(site, lambda value, given=given: given), Edit(site, lambda value: 3 * value, (1,))]
        cell.append(Rewrite(site, lambda value: value.mul_(2)))
        expected = 2 * before
        expected[:, 1] *= 3
        value = torch.zeros(n_cells, *stored.shape[1:])
        found = writer(site, [cell] * n_cells)(value, model.hook_dict[site])
        assert_close(found, expected.expand_as(value))
        assert_close(given, before)
