"""Thought anchors: which sentences of a chain of thought decide the answer, and the sentences after them."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hooked_lm.analysis.thoughts.receivers import attention_between, kurtosis, vertical_scores
from hooked_lm.analysis.thoughts.resampling import Different, Metric, other_words, resample
from hooked_lm.analysis.thoughts.sentences import Split, ThoughtSentence, sentences_of, split_sentences
from hooked_lm.analysis.thoughts.suppression import suppress
from hooked_lm.errors import ArgumentError
from hooked_lm.extras import lazy_import
from hooked_lm.hooks.head_labels import head_label
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
TENSORS = ("values", "differs", "suppression", "received")
ANSWER = "answer"
LONGEST = 40  # characters of a sentence in a label


@dataclass(frozen=True, eq=False, repr=False)
class ThoughtAnchors(Tabular):
    """What the sentences of a thought do; see `thought_anchors`.

    Attributes:
        sentences: their texts and positions.
        tokens: the tokens of each, as strings.
        answer: the answer of the conversation.
        values: of each rollout from before a sentence, and in the last row from after all of them, the metric of its answer.
        answers: the texts of these answers.
        differs: whether the first sentence of a rollout differs from the one that it replaces.
        suppression: the mean divergence, in nats, of the predictions of each later sentence, and in the last row of the
            answer, if attention to a sentence is suppressed; NaN for what is not later.
        received: the mean attention of each head to a sentence from later ones; NaN if there are none.
        about: the origin of the numbers.
    """

    sentences: tuple[ThoughtSentence, ...]
    tokens: tuple[tuple[str, ...], ...]
    answer: str
    values: Float[Tensor, "before rollout"]
    answers: tuple[tuple[str, ...], ...]
    differs: Bool[Tensor, "sentence rollout"]
    suppression: Float[Tensor, "later sentence"]
    received: Float[Tensor, "layer head sentence"]
    about: dict[str, Any]

    def importance(self, kind: str = "counterfactual", level: float = 0.95) -> list[Difference]:
        """The importance of each sentence for the answer, with confidence intervals.

        The mean metric of rollouts that keep the sentence, less that of rollouts from just before it: of all of them
        ("resampling"), or of those whose first sentence differs ("counterfactual"; NaN if none does). Raises ValueError for
        another kind.
        """
        if kind not in KINDS:
            raise ArgumentError(f"kind must be 'counterfactual' or 'resampling', got {kind!r}")
        replaced = [
            before[differs] if kind == "counterfactual" else before
            for before, differs in zip(self.values[:-1], self.differs, strict=True)
        ]
        return [difference(kept, other, level) for kept, other in zip(self.values[1:], replaced, strict=True)]

    @property
    def n_different(self) -> list[int]:
        """How many rollouts from before each sentence begin with another one."""
        return self.differs.sum(1).tolist()

    @property
    def kurtosis(self) -> Float[Tensor, "layer head"]:
        """The excess kurtosis of what sentences receive from each head: large if few of them stand out."""
        return kurtosis(self.received)

    def receiver_heads(self, n: int = 16) -> list[str]:
        """The heads with the largest kurtosis, such as "L1H7", at most `n`, the largest first. Empty if fewer than four sentences
        have later ones at the distance asked for, and so no kurtosis."""
        found = self.kurtosis.nan_to_num(nan=-torch.inf).flatten()
        order = found.argsort(descending=True, stable=True).tolist()[:n]
        n_heads = self.received.shape[1]
        return [head_label(*divmod(place, n_heads)) for place in order if found[place].isfinite()]

    def received_from(self, n: int = 16) -> Float[Tensor, " sentence"]:
        """The mean attention to each sentence of the `n` receiver heads; NaN if no head has a kurtosis."""
        heads = self.receiver_heads(n)
        rows = [self.received[int(head[1 : head.index("H")]), int(head[head.index("H") + 1 :])] for head in heads]
        return torch.stack(rows).mean(0) if rows else torch.full((len(self.sentences),), torch.nan)

    def counts(self) -> "pd.DataFrame":
        """How often each answer came: a row for each answer, the most frequent first, and a column for each sentence before
        which rollouts began, the last for those after all sentences."""
        every = Counter(answer for row in self.answers for answer in row)
        rows = [[Counter(row)[answer] for row in self.answers] for answer, _ in every.most_common()]
        columns = [f"before {i}" for i in range(len(self.sentences))] + ["after all"]
        return pd.DataFrame(
            rows, index=pd.Index([answer for answer, _ in every.most_common()], name=ANSWER), columns=columns
        )

    def effects(self) -> Scores:
        """`suppression` with its axes, "later" and "sentence"."""
        labels = [f"{i} {one.text[:LONGEST]}" for i, one in enumerate(self.sentences)]
        return Scores(self.suppression[..., None], {"later": [*labels, ANSWER], "sentence": labels}, about=self.about)

    def to_dataframe(self, level: float = 0.95, n: int = 16) -> "pd.DataFrame":
        """A row for each sentence: its text; its importance by both kinds with intervals, and how many rollouts differed.

        If it is suppressed, the largest divergence of a later sentence, and that of the answer; and what it receives from `n`
        receiver heads.
        """
        table: dict[str, Any] = {
            "sentence": [one.text for one in self.sentences],
            "kept": self.values[1:].mean(1).tolist(),
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
                "suppression": later.where(later.isfinite(), torch.nan).tolist(),
                "suppression_answer": self.suppression[-1].tolist(),
                "received": self.received_from(n).tolist(),
            }
        )

    def plot(self, kind: str = "counterfactual", title: str = "") -> "go.Figure":
        """The importance of each sentence with its interval; `effects().plot()` draws what suppression changes."""
        from hooked_lm import viz

        found = torch.tensor([list(each) for each in self.importance(kind)])
        return viz.bars(
            found[:, 0],
            [f"{i} {one.text[:LONGEST]}" for i, one in enumerate(self.sentences)],
            (found[:, 1], found[:, 2]),
            title=title or f"Thought anchors: {kind} importance",
            x_title="sentence",
            y_title="difference of the mean metric",
        )

    def view(self, title: str = "Thought anchors") -> "View":
        """The thought, each sentence coloured by a measure, which buttons choose: a column of `to_dataframe`."""
        from hooked_lm import viz

        measures = {
            **{kind: [each.mean for each in self.importance(kind)] for kind in KINDS},
            "suppression: answer": self.suppression[-1].tolist(),
            "received": self.received_from().tolist(),
        }
        pairs = {name: zip(values, self.tokens, strict=True) for name, values in measures.items()}
        spread = {name: [value for value, own in both for _ in own] for name, both in pairs.items()}
        return viz.tokens([token for own in self.tokens for token in own], spread, title=title)

    def save(self, path: str | Path) -> None:
        """Writes everything to one safetensors file; `load` restores it."""
        header = {name: getattr(self, name) for name in ("sentences", "tokens", "answer", "answers", "about")}
        stored.write(path, FORMAT, {name: getattr(self, name) for name in TENSORS}, header)

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "ThoughtAnchors":
        """Reads what `save` wrote. Raises ValueError for any other file."""
        tensors, header = stored.read(path, FORMAT)
        sentences = tuple(ThoughtSentence(*each) for each in header["sentences"])
        tokens, answers = (tuple(map(tuple, header[name])) for name in ("tokens", "answers"))
        values, differs, suppression, received = (tensors[name] for name in TENSORS)
        return cls(
            sentences, tokens, header["answer"], values, answers, differs, suppression, received, header["about"]
        )

    def __repr__(self) -> str:
        found = torch.tensor([each.mean for each in self.importance()]).nan_to_num(nan=-torch.inf)
        best = int(found.argmax())
        most = f"; most important: {best} {self.sentences[best].text[:LONGEST]!r}" if found[best].isfinite() else ""
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
    batch_size: int = 100,
    progress: bool | None = None,
    **sampling: object,
) -> ThoughtAnchors:
    """Which sentences of a thought matter, measured in three ways (Bogdan et al. 2025, arXiv:2506.19143).

    Rollouts: from just before each sentence the model writes the rest `n` times. A sentence is important for the answer if
    answers differ between rollouts that keep it and those that begin with another sentence. The rollouts that keep one sentence
    are those from before the next one; each set shares the keys and values of what it continues.

    Suppression: if no later token attends to the sentence, in any layer and head, by how much the predictions of each later
    sentence change. The text stays as it is, so an effect is one on that sentence itself.

    Receiver heads: heads whose queries in later sentences look at few sentences, by the kurtosis of the attention that sentences
    receive. It says where heads look, not what for: compare it with the other two.

    Args:
        chat: one conversation whose last thought is studied, with the answer to which it led, such as `chat.reply(model)`.
        n: the number of rollouts from each place.
        metric: the number that the text of an answer gives, such as 1.0 if it is right; by default 1.0 if it is the answer of
            the conversation. A rollout that has not come to its answer after `max_new_tokens` has the text "".
        max_new_tokens: of a rollout; None: twice as many as the conversation has from there on, as far as the context allows.
        split: cuts the text of the thought into sentences that together are the text.
        is_different: whether the first sentence of a rollout differs from the one that it replaces: by default, in its words.
            The paper asks for a cosine similarity of sentence embeddings below the median.
        distance: the attention that a sentence receives is that from so many sentences later on.
        batch_size: how many rollouts, and suppressed sentences, run together at most.
        progress: a bar on work longer than two seconds if None.
        sampling: of `model.rollouts`: `temperature`, `top_k`, `top_p`, and others.

    Raises ValueError for several conversations, one without thought or answer, and fewer than two rollouts.

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
    sentences = sentences_of(chat, split)
    turn = chat.labels[0][sentences[0].start].turn
    said = [i for i, (of, _, part) in enumerate(chat.labels[0]) if of == turn and part == "content"]
    if not [i for i in said if i >= sentences[-1].stop]:
        raise ValueError(
            f"turn {turn} has a thought and no answer after it: let the model finish it with chat.reply(model)"
        )
    if n < 2:
        raise ValueError(f"n is the number of rollouts from each place, at least 2, got {n}")
    answer = chat.of({"turn": turn, "part": "content"}).strip()
    measured = metric or (lambda text: float(text == answer))
    options = {"batch_size": batch_size, **sampling}
    found = resample(model, chat, sentences, n, max_new_tokens, seed, split, is_different, progress, options)
    later = [*(range(one.start, one.stop) for one in sentences), range(said[0], said[-1] + 1)]
    return ThoughtAnchors(
        sentences,
        tuple(chat.str_tokens[0][one.start : one.stop] for one in sentences),
        answer,
        torch.tensor([[float(measured(text)) for text in row] for row in found.answers]),
        found.answers,
        found.differs,
        suppress(model, chat, sentences, later, batch_size),
        vertical_scores(attention_between(model, chat, sentences), distance),
        provenance(model, n=n, distance=distance, seed=seed if isinstance(seed, int) else None),
    )
