"""Rollouts: many continuations of one prompt, which is read once."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.generation_step import run_generation
from hooked_lm.hooks.token_labels import PADDING, PARTS, Labels
from hooked_lm.models.generation.decoder import started
from hooked_lm.models.generation.loop import check_room, end_ids
from hooked_lm.models.generation.reading import read_prefix
from hooked_lm.models.generation.sampling import check_sampling
from hooked_lm.models.prefix import Prefix, Prompt, as_prompt, changing_hooks, opened
from hooked_lm.models.text.chat import Chat, Decodes, continued
from hooked_lm.notebook_repr import NotebookRepr, Table, short_repr
from hooked_lm.progress import progress_bar


@dataclass(frozen=True, eq=False)
class Rollouts(NotebookRepr):
    """Sampled continuations of one prompt; see `model.rollouts`.

    Attributes:
        prompt: the prompt as it was given.
        tokens: the new ids [n, new], padded on the right with the token that ends a row.
        attention_mask: 1 for tokens that the model wrote, also the one that ends a row, 0 for padding.
        texts: of each row the text of its new tokens, without special ones; empty if the model has no tokenizer.
        has_ended: which rows ended before `max_new_tokens`.
        labels: of each row, for each column what it is, if the prompt is a conversation; else None.
    """

    prompt: object
    tokens: Int[Tensor, "n new"]
    attention_mask: Int[Tensor, "n new"]
    texts: tuple[str, ...]
    has_ended: Bool[Tensor, " n"]
    labels: tuple[Labels, ...] | None
    tokenizer: Decodes | None = field(repr=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def of(self, part: str) -> tuple[str, ...]:
        """Of each row the text of a part: "thinking" or "content". "" where there is none.

        Raises ValueError for another name, and if the prompt is no conversation.
        """
        if part not in PARTS:
            raise ValueError(f"a part is one of {', '.join(PARTS)}, got {part!r}")
        labels, tokenizer = self._conversation()
        rows = zip(self.tokens.tolist(), labels, strict=True)
        each = ([token for token, label in zip(*row, strict=True) if label.part == part] for row in rows)
        return tuple(tokenizer.decode(some, skip_special_tokens=True).strip() for some in each)

    @property
    def chats(self) -> tuple[Chat, ...]:
        """Of each row the conversation with what the model wrote, token by token; its last message is the turn that it wrote.

        Raises ValueError if the prompt is no `Chat`, or no prefix of one.
        """
        labels, tokenizer = self._conversation()
        chat = self.prompt.prompt if isinstance(self.prompt, Prefix) else self.prompt
        if not isinstance(chat, Chat):
            raise ValueError(
                f"the prompt is a {type(chat).__name__}: conversations continue a Chat, or a prefix of one"
            )
        lengths = self.attention_mask.sum(1).tolist()
        rows = zip(self.tokens.tolist(), labels, lengths, strict=True)
        return tuple(continued(chat, new[:n], of_row[:n], tokenizer) for new, of_row, n in rows)

    def _conversation(self) -> tuple[tuple[Labels, ...], Decodes]:
        if self.labels is None or self.tokenizer is None:
            raise ValueError("the prompt of these rollouts has no roles: give model.chat(messages)")
        return self.labels, self.tokenizer

    def repr_table(self) -> Table:
        """The text of each row, and why it ends."""
        ends = ("end" if ended else "max_new_tokens" for ended in self.has_ended.tolist())
        rows = zip(
            range(len(self)), self.attention_mask.sum(1).tolist(), ends, map(short_repr, self.texts), strict=True
        )
        return Table(("row", "tokens", "ends by", "text"), rows)

    def __repr__(self) -> str:
        return f"Rollouts({len(self)} x {self.tokens.shape[1]} tokens, {int(self.has_ended.sum())} ended)"


def rollouts(
    model: HookedRootModule,
    prompt: Prompt,
    n: int,
    max_new_tokens: int = 100,
    *,
    seed: int | torch.Generator | None = None,
    batch_size: int | None = None,
    stop_at_eos: bool = True,
    eos_token_id: int | Sequence[int] | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float = 1.0,
    freq_penalty: float = 0.0,
    prepend_bos: bool | None = None,
    chunk: int | str | None = None,
    progress: bool | None = None,
) -> Rollouts:
    """Samples `n` continuations of one prompt, which is read once and shared by all of them.

    Each equals a row of `generate` from the prompt, under the active hooks, up to rounding. The random numbers of row i
    depend on the seed and on i alone: with more rows, a longer `max_new_tokens` or another `batch_size` they are the same.
    Its tokens are then the same unless logits that are rounded otherwise, as in a batch of another size, move a choice.

    Args:
        prompt: text, token ids, a `Chat` (also one that is cut within a thought, `chat[0, :n]`), a prefix or `prefix + text`:
            one row.
        n: the number of rows.
        seed: an int, or a generator to draw from; torch's global generator if None.
        batch_size: the number of rows that run together; all if None.
        progress: a bar on work longer than two seconds if None.

    The other arguments are those of `generate`.

    Raises ValueError for several prompts, `n` below 1, hooks with `rows`, and as `generate`.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> drawn = model.rollouts("The capital of France is", 4, max_new_tokens=2, seed=0)
    >>> drawn.tokens.shape, len(drawn.texts)
    (torch.Size([4, 2]), 4)
    >>> drawn.tokens[:2].equal(
    ...     model.rollouts("The capital of France is", 2, 2, seed=0).tokens
    ... )
    True
    """
    if n < 1 or (batch_size is not None and batch_size < 1):
        raise ValueError(f"n and batch_size are numbers of rows, at least 1, got {n} and {batch_size}")
    check_sampling(top_k, top_p, temperature)
    _check_no_rows(model)
    ends = end_ids(model, eos_token_id) if stop_at_eos else []
    how = {"prepend_bos": prepend_bos, "padding_side": None, "attention_mask": None}
    start = opened(model, as_prompt(prompt), max_new_tokens, how)
    if (n_rows := len(start[0].real)) != 1:
        raise ValueError(f"rollouts continue one prompt, got {n_rows}: call it for each, or generate(prompts)")
    check_room(len(start[0]), max_new_tokens, model.cfg.longest_input)
    prefix = read_prefix(model, prompt, start, None, chunk)
    master = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    device = "cpu" if master is None else master.device
    seeds = torch.randint(1 << 62, (n,), generator=master, device=device).tolist()
    bar = progress_bar("rollouts", n * max_new_tokens, progress, "tokens")

    def written() -> list[tuple[Tensor, Sequence[Labels] | None]]:
        found = []
        for first in range(0, n, batch_size or n):
            some = seeds[first : first + (batch_size or n)]
            reader, steps = started(
                model, prefix.repeated(len(some)), max_new_tokens, None, stop_at_eos, eos_token_id, True, top_k, top_p,
                temperature, freq_penalty, seed=some,
            )  # fmt: skip
            for _ in steps:
                bar.update(len(some))
            found.append((reader.sequence.tokens[:, prefix.tokens.shape[1] :], reader.sequence.labels))
        return found

    with bar:
        return _result(model, prompt, prefix, run_generation(written), ends)


def _check_no_rows(model: HookedRootModule) -> None:
    """Raises ValueError for a hook that acts on some rows of a batch, as the prompt is one row of all."""
    for hook in changing_hooks(model):
        if getattr(hook.user_hook, "rows", None) is not None:
            raise ValueError(
                f"{hook.user_hook!r} at '{hook.point.name}' acts on some rows, and rollouts share the row of their prompt: omit "
                "rows, or use generate"
            )


def _result(
    model: HookedRootModule,
    prompt: object,
    prefix: Prefix,
    batches: Sequence[tuple[Tensor, Sequence[Labels] | None]],
    ends: list[int],
) -> Rollouts:
    """The rows of all batches, as long as the longest."""
    n_new = max(new.shape[1] for new, _ in batches)
    fill = next(iter(ends), 0)
    tokens = torch.cat([F.pad(new, (0, n_new - new.shape[1]), value=fill) for new, _ in batches])
    is_end = torch.isin(tokens, tokens.new_tensor(ends))
    real = is_end.cumsum(1) - is_end.long() == 0
    lengths = real.sum(1).tolist()
    labels = None
    if prefix.sequence.growing is not None:
        n_prompt = prefix.n_pos
        rows = [row[n_prompt:] for _, of_batch in batches for row in of_batch or ()]
        labels = tuple((*row[:n], *[PADDING] * (n_new - n)) for row, n in zip(rows, lengths, strict=True))
    texts: tuple[str, ...] = ()
    if model.tokenizer is not None:
        before = prefix.tokens[0, -1:].tolist()
        written = ([*before, *row[:n]] for row, n in zip(tokens.tolist(), lengths, strict=True))
        n_before = len(model.tokenizer.decode(before, skip_special_tokens=True))
        texts = tuple(model.tokenizer.decode(row, skip_special_tokens=True)[n_before:] for row in written)
    return Rollouts(prompt, tokens, real.long(), texts, is_end.any(1), labels, model.tokenizer)
