"""The quick evaluations of the shim, each against losses computed by hand."""

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.compat import evals, ioi, mmlu
from hooked_lm.demo import corpus
from tests.close import assert_close


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


def by_hand(model: HookedTransformer, tokens: Tensor) -> Tensor:
    """The mean loss of next tokens, in nats."""
    probs = model(tokens).double().softmax(-1)
    rows, places = torch.meshgrid(torch.arange(len(tokens)), torch.arange(tokens.shape[1] - 1), indexing="ij")
    return -probs[rows, places, tokens[:, 1:]].log().mean()


class Copier(torch.nn.Module):
    """Says with certainty what stood `distance` tokens ago; uniform where nothing did."""

    def __init__(self, distance: int, d_vocab: int = 30, bos: int | None = 0, n_ctx: int = 64) -> None:
        super().__init__()
        self.distance = distance
        self.cfg = SimpleNamespace(device="cpu", d_vocab=d_vocab, n_ctx=n_ctx, default_prepend_bos=True)
        self.tokenizer = Vocabulary(d_vocab, bos)
        self.seen: list[Tensor] = []

    def forward(self, tokens: Tensor, return_type: str) -> Tensor:
        self.seen.append(tokens)
        logits = torch.zeros(*tokens.shape, self.cfg.d_vocab)
        n_first = self.distance - 1
        copied = torch.nn.functional.one_hot(tokens[:, : tokens.shape[1] - n_first], self.cfg.d_vocab)
        logits[:, n_first:] = copied * 50.0
        return logits


class Vocabulary:
    """As much of a tokenizer as `induction_loss` needs; the first two tokens are special."""

    def __init__(self, size: int, bos: int | None) -> None:
        self.size, self.bos_token_id, self.all_special_ids = size, bos, [0, 1]

    def __len__(self) -> int:
        return self.size


# ---- one text ------------------------------------------------------------------------------------------------------


def test_the_loss_on_one_text(model: HookedTransformer) -> None:
    tokens = model.to_tokens(evals.PLAIN_TEXT)
    assert tokens.shape[1] == model.cfg.n_ctx  # cut
    assert_close(evals.sanity_check(model), by_hand(model, tokens), dtype=torch.float32)
    assert not evals.sanity_check(model).requires_grad


# ---- repeated tokens -----------------------------------------------------------------------------------------------


def test_a_model_that_copies_has_no_loss() -> None:
    copier = Copier(distance=20)
    assert_close(evals.induction_loss(copier, subseq_len=20), 0.0, scale=1.0)
    assert evals.induction_loss(Copier(distance=19), subseq_len=20) > 40  # copies the wrong ones
    [tokens] = copier.seen
    assert tokens.shape == (4, 40)
    assert (tokens[:, 0] == 0).all()  # the BOS
    assert torch.equal(tokens[:, 1:20], tokens[:, 21:])
    assert tokens[:, 1:].min() >= 2  # no other special token
    assert tokens[:, 1:].max() < 30


def test_a_model_that_knows_nothing_has_the_log_of_the_vocabulary() -> None:
    uniform = Copier(distance=1000)
    uniform.forward = lambda tokens, return_type: torch.zeros(*tokens.shape, 30)  # type: ignore[method-assign]
    assert_close(evals.induction_loss(uniform, subseq_len=20).item(), math.log(30))


def test_the_same_seed_the_same_tokens() -> None:
    copier, state = Copier(distance=20), torch.get_rng_state()
    for seed in (0, 0, 1):
        evals.induction_loss(copier, subseq_len=20, batch_size=2, seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    first, again, other = copier.seen
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_bos_is_asked_for_or_not() -> None:
    without = Copier(distance=20, bos=None)
    with pytest.raises(ValueError, match="no BOS token to prepend"):
        evals.induction_loss(without, subseq_len=20)
    evals.induction_loss(without, subseq_len=20, prepend_bos=False)
    assert without.seen[0][:, 0].min() >= 2
    evals.induction_loss(without, Vocabulary(30, 1), subseq_len=20)  # another tokenizer
    assert (without.seen[1][:, 0] == 1).all()


def test_a_repeated_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match=r"384.*at most half of n_ctx=64"):
        evals.induction_loss(Copier(distance=20))


def test_induction_in_a_real_model(model: HookedTransformer) -> None:
    ours = evals.induction_loss(model, subseq_len=20, batch_size=2)
    assert 0 < ours < 3 * math.log(model.cfg.d_vocab)


# ---- sets of texts -------------------------------------------------------------------------------------------------

TEXTS = [f"Mary and John went to the {place}. John gave a drink to Mary." for place in ("store", "park", "school") * 20]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls to the package `datasets`, and their replacements."""
    calls: list[Any] = []

    def load_dataset(*names: str, **kwargs: Any) -> list[dict[str, Any]]:
        calls.append((names, kwargs))
        if names[0] == "cais/mmlu":
            return [
                {"question": f"{names[1]} {i}?", "choices": ["one", "two", "three", "four"], "answer": i, "more": 0}
                for i in range(4)
            ]
        column = "content" if "codeparrot" in names[0] else "text"
        return [{column: text} for text in TEXTS]

    monkeypatch.setitem(
        sys.modules,
        "datasets",
        SimpleNamespace(load_dataset=load_dataset, config=SimpleNamespace(HF_HUB_OFFLINE=False)),
    )
    return calls


@pytest.mark.parametrize(
    ("loader", "names"),
    [
        (evals.make_wiki_data_loader, ("Salesforce/wikitext", "wikitext-2-v1")),
        (evals.make_owt_data_loader, ("stas/openwebtext-10k",)),
        (evals.make_pile_data_loader, ("NeelNanda/pile-10k",)),
        (evals.make_code_data_loader, ("codeparrot/codeparrot-valid-v2-near-dedup",)),
    ],
)
def test_batches_of_texts(
    model: HookedTransformer, asked: list[Any], loader: Callable[..., Any], names: tuple[str, ...]
) -> None:
    state = torch.get_rng_state()
    batches = [batch["tokens"] for batch in loader(model.tokenizer, batch_size=3, max_length=32)]
    assert asked == [(names, {"split": "train"})]
    assert {batch.shape for batch in batches} == {(3, 32)}
    rows = torch.cat(batches)
    assert (rows[:, 0] == model.tokenizer.bos_token_id).all()
    again = torch.cat([batch["tokens"] for batch in loader(model.tokenizer, batch_size=3, max_length=32)])
    other = torch.cat([batch["tokens"] for batch in loader(model.tokenizer, batch_size=3, max_length=32, seed=1)])
    assert torch.equal(rows, again)
    assert not torch.equal(rows, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_mean_over_so_many_batches(model: HookedTransformer) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [{"tokens": torch.randint(1000, (2, 8), generator=generator)} for _ in range(5)]
    losses = [by_hand(model, batch["tokens"]).item() for batch in batches]
    assert_close(evals.evaluate_on_dataset(model, batches, truncate=3), sum(losses[:3]) / 3)
    assert_close(evals.evaluate_on_dataset(model, iter(batches), device="cpu"), sum(losses) / 5)
    with pytest.raises(ValueError, match="no batch"):
        evals.evaluate_on_dataset(model, [])


@pytest.mark.usefixtures("asked")
def test_every_set(model: HookedTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    found = evals.evaluate(model, truncate=2, batch_size=2)
    assert list(found) == ["wiki_loss", "owt_loss", "pile_loss", "code_loss"]
    batches = list(evals.make_wiki_data_loader(model.tokenizer, 2, max_length=model.cfg.n_ctx))[:2]
    expected = sum(by_hand(model, batch["tokens"]).item() for batch in batches) / 2
    assert_close(found["wiki_loss"], expected)
    monkeypatch.setattr(evals, "DATASET_NAMES", ["mine"])
    monkeypatch.setattr(evals, "DATASET_LOADERS", [lambda **options: batches])
    assert_close(evals.evaluate(model), {"mine_loss": expected})


# ---- indirect objects ----------------------------------------------------------------------------------------------

SEEN = corpus.INDIRECT_OBJECT_TEMPLATES[0].format(
    a="[A]", b="[B]", s="[B]", place="[PLACE]", object="[OBJECT]", gave="gave"
)


def data(model: HookedTransformer, **options: Any) -> ioi.IOIDataset:
    """Sentences of the kind that the bundled model was trained on."""
    settings: dict[str, Any] = {
        "templates": [f"{SEEN} [A]"],
        "names": ["Mary", "John", "Alice", "Tom"],
        "nouns": {"PLACE": ["store", "park"], "OBJECT": ["a drink", "a book"]},
        "num_samples": 21,
        "seed": 3,
    }
    return ioi.IOIDataset(model.tokenizer, **settings | options)


def test_sentences(model: HookedTransformer) -> None:
    sentences = data(model)
    assert len(sentences) == len(sentences.samples) == 21
    for sample, item in zip(sentences.samples, (sentences[i] for i in range(21)), strict=True):
        assert sample["IO"] != sample["S"]
        assert sample["text"].endswith(sample["IO"])
        assert sample["text"].count(sample["S"][1:]) == 2
        assert "[" not in sample["text"]
        assert model.to_string(item["prompt"]) == model.tokenizer.bos_token + sample["text"]
        assert (item["prompt"] == model.tokenizer.bos_token_id).sum() == 1
        assert model.to_string(item["IO"]) == sample["IO"]
        assert model.to_string(item["S"]) == sample["S"]
    assert data(model).samples == sentences.samples
    assert data(model, seed=4).samples != sentences.samples
    assert data(model, prepend_bos=False)[0]["prompt"].tolist() == sentences[0]["prompt"][1:].tolist()


def test_both_orders(model: HookedTransformer) -> None:
    samples = data(model, symmetric=True).samples
    assert len(samples) == 20
    for first, second in zip(samples[::2], samples[1::2], strict=True):
        assert (first["IO"], first["S"]) == (second["S"], second["IO"])
        swapped = first["text"].replace(first["IO"], " X").replace(first["S"], first["IO"]).replace(" X", first["S"])
        assert second["text"].replace("When ", "When") == swapped.replace("When ", "When")


def test_sentences_by_default(model: HookedTransformer) -> None:
    samples = ioi.IOIDataset(model.tokenizer, num_samples=200, seed=0).samples
    texts = {sample["text"] for sample in samples}
    assert len(texts) > 150
    assert not any("[" in text for text in texts)
    assert {sample["IO"] for sample in samples} == {f" {name}" for name in ioi.NAMES}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"names": ["Mary", "Mary"]}, "two different names"),
        ({"templates": ["[A] gave it to [B]"]}, r"must end with ' \[A\]'"),
    ],
)
def test_sentences_that_cannot_be_made(model: HookedTransformer, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        data(model, **options)


def test_who_receives_it(model: HookedTransformer) -> None:
    """Each sentence alone, up to the name, against batches of sentences of unequal lengths."""
    sentences = data(model, templates=[f"{SEEN} [A]", f"Then {SEEN} [A]"])
    expected = []
    for sample in sentences.samples:
        logits = model(sample["text"].removesuffix(sample["IO"]))[0, -1]
        difference = logits[model.to_single_token(sample["IO"])] - logits[model.to_single_token(sample["S"])]
        expected.append(difference.item())
    assert len({len(item["prompt"]) for item in (sentences[i] for i in range(21))}) > 1
    for batch_size in (1, 8):
        found = ioi.ioi_eval(model, sentences, batch_size=batch_size)
        assert_close(found["Logit Difference"], sum(expected) / 21)
        assert found["Accuracy"] == sum(difference > 0 for difference in expected) / 21
    assert found["Accuracy"] > 0.8
    left = HookedTransformer.from_pretrained("demo", default_padding_side="left")
    assert_close(ioi.ioi_eval(left, sentences)["Logit Difference"], sum(expected) / 21)
    exchanged = [
        {"prompt": item["prompt"], "IO": item["S"], "S": item["IO"]} for item in (sentences[i] for i in range(21))
    ]
    wrong = ioi.ioi_eval(model, exchanged)
    assert_close(wrong["Logit Difference"], -sum(expected) / 21)
    assert wrong["Accuracy"] < 0.2


def test_sentences_are_drawn_without_any(model: HookedTransformer) -> None:
    found = ioi.ioi_eval(model, num_samples=6, symmetric=True)
    assert found.keys() == {"Logit Difference", "Accuracy"}
    assert 0 <= found["Accuracy"] <= 1


def test_names_of_several_tokens() -> None:
    """They are compared where they first differ: here the second of three tokens and of two."""
    logits = torch.randn(1, 6, 9)
    fixed = SimpleNamespace(cfg=SimpleNamespace(device="cpu"), tokenizer=None)

    def call(tokens: Tensor, **options: Any) -> Tensor:
        return logits[:, : tokens.shape[1]]

    class Fixed:
        cfg, tokenizer = fixed.cfg, None
        __call__ = staticmethod(call)

    item = {"prompt": torch.tensor([0, 1, 2, 3, 4, 5]), "IO": torch.tensor([3, 4, 5]), "S": torch.tensor([3, 7])}
    found = ioi.ioi_eval(Fixed(), [item])
    assert_close(found["Logit Difference"], (logits[0, 3, 4] - logits[0, 3, 7]).item())
    with pytest.raises(ValueError, match="one name is a prefix of the other"):
        ioi.ioi_eval(Fixed(), [item | {"S": torch.tensor([3, 4])}])


# ---- questions -----------------------------------------------------------------------------------------------------


def test_subjects() -> None:
    assert len(set(mmlu.MMLU_SUBJECTS)) == 57


def test_questions(asked: list[Any]) -> None:
    found = mmlu.make_mmlu_data_loader(["anatomy", "astronomy"], "dev", num_samples=2)
    assert asked == [(("cais/mmlu", name), {"split": "dev"}) for name in ("anatomy", "astronomy")]
    assert found[3] == {
        "question": "astronomy 1?",
        "choices": ["one", "two", "three", "four"],
        "answer": 1,
        "subject": "astronomy",
    }
    with pytest.raises(ValueError, match="unknown subjects alchemy"):
        mmlu.make_mmlu_data_loader("alchemy")


@pytest.mark.usefixtures("asked")
def test_answers(model: HookedTransformer) -> None:
    """A model that always ends with " C" is right in the third of four questions; before the end it says " A"."""
    first, third = (mmlu._letter_id(model.tokenizer, letter) for letter in "AC")
    seen: list[str] = []

    class Always:
        cfg, tokenizer = model.cfg, model.tokenizer

        def __call__(self, tokens: Tensor, return_type: str) -> Tensor:
            seen.append(model.to_string(tokens[0]))
            said = torch.full(tokens.shape, first)
            said[:, -1] = third
            return torch.nn.functional.one_hot(said, model.cfg.d_vocab).float()

    found = mmlu.mmlu_eval(Always(), subjects=["anatomy", "astronomy"])
    assert found == {
        "accuracy": 0.25,
        "num_correct": 2,
        "num_total": 8,
        "subject_scores": {"anatomy": 0.25, "astronomy": 0.25},
    }
    assert seen[5] == "astronomy 1?\nA. one\nB. two\nC. three\nD. four\nAnswer:"
    assert mmlu.mmlu_eval(Always(), subjects="anatomy", num_samples=2)["num_correct"] == 0
    assert mmlu.mmlu_eval(Always(), subjects="anatomy", num_samples=3)["num_correct"] == 1
    with pytest.raises(ValueError, match="no questions"):
        mmlu.mmlu_eval(Always(), subjects="anatomy", num_samples=0)
