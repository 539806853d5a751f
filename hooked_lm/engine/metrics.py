"""Metrics of causal experiments; `hooked_lm.analysis.metrics` is their public module, and describes their arguments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_lm.engine.answers import NEST, Answers, Rows, answer_rows, right_and_wrong, whole_numbers
from hooked_lm.models.text.methods import TextMethods

Positions = int | Sequence[int] | Tensor
# with a better answer
RISING = ("accuracy", "faithfulness", "log_probability", "logit", "logit_difference", "probability")
FALLING = ("kl_divergence", "loss", "rank")


# ---- shared parts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fits:
    """The sizes that logits must have for a metric; None: any size."""

    prompts: int | None = None
    positions: int | None = None
    d_vocab: int | None = None
    largest_token: int = -1
    hint: str = ""  # for another number of prompts

    def check(self, shape: Sequence[int], metric: object) -> None:
        """Raises ValueError or IndexError if logits of this shape do not fit."""
        if len(shape) != 3:
            raise ValueError(f"{metric} reads logits [batch, pos, d_vocab], got {list(shape)}")
        wanted = {"prompts": self.prompts, "positions": self.positions, "tokens in the vocabulary": self.d_vocab}
        for (what, want), got in zip(wanted.items(), shape, strict=True):
            if want is not None and want != got:
                hint = f": {self.hint}" if self.hint and what == "prompts" else ""
                raise ValueError(f"{metric} was made for {want} {what}, and the logits {list(shape)} have {got}{hint}")
        if self.largest_token >= shape[2]:
            raise IndexError(
                f"token {self.largest_token} of {metric} is out of range: the logits are of {shape[2]} tokens"
            )


@dataclass(frozen=True, eq=False)
class Where:
    """The positions and tokens of the logits that a metric reads; tokens None: all."""

    pos: int | slice | Int[Tensor, "pos_row pos"]
    tokens: Rows | None = None

    def check(self, n_pos: int, metric: object) -> None:
        """Raises IndexError if the positions are out of range for `n_pos` positions."""
        if isinstance(self.pos, slice):
            return
        ends = (self.pos,) if isinstance(self.pos, int) else (int(self.pos.min()), int(self.pos.max()))
        for pos in ends:
            if not -n_pos <= pos < n_pos:
                raise IndexError(f"position {pos} of {metric} is out of range: there are {n_pos}")

    def __call__(self, logits: Float[Tensor, "batch n_pos d_vocab"]) -> Float[Tensor, "batch pos column"]:
        """The selected logits, by a single indexing operation, in fp32 or wider."""
        found = logits[self._index(logits.shape[0])]
        found = found if found.dtype in (torch.float32, torch.float64) else found.float()
        return found[:, None] if len(found.shape) == 2 else found

    def _index(self, batch: int) -> tuple[Any, ...]:
        parts = [part for part in (self.pos, self.tokens) if isinstance(part, Tensor)]
        if all(len(part) == 1 for part in parts):  # the same for all prompts
            pos = self.pos[0] if isinstance(self.pos, Tensor) else self.pos
            if self.tokens is None:
                return slice(None), pos
            return slice(None), pos[:, None] if isinstance(pos, Tensor) else pos, self.tokens[0]
        rows = torch.arange(batch)[:, None]
        if self.tokens is None:
            return rows, self.pos
        return (
            rows[:, :, None],
            self.pos[:, :, None] if isinstance(self.pos, Tensor) else self.pos,
            self.tokens[:, None],
        )


@dataclass(frozen=True, eq=False, repr=False)
class Metric:
    """A callable that maps logits [batch, pos, d_vocab] to one number per prompt; created by the functions of this module.

    `name` is the name of that function; `repr(metric)` also shows the arguments.
    """

    name: str
    arguments: str
    where: Where
    fits: Fits
    compute: Callable[[Tensor], Tensor]  # from the selected logits [batch, pos, column] to [batch]

    def __call__(self, logits: Float[Tensor, "..."]) -> Float[Tensor, " batch"]:
        self.fits.check(logits.shape, self)
        self.where.check(logits.shape[1], self)
        return self.compute(self.where(logits))

    @property
    def rises_with_answer(self) -> bool:
        """Whether a larger number means a better answer."""
        return self.name in RISING

    def __repr__(self) -> str:
        return f"{self.name}({self.arguments})"


# ---- the metrics -----------------------------------------------------------------------------------------------------


def logit(answers: Answers, positions: Positions = -1, *, model: TextMethods | None = None) -> Metric:
    """The logit of a token, or the mean of several.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> metric = logit(" Paris", model=model)
    >>> metric(model("The capital of France is")).shape
    torch.Size([1])
    """
    ids, prompts = answer_rows(answers, "answers", model)
    return _metric("logit", (answers,), positions, ids, prompts, lambda read: read.mean((1, 2)), columns=ids)


def logit_difference(
    answers: Answers, wrong_answers: Answers, positions: Positions = -1, *, model: TextMethods | None = None
) -> Metric:
    """The logit of the answer minus that of a wrong answer; the mean of each if there are several.

    For two tokens this is the log ratio of their probabilities, in nats (Wang et al. 2022, arXiv:2211.00593). Sweeps compute
    only these logits.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> metric = logit_difference(" Paris", " Rome", model=model)
    >>> bool(metric(model("The capital of France is")) > 0)
    True
    """
    (right, n_right), (other, n_wrong) = right_and_wrong(answers, wrong_answers, model)
    rows, n = max(len(right), len(other)), right.shape[1]
    columns = torch.cat([right.expand(rows, -1), other.expand(rows, -1)], 1)

    def compute(read: Float[Tensor, "batch pos token"]) -> Float[Tensor, " batch"]:
        return (read[..., :n].mean(-1) - read[..., n:].mean(-1)).mean(1)

    prompts = n_wrong if n_right is None else n_right
    return _metric("logit_difference", (answers, wrong_answers), positions, columns, prompts, compute, columns=columns)


def probability(answers: Answers, positions: Positions = -1, *, model: TextMethods | None = None) -> Metric:
    """The probability of a token, or the sum over several. Raises ValueError for a token given twice.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> metric = probability(" Paris", model=model)
    >>> bool(metric(model("The capital of France is")) > 0.5)
    True
    """
    ids, prompts = _distinct(answers, model)

    def compute(read: Float[Tensor, "batch pos d_vocab"]) -> Float[Tensor, " batch"]:
        return _picked(read.softmax(-1), ids).sum(-1).mean(1)

    return _metric("probability", (answers,), positions, ids, prompts, compute)


def log_probability(answers: Answers, positions: Positions = -1, *, model: TextMethods | None = None) -> Metric:
    """The log probability of a token in nats, or that of the union of several. Raises ValueError for a token given twice.

    >>> import torch
    >>> log_probability([[0, 1]])(torch.zeros(1, 1, 4)).exp()
    tensor([0.5000])
    """
    ids, prompts = _distinct(answers, model)

    def compute(read: Float[Tensor, "batch pos d_vocab"]) -> Float[Tensor, " batch"]:
        return _picked(read.log_softmax(-1), ids).logsumexp(-1).mean(1)

    return _metric("log_probability", (answers,), positions, ids, prompts, compute)


def rank(answers: Answers, positions: Positions = -1, *, model: TextMethods | None = None) -> Metric:
    """The number of tokens with a larger logit than the answer: 0 for the most likely token. Of several answers, the best rank.

    NaN where the logit of the token is NaN. It has no gradient.

    >>> import torch
    >>> rank(2)(torch.tensor([[[0.0, 3.0, 1.0, 2.0]]]))
    tensor([2.])
    """
    ids, prompts = answer_rows(answers, "answers", model)

    def compute(read: Float[Tensor, "batch pos d_vocab"]) -> Float[Tensor, " batch"]:
        best = _picked(read, ids).amax(-1, keepdim=True)
        above = (read > best).sum(-1).to(read.dtype)
        return above.masked_fill(best[..., 0].isnan(), torch.nan).mean(1)

    return _metric("rank", (answers,), positions, ids, prompts, compute)


def accuracy(
    answers: Answers,
    wrong_answers: Answers | None = None,
    positions: Positions = -1,
    *,
    model: TextMethods | None = None,
) -> Metric:
    """1 where the answer has a larger logit than each wrong answer, or than all other tokens (None), and 0 elsewhere.

    Of several answers the best counts. With several positions it is the share of those that are right. It has no gradient.

    >>> import torch
    >>> logits = torch.tensor([[[0.0, 3.0, 1.0, 2.0]]])
    >>> accuracy(3)(logits), accuracy(3, 2)(logits)
    (tensor([0.]), tensor([1.]))
    """
    wrong, n_wrong = None, None
    if wrong_answers is None:
        right, n_right = answer_rows(answers, "answers", model)
    else:
        (right, n_right), (wrong, n_wrong) = right_and_wrong(answers, wrong_answers, model)

    def compute(read: Float[Tensor, "batch pos d_vocab"]) -> Float[Tensor, " batch"]:
        best = _picked(read, right).amax(-1)
        columns = right.to(read.device)[:, None].expand(len(read), read.shape[1], -1)
        others = read.scatter(-1, columns, -torch.inf) if wrong is None else _picked(read, wrong)
        is_right = (best > others.amax(-1)).to(read.dtype)
        return is_right.masked_fill(best.isnan(), torch.nan).mean(1)

    ids = right if wrong is None or int(right.max()) >= int(wrong.max()) else wrong
    given = (answers,) if wrong_answers is None else (answers, wrong_answers)
    return _metric("accuracy", given, positions, ids, n_wrong if n_right is None else n_right, compute)


def kl_divergence(reference: Float[Tensor, "..."], positions: Positions = -1) -> Metric:
    """KL(reference || run) of the next-token distributions, in nats.

    Args:
        reference: the logits or log probabilities of the other run: [batch, pos, d_vocab] for a run of the same length, or
            [batch, d_vocab] at the single position of each prompt. It is detached.

    Raises ValueError for another shape, and for a reference at one position for several positions.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> logits = model("The capital of France is")
    >>> kl_divergence(logits)(logits).tolist()
    [0.0]
    """
    shape, (at, of_pos) = list(reference.shape), _positions(positions)
    if len(shape) not in (2, 3):
        raise ValueError(f"the reference must be [batch, pos, d_vocab] or [batch, d_vocab], got {shape}")
    if len(shape) == 3:
        there = Where(at)
        Fits(prompts=of_pos).check(shape, f"kl_divergence(reference, positions={_shown(positions)})")
        there.check(shape[1], "the reference of kl_divergence")
        known = there(reference.detach())
    elif isinstance(at, Tensor) and at.shape[1] > 1:
        raise ValueError(
            f"the reference {shape} is at one position, but positions={_shown(positions)} are {at.shape[1]}"
        )
    else:
        known = Where(0)(reference.detach()[:, None])
    log_p = known.log_softmax(-1)

    def compute(read: Float[Tensor, "batch pos d_vocab"]) -> Float[Tensor, " batch"]:
        target = log_p.to(read.device)
        p = target.exp()
        # a token with probability 0 in the reference adds 0, but 0 * -inf would be NaN
        return (p * (target - read.log_softmax(-1))).masked_fill(p == 0, 0).sum(-1).mean(1)

    fits = Fits(shape[0], shape[1] if len(shape) == 3 else None, shape[-1])
    return _metric("kl_divergence", (reference,), positions, None, None, compute, fits=fits)


def loss(
    tokens: Int[Tensor, "..."] | str | Sequence[str],
    attention_mask: Tensor | None = None,
    positions: Positions | None = None,
    *,
    model: TextMethods | None = None,
) -> Metric:
    """The cross entropy of the next token in nats, averaged over the positions of a prompt.

    Args:
        tokens: the prompts: ids [batch, pos], or texts with `model=`, whose padding does not count.
        attention_mask: [batch, pos], 1 for real tokens; only predictions of a real token from a real token count. Of ids.
        positions: those whose next tokens are predicted, as for the other metrics; None: all that have a next token. On text
            whose first part is random, as in tests of induction, average over the part that can be predicted.

    Raises ValueError for tokens or masks of other shapes, for a prompt without a token to predict, and for the last position,
    which has no next token; IndexError for positions out of range.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> prompt = "The capital of France is Paris"
    >>> whole = loss(prompt, model=model)(model(prompt))
    >>> answer = loss(prompt, positions=-2, model=model)(model(prompt))
    >>> bool(answer < 0.5 < whole)
    True
    """
    ids, real = _ids_and_mask(tokens, attention_mask, model)
    counts: Bool[Tensor, "batch next"] = real[:, 1:] & real[:, :-1]
    shown = "" if positions is None else f", positions={_shown(positions)}"
    if positions is not None:
        counts = counts & _predicting(positions, ids.shape)
    if empty := (~counts.any(1)).nonzero()[:, 0].tolist():
        raise ValueError(
            f"nothing to predict in prompts {empty}: no two real tokens in a row{shown and f' at{shown[1:]}'}"
        )

    def compute(read: Float[Tensor, "batch next d_vocab"]) -> Float[Tensor, " batch"]:
        counted = counts.to(read.device)
        losses = -read.log_softmax(-1).gather(-1, ids[:, 1:, None].to(read.device))[..., 0]
        return losses.masked_fill(~counted, 0).sum(1) / counted.sum(1)

    fits = Fits(ids.shape[0], ids.shape[1], None, int(ids.max()))
    return Metric("loss", f"tokens {_shown(ids)}{shown}", Where(slice(None, -1)), fits, compute)


def _ids_and_mask(
    tokens: Int[Tensor, "..."] | str | Sequence[str], attention_mask: Tensor | None, model: TextMethods | None
) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"]]:
    """The ids that a loss is of, on the CPU, and which of them are real."""
    if not isinstance(tokens, Tensor):
        if model is None:
            raise TypeError("loss: texts need a tokenizer: pass model=..., or ids [batch, pos] (see model.to_tokens)")
        if attention_mask is not None:
            raise ValueError("loss: texts have their own mask; give attention_mask with ids, from model.to_tokens")
        tokens, attention_mask = model.tokens.encode(tokens)
    shape = list(tokens.shape)
    if len(shape) != 2 or shape[1] < 2:
        raise ValueError(f"loss needs tokens [batch, pos] with two positions at least, got {shape}")
    ids, _ = answer_rows(tokens, "tokens")
    real = torch.ones(shape, dtype=torch.bool) if attention_mask is None else attention_mask.cpu().bool()
    if list(real.shape) != shape:
        raise ValueError(f"the attention mask is {list(real.shape)}, the tokens are {shape}")
    return ids, real


def _predicting(positions: Positions, shape: Sequence[int]) -> Bool[Tensor, "batch_or_1 next"]:
    """Which positions but the last are chosen, of prompts of this shape [batch, pos]."""
    where, of_pos = _positions(positions)
    if of_pos not in (None, shape[0]):
        raise ValueError(f"loss is given {shape[0]} prompts, and positions for {of_pos}")
    rows = torch.tensor([[where]]) if isinstance(where, int) else where
    Where(rows).check(shape[1], f"loss(positions={_shown(positions)})")
    chosen = torch.zeros(len(rows), shape[1], dtype=torch.bool).scatter(1, rows % shape[1], True)
    if bool(chosen[:, -1].any()):
        raise ValueError(
            f"loss: position {shape[1] - 1} is the last and has no next token; the last prediction is at position -2"
        )
    return chosen[:, :-1]


# ---- arguments -------------------------------------------------------------------------------------------------------


def _metric(
    name: str,
    arguments: tuple[Any, ...],
    positions: Positions,
    ids: Rows | None,
    prompts: int | None,
    compute: Callable[[Tensor], Tensor],
    columns: Rows | None = None,
    fits: Fits | None = None,
) -> Metric:
    """A metric of these tokens and positions; raises ValueError if they are given for different numbers of prompts."""
    where, of_pos = _positions(positions)
    prompts = fits.prompts if fits is not None else prompts
    if None not in (prompts, of_pos) and prompts != of_pos:
        raise ValueError(f"{name} is given {prompts} prompts, and positions for {of_pos}")
    if fits is None:
        hint = "" if prompts is None else NEST
        largest = -1 if ids is None else int(ids.max())
        fits = Fits(of_pos if prompts is None else prompts, largest_token=largest, hint=hint)
    shown = ", ".join([*map(_shown, arguments), f"positions={_shown(positions)}"])
    return Metric(name, shown, Where(where, columns), fits, compute)


def _positions(positions: Positions) -> tuple[int | Int[Tensor, "pos_row pos"], int | None]:
    """Positions as indices of logits, and the number of prompts they are given for (None: any number)."""
    found = whole_numbers(positions, "positions")
    if found.ndim > 1:
        raise ValueError(f"positions must be an int, a list, or a tensor [batch]; got shape {list(found.shape)}")
    if isinstance(positions, Tensor) and found.ndim:
        return found[:, None], len(found)
    return (int(found), None) if found.numel() == 1 else (found[None], None)


def _distinct(answers: Answers, model: TextMethods | None) -> tuple[Rows, int | None]:
    ids, prompts = answer_rows(answers, "answers", model)
    ordered = ids.sort(1).values
    if len(twice := ordered[:, 1:][ordered.diff(dim=1) == 0]):
        raise ValueError(f"token {int(twice[0])} is given twice, and would count twice")
    return ids, prompts


def _picked(values: Float[Tensor, "batch pos d_vocab"], tokens: Rows) -> Float[Tensor, "batch pos token"]:
    batch, n_pos, _ = values.shape
    return values.gather(-1, tokens.to(values.device)[:, None].expand(batch, n_pos, -1))


def _shown(given: Any) -> str:
    if isinstance(given, str):
        return repr(given)
    if isinstance(given, Tensor) and given.ndim:
        return f"<{' x '.join(map(str, given.shape))}>"
    if isinstance(given, Sequence) and len(given) > 6:
        return f"[{', '.join(map(str, given[:3]))}, ... {len(given)} in all]"
    return str(given.item() if isinstance(given, Tensor) else given)
