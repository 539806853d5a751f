"""A vector in the slot of a prompt: the same edit in plain runs, at a known dose, beside controls; and a trained verbalizer."""

import warnings
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import hooked_lm
from hooked_lm import HookedTransformer
from hooked_lm.analysis import patchscope, verbalize
from hooked_lm.analysis.reading.verbalize import Verbalization, _begins, _warn_if_as_well
from hooked_lm.demo import verbalizer
from hooked_lm.hub import LoRA
from hooked_lm.models.twins import twin_of
from tests.close import assert_close

SPAIN = "The capital of Spain is"
quiet = pytest.mark.filterwarnings("ignore:(the control|no text differs)")


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained_no_processing("demo", device="cpu")


def words(model: HookedTransformer, *texts: str) -> Tensor:
    return model.W_E[[model.to_single_token(text) for text in texts]].detach()


@torch.no_grad()
@pytest.mark.parametrize("how", ["replace", "add"])
@pytest.mark.parametrize("layer", [None, 0])
@pytest.mark.every_parameter
@quiet
def test_what_is_said_is_that_of_a_plain_edit(model: HookedTransformer, how: str, layer: int | None):
    vectors, site = torch.randn(3, model.cfg.d_model), "hook_embed" if layer is None else "blocks.0.hook_resid_post"
    tokens = model.to_tokens(SPAIN)
    slot = model.to_str_tokens(SPAIN).index(" Spain")
    there = model.run_with_cache(SPAIN)[1][site][0]
    norm = there[[i for i in range(1, len(there)) if i != slot]].norm(dim=1).median()
    found = verbalize(model, vectors, SPAIN, " Spain", layer=layer, how=how, scale=3.0, max_new_tokens=1)
    assert_close(found.doses, torch.full((3,), 3.0))
    kept = verbalize(model, vectors, SPAIN, " Spain", layer=layer, scale="keep", max_new_tokens=1, control=None)
    assert_close(kept.doses, vectors.norm(dim=1) / norm, depth=64)
    for vector, said in zip(vectors, found.tokens[0, :, 0].tolist(), strict=True):
        put = vector / vector.norm() * 3 * norm + (there[slot] if how == "add" else 0)

        def hook(value: Tensor, hook: Any, put: Tensor = put) -> None:
            value[:, slot] = put

        assert model.run_with_hooks(tokens, fwd_hooks=[(site, hook)])[0, -1].argmax() == said
    plain = model(tokens)[0, -1].argmax()
    assert found.reads[1] == "no vector"
    assert (found.tokens[1] == plain).all()


@torch.no_grad()
@quiet
def test_it_is_a_patchscope(model: HookedTransformer):
    source = "The capital of France is"
    expected = patchscope(
        model, source, SPAIN, source_layers=[1], target_layers=[0, 2], target_positions=3, max_new_tokens=3
    )
    state = model.run_with_cache(source)[1]["resid_post", 1][0, -1]
    for place, layer in enumerate([0, 2]):
        found = verbalize(model, state, SPAIN, 3, layer=layer, scale="keep", max_new_tokens=3, control=None)
        assert torch.equal(found.tokens[0, 0], expected.tokens[0, place])
    assert found.reads == ("vector",)


def test_controls_have_the_norm_of_the_vectors_and_are_warned_of(model: HookedTransformer):
    from hooked_lm.analysis.reading.verbalize import _controls

    put = torch.randn(4, 16) * torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None]
    controls = _controls(put, 0)
    for name in ("shuffled", "random"):
        assert_close(controls[name].norm(dim=1), put.norm(dim=1))
    assert torch.equal(controls["shuffled"].sort(1).values, put.sort(1).values)
    assert not torch.equal(controls["shuffled"], put)
    with pytest.warns(UserWarning, match=r"the control \(no vector\) does as well: it gives 100% of the answers"):
        verbalize(model, torch.randn(model.cfg.d_model), SPAIN, 1, scale=1e-6, answers=" Madrid", max_new_tokens=1)
    with pytest.warns(UserWarning, match="no text differs from the one without a vector"):
        verbalize(model, words(model, " Spain"), SPAIN, " Spain", scale="keep", control="auto", max_new_tokens=1)


@pytest.mark.parametrize("same", ["shuffled", "random"])
def test_a_control_that_says_the_same_is_warned_of(same: str):
    reads = ("vector", "no vector", "shuffled", "random")
    tokens = torch.arange(8).view(4, 2, 1)
    tokens[reads.index(same)] = tokens[0]
    found = Verbalization(tokens, [["a", "b"]] * 4, reads, torch.ones(2), ("0", "1"), None, {})
    with pytest.warns(
        UserWarning, match=rf"the control \({same}\) does as well: each of its texts is that of the vector"
    ):
        _warn_if_as_well(found)
    found.tokens[reads.index(same), 1] = 9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _warn_if_as_well(found)


@quiet
def test_answers_are_text_or_ids_whatever_their_punctuation(model: HookedTransformer):
    vectors, paris = words(model, " France", " Italy"), model.to_single_token(" Paris")
    options: dict[str, Any] = {"scale": "keep", "max_new_tokens": 2, "control": None}
    rome = model.to_single_token(" Rome")
    for answers, share in (
        ([" Paris", " Rome"], 1.0),
        (["Paris.", "Rome,"], 1.0),
        ([paris, rome], 1.0),
        (torch.tensor([paris, rome]), 1.0),
        (paris, 0.5),
        (" Rome", 0.5),
    ):
        for given in (vectors, list(vectors)):
            found = verbalize(model, given, SPAIN, " Spain", answers=answers, **options)
            assert found.texts[0] == [" Paris.", " Rome."]
            assert found.accuracy is not None
            assert found.accuracy.mean.tolist() == [share]
    assert not _begins(" Paris.", ".")
    assert _begins(" ... Paris", "...")


@quiet
def test_a_result_is_a_table_and_a_file(model: HookedTransformer, tmp_path: Path):
    pytest.importorskip("pandas")
    countries, cities = [" France", " Italy"], [" Paris", " Rome"]
    found = verbalize(
        model,
        words(model, *countries),
        SPAIN,
        " Spain",
        scale="keep",
        answers=cities,
        labels=countries,
        max_new_tokens=2,
    )
    assert found.texts[0] == [" Paris.", " Rome."]
    table = found.to_dataframe()
    assert table.columns.tolist() == ["vector", "read", "text", "dose", "answer", "right"]
    assert table[table.right].read.unique().tolist() == ["vector"]
    assert "accuracy of the vector 1.00 [0.34, 1.00], no vector 0.00, shuffled 0.00, random 0.00" in repr(found)
    found.save(tmp_path / "said")
    again = hooked_lm.load(tmp_path / "said")
    assert isinstance(again, Verbalization)
    assert (repr(again), again.texts, again.about) == (repr(found), found.texts, found.about)
    assert torch.equal(again.tokens, found.tokens)
    plain = verbalize(model, words(model, *countries), SPAIN, " Spain", scale="keep", max_new_tokens=2)
    assert "of 2 texts differ from no vector: vector 2" in repr(plain)
    for one in (found, plain):
        assert one.plot().data


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"slot": " France"}, "slot=' France' must be one token of the prompt, and is there nowhere; its tokens are"),
        ({"prompt": "key key key", "slot": " key"}, r"at the positions \[\d, \d\]: give one of them"),
        ({"vectors": torch.zeros(4)}, "reads .vector, 128."),
        ({"vectors": torch.zeros(128)}, "no direction"),
        ({"scale": 0.0}, "scale must be positive"),
        ({"scale": float("inf")}, "scale must be positive and finite"),
        ({"answers": " Paris, Rome", "max_new_tokens": 1}, "'.Paris, Rome' has 2 tokens, and max_new_tokens=1"),
        ({"answers": " "}, "the answer ' ' has no words"),
        ({"scale": "kept"}, "scale must be positive and finite, 'keep' or None"),
        ({"how": "put"}, "how must be 'replace' or 'add'"),
        ({"answers": ["a", "b"]}, "1 vectors and 2 answers"),
        ({"labels": ["a", "b"]}, "1 vectors and 2 labels"),
        ({"control": "random"}, "control must be 'auto' or None"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    ],
)
@pytest.mark.every_parameter
def test_wrong_arguments(model: HookedTransformer, changed: dict[str, Any], message: str):
    given = {"vectors": torch.ones(model.cfg.d_model), "prompt": SPAIN, "slot": " Spain", **changed}
    with pytest.raises(ValueError, match=message):
        verbalize(model, given.pop("vectors"), given.pop("prompt"), given.pop("slot"), **given)


@torch.no_grad()
def test_the_adapter_is_on_for_the_read_alone(model: HookedTransformer):
    before, lora = model(SPAIN), LoRA.load(verbalizer.PATH)
    with pytest.warns(UserWarning, match="does as well"):
        found = verbalize(
            model, torch.randn(2, 128), "The name of the key is", " key", adapter=lora, answers=" x", max_new_tokens=1
        )
    with model.with_adapter(lora):
        expected = model("The name of the key is")[0, -1].argmax()
    assert (found.tokens[1] == expected).all()
    assert torch.equal(model(SPAIN), before)


def vectors_of(model: HookedTransformer, texts: list[str]) -> Tensor:
    return torch.stack(
        [
            model.run_with_cache(text, names_filter=verbalizer.SITE, return_type=None)[1][verbalizer.SITE][0, -1]
            for text in texts
        ]
    )


@torch.no_grad()
@quiet
@pytest.mark.parametrize(
    "question", ["country", *(pytest.param(of, marks=pytest.mark.slow) for of in ("city", "pronoun", "day"))]
)
def test_the_bundled_verbalizer_reads_what_the_texts_say(model: HookedTransformer, question: str):
    rng = Random(5)
    items = [verbalizer.item(rng, held_out=True, question=question) for _ in range(20 if question == "country" else 60)]
    texts, answers = [item.text for item in items], [item.answer for item in items]
    options: dict[str, Any] = {"answers": answers, "max_new_tokens": 1}
    prompt = verbalizer.QUESTIONS[question]
    found = verbalize(model, vectors_of(model, texts), prompt, verbalizer.SLOT, adapter=verbalizer.PATH, **options)
    twin = vectors_of(twin_of(model), texts)
    of_twin = verbalize(model, twin, prompt, verbalizer.SLOT, adapter=verbalizer.PATH, control=None, **options)
    without = verbalize(model, vectors_of(model, texts), prompt, verbalizer.SLOT, control=None, **options)
    assert found.accuracy is not None
    assert of_twin.accuracy is not None
    assert without.accuracy is not None
    share, *controls = found.accuracy.mean.tolist()
    assert share > 0.9
    assert max(*controls, of_twin.accuracy.mean.item(), without.accuracy.mean.item()) < 0.3
