"""The labels of conversations that a model continues."""

from collections.abc import Sequence
from copy import copy
from itertools import takewhile

from jaxtyping import Bool, Int
from torch import Tensor

from hooked_lm.hooks.token_labels import PADDING, Labels, TokenLabel
from hooked_lm.models.text.chat import Chat, Decodes
from hooked_lm.models.text.chat_spans import is_header_at_end, thinks_at_end


class GrowingLabels:
    """The labels of conversations that a model continues: what it generates is the next turn of the assistant.

    A conversation that ends within a turn of the assistant is continued there. Thoughts are what follows the opening marker of a
    template, until the closing one.
    """

    def __init__(self, chat: Chat, tokenizer: Decodes) -> None:
        self._tokenizer = tokenizer
        self._rows = [[label for label in row if label != PADDING] for row in chat.labels]
        self._markers = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        self._turns = [_next_turn(chat, row) for row in range(len(chat))]
        self._written = [_written_in(chat, row, turn) for row, turn in enumerate(self._turns)]

    def repeated(self, n: int) -> "GrowingLabels":
        """The same for `n` rows, which grow by themselves: each of these, or the only one again and again."""
        made, rows = copy(self), range(n) if len(self._rows) == n else [0] * n
        made._rows = [[*self._rows[row]] for row in rows]
        made._turns, made._written = [self._turns[row] for row in rows], [self._written[row] for row in rows]
        return made

    def then(self, chat: Chat) -> "GrowingLabels":
        """These with what follows of a conversation, of which each row has the beginning."""
        made, after = self.repeated(len(self._rows)), GrowingLabels(chat, self._tokenizer)
        for row, before in enumerate(made._written):
            is_same = {label.turn for label in after._rows[0]} <= {-1, after._turns[0]} and (
                made._turns[row] == after._turns[0]
            )
            made._rows[row] += after._rows[0]
            made._turns[row] = after._turns[0]
            made._written[row] = (before if is_same else "") + after._written[0]
        return made

    def of(self, real: Bool[Tensor, "batch pos"], tokens: Int[Tensor, "batch pos"]) -> Sequence[Labels]:
        """The labels of all real tokens of each row, of which the last ones may be new."""
        for row, labels in enumerate(self._rows):
            for token in tokens[row][real[row]][len(labels) :].tolist():
                labels.append(self._next(row, token))
        return self._rows

    def _next(self, row: int, token: int) -> TokenLabel:
        before = self._written[row]
        after = self._written[row] = before + self._tokenizer.decode([token], skip_special_tokens=False)
        thinks = thinks_at_end(after)
        is_marker = thinks != thinks_at_end(before) or is_header_at_end(after) or token in self._markers
        return TokenLabel(self._turns[row], "assistant", "marker" if is_marker else "thinking" if thinks else "content")


def _next_turn(chat: Chat, row: int) -> int:
    """The turn that a model goes on with."""
    last, messages = chat.labels[row][-1], chat.messages[row]
    if chat.options.get("continue_final_message") and messages[-1]["role"] == "assistant":
        return len(messages) - 1
    return last.turn if last.role == "assistant" and last.part != "marker" else len(messages)


def _written_in(chat: Chat, row: int, turn: int) -> str:
    """What the template wrote of a turn at the end of a conversation."""
    n = sum(1 for _ in takewhile(lambda label: label.turn in (-1, turn), reversed(chat.labels[row])))
    return chat.texts[row][chat.offsets[row][-n][0] :] if n else ""
