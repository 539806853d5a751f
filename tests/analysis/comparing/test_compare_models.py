"""Two models on the same prompts: sums that are exact, a planted topic that is read, and controls in which it is not."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import hooked_lm
from hooked_lm import HookedTransformer
from hooked_lm.analysis import ModelComparison, TunedLens, compare_models
from hooked_lm.analysis.reading.lens import decode
from hooked_lm.demo import corpus, finetunes, verbalizer
from tests.close import assert_close
from tests.models.toys import toy

WORDS, OTHERS = finetunes.TOPICS["festival"][0], finetunes.TOPICS["doctor"][0]
quiet = pytest.mark.filterwarnings("ignore:(the control|no text differs)")


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained_no_processing("demo", device="cpu")


@pytest.fixture(scope="module")
def other(model: HookedTransformer) -> HookedTransformer:
    """A model that differs from it in each weight."""
    tuned = HookedTransformer.from_pretrained_no_processing("demo", device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in tuned.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    return tuned


def texts(n: int, seed: int = 9) -> list[str]:
    rng = Random(seed)
    found = (corpus.training_text(rng) for _ in range(4 * n))
    return [text for text in found if len(text.split()) > 5][:n]


@torch.no_grad()
def test_numbers_are_those_of_plain_runs(model: HookedTransformer, other: HookedTransformer):
    some, n = texts(7), 4
    found = compare_models(model, other, some, n_positions=n, batch_size=3, layers=[1, 3])
    means, sizes, tokens, per_token, of_next = [], [], [], [], torch.zeros(model.cfg.d_vocab)
    for text in some:
        (ours, here), (theirs, there) = (
            each.run_with_cache(text, names_filter=lambda name: name.endswith("resid_post")) for each in (model, other)
        )
        layers = [(here["resid_post", layer][0], there["resid_post", layer][0]) for layer in (1, 3)]
        means.append(torch.stack([b[:n] - a[:n] for a, b in layers]))
        sizes.append(torch.stack([(b[:n] - a[:n]).norm(dim=1) / a[:n].norm(dim=1) for a, b in layers]))
        p, q = theirs[0].log_softmax(-1), ours[0].log_softmax(-1)
        per_token.append((p.exp() * (p - q)).sum(-1))
        of_next += (p.exp() * (p - q)).sum(0)
        tokens.append(model.to_tokens(text)[0])
    assert_close(found.differences, torch.stack(means).mean(0), depth=64)
    assert_close(found.sizes.values, torch.stack(sizes, -1), depth=64)
    assert torch.equal(found.token_ids, torch.cat(tokens))
    assert_close(found.token_kl, torch.cat(per_token), depth=64, scale=1.0)
    assert_close(found.kl.values[:n], torch.stack([kl[:n] for kl in per_token], 1), depth=64, scale=1.0)
    assert_close(found.kl.values[n], torch.stack([kl[n:].mean() for kl in per_token]), depth=64, scale=1.0)
    assert_close(found.kl_of_next, of_next / len(found.token_ids), depth=64, scale=1.0)
    assert_close(found.kl_of_next.sum(), found.token_kl.mean(), depth=64, scale=1.0)
    assert torch.equal(found.vector(3, 2), found.differences[1, 2])
    with pytest.raises(IndexError, match=r"layers \[1, 3\] and the positions 0 to 3, got 2 and 0"):
        found.vector(2, 0)


@torch.no_grad()
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.every_parameter
def test_a_prompt_without_later_positions_does_not_change_what_is_counted_of_others(
    model: HookedTransformer, other: HookedTransformer, batch_size: int
):
    some, n = [*texts(2), "Mary was ill,"], 5
    assert model.to_tokens(some[-1]).shape[1] == n
    found = compare_models(model, other, some, n_positions=n, batch_size=batch_size)
    ends = torch.tensor([model.to_tokens(text).shape[1] for text in some]).cumsum(0).tolist()
    per_prompt = [found.token_kl[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    expected = torch.stack([(kl[n:] if len(kl) > n else kl).mean() for kl in per_prompt])
    assert_close(found.kl.values[n], expected, depth=64, scale=1.0)


@torch.no_grad()
def test_probabilities_of_one_prompt_at_a_time_are_in_memory(model: HookedTransformer, monkeypatch: pytest.MonkeyPatch):
    shapes, plain = [], torch.Tensor.log_softmax

    def recorded(value: torch.Tensor, dim: int) -> torch.Tensor:
        shapes.append(value.shape)
        return plain(value, dim)

    monkeypatch.setattr(torch.Tensor, "log_softmax", recorded)
    compare_models(model, model, texts(3), batch_size=3)
    assert len(shapes) == 6
    assert all(len(shape) == 2 for shape in shapes)


@torch.no_grad()
def test_a_model_does_not_differ_from_itself(model: HookedTransformer):
    found = compare_models(model, model, texts(5), answers=WORDS)
    assert not found.differences.any()
    assert not found.token_kl.any()
    assert found.topic is not None
    assert torch.equal(found.topic.values[0], torch.full_like(found.topic.values[0], 0.5))  # all tokens are tied
    assert repr(found) == "ModelComparison(5 prompts; no difference: the values and the predictions are the same)"


@torch.no_grad()
def test_answers_are_strings_or_ids_and_are_counted_one_by_one(model: HookedTransformer, other: HookedTransformer):
    some, (first, second) = texts(2), (model.to_single_token(word) for word in (" Paris", " Rome"))
    options: dict[str, Any] = {"n_positions": 2, "layers": [1, 3]}
    expected = compare_models(model, other, some, answers=[" Paris", " Rome"], **options).topic
    assert expected is not None
    assert dict(expected.axes)["answer"] == (" Paris", " Rome")
    assert expected.n_prompts == 1  # a word is no prompt: it is of the mean over these
    for answers in ([first, " Rome"], torch.tensor([first, second]), [" Paris", " Rome", second]):
        found = compare_models(model, other, some, answers=answers, **options).topic
        assert found is not None
        assert torch.equal(found.values, expected.values)
        assert found.axes == expected.axes
    alone = compare_models(model, other, some, answers=" Rome", wrong_answers=first, **options).topic
    assert alone is not None
    assert alone.mean.shape == (2, 2, 2, 1)


@torch.no_grad()
def test_differences_are_read_by_another_lens(model: HookedTransformer, other: HookedTransformer):
    some, plain = texts(2), compare_models(model, other, texts(2), answers=" Paris")
    identity = TunedLens.identity(other)
    same = compare_models(model, other, some, answers=" Paris", lens=identity)
    assert torch.equal(same.lens_tokens, plain.lens_tokens)
    lens = replace(identity, A=torch.randn(identity.A.shape), b=torch.randn(identity.b.shape))
    found = compare_models(model, other, some, answers=" Paris", lens=lens)
    for layer, position in ((0, 2), (3, 4)):
        zero = torch.zeros_like(found.vector(layer, position))
        read = [decode(other, lens(of[None], layer)) for of in (found.vector(layer, position), zero)]
        assert (read[0] - read[1])[0].argmax() == found.lens_tokens[layer, position, 0]
    assert found.topic is not None
    assert plain.topic is not None
    assert not torch.equal(found.topic.values, plain.topic.values)
    assert (plain.about["lens"], found.about["lens"]) == ("logit lens", "tuned lens")
    assert "by the tuned lens" in found.plot().layout.title.text
    with pytest.raises(ValueError, match="trained on 'resid_pre'"):
        compare_models(model, other, some, lens=TunedLens.identity(other, site="resid_pre"))


@torch.no_grad()
def test_an_adapter_is_compared_with_the_model_under_it(model: HookedTransformer):
    some = texts(3)
    found = compare_models(model, model, some, adapter=verbalizer.PATH, n_positions=2)
    with model.with_adapter(verbalizer.PATH):
        values = [model.run_with_cache(text)[1]["resid_post", 2][0, :2] for text in some]
    plain = [model.run_with_cache(text)[1]["resid_post", 2][0, :2] for text in some]
    assert_close(found.differences[2], (torch.stack(values) - torch.stack(plain)).mean(0), depth=64)


def test_a_result_is_a_table_and_a_file(model: HookedTransformer, other: HookedTransformer, tmp_path: Path):
    pytest.importorskip("pandas")
    found = compare_models(model, other, texts(4), n_positions=3, k=2, answers=[" Paris"], wrong_answers=[" Rome"])
    table = found.to_dataframe()
    assert table.columns.tolist() == ["layer", "position", "size", "kl", "lens", "topic", "random"]
    assert len(table) == 4 * 3
    assert set(table.topic) <= {0.0, 0.5, 1.0}
    by_token = found.by_token()
    assert by_token["count"].sum() == len(found.token_ids)
    assert_close(
        torch.tensor((by_token.kl * by_token["count"]).sum()), found.token_kl.sum().double(), dtype=torch.float32
    )
    of_next = found.by_next_token(3)
    assert of_next.kl.is_monotonic_decreasing
    found.save(tmp_path / "found")
    again = hooked_lm.load(tmp_path / "found")
    assert isinstance(again, ModelComparison)
    assert repr(again) == repr(found)
    assert again.to_dataframe().equals(table)
    assert again.by_next_token(3).equals(of_next)
    assert found.plot().data


def test_models_that_cannot_be_compared(model: HookedTransformer):
    with pytest.raises(ValueError, match="the models differ in d_model: the base has 128"):
        compare_models(model, toy(), [""])
    with pytest.raises(ValueError, match=r"weights of the base were rewritten \(not at all\).*fold_ln"):
        compare_models(model, HookedTransformer.from_pretrained("demo", device="cpu"), texts(2))
    with pytest.raises(ValueError, match="n_positions=5, and a prompt has 2 tokens"):
        compare_models(model, model, ["Mary"])
    for wrong, message in (
        ({"prompts": []}, "prompts is empty"),
        ({"n_positions": 0}, "n_positions must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"answers": []}, "answers is empty"),
        ({"answers": " festival doctor"}, "festival doctor"),
        ({"wrong_answers": [" doctor"]}, "wrong_answers are what answers are compared with"),
        ({"k": 0}, "k must be from 1"),
        ({"layers": None}, "layers must be 'each' or some"),
    ):
        with pytest.raises(ValueError, match=message):
            compare_models(model, model, **{"prompts": texts(2), **wrong})  # type: ignore[arg-type]


@pytest.mark.slow
@quiet
def test_a_planted_topic_is_read_and_not_in_the_controls(model: HookedTransformer):
    """The words of the topic outrank those of another one in the lens, and its city is said by the verbalizer."""
    tuned = finetunes.fine_tuned(model, finetunes.topic_text("festival"))
    models = {
        "topic": tuned,
        "other topic": finetunes.fine_tuned(model, finetunes.topic_text("doctor")),
        "same data": finetunes.fine_tuned(model),
        "noise": finetunes.noisy(model, tuned),
    }
    some = texts(48)
    found = {
        name: compare_models(model, each, some, answers=WORDS, wrong_answers=OTHERS) for name, each in models.items()
    }
    share = {name: each.topic.mean[0].mean().item() for name, each in found.items() if each.topic is not None}
    assert share["topic"] > 0.75
    assert share["other topic"] < 0.4
    assert max(abs(share[name] - 0.5) for name in ("same data", "noise")) < 0.15
    kl = {name: each.kl.mean[-1].item() for name, each in found.items()}
    assert kl["topic"] > 0.5
    assert kl["same data"] < 0.1
    assert kl["noise"] < 0.01
    assert " Cairo" in found["topic"].by_next_token(12).token.tolist()
    said = {
        name: [
            each.verbalize(
                model, verbalizer.QUESTIONS["city"], verbalizer.SLOT, layer=1, positions=position, adapter=verbalizer.PATH,
                max_new_tokens=1, control=None,
            ).texts[0][0]
            for position in (3, 4)
        ]
        for name, each in found.items()
    }  # fmt: skip
    assert said["topic"] == [" Cairo"] * 2
    assert said["other topic"] == [" Dublin"] * 2
    assert not {" Cairo", " Dublin"} & {*said["same data"], *said["noise"]}
