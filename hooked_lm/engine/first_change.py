"""The first position at which a cell differs from the base run; earlier positions need no computation."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from hooked_lm.components.readable import is_readable
from hooked_lm.engine.base_run import BaseRun
from hooked_lm.engine.edit import NONE, Edit, Input
from hooked_lm.engine.site_info import SiteInfo, score_edits
from hooked_lm.models.vision.inputs import Rows


class FirstChange:
    """Finds the first position at which a cell differs from the base run.

    Earlier positions of a causal model equal the base run, unless they see later ones in their image, or the base run has an
    edited attention pattern.
    """

    def __init__(self, base: BaseRun, site_infos: Mapping[str, SiteInfo]) -> None:
        self.base, self.site_infos = base, site_infos
        starts = [edit.span(base.n_pos)[0] for edit in score_edits(base.edits, site_infos)]
        self._causal_until = min(starts, default=base.n_pos)  # a changed pattern may attend to later keys
        self._known: dict[tuple[str, int], int] = {}

    def without_unchanged_prefix(self, edits: Sequence[Edit]) -> list[Edit]:
        """The edits of a cell from its first change on, without empty edits (except at on-demand sites)."""
        n_pos = self.base.n_pos
        first = min((self.of(edit) for edit in edits), default=n_pos)
        if first < n_pos:
            first = min(self.base.context.first_reader(first), self._causal_until)
        later = [edit.starting_at(first, n_pos) for edit in edits]
        return [edit for edit in later if edit.span(n_pos) != NONE or self.site_infos[edit.site].on_demand]

    def of(self, edit: Edit) -> int:
        """The first position that an edit changes (or may change, if the base run did not keep the site)."""
        start, stop = edit.span(self.base.n_pos)
        if edit.site not in self.base.kept or not isinstance(edit.value, Tensor) or isinstance(edit, Input):
            return start
        key = edit.site, id(edit.value)
        if key not in self._known:
            differs = self._differs(edit).transpose(0, 1).flatten(1).any(1)
            self._known[key] = int(differs.long().argmax()) if bool(differs.any()) else self.base.n_pos
        first = self._known[key]
        return max(start, first) if first < stop else self.base.n_pos

    def _differs(self, edit: Edit) -> Bool[Tensor, "batch pos *features"]:
        """Where the new values differ from those of the base run; in a dry run, where the tokens of both runs do."""
        there = self.base.kept[edit.site]
        if is_readable(there):
            return edit.source(there, self.site_infos[edit.site].dims, self.base.n_pos).to(there) != there
        here, other = self.base.tokens, getattr(edit.value, "of_tokens", None)
        if isinstance(here, Tensor) and isinstance(other, Tensor) and here.shape == other.shape:
            return torch.ne(here, other)
        return torch.ones(here.shape, dtype=torch.bool)


def note_tokens(values: Iterable[Tensor], tokens: Rows) -> None:
    """Notes of values of a dry run, which cannot be compared, of which tokens they are."""
    for value in values:
        if not is_readable(value):
            value.of_tokens = tokens  # type: ignore[attr-defined]
