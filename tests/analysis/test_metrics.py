"""Metrics equal the formulas written by hand, read what they need and nothing else, and say what is wrong."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.analysis import direct_logit_attribution, evaluate, logit_lens, metrics
from hooked_lm.analysis.metrics import (
    accuracy,
    kl_divergence,
    log_probability,
    logit,
    logit_difference,
    loss,
    probability,
    rank,
)
from hooked_lm.engine.answers import answer_rows, whole_numbers
from tests.close import assert_apart, assert_close

BATCH, POS, VOCAB = 3, 5, 11


def draw(*shape: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def logits(seed: int = 0) -> Tensor:
    return draw(BATCH, POS, VOCAB, seed=seed)


REFERENCE = logits(7)
PER_PROMPT = torch.tensor([0, 10, 4])
SEVERAL = torch.tensor([[1, 2], [3, 4], [10, 0]])
TEXT = torch.tensor([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1], [0, 10, 0, 10, 0]])

# tokens as they are given -> those of each prompt
TOKENS = {
    "one": (4, [[4]] * BATCH),
    "several": ([[4, 0, 10]], [[4, 0, 10]] * BATCH),
    "a list": ([0, 10, 4], [[0], [10], [4]]),
    "one a prompt": (PER_PROMPT, [[0], [10], [4]]),
    "two a prompt": (SEVERAL, SEVERAL.tolist()),
    "a nested list": (SEVERAL.tolist(), SEVERAL.tolist()),
}
OTHERS = torch.tensor([5, 8, 9, 5, 7, 5, 6, 7, 8, 9, 6])  # of each token a wrong one, which is no right one


def others_of(name: str) -> tuple[Any, list[list[int]]]:
    """Wrong answers of the same form as some tokens."""
    given, ids = TOKENS[name]
    other = OTHERS[given if isinstance(given, torch.Tensor) else torch.tensor(given)]
    return other if isinstance(given, torch.Tensor) else other.tolist(), OTHERS[torch.tensor(ids)].tolist()


PLACES = {
    "last": (-1, [[4]] * BATCH),
    "second": (1, [[1]] * BATCH),
    "a list": ([0, -2], [[0, 3]] * BATCH),
    "one a prompt": (torch.tensor([2, -1, 0]), [[2], [4], [0]]),
}


def by_hand(of_tokens: Callable[[Tensor, list[int]], Tensor]) -> Callable[[Tensor, list, list], Tensor]:
    """The mean over positions of what a formula makes of the logits of one position and the tokens of a prompt."""

    def compute(values: Tensor, tokens: list, places: list) -> Tensor:
        rows = zip(values, tokens, places, strict=True)
        return torch.stack([torch.stack([of_tokens(row[p], ids) for p in at]).mean() for row, ids, at in rows])

    return compute


def likelihood(row: Tensor, ids: list[int]) -> Tensor:
    return (row - row.max()).exp()[ids].sum() / (row - row.max()).exp().sum()


FORMULAS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "logit": (logit, by_hand(lambda row, ids: row[ids].mean())),
    "probability": (probability, by_hand(likelihood)),
    "log_probability": (log_probability, by_hand(lambda row, ids: likelihood(row, ids).log())),
    "rank": (
        rank,
        by_hand(lambda row, ids: row.sort(descending=True).indices.tolist().index(best(row, ids)) * row.new_ones(())),
    ),
    "accuracy": (accuracy, by_hand(lambda row, ids: row.new_tensor(float(int(row.argmax()) in ids)))),
}


def best(row: Tensor, ids: list[int]) -> int:
    return max(ids, key=lambda token: float(row[token]))


@pytest.mark.every_parameter
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", FORMULAS)
def test_metrics_of_tokens(name: str, tokens: str, places: str):
    make, formula = FORMULAS[name]
    (given, ids), (pos, at) = TOKENS[tokens], PLACES[places]
    found = make(given, positions=pos)(logits())
    assert_close(found, formula(logits(), ids, at))
    assert found.shape == (BATCH,)


@pytest.mark.every_parameter
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("wrong", TOKENS)
@pytest.mark.parametrize("answers", TOKENS)
def test_logit_difference(answers: str, wrong: str, places: str):
    (right, right_ids), (other, other_ids), (pos, at) = TOKENS[answers], others_of(wrong), PLACES[places]
    mean = by_hand(lambda row, ids: row[ids].mean())
    expected = mean(logits(), right_ids, at) - mean(logits(), other_ids, at)
    assert_close(logit_difference(right, other, pos)(logits()), expected)


@pytest.mark.parametrize("wrong", TOKENS)
@pytest.mark.parametrize("answers", TOKENS)
def test_accuracy_against_wrong_answers(answers: str, wrong: str):
    (right, right_ids), (other, other_ids), (pos, at) = TOKENS[answers], others_of(wrong), PLACES["a list"]
    is_ahead = [
        torch.tensor([float(max(row[p][ids]) > max(row[p][others])) for p in places]).mean()
        for row, ids, others, places in zip(logits(), right_ids, other_ids, at, strict=True)
    ]
    found = accuracy(right, other, pos)(logits())
    assert_close(found, torch.stack(is_ahead).double(), scale=1.0)
    assert ((found == 0) | (found == 0.5) | (found == 1)).all()


def test_an_evaluation_is_the_metric_of_a_forward_pass():
    model = HookedTransformer.from_pretrained("demo")
    prompts = ["The capital of France is", "The capital of Italy is", "The capital of Spain is"]
    right = metrics.accuracy([[" Paris"], [" Rome"], [" Paris"]], model=model)
    difference = metrics.logit_difference([[" Paris"]], [[" Rome"]], model=model)
    found = evaluate(model, prompts, {"accuracy": right, "difference": difference})
    assert found.axes == {"metric": ("accuracy", "difference")}
    assert found.values[0].tolist() == [1, 1, 0]
    assert_close(found.values[1], difference(model(prompts)))
    single = evaluate(model, prompts, difference)
    assert_close(single.values, found.values[1])  # of other columns of the logits
    assert single.axes == {}
    low, high = single.interval()
    assert low < single.mean < high
    with pytest.raises(ValueError, match="same number of tokens"):
        evaluate(model, [*prompts, "The capital of Germany is not"], right)


@pytest.mark.parametrize("places", PLACES)
def test_kl_divergence(places: str):
    pos, at = PLACES[places]
    rows = [torch.stack([kl_by_hand(REFERENCE[b, p], logits()[b, p]) for p in at[b]]).mean() for b in range(BATCH)]
    for reference in (REFERENCE, REFERENCE.log_softmax(-1)):
        found = kl_divergence(reference, pos)(logits())
        assert_close(found, torch.stack(rows))
    backwards = kl_divergence(logits(), pos)(REFERENCE)
    assert_apart(found, backwards, msg="the direction matters")


def kl_by_hand(reference: Tensor, run: Tensor) -> Tensor:
    p, q = reference.softmax(0), run.softmax(0)
    return (p * (p / q).log()).sum()


@pytest.mark.parametrize("places", ["last", "second", "one a prompt"])
def test_kl_divergence_from_a_reference_at_one_position(places: str):
    pos, at = PLACES[places]
    there = REFERENCE[torch.arange(BATCH), torch.tensor(at)[:, 0]]
    assert torch.equal(kl_divergence(there, pos)(logits()), kl_divergence(REFERENCE, pos)(logits()))


def test_kl_divergence_from_itself_is_zero_and_ruled_out_tokens_count_for_nothing():
    reference = logits()
    reference[..., 3] = -torch.inf
    assert_close(kl_divergence(reference)(reference), 0.0, scale=1.0)
    without = [i for i in range(VOCAB) if i != 3]
    expected = kl_by_hand(reference[0, -1, without], REFERENCE[0, -1, without]) + torch.log(
        1 / (1 - REFERENCE[0, -1].softmax(0)[3])
    )
    assert_close(kl_divergence(reference)(REFERENCE)[0], expected)
    assert kl_divergence(REFERENCE)(reference)[0] == torch.inf


def test_loss():
    log_p = logits().log_softmax(-1)
    expected = torch.stack(
        [-sum(log_p[b, p, TEXT[b, p + 1]] for p in range(POS - 1)) / (POS - 1) for b in range(BATCH)]
    )
    assert_close(loss(TEXT)(logits()), expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_loss_without_padding(side: str):
    mask = torch.ones(BATCH, POS, dtype=torch.long)
    real = slice(2, None) if side == "left" else slice(0, 3)
    mask[1] = 0
    mask[1, real] = 1
    found = loss(TEXT, mask)(logits())
    alone = loss(TEXT[1:2, real])(logits()[1:2, real])
    assert_close(found[1:2], alone)
    assert_close(found[[0, 2]], loss(TEXT)(logits())[[0, 2]])


def test_loss_at_positions():
    log_p = logits().log_softmax(-1)
    each = torch.stack([-log_p[b, torch.arange(POS - 1), TEXT[b, 1:]] for b in range(BATCH)])
    for positions in (0, -2, [1, -2], torch.tensor([0, 1, 2])):
        at = positions[:, None] if isinstance(positions, torch.Tensor) else torch.tensor(positions).view(1, -1)
        expected = each.gather(1, (at % POS).expand(BATCH, -1)).mean(1)
        assert_close(loss(TEXT, positions=positions)(logits()), expected)
    mask = torch.ones(BATCH, POS, dtype=torch.long)
    mask[1, :2] = 0
    assert_close(loss(TEXT, mask, positions=[1, 2])(logits())[1], each[1, 2])


def test_loss_of_texts():
    """Of different lengths: the padding of neither side counts."""
    model = HookedTransformer.from_pretrained("demo")
    texts = ["The capital of France is Paris", "When Mary and John left the room, John"]
    alone = torch.stack([loss(model.to_tokens(text))(model(text))[0] for text in texts])
    for side in ("left", "right"):
        model.tokenizer.padding_side = side
        found = loss(texts, model=model)(model(texts))
        assert_close(found, alone, scale=1.0)
    assert_close(loss(texts[0], model=model)(model(texts[0])), alone[:1])


def test_bad_positions_of_a_loss():
    for positions, error, words in [
        (-1, ValueError, f"position {POS - 1} is the last and has no next token"),
        ([0, POS - 1], ValueError, "the last prediction is at position -2"),
        (POS, IndexError, f"position {POS} of loss\\(positions={POS}\\) is out of range: there are {POS}"),
        (torch.tensor([0, 0]), ValueError, f"loss is given {BATCH} prompts, and positions for 2"),
    ]:
        with pytest.raises(error, match=words):
            loss(TEXT, positions=positions)
    mask = torch.ones(BATCH, POS, dtype=torch.long)
    mask[1, :2] = 0
    with pytest.raises(
        ValueError, match=r"nothing to predict in prompts \[1\]: no two real tokens in a row at positions=0"
    ):
        loss(TEXT, mask, positions=0)
    with pytest.raises(TypeError, match="texts need a tokenizer: pass model="):
        loss("some text")
    with pytest.raises(ValueError, match="texts have their own mask"):
        loss("some text", mask, model=HookedTransformer.from_pretrained("demo"))


def test_loss_is_that_of_the_model():
    model = HookedTransformer.from_pretrained("demo")
    tokens = model.to_tokens(["The capital of France is Paris", "The capital of Italy is Rome"])
    found = loss(tokens)(model(tokens))
    assert_close(found.mean(), model(tokens, return_type="loss"))
    text = [model(row[None], return_type="loss") for row in tokens]
    assert_close(found, torch.stack(text))


def test_ties_have_the_rank_of_the_first_and_nan_has_none():
    values = torch.zeros(2, 1, 4)
    values[1, 0, 2] = torch.nan
    found = rank(2)(values)
    assert found[0] == 0
    assert found[1].isnan()


# ---- precision and gradients -----------------------------------------------------------------------------------------

EVERY = {
    "logit": logit(SEVERAL, [0, 2]),
    "logit_difference": logit_difference(PER_PROMPT, [[1, 2]], torch.tensor([1, 2, 3])),
    "probability": probability(SEVERAL),
    "log_probability": log_probability([[1, 7]]),
    "kl_divergence": kl_divergence(REFERENCE, [0, 1]),
    "loss": loss(TEXT),
    "rank": rank(3),
}


@pytest.mark.parametrize("name", sorted(EVERY.keys() - {"rank"}))
def test_gradients(name: str):
    assert torch.autograd.gradcheck(EVERY[name], logits().requires_grad_())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", EVERY)
def test_narrow_logits_are_widened_before_anything_is_computed(name: str, dtype: torch.dtype):
    narrow = logits().to(dtype)
    found = EVERY[name](narrow)
    expected = EVERY[name](narrow.double())
    assert found.dtype in (torch.float32, torch.float64)
    assert_close(found, expected, dtype=torch.float32)


def test_a_reference_in_bf16_is_widened():
    narrow = REFERENCE.bfloat16()
    found = kl_divergence(narrow)(logits().float())
    assert_close(found, kl_divergence(narrow.double())(logits()).float())


def test_no_gradient_goes_into_a_reference():
    reference, run = logits(1).requires_grad_(), logits().requires_grad_()
    kl_divergence(reference)(run).sum().backward()
    assert reference.grad is None
    assert run.grad is not None
    assert run.grad[:, -1].abs().max() > 0


# ---- what is read ----------------------------------------------------------------------------------------------------


class Recorder(Tensor):
    """Logits that allow nothing but to ask for their shape and dtype and to take some out, once."""

    indices: list[Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[0], Recorder):
            args[0].indices.append(args[1])
        elif func not in (Tensor.shape.__get__, Tensor.dtype.__get__):
            raise AssertionError(f"{func} on logits that are not all there")
        with torch._C.DisableTorchFunctionSubclass():
            plain = tuple(arg.as_subclass(Tensor) if isinstance(arg, Recorder) else arg for arg in args)
            return func(*plain, **(kwargs or {}))


def read_by(metric: Callable[[Tensor], Tensor]) -> tuple[Any, Tensor]:
    """The index, and which logits [batch, pos, d_vocab] it takes."""
    recorder = logits().as_subclass(Recorder)
    recorder.indices = []
    found = metric(recorder)
    assert type(found) is Tensor
    assert torch.equal(found, metric(logits()))
    [index] = recorder.indices
    items = index if isinstance(index, tuple) else (index,)
    for item in items:
        assert isinstance(item, int) or (isinstance(item, slice) and item.step is None) or item.dtype == torch.long
    taken = torch.zeros(BATCH, POS, VOCAB, dtype=torch.bool)
    taken[index] = True
    return index, taken


def expected_reads(places: list[list[int]], tokens: list[list[int]]) -> Tensor:
    expected = torch.zeros(BATCH, POS, VOCAB, dtype=torch.bool)
    for row in range(BATCH):
        for pos in places[row]:
            expected[row, pos, tokens[row]] = True
    return expected


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_columns_are_read_alone(tokens: str, places: str):
    (given, ids), (pos, at) = TOKENS[tokens], PLACES[places]
    assert torch.equal(read_by(logit(given, pos))[1], expected_reads(at, ids))
    both = [[*row, 7] for row in ids]
    assert torch.equal(read_by(logit_difference(given, 7, pos))[1], expected_reads(at, both))


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("make", [lambda pos: kl_divergence(REFERENCE, pos), *(
    lambda pos, make=make: make(SEVERAL, pos) for make in (probability, log_probability, rank)
)])  # fmt: skip
def test_positions_are_read_alone(make: Callable, places: str):
    pos, at = PLACES[places]
    assert torch.equal(read_by(make(pos))[1], expected_reads(at, [list(range(VOCAB))] * BATCH))


def test_the_loss_leaves_out_the_last_position():
    index, taken = read_by(loss(TEXT))
    assert index == (slice(None), slice(None, -1))
    assert not taken[:, -1].any()
    assert taken[:, :-1].all()


def test_indices_are_plain_where_they_can_be():
    assert read_by(probability(3))[0] == (slice(None), -1)
    (rows, pos, columns) = read_by(logit_difference(3, [[4, 5]], 2))[0]
    assert (rows, pos, columns.tolist()) == (slice(None), 2, [3, 4, 5])


# ---- names and errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "shown"),
    [
        (logit_difference(5, [[7, 9]]), "logit_difference(5, [[7, 9]], positions=-1)"),
        (probability(SEVERAL, [0, 1]), "probability(<3 x 2>, positions=[0, 1])"),
        (rank(list(range(10)), torch.ones(10).long()), "rank([0, 1, 2, ... 10 in all], positions=<10>)"),
        (loss(TEXT), "loss(tokens <3 x 5>)"),
        (kl_divergence(REFERENCE, 2), "kl_divergence(<3 x 5 x 11>, positions=2)"),
        (logit(torch.tensor(4)), "logit(4, positions=-1)"),
    ],
)
def test_metrics_tell_what_they_are(metric: metrics.Metric, shown: str):
    assert repr(metric) == shown
    assert shown.startswith(metric.name)


@pytest.mark.parametrize(
    ("metric", "shape", "error", "says"),
    [
        (
            logit(3),
            (POS, VOCAB),
            ValueError,
            r"logit\(3, positions=-1\) reads logits \[batch, pos, d_vocab\], got \[5, 11\]",
        ),
        (
            logit(11),
            (BATCH, POS, VOCAB),
            IndexError,
            r"token 11 of logit\(11, positions=-1\) is out of range: .* 11 tokens",
        ),
        (
            logit(3, 5),
            (BATCH, POS, VOCAB),
            IndexError,
            r"position 5 of logit\(3, positions=5\) is out of range: there are 5",
        ),
        (logit(3, [0, -6]), (BATCH, POS, VOCAB), IndexError, "position -6 of .* there are 5"),
        (logit(PER_PROMPT), (2, POS, VOCAB), ValueError, "was made for 3 prompts, and the logits .2, 5, 11. have 2"),
        (
            logit([1, 2]),
            (1, POS, VOCAB),
            ValueError,
            r"was made for 2 prompts, .* have 1: .* nest it, \[\[...\]\], for several",
        ),
        (logit(3, torch.tensor([1])), (2, POS, VOCAB), ValueError, "was made for 1 prompts, .* have 2"),
        (logit_difference(3, 12), (BATCH, POS, VOCAB), IndexError, "token 12 of logit_difference"),
        (probability(torch.tensor([3, 3, 12])), (BATCH, POS, VOCAB), IndexError, "token 12 of probability"),
        (kl_divergence(REFERENCE), (BATCH, POS, 12), ValueError, "made for 11 tokens in the vocabulary, .* have 12"),
        (kl_divergence(REFERENCE), (BATCH, 4, VOCAB), ValueError, "made for 5 positions, .* have 4"),
        (kl_divergence(REFERENCE[:, 0]), (1, POS, VOCAB), ValueError, "made for 3 prompts, .* have 1"),
        (loss(TEXT), (BATCH, 6, VOCAB), ValueError, "made for 5 positions, .* have 6"),
        (loss(TEXT + 1), (BATCH, POS, VOCAB), IndexError, "token 11 of loss"),
    ],
)
def test_logits_that_do_not_fit(metric: metrics.Metric, shape: tuple[int, ...], error: type, says: str):
    with pytest.raises(error, match=says):
        metric(torch.zeros(shape))


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: logit([]), ValueError, r"answers must .* not be empty, got shape \[0\]"),
        (lambda: logit([[1, 2], [3]]), ValueError, r"as many entries for each prompt, got \[\[1, 2\], \[3\]\]"),
        (lambda: logit([1, [3]]), TypeError, r"answers must be an int, .* got \[1, \[3\]\]"),
        (lambda: logit(-1), IndexError, "answers: -1 is not a token id"),
        (lambda: logit(torch.zeros(2, 0, dtype=torch.long)), ValueError, r"not be empty, got shape \[2, 0\]"),
        (lambda: logit(torch.zeros(2, 2, 2, dtype=torch.long)), ValueError, r"got shape \[2, 2, 2\]"),
        (lambda: logit(torch.zeros(2)), TypeError, "answers must be whole numbers, got float32"),
        (lambda: logit(torch.ones(2, dtype=torch.bool)), TypeError, "answers must be whole numbers, got bool"),
        (
            lambda: logit(3, SEVERAL),
            ValueError,
            r"positions must be an int, a list, or a tensor \[batch\]; got .*\[3, 2\]",
        ),
        (lambda: logit(PER_PROMPT, torch.tensor([1, 2])), ValueError, "logit is given 3 prompts, and positions for 2"),
        (lambda: logit_difference(PER_PROMPT, torch.tensor([1, 2])), ValueError, "for 3 prompts, wrong_answers for 2"),
        (lambda: logit_difference(1, -4), IndexError, "wrong_answers: -4 is not a token id"),
        (lambda: probability([[4, 5, 4]]), ValueError, "token 4 is given twice"),
        (lambda: log_probability(torch.tensor([[1, 2], [6, 6]])), ValueError, "token 6 is given twice"),
        (lambda: kl_divergence(torch.zeros(4)), ValueError, r"the reference must be .*, got \[4\]"),
        (
            lambda: kl_divergence(torch.zeros(2, 4), [0, 1]),
            ValueError,
            r"at one position, but positions=\[0, 1\] are 2",
        ),
        (lambda: kl_divergence(REFERENCE, 5), IndexError, "position 5 of the reference .* there are 5"),
        (lambda: kl_divergence(REFERENCE, torch.tensor([1, 2])), ValueError, "made for 2 prompts, .* have 3"),
        (lambda: loss(TEXT[0]), ValueError, r"tokens \[batch, pos\] with two positions at least, got \[5\]"),
        (lambda: loss(TEXT[:, :1]), ValueError, r"two positions at least, got \[3, 1\]"),
        (lambda: loss(TEXT, torch.ones(3, 4)), ValueError, r"mask is \[3, 4\], the tokens are \[3, 5\]"),
        (lambda: loss(TEXT, torch.eye(5)[:3]), ValueError, r"nothing to predict in prompts \[0, 1, 2\]"),
        (lambda: answer_rows(" Mary"), TypeError, r"answers: ' Mary' needs a tokenizer: pass model="),
        (lambda: answer_rows([" a", 3], "wrong"), TypeError, r"wrong: \[' a', 3\] needs a tokenizer"),
        (
            lambda: whole_numbers({3}, "wrong"),
            TypeError,
            r"wrong must be an int, a list of ints or a tensor, got \{3\}",
        ),
    ],
)
def test_arguments_that_make_no_metric(make: Callable, error: type, says: str):
    with pytest.raises(error, match=says):
        make()


def test_answers_are_strings_or_ids() -> None:
    model = HookedTransformer.from_pretrained("demo")
    paris, rome = (model.to_single_token(name) for name in (" Paris", " Rome"))
    numbers = torch.randn(2, 5, model.cfg.d_vocab, generator=torch.Generator().manual_seed(2))
    for named, numbered in (
        (logit_difference(" Paris", [" Rome", rome], model=model), logit_difference(paris, [rome, rome])),
        (probability([[" Paris", " Rome"]], model=model), probability([[paris, rome]])),
        (rank(" Paris", model=model), rank(paris)),
    ):
        assert torch.equal(named(numbers), numbered(numbers))
    assert repr(logit(" Paris", model=model)) == "logit(' Paris', positions=-1)"
    with pytest.raises(ValueError, match=r"'Rome' is not a single token: .*; ' Rome' is one"):
        logit_difference(" Paris", "Rome", model=model)


def test_a_list_of_answers_has_one_for_each_prompt_everywhere() -> None:
    model, prompts = HookedTransformer.from_pretrained("demo"), ["The capital of France is", "The capital of Italy is"]
    answers, wrong = [" Paris", " Rome"], [" Rome", " Paris"]
    logits = model(prompts)
    expected = logit_difference(answers, wrong, model=model)(logits)
    rows = [[model.to_single_token(word) for word in some] for some in (answers, wrong)]
    assert torch.equal(expected, torch.stack([logits[i, -1, rows[0][i]] - logits[i, -1, rows[1][i]] for i in range(2)]))
    assert_close(direct_logit_attribution(model, prompts, answers, wrong).values.sum(0), expected)
    lens = logit_lens(model, prompts, answers=answers, positions=[-1]).answers
    assert_close(lens.select(metric="logit", layer=-1, position=-1, answer=0).values, logits[range(2), -1, rows[0]])
    for call in (
        lambda: logit_difference(answers, wrong, model=model)(logits[:1]),
        lambda: direct_logit_attribution(model, prompts[:1], answers),
        lambda: logit_lens(model, prompts[:1], answers=answers),
    ):
        with pytest.raises(ValueError, match=r"2 prompts.* nest it, \[\[...\]\], for several answers of every prompt"):
            call()


def test_answers_that_are_the_same_are_refused_by_name() -> None:
    model = HookedTransformer.from_pretrained("demo")
    says = "the right and the wrong answers{} are the same, give two different tokens; got answers={}, wrong_answers={}"
    refused = {
        "": (" Mary", " Mary"),
        " of prompt 1": ([" Mary", " John"], [" John", " John"]),
    }
    for of_prompt, (right, wrong) in refused.items():
        expected = says.format(of_prompt, right, wrong) if of_prompt else says.format("", "' Mary'", "' Mary'")
        for make in (metrics.logit_difference, metrics.accuracy):
            with pytest.raises(ValueError, match=re.escape(expected)):
                make(right, wrong, model=model)
    with pytest.raises(ValueError, match="are the same, give two different tokens"):
        metrics.logit_difference([[3, 4]], [[4, 3]])
    with pytest.raises(ValueError, match="are the same, give two different tokens"):
        direct_logit_attribution(model, "Mary left", " John", " John")
    metrics.logit_difference([[3, 4]], [[4, 5]])  # they overlap, and their difference is not always 0
