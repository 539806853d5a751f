"""The table of a study: a row for each pair and cell."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from hooked_lm.analysis.attribution.attribution_result import Attribution
from hooked_lm.engine.result import SweepResult
from hooked_lm.extras import lazy_import
from hooked_lm.files import replacing, unfinished_path
from hooked_lm.hooks.token_labels import KEYS, TokenLabel, group_name
from hooked_lm.notebook_repr import Table
from hooked_lm.results import Label, Scores
from hooked_lm.results.groups import Groups, checked_groups
from hooked_lm.results.scores import METRIC, POSITION
from hooked_lm.results.turns import TURNS, stretches
from hooked_lm.shards import Shards
from hooked_lm.shards.records import checksum, read_record, record_path, seal, sync_folder
from hooked_lm.shards.stored import n_shards
from hooked_lm.studies.job import FROM_END, PAIR, SUFFIX, VALUE, WRITING
from hooked_lm.studies.plan import StudyPlan

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
    import pyarrow
else:
    pd = lazy_import("pandas", "viz")

TABLE = "table.parquet"  # a cache of the shards, which may be deleted
RECORD = "table.sha256"  # of the table and the shards; without it the table is made anew
Read = TypeVar("Read")
ALIGN = {"start": "position", "end": FROM_END}


class PairTable(Shards):
    """The results of a study, a row for each pair and cell of the experiment's grid.

    The columns are `pair` (the number of the pair), the axes of the experiment (`layer`, `position`, `head`, ...; `from_end` is
    the position from the end, -1 the last; of conversations `turn`, `role` and `part` say whose the token of the clean prompt
    is), `value`, `exact` where attribution was checked, and the metric of the unchanged runs, `corrupted` and `clean`, where the
    experiment has them. A study in progress can be read: `missing` are the shards without a record.

    Raises FileNotFoundError for a folder that is not of a study, ValueError for a damaged one.
    """

    PLAN = StudyPlan
    SUFFIX: ClassVar[str] = SUFFIX
    FIELDS = ("bytes", "sha256", "rows", "pairs")
    plan: StudyPlan

    def __len__(self) -> int:
        """The number of rows."""
        return sum(self._facts[shard]["rows"] for shard in self.shards)

    @property
    def n_pairs(self) -> int:
        """The number of pairs that are there."""
        return sum(end - start for start, end in (self._facts[shard]["pairs"] for shard in self.shards))

    @property
    def alignment(self) -> str | None:
        """How positions of the pairs line up, for `scores`: None where all pairs have the same, else "turn" for conversations,
        and "end" for other prompts. Raises ValueError if no shard is there."""
        frame = self.to_dataframe()
        if POSITION not in frame or len({tuple(some.unique()) for _, some in frame.groupby(PAIR)[POSITION]}) == 1:
            return None
        return "turn" if {*KEYS} <= {*frame} else "end"

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({str(self.path)!r}): {self.plan.experiment['name']} of {self.n_pairs:,} pairs in "
            f"{n_shards(len(self.shards))} ({self._state}), {len(self):,} rows"
        )

    def repr_table(self) -> Table:
        """The folder, the state of its shards, the experiment, and the axes of its grid."""
        axes = ", ".join(self._record["axes"]) if self.shards else ""
        facts = {
            "folder": self.path,
            "shards": f"{len(self.shards)} ({self._state})",
            "model": self.plan.model["name"],
            "experiment": self.plan.experiment["name"],
            "pairs": f"{self.n_pairs:,}",
            "axes": axes,
            "rows": f"{len(self):,}",
        }
        return Table(("", "value"), [*facts.items()])

    # ---- reading ---------------------------------------------------------------------------------------------------------

    def to_arrow(self) -> "pyarrow.Table":
        """All rows, in the order of the pairs. Raises ValueError if no shard is there, or one has other columns."""
        import pyarrow
        from pyarrow import parquet

        if not self.shards:
            raise ValueError(f"{self.path} has no shard yet: run the study")
        tables = [self.read_file(shard, parquet.read_table) for shard in self.shards]
        self._check_columns([table.schema for table in tables])
        return pyarrow.concat_tables(tables)

    def to_dataframe(self) -> "pd.DataFrame":
        """All rows as a data frame."""
        return self.to_arrow().to_pandas()

    def to_datasets(self) -> Any:
        """All rows as a `datasets.Dataset`. Raises ImportError without the package `datasets`."""
        try:
            import datasets
        except ImportError:
            raise ImportError("this needs the package datasets: pip install 'hooked-lm[corpus]'") from None
        return datasets.Dataset(self.to_arrow())

    def scores(self, align: str | None = None, groups: Groups = None) -> Scores:
        """The numbers with named axes, one for each cell and pair, for means over pairs and their intervals.

        A SweepResult where the experiment has the metric of unchanged runs, and an Attribution, with exact values if they were
        computed, where it estimates. Pairs of different lengths have different positions: `align` takes the positions that all
        pairs have, counted from the "start" or from the "end" (-1 is the last); or, of conversations, the means over the
        positions of each "turn", "role" or "part", as `Scores.mean_by`. `groups` is a label for each pair, such as its
        template: intervals count groups, not pairs (see `Scores`). Raises ValueError if shards are missing, if the
        pairs have different cells, and for groups that are not one label for each pair.
        """
        if align is not None and align not in (*ALIGN, *KEYS):
            raise ValueError(f"align must be {', '.join(map(repr, (*ALIGN, *KEYS)))} or None, got {align!r}")
        if self.missing:
            raise ValueError(
                f"{len(self.missing)} shards of {self.path} are missing: run the study again to complete it"
            )
        about: dict[str, Any] = {"about": self._about, "groups": checked_groups(groups, self.n_pairs)}
        frame, record = self.to_dataframe(), self._record
        axes = list(record["axes"])
        if align in KEYS:
            frame, axes = _means_by(frame, axes, align), [align if name == POSITION else name for name in axes]
        elif align is None and {*KEYS} <= {*frame}:
            about["about"] = {**self._about, **_turns(frame)}
        elif align is not None and FROM_END in frame:
            frame["position"] = frame[ALIGN[align]]
            pairs = frame[[PAIR, "position"]].drop_duplicates().groupby("position").size()
            frame = frame[frame["position"].isin(pairs[pairs == self.n_pairs].index)]
        labels = _grid(frame, axes, self.n_pairs)
        for name, mixed in record["axes"].items():
            if mixed is not None:  # numbers and strings, all of them strings in the file
                labels[name] = mixed
        shape = [self.n_pairs, *map(len, labels.values())]

        def grid(column: str) -> Tensor:
            return torch.tensor(frame[column].to_numpy()).view(shape).movedim(0, -1)

        if "corrupted" not in frame:
            return Scores(grid(VALUE), labels, **about)
        # the metric of unchanged runs is the same in all cells
        n_cells = len(axes) - (METRIC in axes)
        first = (slice(None),) * (METRIC in axes) + (0,) * n_cells
        corrupted, clean = (grid(name)[first] if name in frame else None for name in ("corrupted", "clean"))
        assert corrupted is not None, "it is a column"
        runs = {"corrupted": corrupted, "clean": clean, "base": record["base"], **about}
        if record["method"] is None:
            return SweepResult(grid(VALUE), labels, **runs)
        exact = grid("exact") if "exact" in frame else None
        return Attribution(grid(VALUE), labels, **runs, method=record["method"], exact=exact)

    @property
    def _about(self) -> dict[str, Any]:
        return {"model": self.plan.model["name"], **self.plan.versions, "experiment": self.plan.experiment}

    @property
    def _record(self) -> dict[str, Any]:
        return read_record(record_path(self.path, self.shards[0]), ("axes", "base", "method"))

    def read_file(self, shard: int, read: Callable[[Path], Read]) -> Read:
        """What a function of pyarrow reads of a shard's file. Raises ValueError for one that is no parquet."""
        path = self.file_of(shard)
        try:
            return read(path)
        except (OSError, ValueError) as error:  # those of pyarrow are both
            raise ValueError(f"{path} is damaged: {error}; `verify` names all such files") from error

    def _check_columns(self, schemas: "list[pyarrow.Schema]") -> None:
        for shard, schema in zip(self.shards, schemas, strict=True):
            if not schema.equals(schemas[0]):
                raise ValueError(
                    f"shard {shard} has the columns {schema.names}, shard {self.shards[0]} {schemas[0].names}: the experiment "
                    "must have the same axes for all pairs"
                )

    def plot(self, title: str = "", align: str | None = None, groups: Groups = None) -> "go.Figure":
        """A figure of the means over pairs; see `scores` for `align` and `groups`, and what it raises."""
        return self.scores(align, groups).plot(title)

    # ---- files -----------------------------------------------------------------------------------------------------------

    def gather(self) -> Path:
        """Writes all shards into one file, `table.parquet`, and returns its path. Raises ValueError if some are missing.

        A table that is there is kept if its record, `table.sha256`, says that it is whole and of these shards, else written anew.
        """
        if self.missing:
            raise ValueError(
                f"{len(self.missing)} shards of {self.path} are missing: run the study again to complete it"
            )
        path, record = self.path / TABLE, self.path / RECORD
        if not (path.is_file() and record.is_file() and record.read_bytes() == self._seal_of(path)):
            unfinished = unfinished_path(path)
            try:
                self._write(unfinished)
                sealed = self._seal_of(unfinished)
                os.replace(unfinished, path)
                with replacing(record) as unsealed:
                    unsealed.write_bytes(sealed)
                sync_folder(self.path)
            finally:
                unfinished.unlink(missing_ok=True)
        return path

    def _seal_of(self, table: Path) -> bytes:
        """What the record of a table says if the table is whole, and of these shards."""
        shards = [self._facts[shard]["sha256"] for shard in self.shards]
        return f"{seal(self.path, [checksum(table), *shards])}\n".encode()

    def _write(self, path: Path) -> None:
        from pyarrow import parquet

        schemas = [self.read_file(shard, parquet.read_schema) for shard in self.shards]
        self._check_columns(schemas)
        with parquet.ParquetWriter(path, schemas[0], **WRITING) as writer:
            for shard in self.shards:
                writer.write_table(self.read_file(shard, parquet.read_table))
        with path.open("rb") as file:
            os.fsync(file.fileno())

    def _verify_joined(self) -> None:
        path = self.path / TABLE
        if path.exists():
            trial = unfinished_path(path)
            try:
                self._write(trial)
                if checksum(trial) != checksum(path):
                    raise ValueError(f"{path} is not what the shards hold: delete it, and `gather` again")
            finally:
                trial.unlink(missing_ok=True)


def _means_by(frame: "pd.DataFrame", axes: Sequence[str], by: str) -> "pd.DataFrame":
    """The means over positions of each turn, role or part, in the order in which pairs have them first."""
    if not {*KEYS} <= {*frame}:
        raise ValueError(
            f"align={by!r} needs positions of conversations, and these pairs have none: give messages as prompts"
        )
    columns = zip(*(frame[name] for name in KEYS), strict=True)
    names = [group_name(TokenLabel(int(turn), role, part), by) for turn, role, part in columns]
    order = {name: place for place, name in enumerate(dict.fromkeys(names))}
    others = [name for name in axes if name != POSITION]
    keys = [PAIR, *(by if name == POSITION else name for name in axes)]
    numbers = [name for name in frame.columns if name not in {*KEYS, *others, PAIR, POSITION, FROM_END}]
    means = frame.assign(**{by: names}).groupby(keys, sort=False)[numbers].mean().reset_index()
    places = {name: list(dict.fromkeys(frame[name])) for name in others}
    place_of = {name: {label: i for i, label in enumerate(labels)} for name, labels in places.items()} | {by: order}
    return means.sort_values(
        keys, key=lambda column: column.map(place_of[column.name]) if column.name in place_of else column
    )


def _turns(frame: "pd.DataFrame") -> dict[str, Any]:
    """For `about`: whose the token of each position is; nothing if that differs between pairs."""
    labels = frame[[POSITION, *KEYS]].drop_duplicates()
    if labels[POSITION].duplicated().any():
        return {}
    by_position = {
        int(place): TokenLabel(int(turn), role, part) for place, turn, role, part in labels.itertuples(index=False)
    }
    return {TURNS: stretches([by_position.get(place) for place in range(max(by_position) + 1)])}


def _grid(frame: "pd.DataFrame", axes: list[str], n_pairs: int) -> dict[str, list[Label]]:
    """The labels of each axis. Raises ValueError unless all pairs have the same cells."""
    n_rows = frame.groupby(PAIR).size()
    cells = frame[axes].to_numpy()
    if len(n_rows) == n_pairs and n_rows.nunique() == 1:
        by_pair = cells.reshape(n_pairs, len(frame) // n_pairs, len(axes))
        different = (by_pair != by_pair[0]).any((1, 2)).nonzero()[0]
    else:
        different = n_rows.index[n_rows != n_rows.iloc[0]] if len(n_rows) else []
    if len(different) or not len(frame):
        raise ValueError(
            "the pairs do not have the same cells" + f" (pair {different[0]} and pair 0)" * bool(len(different)) + ": "
            "align='start' or align='end' takes the positions that all have; to_dataframe() has every row"
        )
    first = frame.iloc[: len(frame) // n_pairs]
    return {name: list(map(_plain, first[name].unique())) for name in axes}


def _plain(label: Any) -> Label:
    return label if isinstance(label, str) else int(label)
