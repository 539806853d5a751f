"""Interchange interventions against patching, and alignments on a model in which the subspace of a variable is planted."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, HookedTransformerConfig, patching
from hooked_lm.analysis.alignment.alignment import Alignment
from hooked_lm.analysis.alignment.interchange import Location, interchange, interchange_accuracy
from hooked_lm.analysis.alignment.search import sweep_alignments, train_alignment
from hooked_lm.demo.experiment import prompt_pairs
from tests.close import assert_apart, assert_close
from tests.engine.small import built, global_generator_untouched, ids, no_hook_is_left, score

N, WIDTH, SIZE = 5, 16, 2  # answers; the stream; directions of the variable
QUERY, FIRST_ANSWER = N * N, N * N + 1
ANSWERS = list(range(FIRST_ANSWER, FIRST_ANSWER + N))

# ---- the planted variable --------------------------------------------------------------------------------------------


def directions() -> Tensor:
    """An orthonormal basis of the stream. Columns 0 and 1 hold the variable at the first token, 2 and 3 another variable that
    nobody reads, 4 and 5 the variable at the second token, behind layer 0; the others noise."""
    return torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3))).Q


def codes() -> Tensor:
    """The values of a variable, on a circle: [value, 2]."""
    angles = torch.arange(N) * 2 * torch.pi / N
    return torch.stack([angles.cos(), angles.sin()], 1)


@cache
def planted() -> HookedTransformer:
    """Token N a + b holds a and b; the head 0.1 carries a to the second token, where the answer is read off."""
    cfg = HookedTransformerConfig(
        n_layers=2, d_model=WIDTH, n_heads=2, d_head=4, n_ctx=3, d_vocab=FIRST_ANSWER + N, attn_only=True,
        normalization_type=None, positional_embedding_type="none", device="cpu", seed=0,
    )  # fmt: skip
    model, basis, noise = HookedTransformer(cfg).requires_grad_(False), directions(), torch.Generator().manual_seed(5)
    for weight in model.parameters():
        weight.zero_()
    a, b = torch.arange(N * N) // N, torch.arange(N * N) % N
    model.embed.W_E[: N * N] = codes()[a] @ basis[:, :2].T + codes()[b] @ basis[:, 2:4].T
    other = torch.randn(N, N, 10, generator=noise)
    other = other - other.mean(
        1, keepdim=True
    )  # it tells nothing of a, or it would be part of the subspace that is best
    model.embed.W_E[: N * N] += 0.3 * other.flatten(0, 1) @ basis[:, 6:].T
    attn = model.blocks[0].attn
    attn.W_V[1, :, :2], attn.W_O[1, :2] = basis[:, :2], basis[:, 4:6].T  # it looks at both tokens alike
    model.unembed.W_U[:, FIRST_ANSWER:] = 5 * basis[:, 4:6] @ codes().T
    return model


def pairs(n: int = 320, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Base and source prompts whose first variables differ, and what the base run says with that of the source run."""
    draw = torch.Generator().manual_seed(seed)
    a, b, other_b = (torch.randint(N, (n,), generator=draw) for _ in range(3))
    other_a = (a + torch.randint(1, N, (n,), generator=draw)) % N
    base, source = (torch.stack([first, torch.full((n,), QUERY)], 1) for first in (N * a + b, N * other_a + other_b))
    return base, source, FIRST_ANSWER + other_a


def aligned(site: Any = ("resid_pre", 0), positions: Any = 0, size: int | None = SIZE, **settings: Any) -> Alignment:
    base, source, labels = pairs()
    known = {"candidates": ANSWERS, "steps": 70, "learning_rate": 0.1, "batch_size": 60, "progress": False, **settings}
    return train_alignment(
        planted(), base, source, known.pop("answers", labels), site=site, size=size, positions=positions, **known
    )


def angle(found: Alignment, subspace: Tensor) -> float:
    """The sine of the largest principal angle between a found subspace and one of the same size."""
    cosine = torch.linalg.svdvals(found.directions.T @ subspace).min()
    return float((1 - cosine.clamp(max=1) ** 2).sqrt())


def accuracy(found: Alignment, exchanged: str = "subspace") -> float:
    assert found.accuracy is not None
    return float(found.accuracy.select(exchanged=exchanged).mean)


def test_the_planted_model_is_right() -> None:
    base, source, labels = pairs()
    logits = planted()(source)[:, -1]
    assert torch.equal(logits.argmax(-1), labels)
    assert not (planted()(base)[:, -1].argmax(-1) == labels).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("site", "pos", "head", "columns"),
    [
        (("z", 0), 1, 1, None),
        pytest.param(("resid_pre", 0), 0, None, (0, 2), marks=pytest.mark.slow),
        pytest.param(("resid_pre", 1), -1, None, (4, 6), marks=pytest.mark.slow),
    ],
)
def test_the_planted_subspace_is_found(site: Any, pos: int, head: int | None, columns: Any) -> None:
    found = aligned(site, pos, heads=head)
    subspace = torch.eye(4)[:, :2] if columns is None else directions()[:, slice(*columns)]
    assert angle(found, subspace) < 0.1
    assert accuracy(found) == accuracy(found, "everything") == 1
    assert accuracy(found, "nothing") == 0
    assert accuracy(found, "random subspace") < (1 if head is not None else 0.5)
    orthonormal = found.directions.T @ found.directions
    assert_close(orthonormal, torch.eye(SIZE))
    assert found.history["loss"][-1] < found.history["loss"][0] - 0.5


@pytest.mark.parametrize(
    ("site", "pos", "head"),
    [(("resid_pre", 0), 1, None), (("resid_pre", 1), 0, None), (("z", 0), 1, 0), (("resid_post", 1), 0, None)],
)
def test_where_the_variable_is_not_nothing_is_found(site: Any, pos: int, head: int | None) -> None:
    found = aligned(site, pos, heads=head, steps=20)
    assert accuracy(found) == accuracy(found, "everything") == 0


@pytest.mark.slow
def test_too_small_a_subspace_does_not_do() -> None:
    assert accuracy(aligned(size=1, steps=50)) < 0.8


@pytest.mark.slow
def test_on_shuffled_labels_held_out_accuracy_is_at_chance() -> None:
    _, _, labels = pairs()
    shuffled = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))]
    found = aligned(answers=shuffled, held_out=0.5, steps=50)
    assert abs(accuracy(found) - 1 / N) < 0.1  # 160 pairs: three standard errors
    assert found.accuracy is not None
    low, high = (end[0] for end in found.accuracy.interval())
    assert low < 1 / N + 0.05
    assert high > 1 / N - 0.05


@pytest.mark.slow
def test_the_boundless_search_finds_the_size_too() -> None:
    found = aligned(size=None, steps=80, size_cost=0.5)
    assert SIZE <= found.size <= SIZE + 2
    assert accuracy(found) > 0.95 > accuracy(found, "random subspace")
    assert found.history["size"][0] > 4 * SIZE
    assert found.about["boundless"]
    outside = directions()[:, :2] - found.directions @ (found.directions.T @ directions()[:, :2])
    assert outside.norm() < 0.3
    free = aligned(size=None, steps=20, size_cost=0.0)
    assert free.size > 2 * SIZE, "without a price nothing has to be small"


# ---- against patching ------------------------------------------------------------------------------------------------


def patched(model: HookedTransformer, base: Tensor, source: Tensor, site: str, pos: int, **heads: Any) -> Tensor:
    """What exact patching makes of it: the metric of each prompt."""
    cell = patching.sweep(
        model, base, source, metric=score, sites=site, layers=[1], positions=[pos], progress=False, **heads
    )
    return cell.values.flatten()


@pytest.mark.parametrize("kind", ["standard", "post_norm", "parallel", "hybrid", "mixture"])
@pytest.mark.parametrize(("site", "head"), [("resid_pre", None), ("mlp_out", None), ("z", 2)])
def test_all_directions_are_plain_patching_and_none_is_nothing(kind: str, site: str, head: int | None) -> None:
    model, base, source = built(kind), ids(3), ids(3, seed=1)
    location = Location.of(model, (site, 1), [2], head)
    width = location.read(model.run_with_cache(source)[1][location.site]).shape[-1]
    expected = patched(model, base, source, site, 2, heads=None if head is None else [head])
    whole, nothing = Alignment(location, width, width), Alignment(location, width, 0)
    for change in (location, whole):
        found = score(interchange(model, base, [(change, source)]))
        assert_close(found, expected)
    assert torch.equal(interchange(model, base, [(nothing, source)]), model(base))
    assert (expected - score(model(base))).abs().min() > 1e-4, "nothing was changed"
    part = score(interchange(model, base, [(Alignment(location, width, width // 2), source)]))
    assert (part - expected).abs().min() > 1e-5, "half of the directions is not all"


def test_a_subspace_is_exchanged_and_the_rest_stays() -> None:
    model, base, source = built("standard"), ids(3), ids(3, seed=1)
    location = Location.of(model, ("resid_post", 0), [1, 4])
    alignment = Alignment(location, 32, 5, seed=2)
    own, other = (model.run_with_cache(tokens)[1][location.site] for tokens in (base, source))
    with torch.no_grad(), model.hooks(alignment.hooks(other)):
        seen = model.run_with_cache(base)[1][location.site]
    inside = alignment.directions @ alignment.directions.T
    assert_close(seen[:, [1, 4]] @ inside, other[:, [1, 4]] @ inside)
    assert_close(seen[:, [1, 4]] @ (torch.eye(32) - inside), own[:, [1, 4]] @ (torch.eye(32) - inside))
    assert torch.equal(seen[:, [0, 2, 3, 5]], own[:, [0, 2, 3, 5]])


def test_several_sources_at_places_of_their_own() -> None:
    model, base, one, other = built("rotary"), ids(3, 6), ids(3, 8, seed=1), ids(1, 6, seed=2)
    moved = torch.tensor([[0], [3], [5]])
    stream = Location.of(model, ("resid_mid", 1), moved, source_positions=moved + 2)  # of prompts of another length
    values = Location.of(model, ("v", 2), 4, heads=1)  # of one prompt for all
    found = interchange(model, base, [(stream, one), (values, other)])

    caches = [model.run_with_cache(tokens)[1] for tokens in (one, other)]

    def resid(value: Tensor, hook: Any) -> Tensor:
        for row, pos in enumerate([0, 3, 5]):
            value[row, pos] = caches[0]["resid_mid", 1][row, pos + 2]
        return value

    def v(value: Tensor, hook: Any) -> Tensor:
        value[:, 4, 1] = caches[1]["v", 2][0, 4, 1]
        return value

    expected = model.run_with_hooks(base, fwd_hooks=[(("resid_mid", 1), resid), (("v", 2), v)])
    assert_close(found, expected)
    alone = interchange(model, base, [(stream, one)])
    assert_apart(alone, expected)


def test_an_alignment_is_a_change_of_an_experiment_and_a_hook_like_any_other() -> None:
    model, (base, source, _) = planted(), pairs(4)
    found = aligned(steps=5)
    cache = model.run_with_cache(source)[1]
    experiment = patching.Experiment(model, base, [lambda logits: logits[:, -1, ANSWERS[0]]])
    with pytest.warns(UserWarning, match="function of a whole value"):
        [(_, scores)] = experiment.run([[found.rewrite(cache)]], progress=False)
    by_hooks = model.run_with_hooks(base, fwd_hooks=found.hooks(cache[found.location.site]))
    together = interchange(model, base, [(found, source)])
    assert_close(by_hooks, together)
    assert_close(scores[0], by_hooks[:, -1, ANSWERS[0]])
    assert not by_hooks.requires_grad


def test_accuracy_of_interchange_is_counted_prompt_by_prompt() -> None:
    model, (base, source, labels) = planted(), pairs(50)
    stream = Location.of(model, ("resid_pre", 0), [0])
    wrong = labels.clone()
    wrong[::5] = QUERY  # never said
    found = interchange_accuracy(model, base, [(stream, source)], wrong, batch_size=7)
    assert found.values.tolist() == [float(i % 5 != 0) for i in range(50)]
    assert float(interchange_accuracy(model, base, [(stream, source)], labels, candidates=ANSWERS).mean) == 1
    own = torch.stack([labels, ANSWERS[0] + (labels + 1 - ANSWERS[0]) % N], 1)
    assert float(interchange_accuracy(model, base, [(stream, source)], own[:, 1], candidates=own).mean) == 0


@pytest.mark.slow
def test_positions_may_differ_between_prompts_and_runs() -> None:
    base, source, labels = pairs(80)
    base = torch.cat([base, base[:, 1:]], 1)  # the answer is read at the second token
    flipped = source[:, [1, 0]]
    found = train_alignment(
        planted(), base, flipped, labels, site="hook_embed", size=SIZE, positions=torch.zeros(80, 1, dtype=torch.long),
        source_positions=torch.ones(80, 1, dtype=torch.long), answer_positions=torch.ones(80, dtype=torch.long),
        candidates=ANSWERS, steps=40, learning_rate=0.1, progress=False,
    )  # fmt: skip
    assert accuracy(found) > 0.9
    with pytest.raises(ValueError, match="positions are given for 80 prompts, and there are 3"):
        interchange(planted(), base[:3], [(found, source[:3])])
    logits = interchange(planted(), base[:3], [(found.at(0), source[:3])])
    assert torch.equal(logits[:, 1].argmax(-1), labels[:3])


# ---- as one expects of a result --------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_alignment_and_nothing_else_is_touched() -> None:
    model = planted()
    model.train()
    model.embed.W_E.requires_grad_(True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with global_generator_untouched(), torch.no_grad():
        one, same, other = aligned(steps=3), aligned(steps=3), aligned(steps=3, seed=1)
        aligned(size=None, steps=2)
    assert torch.equal(one.directions, same.directions)
    assert one.history == same.history
    assert not torch.equal(one.directions, other.directions)
    assert one.about["held_out"] == same.about["held_out"] != other.about["held_out"]
    assert [name for name, weight in model.named_parameters() if weight.requires_grad] == ["embed.W_E"]
    assert model.training
    assert no_hook_is_left(model)
    assert model.embed.W_E.grad is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.eval().requires_grad_(False)


class Trouble(Exception):
    pass


@pytest.mark.parametrize("trouble", [Trouble, KeyboardInterrupt])
def test_whatever_is_raised_in_training_leaves_nothing_behind(
    trouble: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = planted(), iter(range(4))
    model.embed.W_E.requires_grad_(True)

    def raising(self: Alignment, base: Tensor, source: Tensor) -> Tensor:
        if next(calls, None) is None:
            raise trouble
        return base + 0 * self.directions.sum()

    monkeypatch.setattr(Alignment, "exchanged", raising)
    with global_generator_untouched(), pytest.raises(trouble):
        aligned()
    assert no_hook_is_left(model)
    assert model.embed.W_E.requires_grad
    assert not model.blocks[0].attn.W_Q.requires_grad
    model.requires_grad_(False)


def test_a_loss_that_is_not_finite_is_an_error() -> None:
    model = planted()
    weight = model.unembed.W_U.clone()
    try:
        model.unembed.W_U[0, ANSWERS[1]] = torch.nan
        with pytest.raises(ValueError, match=r"the loss of step 0 is nan: at 'blocks.0.hook_resid_pre'"):
            aligned()
    finally:
        model.unembed.W_U.copy_(weight)


def test_an_alignment_is_saved_and_loaded_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, path = aligned(steps=5), tmp_path / "giver.safetensors"
    found.save(path)
    again = Alignment.load(path)
    assert torch.equal(again.directions, found.directions)
    assert repr(again) == repr(found)
    assert (again.history, again.about) == (found.history, found.about)
    assert again.accuracy is not None
    assert torch.equal(again.accuracy.values, found.accuracy.values)
    base, source, _ = pairs(4)
    both = [interchange(planted(), base, [(each, source)]) for each in (found, again)]
    assert torch.equal(*both)
    by_prompt = Alignment(Location("hook_embed", torch.tensor([[0], [1]]), heads=None), 16, 3)
    by_prompt.save(path)
    assert torch.equal(Alignment.load(path).location.positions, by_prompt.location.positions)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"of width 16, and those at .* have 32: it is of another model"):
        interchange(built("standard"), ids(2), [(again.at(0), ids(2, seed=1))])

    def failing(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", failing)
    with pytest.raises(OSError, match="disk full"):
        found.save(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert Alignment.load(path).size == 3
    (tmp_path / "other").write_bytes(b"no")
    with pytest.raises(ValueError, match="not a safetensors file"):
        Alignment.load(tmp_path / "other")


def test_the_course_of_training_is_a_table_and_a_figure() -> None:
    found = aligned(size=None, steps=4)
    assert list(found.to_dataframe().columns) == ["step", "loss", "size"]
    assert len(found.to_dataframe()) == 4
    assert list(found.plot().data[0].y) == found.history["loss"]
    assert "accuracy" in repr(found)
    assert found.accuracy is not None
    assert list(found.accuracy.to_dataframe()["exchanged"]) == ["subspace", "nothing", "everything", "random subspace"]


@pytest.mark.slow
def test_a_sweep_finds_where_the_variable_is() -> None:
    base, source, labels = pairs(80)
    found = sweep_alignments(
        planted(), base, source, labels, size=SIZE, candidates=ANSWERS, steps=20, learning_rate=0.2, progress=False
    )
    assert list(found.axes) == ["exchanged", "layer", "position"]
    assert found.n_prompts == 20
    assert_close(found.select(exchanged="everything").mean, torch.eye(2))
    assert (found.select(exchanged="subspace").mean - torch.eye(2)).abs().max() < 0.2
    assert found.select(exchanged="random subspace").mean.max() < 0.6
    assert found.select(exchanged="subspace").plot().data


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"answers": [99] * 320}, ValueError, "99"),
        ({"answers": [-1] * 320}, IndexError, "answers: -1"),
        ({"answers": [3] * 320}, ValueError, "the answers of prompts .* are not among the candidates"),
        ({"answers": ANSWERS}, ValueError, "answers are given for 5 prompts, and there are 320"),
        ({"size": 17}, ValueError, "0 to 16 directions, got size=17"),
        ({"size": -1}, ValueError, "0 to 16 directions"),
        ({"site": ("resid_prae", 0)}, KeyError, "did you mean"),
        ({"site": "blocks.*.hook_resid_pre"}, ValueError, "a location is at one site, and .* means 2"),
        ({"site": ("pattern", 0)}, ValueError, "no vector at each position"),
        ({"heads": 0}, ValueError, "has no heads"),
        ({"site": ("z", 0), "heads": 2}, IndexError, "head of .* 2 is out of range"),
        ({"positions": 2}, IndexError, "position at .* 2 is out of range: there are 2"),
        ({"positions": [0, -2]}, ValueError, "a position is given twice"),
        ({"positions": torch.zeros(3, 1, dtype=torch.long)}, ValueError, "given for 3 prompts, and there are 320"),
        ({"positions": [0], "source_positions": [0, 1]}, ValueError, "as many source_positions as positions"),
        ({"answer_positions": 2}, IndexError, "answer_positions 2 is out of range"),
        ({"held_out": 1.0}, ValueError, "a share between 0 and 1"),
        ({"held_out": [320]}, IndexError, "held_out 320 is out of range"),
        ({"held_out": range(320)}, ValueError, "none are left to train on"),
        ({"steps": 0}, ValueError, "steps must be 1 at least"),
        ({"learning_rate": float("nan")}, ValueError, "learning_rate must be a finite number"),
    ],
)
def test_what_cannot_be_is_said_before_training(
    changed: dict[str, Any], error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(*_: Any, **__: Any) -> None:
        pytest.fail("training has begun")

    monkeypatch.setattr("hooked_lm.analysis.alignment.search._train", begun)
    with pytest.raises(error, match=said):
        aligned(**changed)


def test_prompts_that_do_not_line_up_are_refused() -> None:
    model, stream = built("standard"), Location("hook_embed")
    with pytest.raises(ValueError, match="differ in length: 6 and 5 positions"):
        interchange(model, ids(2), [(stream, ids(2, 5))])
    with pytest.raises(ValueError, match="the base run has 2 prompts, a source run 3"):
        interchange(model, ids(2), [(stream, ids(3))])
    with pytest.raises(ValueError, match="each corrupted prompt needs a clean one; there are 2 and 3"):
        train_alignment(model, ids(2), ids(3), [1, 2], site="hook_embed", size=1)
    with pytest.raises(ValueError, match="do not match those"):
        model.run_with_hooks(ids(2), fwd_hooks=stream.hooks(torch.zeros(2, 5, 32)))


def test_unknown_settings_of_a_sweep_are_named() -> None:
    base, source, answers = pairs(4)
    with pytest.raises(
        TypeError, match="sweep_alignments has no argument 'learning_rat'; did you mean 'learning_rate'"
    ):
        sweep_alignments(planted(), base, source, answers, size=SIZE, learning_rat=0.1)


# ---- the bundled model -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_few_directions_at_the_giver_hold_who_gave() -> None:
    """A quarter of the stream at the second giver is enough for the model to name the other receiver, with names of which no
    pair was trained on; where the last token has read it already, all of the stream is not."""
    model, some = HookedTransformer.from_pretrained("demo"), prompt_pairs(60)
    base, source = [pair.corrupted for pair in some], [pair.clean for pair in some]
    words = [[model.to_single_token(getattr(pair, which)) for pair in some] for which in ("answer", "wrong_answer")]
    answers = torch.tensor([words[0] + words[1], words[1] + words[0]])
    known = {
        "size": 32, "positions": 10, "candidates": answers.T, "progress": False,
        "held_out": [*range(0, 60, 4), *range(60, 120, 4)],
    }  # fmt: skip
    pairs = (base + source, source + base, answers[0])
    found = train_alignment(model, *pairs, site=("resid_pre", 1), steps=25, learning_rate=0.04, **known)
    assert accuracy(found, "nothing") == 0
    assert accuracy(found, "everything") == 1
    assert accuracy(found) > 0.75 > 0.25 > accuracy(found, "random subspace")
    late = train_alignment(model, *pairs, site=("resid_pre", 3), steps=2, **known)
    assert accuracy(late, "everything") == accuracy(late) == 0


def test_inference_mode_is_refused_for_what_it_is() -> None:
    model = HookedTransformer.from_pretrained("demo")
    texts = ["When Mary left", "When John left"]
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        train_alignment(model, texts, texts[::-1], [5, 6], site=("resid_pre", 1), size=2, steps=1)
