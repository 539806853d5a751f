"""The first position at which a cell differs from the base run; earlier positions need no computation."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from hooked_lm.engine.base_run import BaseRun
from hooked_lm.engine.edit import NONE, Edit, Input
from hooked_lm.engine.site_info import SiteInfo, score_edits


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
            there = self.base.kept[edit.site]
            new = edit.source(there, self.site_infos[edit.site].dims, self.base.n_pos).to(there)
            differs = (new != there).transpose(0, 1).flatten(1).any(1)
            self._known[key] = int(differs.long().argmax()) if bool(differs.any()) else self.base.n_pos
        first = self._known[key]
        return max(start, first) if first < stop else self.base.n_pos
