"""The store of a harvest: its activations, their statistics, and ways to read them for training."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.engine.budget import bytes_of
from hooked_lm.files import OF_DAMAGE
from hooked_lm.harvest import export
from hooked_lm.harvest.columns import Columns, SiteName
from hooked_lm.harvest.shard import moments_of
from hooked_lm.harvest.shuffled import ShuffledVectors
from hooked_lm.interventions.dictionaries.stream import both_sites
from hooked_lm.interventions.statistics import Summary
from hooked_lm.shards.records import AGAIN, read_record, record_path

AT_ONCE = 4096  # tokens that are read together


class ActivationStore(Columns):
    """The activations of a harvest: for each token, in the order of the documents, its vectors at the sites.

    `store[site]` and the columns "tokens", "documents" (the number of the token's document), "positions" (in its row) and
    "is_special" are indexed as tensors are; `store[10:20]` is everything that is known of these tokens. Of conversations
    `store["labels"]` says what each token is, and `store.select(role="assistant")` are some of them. Nothing is read before it
    is asked for. With `reduce`, the columns are those of the last token of each row that is kept. A harvest in progress can
    be read: `missing` are the shards without a record.

    Raises FileNotFoundError for a folder that is not of a harvest, ValueError for a damaged one.
    """

    # ---- statistics ------------------------------------------------------------------------------------------------------

    def mean(self, site: SiteName) -> Float[Tensor, "*width"]:
        """The mean vector of a site, in float64."""
        return self._summary(site).mean

    def variance(self, site: SiteName) -> Float[Tensor, "*width"]:
        """The variance of each number of a site's vectors, in float64."""
        return self._summary(site).variance

    def _summary(self, site: SiteName) -> Summary:
        name = self.site(site)
        whole = moments_of(self[name].shape[1:])
        if self._selected is not None:
            for start in range(0, len(self), AT_ONCE):
                whole.add(self[name][start : start + AT_ONCE].flatten(1))
            return whole.summary()
        for shard in self.shards:
            path = record_path(self.path, shard)
            record = read_record(path, ("tokens", "sites"))
            try:
                moments = (torch.tensor(record["sites"][name][each], dtype=torch.float64) for each in ("mean", "m2"))
                whole.merge(record["tokens"], *moments)
            except OF_DAMAGE as error:
                raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}; {AGAIN}") from error
        return whole.summary()

    # ---- training --------------------------------------------------------------------------------------------------------

    def stream(
        self,
        site: SiteName | list[SiteName],
        site_out: SiteName | list[SiteName] | None = None,
        *,
        buffer: int | str = "256MB",
        run: int | str = "1MiB",
        seed: int = 0,
    ) -> ShuffledVectors:
        """The vectors of a site, or of two, in a seeded random order, to train a dictionary on; see `ShuffledVectors`.

        For transcoders of several layers, `site` and `site_out` are lists of a site for each layer, in order.
        """
        columns = [self[self.site(name)] for name in both_sites(site, site_out)]  # type: ignore[arg-type]
        return ShuffledVectors(columns, bytes_of(buffer, "buffer"), bytes_of(run, "run"), seed, isinstance(site, list))

    def to_datasets(self, sites: str | Sequence[str] | None = None, schema: str = "tokens") -> Any:
        """A `datasets.Dataset` of some sites, or of all.

        With the schema "tokens" it has an example for each token; with "sae_lens", the schema of cached activations in SAELens,
        one for each row of the full context. Raises ImportError without the package `datasets`.
        """
        if schema not in ("tokens", "sae_lens"):
            raise ValueError(f"schema must be 'tokens' or 'sae_lens', got {schema!r}")
        make = export.by_token if schema == "tokens" else export.by_row
        return make(self, self._names(sites))

    def to_torch_dataset(self, sites: str | Sequence[str] | None = None) -> export.TokenDataset:
        """A map-style data set of torch with an example for each token: its vectors, and the columns."""
        return export.TokenDataset(self, [*self._names(sites), *self.plan.columns])

    def batches(self, site: SiteName, batch_size: int) -> Any:
        """Yields the rows of the corpus: ids, mask and labels [batch, pos], their documents, and the values of a site.

        A column is a position in the row; the mask is True at tokens that are stored, and labels are None for texts. Raises
        ValueError for a harvest with `reduce`.
        """
        return export.row_batches(self, self.site(site), batch_size)

    def _names(self, sites: str | Sequence[str] | None) -> list[str]:
        return (
            self.sites
            if sites is None
            else [self.site(name) for name in ([sites] if isinstance(sites, str) else sites)]
        )
