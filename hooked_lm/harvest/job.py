"""The work of a harvest: its plan, its documents, and a model that computes its shards."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hooked_lm.engine.progress import progress_bar
from hooked_lm.harvest.documents import Documents
from hooked_lm.harvest.plan import Plan, planned
from hooked_lm.harvest.rows import RowMaker
from hooked_lm.harvest.shard import write_shard
from hooked_lm.harvest.shard_file import record_path, remove_leftovers
from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.select import Site
from hooked_lm.models.encoder_decoder import EncoderDecoder


@dataclass
class Job:
    """A harvest in its folder."""

    plan: Plan
    folder: Path
    documents: Documents
    maker: RowMaker

    def is_done(self, shard: int) -> bool:
        """Whether a shard has a record."""
        return record_path(self.folder, shard).exists()

    def left(self, shards: Iterable[int]) -> list[int]:
        """Those of the shards that have no record; of a data set of known length."""
        return [shard for shard in shards if not self.is_done(shard)]

    def n_tokens(self, n_shards: int) -> int:
        """The number of tokens of some shards, about."""
        return round(self.plan.tokens_per_document * self.plan.documents_per_shard * n_shards)

    def compute(self, shards: Iterable[int], progress: bool | None = None) -> None:
        """Computes those of the shards that have no record yet, with the threads of the plan."""
        before, total = torch.get_num_threads(), None
        if self.plan.n_shards is not None:
            shards = self.left(shards)
            total = self.n_tokens(len(shards))
        torch.set_num_threads(self.plan.threads)
        try:
            with progress_bar("harvest", total, progress, unit="tokens") as bar:
                for shard in shards:
                    if self.is_done(shard):
                        continue
                    if write_shard(self.plan, self.documents, self.maker, self.folder, shard, bar.update) is None:
                        return  # the stream ended before
        finally:
            torch.set_num_threads(before)


def job_of(
    model: HookedRootModule,
    documents: Documents,
    sites: Site,
    directory: str | os.PathLike[str],
    maker: RowMaker,
    **settings: Any,
) -> Job:
    """A harvest with its plan written. Raises ValueError, before that, for what cannot be harvested."""
    if isinstance(model, EncoderDecoder):
        raise ValueError("a harvest reads documents by decoders and encoders; this model needs a source and a target")
    plan = planned(model, documents, sites, maker, **settings)
    folder = plan.write(directory)
    remove_leftovers(folder)
    return Job(plan, folder, documents, maker)
