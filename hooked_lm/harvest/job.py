"""The work of a harvest: its plan, its documents, and a model that computes its shards."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hooked_lm import shards
from hooked_lm.engine.stacks import has_two_stacks
from hooked_lm.harvest.documents import STREAM, Documents, digest
from hooked_lm.harvest.plan import HarvestPlan, planned
from hooked_lm.harvest.rows import RowMaker
from hooked_lm.harvest.shard import write_shard
from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.select import Site
from hooked_lm.models.text.methods import TextMethods
from hooked_lm.shards.job import Advance
from hooked_lm.shards.records import read_record, record_path, recorded
from hooked_lm.shards.run import Part


@dataclass
class HarvestJob(shards.Job):
    """A harvest in its folder."""

    plan: HarvestPlan
    folder: Path
    documents: Documents
    maker: RowMaker
    UNIT: ClassVar[str] = "tokens"

    def __post_init__(self) -> None:
        self.model = self.maker.model

    def n_units(self, n_shards: int) -> int:
        return round(self.plan.tokens_per_document * self.plan.items_per_shard * n_shards)

    def check_documents(self, part: Part) -> None:
        """Raises ValueError for a complete shard of the part that was computed from other documents.

        Only a stream can have others under the same plan, which knows its beginning.
        """
        if self.plan.data["kind"] != STREAM:
            return
        i, n = part
        for shard in recorded(self.folder):
            if shard % n != i:
                continue
            known = read_record(record_path(self.folder, shard), ("documents_sha256",))["documents_sha256"]
            texts = self.documents.between(*self.plan.places(shard))
            if digest(document for _, document in texts) != known:
                raise ValueError(
                    f"shard {shard} in {self.folder} was computed from other documents: the stream begins as that one did, and "
                    "goes on differently. Give another directory, or delete the folder"
                )

    def write(self, shard: int, advance: Advance) -> bool:
        return write_shard(self.plan, self.documents, self.maker, self.folder, shard, advance) is not None


def job_of(
    model: HookedRootModule,
    documents: Documents,
    sites: Site,
    directory: str | os.PathLike[str],
    maker: RowMaker,
    **settings: Any,
) -> HarvestJob:
    """A harvest with its plan written. Raises ValueError, before that, for what cannot be harvested."""
    if has_two_stacks(model):
        raise ValueError("a harvest reads documents by decoders and encoders; this model needs a source and a target")
    if not isinstance(model, TextMethods):
        raise TypeError(f"a harvest reads texts, which a {type(model).__name__} does not")
    plan = planned(model, documents, sites, maker, **settings)
    folder = plan.write(directory)
    return HarvestJob(plan, folder, documents, maker)
