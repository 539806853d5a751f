"""Thought anchors: which sentences of a chain of thought decide the answer, and the sentences after them."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hooked_lm.analysis.thoughts.receivers import attention_between, kurtosis, vertical_scores
from hooked_lm.analysis.thoughts.resampling import Different, Metric, Resampled, other_words, resample
from hooked_lm.analysis.thoughts.sentences import Split, ThoughtSentence, sentences_of, split_sentences
from hooked_lm.analysis.thoughts.suppression import suppress
from hooked_lm.callers import warn_caller
from hooked_lm.errors import ArgumentError
from hooked_lm.extras import lazy_import
from hooked_lm.hooks.head_labels import head_label, parse_head_label
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.text.chat import Chat
from hooked_lm.results import Scores, stored
from hooked_lm.results.difference import Difference, difference
from hooked_lm.results.scores import provenance
from hooked_lm.results.tabular import Tabular

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from hooked_lm.viz import View
else:
    pd = lazy_import("pandas", "viz")

__all__ = ["ThoughtAnchors", "thought_anchors"]

FORMAT = "hooked_lm.ThoughtAnchors"
KINDS = ("counterfactual", "resampling")
TENSORS = ("values", "differs", "suppression", "vertical_attention")
ANSWER = "answer"
LONGEST = 40  # characters of a sentence in a label
MANY = 0.05  # of rollouts without an answer


@dataclass(frozen=True, eq=False, repr=False)
class ThoughtAnchors(Tabular):
    """What the sentences of a thought do; see `thought_anchors`.

    Attributes:
        sentences: their texts and positions.
        tokens: the tokens of each, as strings.
        answer: the answer of the conversation.
        values: of each rollout from before a sentence, and in the last row from after all of them, the metric of its answer; NaN
            of those that did not come to the end of their answer.
        answers: the texts of these answers, as far as they go.
        firsts: the first sentence of each of these rollouts.
        differs: whether it differs from the sentence that it replaces.
        suppression: the mean divergence, in nats, of the predictions of each later sentence, and in the last row of the
            answer, if attention to a sentence is suppressed; NaN where no prediction follows the sentence.
        vertical_attention: the mean attention of each head to a sentence from later ones; NaN if there are none.
        about: the origin of the numbers, with the settings of the rollouts.
    """

    sentences: tuple[ThoughtSentence, ...]
    tokens: tuple[tuple[str, ...], ...]
    answer: str
    values: Float[Tensor, "before rollout"]
    answers: tuple[tuple[str, ...], ...]
    firsts: tuple[tuple[str, ...], ...]
    differs: Bool[Tensor, "sentence rollout"]
    suppression: Float[Tensor, "later sentence"]
    vertical_attention: Float[Tensor, "layer head sentence"]
    about: dict[str, Any]

    def importance(self, kind: str = "counterfactual", level: float = 0.95) -> list[Difference]:
        """The importance of each sentence for the answer, with confidence intervals.

        The mean metric of rollouts that keep the sentence, less that of rollouts from just before it: of all of them
        ("resampling"), or of those whose first sentence differs ("counterfactual"; NaN if none does). Rollouts without an
        answer are left out. Raises ValueError for another kind.
        """
        if kind not in KINDS:
            raise ArgumentError(f"kind must be 'counterfactual' or 'resampling', got {kind!r}")
        replaced = [
            before[differs] if kind == "counterfactual" else before
            for before, differs in zip(self.values[:-1], self.differs, strict=True)
        ]
        pairs = zip(self.values[1:], replaced, strict=True)
        return [difference(kept[~kept.isnan()], other[~other.isnan()], level) for kept, other in pairs]

    @property
    def n_different(self) -> list[int]:
        """How many rollouts from before each sentence begin with another one, and come to an answer."""
        return (self.differs & ~self.values[:-1].isnan()).sum(1).tolist()

    @property
    def n_unfinished(self) -> list[int]:
        """How many rollouts from before each sentence, and from after all, did not come to the end of their answer."""
        return self.values.isnan().sum(1).tolist()

    @property
    def kurtosis(self) -> Float[Tensor, "layer head"]:
        """The excess kurtosis of the vertical attention of each head: large if few sentences stand out."""
        return kurtosis(self.vertical_attention)

    def receiver_heads(self, n: int = 16) -> list[str]:
        """The heads with the largest kurtosis, such as "L1H7", at most `n`, the largest first. Empty if fewer than four sentences
        have later ones at the distance asked for, and so no kurtosis."""
        found = self.kurtosis.nan_to_num(nan=-torch.inf).flatten()
        order = found.argsort(descending=True, stable=True).tolist()[:n]
        n_heads = self.vertical_attention.shape[1]
        return [head_label(*divmod(place, n_heads)) for place in order if found[place].isfinite()]

    def receiver_attention(self, n: int = 16) -> Float[Tensor, " sentence"]:
        """The mean vertical attention to each sentence of the `n` receiver heads; NaN if no head has a kurtosis."""
        rows = [self.vertical_attention[parse_head_label(head)] for head in self.receiver_heads(n)]
        return torch.stack(rows).mean(0) if rows else torch.full((len(self.sentences),), torch.nan)

    def counts(self) -> "pd.DataFrame":
        """How often each answer came: a row for each answer, the most frequent first, and a column for each sentence before
        which rollouts began, the last for those after all sentences. The answer of unfinished rollouts is "(unfinished)"."""
        rows = [
            ["(unfinished)" if value.isnan() else text for value, text in zip(values, texts, strict=True)]
            for values, texts in zip(self.values, self.answers, strict=True)
        ]
        every = [answer for answer, _ in Counter(answer for row in rows for answer in row).most_common()]
        columns = [f"before {i}" for i in range(len(self.sentences))] + ["after all"]
        table = [[Counter(row)[answer] for row in rows] for answer in every]
        return pd.DataFrame(table, index=pd.Index(every, name=ANSWER), columns=columns)

    def effects(self) -> Scores:
        """`suppression` with its axes, "later" and "sentence"."""
        labels = self._labels()
        return Scores(self.suppression[..., None], {"later": [*labels, ANSWER], "sentence": labels}, about=self.about)

    def to_dataframe(self, level: float = 0.95, n: int = 16) -> "pd.DataFrame":
        """A row for each sentence.

        Its text; the mean metric of rollouts that keep it (`kept`); its importance by both kinds with intervals; how many
        rollouts from before it differed, and how many were unfinished. If it is suppressed, the largest divergence of a later
        sentence (`suppression`), and that of the answer (`suppression_answer`); and the attention of `n` receiver heads.
        """
        table: dict[str, Any] = {
            "sentence": [one.text for one in self.sentences],
            "kept": self.values[1:].nanmean(1).tolist(),
        }
        for kind in KINDS:
            found = self.importance(kind, level)
            ends = ("", "_low", "_high")
            table |= {f"{kind}{end}": [each[i] for each in found] for i, end in enumerate(ends)}
        later = self.suppression[:-1].nan_to_num(nan=-torch.inf).amax(0)
        return pd.DataFrame(
            {
                **table,
                "n_different": self.n_different,
                "n_unfinished": self.n_unfinished[:-1],
                "suppression": later.where(later.isfinite(), torch.nan).tolist(),
                "suppression_answer": self.suppression[-1].tolist(),
                "receiver_attention": self.receiver_attention(n).tolist(),
            }
        )

    def plot(self, kind: str = "counterfactual", title: str = "") -> "go.Figure":
        """The importance of each sentence with its interval; `effects().plot()` draws what suppression changes."""
        from hooked_lm import viz

        found = torch.tensor([list(each) for each in self.importance(kind)])
        return viz.bars(
            found[:, 0],
            self._labels(),
            (found[:, 1], found[:, 2]),
            title=title or f"Thought anchors: {kind} importance",
            x_title="sentence",
            y_title="difference of the mean metric",
        )

    def view(self, title: str = "Thought anchors") -> "View":
        """The thought, each sentence coloured by a column of `to_dataframe`, which buttons choose."""
        from hooked_lm import viz

        measures = {
            **{kind: [each.mean for each in self.importance(kind)] for kind in KINDS},
            "suppression_answer": self.suppression[-1].tolist(),
            "receiver_attention": self.receiver_attention().tolist(),
        }
        pairs = {name: zip(values, self.tokens, strict=True) for name, values in measures.items()}
        spread = {name: [value for value, own in both for _ in own] for name, both in pairs.items()}
        return viz.tokens([token for own in self.tokens for token in own], spread, title=title)

    def save(self, path: str | Path) -> None:
        """Writes everything to one safetensors file; `load` restores it."""
        header = {name: getattr(self, name) for name in ("sentences", "tokens", "answer", "answers", "firsts", "about")}
        stored.write(path, FORMAT, {name: getattr(self, name) for name in TENSORS}, header)

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "ThoughtAnchors":
        """Reads what `save` wrote. Raises ValueError for any other file."""
        tensors, header = stored.read(path, FORMAT)
        sentences = tuple(ThoughtSentence(*each) for each in header["sentences"])
        tokens, answers, firsts = (tuple(map(tuple, header[name])) for name in ("tokens", "answers", "firsts"))
        values, differs, *white_box = (tensors[name] for name in TENSORS)
        return cls(
            sentences,
            tokens,
            header["answer"],
            values,
            answers,
            firsts,
            differs,
            white_box[0],
            white_box[1],
            header["about"],
        )

    def _labels(self) -> list[str]:
        return [f"{i} {one.text[:LONGEST]}" for i, one in enumerate(self.sentences)]

    def __repr__(self) -> str:
        found = [(i, each) for i, each in enumerate(self.importance()) if each.low > 0 or each.high < 0]
        best = max(found, key=lambda each: abs(each[1].mean), default=None)
        most = "" if best is None else f"; most important: {self._labels()[best[0]]!r} ({best[1].mean:+.2f})"
        return f"ThoughtAnchors({len(self.sentences)} sentences, {self.values.shape[1]} rollouts each{most})"


def thought_anchors(
    model: Decoder,
    chat: Chat,
    *,
    n: int = 100,
    metric: Metric | None = None,
    max_new_tokens: int | None = None,
    seed: int | torch.Generator | None = 0,
    split: Split = split_sentences,
    is_different: Different = other_words,
    distance: int = 4,
    batch_size: int = 20,
    progress: bool | None = None,
    **sampling: object,
) -> ThoughtAnchors:
    """Which sentences of a thought matter, measured in three ways (Bogdan et al. 2025, arXiv:2506.19143).

    Rollouts: from just before each sentence the model writes the rest `n` times. A sentence is important for the answer if
    answers differ between rollouts that keep it and those that begin with another sentence. The rollouts that keep one sentence
    are those from before the next one; each set shares the keys and values of what it continues. The paper compares the
    distributions of answers by their divergence; here it is the mean of a metric, which has a sign and an interval.

    Suppression: if no later token attends to the sentence, in any layer and head, by how much the predictions of each later
    sentence change. The text stays as it is, so an effect is one on that sentence itself. The paper takes logarithms of the
    divergences; here they are in nats.

    Receiver heads: heads whose queries in later sentences look at few sentences, by the kurtosis of the attention that sentences
    receive. It says where heads look, not what for: compare it with the other two. The paper averages the kurtosis over many
    thoughts; here it is that of one, and the mean of several `.kurtosis` is yours to take.

    Args:
        chat: one conversation whose last thought is studied, with the answer to which it led: `chat.reply(model)`, or, where the
            template leaves thoughts out, `model.rollouts(chat, 1).chats[0]`.
        n: the number of rollouts from each place; 0 for none, which leaves the other two measures.
        metric: the number that the text of an answer gives, such as 1.0 if it is right; by default 1.0 if it is the answer of
            the conversation, word for word, which suits answers of a word or a number.
        max_new_tokens: of a rollout, within the context; None: twice as many as the conversation has from there on and 100
            more. Rollouts that do not end within them have no value; a warning says if they are many.
        split: cuts the text of the thought into sentences that together are the text.
        is_different: whether the first sentence of a rollout differs from the one that it replaces: by default, in its words,
            which nearly all do in free text. The paper asks for a cosine similarity of sentence embeddings below the median:
            the result has all first sentences, for which `dataclasses.replace(found, differs=...)` takes another comparison.
        distance: the attention that a sentence receives is that from so many sentences later on.
        batch_size: how many rollouts, and suppressed sentences, run together at most; rollouts take the keys and values of all
            their tokens each.
        progress: a bar on rollouts that take longer than two seconds if None.
        sampling: of `model.rollouts`: `temperature` (1 by default), `top_k`, `top_p`, and others.

    Raises ValueError for several conversations, one without a thought, or an answer after it, and for a single rollout. Warns if
    no rollout that keeps the whole thought gives its answer.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.demo import steps
    >>> model = HookedTransformer.from_pretrained("demo-steps")
    >>> chat = model.chat(
    ...     steps.solution([347, 136], steps.Addition(347, (285, 136))).messages
    ... )
    >>> found = thought_anchors(model, chat, n=20)
    >>> len(found.sentences), found.sentences[0].text, found.importance()[0].low > 0
    (8, 'I take 136.', True)
    """
    if n < 0 or n == 1:
        raise ValueError(f"n is the number of rollouts from each place, at least 2, or 0 for none, got {n}")
    sentences = sentences_of(chat, split)
    said, answer = _answer_of(chat, sentences[-1])
    measured = metric or (lambda text: float(text == answer))
    for trial in (measured(answer), measured(""), is_different(sentences[0].text, "")):
        float(trial)  # what raises, does so before any rollout
    later = [*(range(one.start, one.stop) for one in sentences), said]
    suppression = suppress(model, chat, sentences, later, batch_size)
    received = vertical_scores(attention_between(model, chat, sentences), distance)
    options = {"batch_size": batch_size, **sampling}
    drawn = resample(model, chat, sentences, n, max_new_tokens, seed, split, progress, options)
    values = _values(drawn, measured, metric is None)
    differs = [
        [is_different(sentence.text, new) for new in row]
        for sentence, row in zip(sentences, drawn.firsts, strict=False)
    ]
    names = {name: getattr(f, "__qualname__", str(f)) for name, f in (("split", split), ("is_different", is_different))}
    settings = {"n": n, "max_new_tokens": max_new_tokens, "distance": distance, **sampling, **names}
    return ThoughtAnchors(
        sentences,
        tuple(chat.str_tokens[0][one.start : one.stop] for one in sentences),
        answer,
        values,
        drawn.answers,
        drawn.firsts,
        torch.tensor(differs, dtype=torch.bool).view(len(sentences), n),
        suppression,
        received,
        provenance(model, seed=seed if isinstance(seed, int) else None, **settings),
    )


def _answer_of(chat: Chat, last: ThoughtSentence) -> tuple[range, str]:
    """The positions and the text of the answer that follows the last sentence of a thought, in its turn."""
    labels = chat.labels[0]
    turn = labels[last.start].turn
    after = [i for i in range(last.stop, len(labels)) if labels[i].turn == turn]
    if any(labels[i].part == "call" for i in after):
        raise ValueError(
            f"turn {turn} ends with a call of a tool: thoughts are studied by the answers to which they lead"
        )
    said = [i for i in after if labels[i].part == "content"]
    if not said:
        raise ValueError(
            f"turn {turn} has a thought and no answer after it: let the model finish it, model.rollouts(chat, 1).chats[0]"
        )
    (start, _), (_, stop) = chat.offsets[0][said[0]], chat.offsets[0][said[-1]]
    return range(said[0], said[-1] + 1), chat.texts[0][start:stop].strip()


def _values(drawn: Resampled, measured: Metric, is_own_answer: bool) -> Float[Tensor, "before rollout"]:
    """The metric of each answer; NaN of rollouts that have not ended. Warns if these are many, and if no answer counts."""
    found = torch.tensor([[float(measured(text)) for text in row] for row in drawn.answers]).view(drawn.ended.shape)
    values = found.where(drawn.ended, torch.nan)
    if drawn.ended.numel() and (share := 1 - drawn.ended.float().mean().item()) > MANY:
        warn_caller(
            f"{share:.0%} of the rollouts did not come to the end of their answer, and are left out: give more max_new_tokens"
        )
    if is_own_answer and drawn.ended.numel() and not values[-1].nansum():
        warn_caller(
            "no rollout that keeps the whole thought gives the answer of the conversation word for word, so that nothing can be "
            "important: give metric=, a function that reads the answer from the text"
        )
    return values
