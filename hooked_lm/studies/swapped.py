"""One warning about all pairs of a study whose answer is better on the corrupted prompt than on the clean one."""

from collections.abc import Mapping, Sequence

import numpy as np

from hooked_lm.callers import warn_caller
from hooked_lm.engine.study import SwapWarning
from hooked_lm.results.scores import METRIC
from hooked_lm.studies.experiments import MakesMetric
from hooked_lm.studies.job import PAIR
from hooked_lm.studies.pairs import Pair
from hooked_lm.studies.table import PairTable

SHOWN = 10  # numbers of pairs in the warning
RUNS = ("corrupted", "clean")


def warn_if_swapped(table: PairTable, makers: Mapping[str, MakesMetric], pairs: Sequence[Pair]) -> None:
    """Warns of pairs of the table whose answer is better on the corrupted prompt, by any metric that rises with it."""
    answers = [list(pairs[0].answer)], [list(pairs[0].wrong_answer)]
    rising = {name for name, make in makers.items() if getattr(make(*answers), "rises_with_answer", False)}
    swapped = sorted(number for shard in table.shards for number in _swapped(table, shard, rising, len(makers) > 1))
    if not swapped:
        return
    n = table.n_pairs
    numbers = ", ".join(map(str, swapped[:SHOWN])) + f" and {len(swapped) - SHOWN} more" * (len(swapped) > SHOWN)
    if len(swapped) == n:
        which, fix = f"all {n} pairs" if n > 1 else "the pair", "exchange the columns 'clean' and 'corrupted'"
    else:
        which = f"{len(swapped)} of {n} pairs (number{'s' * (len(swapped) > 1)} {numbers}, counted from 0)"
        fix = "see whether these have 'clean' and 'corrupted' exchanged, or the model does not know their answers"
    warn_caller(f"in {which} the answer is better on the corrupted prompt than on the clean one: {fix}", SwapWarning)


def _swapped(table: PairTable, shard: int, rising: set[str], has_metrics: bool) -> set[int]:
    """The numbers of the pairs in a shard whose answer is better on the corrupted prompt."""
    from pyarrow import parquet

    if not rising or not {*RUNS} <= {*table.read_file(shard, parquet.read_schema).names}:
        return set()
    of_metrics = [METRIC] if has_metrics else []
    columns = [PAIR, *RUNS, *of_metrics]
    frame = table.read_file(shard, lambda path: parquet.read_table(path, columns=columns)).to_pandas()
    worse = (frame["corrupted"] > frame["clean"]).to_numpy()
    if has_metrics:
        worse = worse & frame[METRIC].isin(rising).to_numpy()
    return set(np.unique(frame[PAIR].to_numpy()[worse]).tolist())
