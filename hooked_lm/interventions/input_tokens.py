"""InputTokens records the input token ids of a model, and which of them are padding."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hooked_lm.hooks import HookPoint
from hooked_lm.hooks.generation_step import current
from hooked_lm.hooks.select import Site
from hooked_lm.interventions.collector import Collector
from hooked_lm.interventions.per_thread import PerThread
from hooked_lm.keywords import check_keywords

__all__ = ["InputTokens", "Texts"]


@dataclass(frozen=True, eq=False)
class Texts:
    """The tokens of one call: all ids of its rows so far, the mask of real ones, the number of the first row, and how many ids
    are new. `sites` are the sites that have already used them in this call."""

    ids: Int[Tensor, "batch pos"]
    mask: Bool[Tensor, "batch pos"]
    first: int
    n_new: int
    sites: set[str] = field(default_factory=set)


@dataclass
class _Reading:
    """The state of a thread: the tokens of its last call, whether `batch` has set those of the next, and the tokens so far of
    each running generation."""

    latest: Texts | None = None
    is_given: bool = False
    generated: WeakKeyDictionary[Any, Texts] = field(default_factory=WeakKeyDictionary)


@dataclass(eq=False, repr=False)
class InputTokens(Collector):
    """Keeps the token ids of each batch, with masks of real (not padding) and special tokens.

    The attention mask is not part of the ids: pass it to `batch(tokens, mask)` before the forward pass. Otherwise ids equal to
    `pad` at either end of a row count as padding; without `pad` there is none. In generation the padding is known, and each
    step is a call that continues the earlier rows. An encoder-decoder has "hook_tokens" (its source) and
    "hook_decoder_tokens"; for a wrapped module, which has no such site, `batch` must pass the ids.

    Args:
        pad: the id of padding, unless it has another meaning too.
        special: the ids of special tokens.
        most_calls: how many batches to keep; the oldest are dropped. All if None.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> inputs = InputTokens.of(model)
    >>> _ = model.run_with_hooks("The capital of France is", fwd_hooks=[inputs])
    >>> inputs.special_mask[0].tolist()
    [[True, False, False, False, False, False]]
    """

    hook_point: Site = "hook_tokens"
    pad: int | None = field(default=None, kw_only=True)
    special: Sequence[int] = field(default=(), kw_only=True)
    most_calls: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most_calls is not None and self.most_calls < 1:
            raise ValueError(f"most_calls must be at least 1, got {self.most_calls}")
        self.special = tuple(sorted(self.special))
        self.clear()

    @classmethod
    def of(cls, model: Any, hook_point: Site = "hook_tokens", **settings: Any) -> "InputTokens":
        """InputTokens with the special ids of a model's tokenizer, and its pad id unless that is also BOS or EOS.

        `settings` are the other arguments of the class; TypeError for one that it does not have.
        """
        check_keywords("InputTokens.of", settings, ("layer", "most_calls", "store", "when"))
        tokenizer = model.tokens.need_tokenizer()
        ids = {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("pad", "bos", "eos")}
        alone = ids["pad"] not in (ids["bos"], ids["eos"])
        special = [int(token) for token in tokenizer.all_special_ids]
        return cls(hook_point, pad=ids["pad"] if alone else None, special=special, **settings)

    def clear(self) -> None:
        """Deletes everything, and counts texts from 0 again."""
        self.ids: list[Tensor] = []
        self.mask: list[Tensor] = []
        self.n_texts = 0
        self._reading = PerThread(_Reading)

    @property
    def latest(self) -> Texts | None:
        """The tokens of the last call in this thread, or of the next one if `batch` has set them."""
        return self._reading.value.latest

    def batch(self, tokens: Int[Tensor, "batch pos"], mask: Tensor | None = None) -> None:
        """Sets the ids of the next forward pass and their mask (1: real, 0: padding); ValueError for a mask of another shape."""
        if mask is not None and mask.shape != tokens.shape:
            raise ValueError(f"the mask is {list(mask.shape)}, and the tokens are {list(tokens.shape)}")
        with self._lock:
            self._begin(tokens, self._not_padding(tokens) if mask is None else mask)
        self._reading.value.is_given = True

    def see(self, value: Tensor, hook: HookPoint) -> None:
        reading, before, generation = self._reading.value, self.latest, current()
        was_given, reading.is_given = reading.is_given, False
        if generation is not None and generation.text in reading.generated:
            self._continue(value, hook, reading.generated[generation.text])
        elif not was_given:
            self._begin(value, self._not_padding(value) if hook.positions is None else hook.positions >= 0)
        elif before is None or value.shape != before.ids.shape or bool((value.cpu() != before.ids).any()):
            given = None if before is None else list(before.ids.shape)
            raise ValueError(
                f"'{hook.name}' reads ids {list(value.shape)}, and batch() was called with others {given}: call it with the "
                "ids of this forward pass, or not at all"
            )
        if generation is not None and reading.latest is not None:
            reading.generated[generation.text] = reading.latest

    def _begin(self, tokens: Tensor, mask: Tensor) -> None:
        ids, real = self._add(tokens, mask)
        self._reading.value.latest = Texts(ids, real, self.n_texts, ids.shape[1])
        self.n_texts += len(ids)

    def _continue(self, tokens: Tensor, hook: HookPoint, before: Texts) -> None:
        """Adds a generation step: its input is the new tokens with a key/value cache, and all tokens without."""
        real = torch.ones_like(tokens) if hook.positions is None else hook.positions.expand(tokens.shape) >= 0
        ids, mask = self._add(tokens, real)
        if ids.shape[1] > before.ids.shape[1]:
            self._reading.value.latest = Texts(ids, mask, before.first, ids.shape[1] - before.ids.shape[1])
        else:
            whole = torch.cat([before.ids, ids], 1), torch.cat([before.mask, mask], 1)
            self._reading.value.latest = Texts(*whole, before.first, ids.shape[1])

    def _add(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        mask = mask.expand(tokens.shape)
        ids, real = tokens.detach().to("cpu", torch.long, copy=True), mask.detach().to("cpu", torch.bool, copy=True)
        self.ids.append(ids)
        self.mask.append(real)
        if self.most_calls is not None:
            del self.ids[: -self.most_calls], self.mask[: -self.most_calls]
        self._write(str(self.hook_point), {"ids": ids, "mask": real})
        return ids, real

    def _not_padding(self, tokens: Tensor) -> Tensor:
        if self.pad is None:
            return torch.ones_like(tokens, dtype=torch.bool)
        real = (tokens != self.pad).long()
        return (real.cumsum(-1) > 0) & (real.flip(-1).cumsum(-1).flip(-1) > 0)

    @property
    def n_bytes(self) -> int:
        """The memory of the ids and masks."""
        kept = [*self.ids, *self.mask, *((self.latest.ids, self.latest.mask) if self.latest else ())]
        return sum({id(ids): ids.numel() * ids.element_size() for ids in kept}.values())

    @property
    def special_mask(self) -> list[Tensor]:
        """The mask of special ids, for each batch."""
        return [torch.isin(ids, torch.tensor(self.special, dtype=torch.long)) for ids in self.ids]

    def texts_of(self, value: Tensor, site: str) -> "Texts":
        """The texts of a value [batch, pos, ...] of this call; each site may get them once for each call.

        Raises ValueError if they are not known, as in a forward pass that starts after the embedding.
        """
        now = self.latest
        if now is not None and site in now.sites:
            raise ValueError(
                f"the token ids of this call are not known at '{site}', only those of an earlier one: run from the tokens on, or "
                "call batch(tokens, mask) before each run"
            )
        if now is None or len(now.ids) != len(value) or value.shape[1] not in (now.n_new, now.ids.shape[1]):
            known = "not known" if now is None else list(now.ids.shape)
            raise ValueError(
                f"'{site}' is {list(value.shape)}, and the token ids are {known}: run from the tokens on, or call "
                "batch(tokens, mask) before each run"
            )
        now.sites.add(site)
        return now
