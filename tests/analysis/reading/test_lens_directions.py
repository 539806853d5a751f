"""Along a lens's directions: hooks are the formulas, sparse sums are found again, recall counts what a lens shows."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.analysis import (
    JacobianLens,
    LensDecomposition,
    fit_jacobian_lens,
    lens_decomposition,
    lens_recall,
    logit_lens,
)
from hooked_lm.components.norms.norm import norm_of
from hooked_lm.interventions import ProjectOut, SwapDirections
from tests.analysis.reading.test_jacobian_lens import TEXTS, ids, tiny
from tests.close import GRADIENT, assert_apart, assert_close, assert_near

PROMPT = TEXTS[0]
WORDS = [" Paris", " Madrid"]


@pytest.fixture(scope="module")
def demo() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


@pytest.fixture(scope="module")
def lens(demo: HookedTransformer) -> JacobianLens:
    return fit_jacobian_lens(demo, TEXTS, held_out=0)


def after(model: HookedTransformer, hooks: Any, layer: int = 1) -> Tensor:
    """The stream after a layer in a run with hooks."""
    return model.run_with_cache(PROMPT, names_filter=f"blocks.{layer}.hook_resid_post", fwd_hooks=hooks)[1][
        "resid_post", layer
    ]


@pytest.mark.parametrize("kind", ["LN", "RMS"])
def test_a_direction_gives_the_logit_of_the_lens(kind: str):
    """The stream's product with it, over the scale of the final norm, is what the lens says, up to biases."""
    model = tiny(normalization_type=kind, dtype=torch.float32)
    found = fit_jacobian_lens(model, ids(2), held_out=0)
    tokens = ids(1, 5, seed=3)
    stream = model.run_with_cache(tokens)[1]["resid_post", 1][0]
    logits = logit_lens(model, tokens, lens=found, layers=[1], answers=torch.tensor([[4, 9]])).answers
    said = logits.select(metric="logit").values[:, 0, :, 0]  # [answer, position]
    moved = found(stream, 1)
    if kind == "LN":
        moved = moved - moved.mean(-1, keepdim=True)
    scale = (moved.square().mean(-1) + model.cfg.eps).sqrt()
    vectors = found.vectors(model, torch.tensor([4, 9]), [1])[0]
    bias = norm_of(model, "ln_final")(torch.zeros(1, 1, 6))[0, 0] @ model.W_U + model.b_U
    assert_close(said, vectors @ stream.T / scale + bias[[4, 9], None].detach(), depth=GRADIENT)
    assert_apart(vectors, found.vectors(model, torch.tensor([9, 4]), [1])[0])


def test_steering_adds_the_direction_by_its_dose(demo: HookedTransformer, lens: JacobianLens):
    plain, length = after(demo, []), lens.lengths[1]
    moved = after(demo, lens.steer(demo, " Paris", [1], dose=0.3, positions=[-1])) - plain
    assert not moved[:, :-1].any()
    vector = lens.vectors(demo, " Paris", [1])[0, 0]
    assert_close(moved[0, -1], 0.3 * length * vector / vector.norm())
    placebo = after(demo, lens.rotated().steer(demo, " Paris", [1], dose=0.3, positions=[-1])) - plain
    assert_close(placebo.norm(), moved.norm())
    with demo.hooks(lens.steer(demo, " Madrid", [1, 2], dose=0.7)):
        steered = logit_lens(demo, PROMPT, positions=[-1], answers=[WORDS]).answers.select(metric="logit", layer=3).mean
    with demo.hooks(lens.rotated().steer(demo, " Madrid", [1, 2], dose=0.7)):
        control = logit_lens(demo, PROMPT, positions=[-1], answers=[WORDS]).answers.select(metric="logit", layer=3).mean
    assert steered[1] - steered[0] > 3 + (control[1] - control[0])


def test_steering_is_along_one_token(demo: HookedTransformer, lens: JacobianLens):
    with pytest.raises(ValueError, match="along one token, got 2: add the hooks of several"):
        lens.steer(demo, WORDS, 1)


def test_ablation_takes_out_the_span(demo: HookedTransformer, lens: JacobianLens):
    plain, vectors = after(demo, []), lens.vectors(demo, WORDS, [1])[0]
    without = after(demo, lens.ablate(demo, WORDS, [1]))
    assert_close(without @ vectors.T, torch.zeros(1, 6, 2), scale=(plain @ vectors.T).abs().max())
    half = after(demo, lens.ablate(demo, WORDS, [1], dose=0.5))
    assert_close(half, (plain + without) / 2)
    assert_apart(without, plain)


def test_a_swap_exchanges_the_coordinates(demo: HookedTransformer, lens: JacobianLens):
    plain, vectors = after(demo, []), lens.vectors(demo, WORDS, [1])[0]
    swapped = after(demo, lens.swap(demo, WORDS, [1]))
    inverse = torch.linalg.pinv(vectors)
    assert_close(swapped @ inverse, (plain @ inverse).flip(-1), scale=plain.abs().max(), depth=GRADIENT)
    rest = torch.eye(128) - inverse @ vectors
    assert_close(swapped @ rest, plain @ rest, depth=GRADIENT)
    assert_close(after(demo, [*lens.swap(demo, WORDS, [1]), *lens.swap(demo, WORDS, [1])]), plain, depth=GRADIENT)
    assert_close(after(demo, lens.swap(demo, WORDS, [1], dose=0)), plain)
    assert_close(after(demo, lens.swap(demo, WORDS, [1], dose=2)) - plain, 2 * (swapped - plain), depth=GRADIENT)
    with pytest.raises(ValueError, match=r"have the cosine 1\.0000: choose tokens that are further apart"):
        lens.swap(demo, (" Paris", " Paris"), 1)
    with pytest.raises(ValueError, match="a swap is of two tokens, got 3"):
        lens.swap(demo, (" Paris", " Madrid", " Rome"), 1)


def test_a_swap_is_at_one_layer(demo: HookedTransformer, lens: JacobianLens):
    """At the next layer a second one would put most of it back."""
    plain, first, second = (
        after(demo, hooks, 2) @ torch.linalg.pinv(lens.vectors(demo, WORDS, [2])[0])
        for hooks in ([], lens.swap(demo, WORDS, 1), [*lens.swap(demo, WORDS, 1), *lens.swap(demo, WORDS, -2)])
    )
    gaps = [float(one[0, -1] @ torch.tensor([1.0, -1.0])) for one in (plain, first, second)]
    assert gaps[0] > 0 > gaps[1]
    assert gaps[2] > 0
    for layers in ("each", [1, 2]):
        with pytest.raises(ValueError, match=r"a swap is at one layer, got \[.*\]: a second one would undo the first"):
            lens.swap(demo, WORDS, layers)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: SwapDirections("resid_post", 1, vectors=torch.ones(2, 8)), "lie on one line"),
        (lambda: SwapDirections("resid_post", 1, vectors=torch.ones(3, 8)), r"\[2, width\], got \(3, 8\)"),
        (lambda: SwapDirections("resid_post", 1, vectors=torch.eye(8)[:2], features=1), "no use for features"),
        (lambda: SwapDirections("resid_post", 1, vectors=torch.eye(8)[:2], strength=float("nan")), "must be finite"),
        (lambda: ProjectOut("resid_post", 1, vectors=torch.ones(8), strength=float("inf")), "must be finite"),
    ],
)
def test_wrong_hooks(made: Any, said: str):
    with pytest.raises(ValueError, match=said):
        made()


# ---- sparse sums -----------------------------------------------------------------------------------------------------


def test_a_sum_of_directions_is_found_again(demo: HookedTransformer, lens: JacobianLens):
    units = torch.nn.functional.normalize(lens.vectors(demo, [*WORDS, " she"], [1])[0], dim=-1)
    made = torch.stack([3 * units[0] + 2 * units[1] + units[2], units[2] - 2 * units[0]])
    found = lens_decomposition(demo, made, lens, 1, k=6)
    assert [found.words[token] for token in found.tokens[0, :3].tolist()] == [*WORDS, " she"]
    assert found.tokens[0, 3] == -1  # nothing is left
    assert_near(found.coefficients[0, :3], torch.tensor([3.0, 2.0, 1.0]), 1e-3, because="it is fitted")
    own = found.explained.select(of="lens").values
    assert own[-1, 0] > 0.999
    assert bool((own.diff(dim=0) > -1e-5).all())
    assert bool((found.coefficients >= 0).all())
    assert own[-1, 0] > 2 * found.explained.select(of="random").values[2, 0]
    table = found.to_dataframe()
    assert table.query("vector == 0")["token"].tolist() == [*WORDS, " she"]
    assert list(table.columns) == ["vector", "rank", "token", "id", "coefficient", "explained", "random"]
    assert "lens" in [line.name for line in found.plot().data]


def test_no_coefficient_is_negative(demo: HookedTransformer, lens: JacobianLens):
    """Of many directions some would have one, if all that were chosen were fitted freely."""
    noise = torch.randn(4, demo.cfg.d_model, generator=torch.Generator().manual_seed(0))
    found = lens_decomposition(demo, noise, lens, 1, k=24, n_random=1)
    assert bool((found.coefficients >= 0).all())
    assert bool((found.explained.select(of="lens").values.diff(dim=0) > -1e-5).all())


def test_layers_count_from_the_end(demo: HookedTransformer, lens: JacobianLens):
    made = lens.vectors(demo, WORDS, -2)[0]
    found, again = (lens_decomposition(demo, made, lens, layer, k=2, n_random=1) for layer in (2, -2))
    assert torch.equal(again.tokens, found.tokens)
    assert again.about["layer"] == 2


def test_the_mean_over_dimensions_counts_for_nothing(demo: HookedTransformer, lens: JacobianLens):
    x = after(demo, [])[0]
    one, other = (lens_decomposition(demo, moved, lens, 1, k=3, n_random=1) for moved in (x, x + 5))
    assert torch.equal(one.tokens, other.tokens)
    assert_close(other.coefficients, one.coefficients, depth=GRADIENT, scale=x.norm())


def test_random_directions_that_do_as_well_are_said(demo: HookedTransformer, lens: JacobianLens, tmp_path: Any):
    noise = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match=r"random rotations of the stream\) does about as well"):
        found = lens_decomposition(demo, noise, lens, 1, k=3)
    found.save(tmp_path / "found.safetensors")
    again = LensDecomposition.load(tmp_path / "found.safetensors")
    assert again.to_dataframe().equals(found.to_dataframe())
    assert repr(again) == repr(found)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"vectors": torch.ones(3, 7)}, r"as wide as the stream, 128, got \[3, 7\]"),
        ({"vectors": torch.ones(128)}, "length 0"),  # its mean is taken out
        ({"k": 0}, "k is from 1"),
        ({"n_random": 0}, "n_random at least 1"),
        ({"layer": 9}, "layer 9 is out of range"),
    ],
)
def test_wrong_decompositions(demo: HookedTransformer, lens: JacobianLens, options: dict[str, Any], said: str):
    with pytest.raises((ValueError, IndexError), match=said):
        lens_decomposition(demo, **{"vectors": torch.eye(128)[0], "lens": lens, "layer": 1, **options})


class Blind:
    def check(self, *fitting: object) -> None:
        pass

    def __call__(self, stream: Tensor, layer: int) -> Tensor:
        return torch.zeros_like(stream)


def without_bias() -> HookedTransformer:
    """The bundled model, whose unembedding says nothing of a vector of zeros."""
    model = HookedTransformer.from_pretrained("demo")
    with torch.no_grad():
        model.unembed.b_U.zero_()
    return model


# ---- recall ----------------------------------------------------------------------------------------------------------


def test_recall_counts_what_a_lens_shows(demo: HookedTransformer, lens: JacobianLens):
    texts, answers = [*TEXTS[:2], "Tom left early because"], [*WORDS, " she"]  # the last is wrong
    lenses = {"logit": None, "Jacobian": lens, "random": lens.rotated()}
    found = lens_recall(demo, texts, answers, lenses, groups=["a", "a", "b"])
    assert list(found.axes["lens"]) == list(lenses)
    assert found.values[:2, 3].tolist() == [[1, 1, 0]] * 2
    read = logit_lens(demo, texts[:2], positions=[-1], answers=WORDS, lens=lens).answers.select(metric="rank").values
    assert torch.equal(found.values[1, :, :2], (read[0, :, 0] < 1).float())
    pronouns = lens_recall(demo, texts[2:], [" he"], lenses, candidates=[" she", " he"], layers=[3])
    assert pronouns.values[:2, 0].tolist() == [[1], [1]]
    assert (pronouns.about["chance"], list(found.groups)) == (0.5, ["a", "a", "b"])
    several = lens_recall(demo, texts[2:], [" she"], {"logit": None}, k=5, layers=[3])
    assert several.values.item() == 1
    blind = {"blind": Blind()}  # to which all tokens without a bias are alike
    for candidates in (None, [" she", " he"]):
        tied = lens_recall(without_bias(), texts[2:], [" he"], blind, candidates=candidates, layers=[3])
        assert tied.values.item() == 0


def test_recall_of_conversations():
    """The same as of their tokens alone, for a `Chat` and for messages, whatever their lengths."""
    model = HookedTransformer.from_pretrained("demo-steps")
    messages = [[{"role": "user", "content": text}] for text in ("2 + 3 = ?", "27 + 35 + 11 = ?")]
    chat = model.chat(messages, add_generation_prompt=True)
    rows = [chat[i].tokens[0] for i in range(2)]
    answers = [int(model(row[None])[0, -1].argmax()) for row in rows]
    expected = lens_recall(model, rows, answers, {"logit": None}).values
    assert len(rows[0]) != len(rows[1])
    assert expected[:, -1].tolist() == [[1, 1]]
    for prompts in (chat, messages):
        assert torch.equal(lens_recall(model, prompts, answers, {"logit": None}).values, expected)
    ends = [chat[i].positions(("user", -1))[0] for i in range(2)]
    said = [int(model(row[None])[0, end].argmax()) for row, end in zip(rows, ends, strict=True)]
    found = lens_recall(model, chat, said, {"logit": None}, positions=("user", -1))
    assert found.values[:, -1].tolist() == [[1, 1]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"answers": [" Paris"]}, "2 prompts and 1 answers"),
        ({"k": 0}, "k must be from 1"),
        ({"candidates": [" he", " she"]}, "none of the candidates"),
        ({"layers": None}, "not None"),
    ],
)
def test_wrong_recall(demo: HookedTransformer, options: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        lens_recall(demo, **{"prompts": TEXTS[:2], "answers": WORDS, "lenses": {"logit": None}, **options})
