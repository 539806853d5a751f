"""Sweeps and attribution of encoder-decoders: against one forward pass per cell, and against finite differences."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedEncoderDecoder, analysis, patching
from hooked_lm.analysis import attribute, attribute_nodes
from tests.close import GRADIENT, assert_close
from tests.models.toys import ids as toy_ids
from tests.models.toys import toy

SIZES: dict[str, Any] = {"n_layers": 2, "n_decoder_layers": 3, "d_model": 16, "n_heads": 2, "n_ctx": 24, "d_vocab": 20}
SIZES |= {"act_fn": "relu", "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10}
SIZES |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, "initializer_range": 0.5, "seed": 0}
CORRUPTED = torch.tensor([[5, 3, 9, 4, 2], [7, 7, 2, 8, 6]])
CLEAN = torch.tensor([[5, 8, 9, 4, 3], [7, 1, 2, 8, 9]])
TARGET = torch.tensor([[0, 7, 4], [0, 2, 2]])
WHOLE = pytest.mark.filterwarnings("ignore:.*whole forward pass")
GRIDS: dict[str, dict[str, Any]] = {
    "the encoder's stream": {"sites": "encoder.resid_pre"},
    "the encoder's heads": {"sites": "encoder.z", "positions": None, "heads": "each"},
    "the encoder's neurons": {"sites": "encoder.post", "positions": [0, -1], "neurons": [3, 5]},
    "the decoder's stream": {"sites": ["decoder.resid_pre", "decoder.mlp_out"]},
    "the decoder's heads": {"sites": "decoder.z", "heads": "each"},
    "the decoder's pattern": {"sites": "decoder.pattern", "positions": None, "heads": [1]},
    "what crosses": {"sites": "decoder.cross_attn.z", "heads": "each", "layers": [-1, 0]},
    "where it looks": {"sites": "decoder.cross_attn.pattern", "positions": "each"},
    "what is looked at": {"sites": "decoder.cross_attn.v", "positions": "each", "heads": "each"},
    "what crossing adds": {"sites": "decoder.cross_attn_out"},
}


def metric(logits: Tensor) -> Tensor:
    return logits[:, -1, 3] - logits[:, -1, 5]


@pytest.fixture(scope="module")
def model() -> HookedEncoderDecoder:
    """A model whose output depends on its source."""
    model = HookedEncoderDecoder({**SIZES, "tie_word_embeddings": False}).requires_grad_(False)
    for block in model.decoder:
        block.cross_attn.W_O.mul_(3.0)
    return model


def site_at(name: str, layer: int) -> str:
    """The full name of a site, as a user would spell it."""
    side, *cross, short = name.split(".")
    inside = {"z": "attn.", "v": "attn.", "pattern": "attn.", "post": "mlp."}.get(short, "")
    return f"{side}.{layer}.{'cross_' * bool(cross)}{inside}hook_{short}"


def cells_by_hand(model: HookedEncoderDecoder, grid: dict[str, Any], cache: Any) -> dict[tuple[int, ...], list[Any]]:
    """The site and the patched index of each grid cell."""
    names = [grid["sites"]] if isinstance(grid["sites"], str) else grid["sites"]
    n_layers = len(getattr(model, names[0].split(".")[0]))
    layers = [layer % n_layers for layer in grid.get("layers", range(n_layers))]
    n_pos = 5 if names[0].startswith("encoder") or names[0].endswith("cross_attn.v") else 3
    where = grid.get("positions", "each")
    positions: list[Any] = [slice(None)] if where is None else list(range(n_pos)) if where == "each" else list(where)
    features = grid.get("neurons", grid.get("heads"))
    some: list[Any] = [slice(None)] if features is None else list(range(2)) if features == "each" else list(features)
    found = {}
    for a, name in enumerate(names):
        for b, layer in enumerate(layers):
            for c, pos in enumerate(positions):
                for d, feature in enumerate(some):
                    index = (slice(None), feature, pos) if name.endswith("pattern") else (slice(None), pos, feature)
                    index = index[:2] if features is None and not name.endswith("pattern") else index
                    place = [a] * (len(names) > 1) + [b] + [c] * (where is not None) + [d] * (features is not None)
                    found[tuple(place)] = [site_at(name, layer), index]
    return found


def by_hand(model: HookedEncoderDecoder, site: str, index: Any, new: Tensor) -> Tensor:
    def exchange(value: Tensor, hook: Any) -> Tensor:
        value = value.clone()
        value[index] = new[index]
        return value

    return metric(model.run_with_hooks(CORRUPTED, TARGET, fwd_hooks=[(site, exchange)]))


@WHOLE
@pytest.mark.parametrize("name", GRIDS)
def test_a_sweep_is_a_forward_pass_for_each_cell(model: HookedEncoderDecoder, name: str) -> None:
    grid = GRIDS[name]
    found = patching.sweep(model, CORRUPTED, CLEAN, metric=metric, decoder_input=TARGET, progress=False, **grid)
    _, cache = model.run_with_cache(CLEAN, TARGET)
    cells = cells_by_hand(model, grid, cache)
    assert found.values.shape[:-1].numel() == len(cells)
    logits = model(CORRUPTED, TARGET)  # of which the metric is a difference
    for place, (site, index) in cells.items():
        assert_close(found.values[place], by_hand(model, site, index, cache[site]), scale=logits)
    assert_close(found.corrupted, metric(logits), scale=logits)
    assert_close(found.clean, metric(model(CLEAN, TARGET)), scale=logits)
    assert found.effects().mean.abs().max() > 1e-3


@WHOLE
def test_targets_and_sources_of_values(model: HookedEncoderDecoder) -> None:
    study = {"metric": metric, "sites": "encoder.resid_pre", "layers": [1], "progress": False}
    one = patching.sweep(model, CORRUPTED, CLEAN, decoder_input=TARGET[0], **study)
    assert_close(
        one.values, patching.sweep(model, CORRUPTED, CLEAN, decoder_input=TARGET[:1].expand(2, -1), **study).values
    )
    start = patching.sweep(model, CORRUPTED, CLEAN, **study)
    assert_close(start.corrupted, metric(model(CORRUPTED)))
    _, cache = model.run_with_cache(CLEAN, TARGET)
    of_cache = patching.sweep(model, CORRUPTED, decoder_input=TARGET, replace_with=cache, **study)
    assert_close(of_cache.values, patching.sweep(model, CORRUPTED, CLEAN, decoder_input=TARGET, **study).values)
    noise = patching.sweep(model, CORRUPTED, CLEAN, decoder_input=TARGET, direction="noise", **study)
    assert_close(noise.unchanged, metric(model(CLEAN, TARGET)))


@WHOLE
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in GRIDS if "neurons" not in GRIDS[name]])
def test_attribution_is_the_derivative_by_finite_differences(name: str) -> None:
    """The derivative of the metric as each cell moves from its corrupted to its clean value."""
    model = HookedEncoderDecoder({**SIZES, "act_fn": "gelu", "dtype": torch.float64, "tie_word_embeddings": False})
    grid, step = GRIDS[name], 1e-5
    found = attribute(
        model, CORRUPTED, CLEAN, metric=metric, decoder_input=TARGET, check=False, progress=False, **grid
    ).effects()
    _, clean = model.run_with_cache(CLEAN, TARGET)
    _, own = model.run_with_cache(CORRUPTED, TARGET)
    for place, (site, index) in cells_by_hand(model, grid, clean).items():
        both = [by_hand(model, site, index, own[site] + sign * step * (clean[site] - own[site])) for sign in (1, -1)]
        slope = (both[0] - both[1]) / (2 * step)
        assert_close(found.values[place], slope.float(), depth=GRADIENT, scale=1.0)


@WHOLE
def test_nodes_of_both_stacks_from_one_pass(model: HookedEncoderDecoder) -> None:
    study = {"metric": metric, "decoder_input": TARGET, "check": False, "progress": False}
    found = attribute_nodes(model, CORRUPTED, CLEAN, **study)
    assert {name.split(".")[0] for name in found} == {"encoder", "decoder"}
    assert found["encoder.z"].values.shape == (2, 5, 2, 2)
    assert found["decoder.z"].values.shape == (3, 3, 2, 2)
    alone = attribute(model, CORRUPTED, CLEAN, sites="decoder.z", heads="each", **study)
    assert_close(found["decoder.z"].values, alone.values, depth=GRADIENT)


@WHOLE
@pytest.mark.parametrize("method", ["ig-inputs", "ig-activations"])
def test_integrals_sum_to_the_whole_difference(method: str) -> None:
    """The stream at the encoder's first layer is a cut: what it changes is the whole difference between the runs."""
    model = HookedEncoderDecoder({**SIZES, "act_fn": "gelu", "dtype": torch.float64, "initializer_range": 0.2})
    study = {"metric": metric, "decoder_input": TARGET, "check": True, "progress": False, "steps": 64}
    found = attribute(
        model, CORRUPTED, CLEAN, sites="encoder.resid_pre", layers=[0], positions=None, method=method, **study
    )
    assert found.exact is not None
    assert_close(found.values, found.exact, depth=GRADIENT)
    assert_close(found.exact[0], found.clean)


@WHOLE
def test_the_model_and_its_weights_are_unchanged() -> None:
    model = HookedEncoderDecoder(SIZES)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with model.hooks(fwd_hooks=[("hook_encoder_out", lambda value, hook: value * 2)]):
        found = patching.sweep(
            model, CORRUPTED, CLEAN, metric=metric, sites="decoder.resid_pre", decoder_input=TARGET, progress=False
        )
        assert_close(found.corrupted, metric(model(CORRUPTED, TARGET)))
        assert model.context_level == 1
    attribute(model, CORRUPTED, CLEAN, metric=metric, sites="encoder.resid_pre", check=False, progress=False)
    assert type(model) is HookedEncoderDecoder
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert not model.list_hooks()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sites": "resid_pre"}, KeyError, "'encoder.resid_pre' or 'decoder.resid_pre'"),
        ({"sites": ["encoder.z", "decoder.z"]}, ValueError, "sites of two: sweep each stack separately"),
        ({"sites": ["decoder.cross_attn.v", "decoder.v"]}, ValueError, "positions of the source and of the target"),
        ({"sites": "encoder.resid_pre", "positions": [5]}, IndexError, "position"),
        ({"sites": "decoder.resid_pre", "positions": [3]}, IndexError, "position"),
        ({"sites": "decoder.resid_pre", "layers": [3]}, IndexError, "layer"),
        ({"sites": "encoder.resid_pre", "layers": [2]}, IndexError, "layer"),
        ({"sites": "decoder.resid_pro"}, KeyError, "did you mean"),
        (
            {"decoder_input": torch.zeros(3, 2, dtype=torch.long)},
            ValueError,
            "one target, or one for each of 2 prompts",
        ),
    ],
)
def test_mistakes_are_refused(
    model: HookedEncoderDecoder, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = {"sites": "decoder.resid_pre", "decoder_input": TARGET, "progress": False, **arguments}
    for run in (patching.sweep, attribute):
        with pytest.raises(error, match=message):
            run(model, CORRUPTED, CLEAN, metric=metric, **given)


def test_tools_for_one_stack_refuse_two(model: HookedEncoderDecoder) -> None:
    runs = {
        "ablate": lambda: patching.ablate(model, CORRUPTED, metric=metric),
        "causal_trace": lambda: patching.causal_trace(model, CORRUPTED, 1, metric=metric),
        "attention_knockout": lambda: patching.attention_knockout(model, CORRUPTED, {"a": (0, -1)}, metric=metric),
        "path patching": lambda: patching.path_patch(model, CORRUPTED, CLEAN, "logits", metric=metric),
        "a classic sweep": lambda: patching.get_act_patch_resid_pre(model, CORRUPTED, {}, metric),
        "an Experiment": lambda: patching.Experiment(model, CORRUPTED, [metric]),
        "atp": lambda: attribute(model, CORRUPTED, CLEAN, metric=metric, sites="encoder.z", method="atp*"),
        "HookedEncoderDecoder": lambda: analysis.attribute_edges(model, CORRUPTED, CLEAN, metric=metric),
    }
    for what, run in runs.items():
        with pytest.raises(TypeError, match=what):
            run()
    with pytest.raises(ValueError, match="decoder_input is for encoder-decoders"):
        patching.sweep(toy(), toy_ids(1, 3), toy_ids(1, 3, 1), metric=metric, decoder_input=TARGET)
