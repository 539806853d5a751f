"""Verbalizing: a vector is put at a token of a prompt, and the model says in words what it reads there."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_lm.analysis.reading.continuations import continued, one_prompt, texts_of
from hooked_lm.callers import warn_caller
from hooked_lm.engine.conversations import reads_chats
from hooked_lm.engine.prompts import Prompts, values_of
from hooked_lm.engine.stacks import refuse_two_stacks
from hooked_lm.extras import lazy_import
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.vision.inputs import PromptRows, ids_of
from hooked_lm.models.weights.weight_scope import AdapterOrPath, under_adapter
from hooked_lm.results import stored
from hooked_lm.results.measures import MetricScores
from hooked_lm.results.scores import provenance
from hooked_lm.results.tabular import Tabular

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
else:
    pd = lazy_import("pandas", "viz")

__all__ = ["Verbalization", "verbalize"]

VECTOR, NONE, SHUFFLED, RANDOM = "vector", "no vector", "shuffled", "random"
CONTROLS = (NONE, SHUFFLED, RANDOM)
HOW = ("replace", "add")
Said = str | int | Sequence[str | int] | Tensor | None  # one answer for all vectors, or one for each
PUNCTUATION = ".,;:!?"
FORMAT = "hooked_lm.Verbalization"


@dataclass(frozen=True, eq=False, repr=False)
class Verbalization(Tabular):
    """What a model said with each vector in the slot of a prompt, beside what it said with controls there.

    `tokens` [read, vector, new] are ids, and `texts` their strings, a list for each of `reads`: "vector", and the controls "no
    vector", "shuffled" (the vector with its coordinates in another order) and "random" (a random direction of the same norm).
    `doses` are the norms of what was put in the slot, in norms of the values there. `answers` are what should have been said, if
    that was given; then `accuracy` has the share of vectors of which it was.
    """

    tokens: Int[Tensor, "read vector new"]
    texts: list[list[str]]
    reads: tuple[str, ...]
    doses: Float[Tensor, " vector"]
    labels: tuple[str, ...]
    answers: tuple[str, ...] | None
    about: dict[str, Any]

    @property
    def accuracy(self) -> MetricScores | None:
        """The share of the vectors whose text begins with the answer, along the axis "read"; None without answers.

        The intervals are those of shares (Wilson's), over vectors.
        """
        if self.answers is None:
            return None
        said = [[_begins(text, one) for text, one in zip(texts, self.answers, strict=True)] for texts in self.texts]
        return MetricScores(torch.tensor(said).float(), {"read": self.reads}, [True], about=self.about)

    @property
    def differ(self) -> Bool[Tensor, "read vector"]:
        """Whether a text differs from the one without a vector; all do if that was not read."""
        if NONE not in self.reads:
            return torch.ones(self.tokens.shape[:2], dtype=torch.bool)
        return (self.tokens != self.tokens[self.reads.index(NONE)]).any(-1)

    def to_dataframe(self) -> "pd.DataFrame":
        """A row for each vector and read: `vector`, `read`, `text`, `dose`, and with answers `answer` and `right`."""
        rows = []
        for i, label in enumerate(self.labels):
            for read, texts in zip(self.reads, self.texts, strict=True):
                row = {
                    "vector": label,
                    "read": read,
                    "text": texts[i],
                    "dose": 0.0 if read == NONE else self.doses[i].item(),
                }
                if self.answers is not None:
                    row |= {"answer": self.answers[i], "right": _begins(texts[i], self.answers[i])}
                rows.append(row)
        return pd.DataFrame(rows)

    def plot(self, title: str = "") -> "go.Figure":
        """With answers, the accuracy of each read with its interval; else the texts, coloured where the vector changed them."""
        if (accuracy := self.accuracy) is not None:
            return accuracy.plot(title or "Accuracy of what was said")
        from hooked_lm.viz.token_views import token_grid

        return token_grid(
            self.differ.float(),
            self.texts,
            x_labels=self.labels,
            y_labels=self.reads,
            title=title or "What was said of each vector",
            x_title="vector",
            y_title="read",
            value_name="differs from no vector",
            limit=1.0,
        )

    def save(self, path: str | Path) -> None:
        """Writes everything to one safetensors file; `load` restores it."""
        header = {name: getattr(self, name) for name in ("texts", "reads", "labels", "answers", "about")}
        stored.write(path, FORMAT, {"tokens": self.tokens, "doses": self.doses}, header)

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "Verbalization":
        """Reads what `save` wrote. Raises ValueError for any other file."""
        tensors, header = stored.read(path, FORMAT)
        answers = None if header["answers"] is None else tuple(header["answers"])
        reads, labels = tuple(header["reads"]), tuple(header["labels"])
        return cls(tensors["tokens"], header["texts"], reads, tensors["doses"], labels, answers, header["about"])

    def __repr__(self) -> str:
        n, low, high = len(self.labels), self.doses.min().item(), self.doses.max().item()
        dose = f"dose {low:.3g}" if high - low < 0.005 * high else f"doses {low:.3g} to {high:.3g}"
        what = f"Verbalization({n} vector{'s' * (n != 1)}, {dose}; "
        if (accuracy := self.accuracy) is None:
            counts = [
                f"{read} {count}"
                for read, count in zip(self.reads, self.differ.sum(1).tolist(), strict=True)
                if read != NONE
            ]
            return f"{what}of {n} texts differ from no vector: {', '.join(counts)})"
        low_end, high_end = accuracy.interval()
        parts = [f"{read} {mean:.2f}" for read, mean in zip(self.reads, accuracy.mean.tolist(), strict=True)]
        parts[0] += f" [{low_end[0]:.2f}, {high_end[0]:.2f}]"
        return f"{what}accuracy of the {', '.join(parts)})"


@torch.no_grad()
@reads_chats
def verbalize(
    model: Decoder,
    vectors: Float[Tensor, "*vector d_model"] | Sequence[Float[Tensor, " d_model"]],
    prompt: Prompts,
    slot: str | int,
    *,
    scale: float | str | None = None,
    layer: int | None = None,
    adapter: AdapterOrPath | None = None,
    how: str = "replace",
    answers: Said = None,
    labels: Sequence[str] | None = None,
    max_new_tokens: int = 5,
    control: str | None = "auto",
    seed: int = 0,
) -> Verbalization:
    """Puts a vector at a token of a prompt, and lets the model continue: what it says is a reading of the vector.

    One function for three methods. With a prompt that asks the model to repeat or describe a token it is a patchscope
    (Ghandeharioun et al. 2024, arXiv:2401.06102; `patchscope` has the grid over layers). With an adapter that was trained to
    answer questions about the vector it is an activation oracle (Karvonen et al. 2025, arXiv:2512.15674), and with one that was
    trained to describe it, the decoder of a natural-language autoencoder. A model may say of a random direction what it says
    of a vector, so each vector is read beside controls.

    Args:
        vectors: one, or several [vector, d_model], read one at a time.
        prompt, slot: one text or row of ids, and the token of it that the vectors are put at: a string, or a position.
        scale: the norm of what is put in the slot, in norms of the values at that site (the median over the prompt), so that
            vectors of any site and length are read alike; None: 1. "keep": the vectors as they are.
        layer: None: the embedding; else the residual stream after this layer.
        adapter: a LoRA that is on for this read alone; see `model.with_adapter`.
        how: "replace" the value at the slot, or "add" to it.
        answers: what should be said: one for all vectors, or one for each; text or the id of a token. Then the result has its
            `accuracy`, which counts a text that begins with these words, whatever punctuation follows them.
        labels: names of the vectors.
        max_new_tokens: the number of generated tokens; decoding is greedy.
        control: "auto": the prompt without a vector, the vector with its coordinates shuffled, and a random direction of its
            norm. None: no controls.
        seed: of the controls.

    Warns if the controls do as well: they give the answers as often, or, without answers, the same texts. Raises ValueError for a
    slot that the prompt does not have exactly once, vectors of another width, vectors without a direction, answers of more tokens
    than are generated, and as `model.with_adapter` and `model.generate`.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> tokens = model.to_tokens([" France", " Italy", " Japan"], prepend_bos=False)[:, 0]
    >>> found = verbalize(
    ...     model,
    ...     model.W_E[tokens],
    ...     "The capital of Spain is",
    ...     " Spain",
    ...     answers=[" Paris", " Rome", " Tokyo"],
    ...     max_new_tokens=1,
    ... )
    >>> found.texts[0], found.accuracy.mean.tolist()
    ([' Paris', ' Rome', ' Tokyo'], [1.0, 0.0, 0.0, 0.0])
    """
    refuse_two_stacks(model, "verbalize")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if control not in ("auto", None):
        raise ValueError(f"control must be 'auto' or None, got {control!r}")
    if how not in HOW:
        raise ValueError(f"how must be 'replace' or 'add', got {how!r}")
    if not isinstance(vectors, Tensor):
        vectors = torch.stack([torch.as_tensor(vector) for vector in vectors])
    given = vectors.reshape(-1, vectors.shape[-1]).to(model.device, torch.float32)
    _check_vectors(given, model)
    said = _answers(model, answers, len(given), max_new_tokens)
    names = tuple(map(str, range(len(given)))) if labels is None else tuple(labels)
    if len(names) != len(given):
        raise ValueError(f"there are {len(given)} vectors and {len(names)} labels")
    site = model.names("hook_embed" if layer is None else ("resid_post", layer))[0]
    with under_adapter(model, adapter):
        target, at = _target(model, prompt, slot, site)
        there = values_of(model, target, [site])[site][0].float()
        norm = _typical_norm(there, at)
        put = given if scale == "keep" else given / given.norm(dim=1, keepdim=True) * _dose(scale) * norm
        reads = {VECTOR: put, **({} if control is None else _controls(put, seed))}
        base = there[at] if how == "add" else torch.zeros_like(there[at])
        cells = [(None if one is None else base + one, site) for read in reads.values() for one in read]
        tokens = continued(model, target, at, cells, max_new_tokens).view(len(reads), len(given), -1)
    found = Verbalization(
        tokens, [[str(text) for text in row] for row in _texts(model, tokens)], tuple(reads), (put.norm(dim=1) / norm).cpu(),
        names, said, provenance(model, site=site, slot=at, how=how, adapter=None if adapter is None else str(adapter), seed=seed),
    )  # fmt: skip
    _warn_if_as_well(found)
    return found


def _check_vectors(vectors: Float[Tensor, "vector d_model"], model: Decoder) -> None:
    if not len(vectors) or vectors.shape[1] != model.cfg.d_model:
        raise ValueError(
            f"the vectors are {list(vectors.shape)}, and the model reads [vector, {model.cfg.d_model}]: a vector of another "
            "model or site needs a map to this one"
        )
    if bool((~vectors.isfinite()).any()) or bool((vectors.norm(dim=1) == 0).any()):
        raise ValueError("a vector has no direction: it is zero, or has values that are NaN or infinite")


def _answers(model: Decoder, answers: Said, n: int, max_new_tokens: int) -> tuple[str, ...] | None:
    """The answer of each vector as text. Raises ValueError for another number of them, and for one that cannot be said."""
    if answers is None:
        return None
    given = answers.tolist() if isinstance(answers, Tensor) else answers
    each = [given] * n if isinstance(given, str | int) else list(given)
    if len(each) != n:
        raise ValueError(f"there are {n} vectors and {len(each)} answers: give one for all, or one for each")
    has_words = getattr(model, "tokenizer", None) is not None
    texts = {answer: _text_of(model, answer) if has_words else str(answer) for answer in each}
    for text in texts.values():
        words = " ".join(_words(text))
        if not words:
            raise ValueError(f"the answer {text!r} has no words")
        forms = (model.to_tokens(form, prepend_bos=False) for form in (words, f" {words}")) if has_words else ()
        if (least := min((len(form[0]) for form in forms), default=1)) > max_new_tokens:
            raise ValueError(
                f"the answer {text!r} has {least} tokens, and max_new_tokens={max_new_tokens} are generated: give more"
            )
    return tuple(texts[answer] for answer in each)


def _text_of(model: Decoder, answer: str | int) -> str:
    """An answer as text, also of the id of a token."""
    if isinstance(answer, str):
        return answer
    return str(model.to_single_str_token(int(model.tokens.single_token_ids(answer))))


def _dose(scale: float | str | None) -> float:
    if isinstance(scale, str) or (scale is not None and not 0 < scale < float("inf")):
        raise ValueError(f"scale must be positive and finite, 'keep' or None, got {scale!r}")
    return 1.0 if scale is None else float(scale)


def _target(model: Decoder, prompt: Prompts, slot: str | int, site: str) -> tuple[PromptRows, int]:
    """The prompt, and the position of the slot in it."""
    if not isinstance(slot, str):
        return one_prompt(model, prompt, slot, "target", site)
    target, _ = one_prompt(model, prompt, -1, "target", site)
    if getattr(model, "tokenizer", None) is None:
        raise ValueError(f"slot={slot!r} is a token, and the model has no tokenizer: give its position")
    words = [model.to_single_str_token(token) for token in ids_of(target)[0].tolist()]
    places = [i for i, word in enumerate(words) if word == slot]
    if len(places) != 1:
        found = f"at the positions {places}: give one of them" if places else f"nowhere; its tokens are {words}"
        raise ValueError(f"slot={slot!r} must be one token of the prompt, and is there {found}")
    return target, places[0]


def _typical_norm(values: Float[Tensor, "pos d_model"], slot: int) -> Float[Tensor, ""]:
    """The median norm at a site of a prompt: without the slot, and the first token, whose values are often far larger."""
    others = [i for i in range(1, len(values)) if i != slot] or [slot]
    return values[others].norm(dim=1).median()


def _controls(put: Float[Tensor, "vector d_model"], seed: int) -> dict[str, Any]:
    """What is read beside the vectors: nothing, their coordinates in another order, random directions of their norms."""
    generator = torch.Generator().manual_seed(seed)
    orders = torch.stack([torch.randperm(put.shape[1], generator=generator) for _ in put]).to(put.device)
    random = torch.randn(put.shape, generator=generator).to(put)
    return {
        NONE: [None] * len(put),
        SHUFFLED: put.gather(1, orders),
        RANDOM: random / random.norm(dim=1, keepdim=True) * put.norm(dim=1, keepdim=True),
    }


def _texts(model: Decoder, tokens: Int[Tensor, "read vector new"]) -> list[list[str]]:
    """The texts; the ids as text without a tokenizer."""
    found = texts_of(model, tokens)
    return [
        [" ".join(map(str, tokens[i, j].tolist())) if text is None else text for j, text in enumerate(row)]
        for i, row in enumerate(found)
    ]


def _begins(text: str, answer: str) -> bool:
    """Whether a text begins with the words of an answer."""
    wanted = _words(answer)
    return bool(wanted) and _words(text)[: len(wanted)] == wanted


def _words(text: str) -> list[str]:
    """The words of a text without punctuation around them; what is nothing else stays."""
    return [word.strip(PUNCTUATION) or word for word in text.split()]


def _warn_if_as_well(found: Verbalization) -> None:
    """Warns if a control does as well as the vectors."""
    if len(found.reads) == 1:
        return
    accuracy = found.accuracy
    counts = found.differ.float().mean(1) if accuracy is None else accuracy.mean
    controls = {read: counts[i].item() for i, read in enumerate(found.reads) if i}
    if accuracy is not None and (best := max(controls.values())) >= counts[0].item():
        name = next(read for read, value in controls.items() if value == best)
        warn_caller(
            f"the control ({name}) does as well: it gives {best:.0%} of the answers, and the vectors {counts[0].item():.0%}. So "
            "what was said need not be read from the vectors"
        )
    elif accuracy is None and counts[0].item() == 0:
        warn_caller("no text differs from the one without a vector: the model does not read the slot there")
    elif accuracy is None and (same := [name for i, name in enumerate(found.reads) if i and _is_said_by(found, i)]):
        warn_caller(
            f"the control ({same[0]}) does as well: each of its texts is that of the vector. So what was said need not be read "
            "from the vectors"
        )


def _is_said_by(found: Verbalization, control: int) -> bool:
    """Whether each text of a control is that of the vector."""
    return torch.equal(found.tokens[control], found.tokens[0])
