"""Runs an experiment on many pairs of prompts: checks all of them, plans, computes the shards that are missing, and gathers."""

import json
import os
import pickle
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

import torch

from hooked_lm.engine.conversations import POSITIONS
from hooked_lm.engine.fingerprint import Digest, Unknown
from hooked_lm.files import writable_folder
from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.token_labels import is_named
from hooked_lm.models.text.methods import TextMethods
from hooked_lm.renamed import renamed
from hooked_lm.shards import Part, carry_out, check_workers, facts_of_model, part_of, versions
from hooked_lm.shards.plan import check_counts
from hooked_lm.studies.experiments import Experiment, MakesMetric, experiment_of, metrics_of
from hooked_lm.studies.job import StudyJob
from hooked_lm.studies.pairs import MissingColumns, Pair, check_positions, digest, pairs_of
from hooked_lm.studies.plan import StudyPlan
from hooked_lm.studies.swapped import warn_if_swapped
from hooked_lm.studies.table import PairTable


@renamed(part="shard", engine="executor")
def study_pairs(
    model: HookedRootModule,
    pairs: object,
    experiment: str | Experiment,
    directory: str | os.PathLike[str],
    *,
    options: Mapping[str, object] | None = None,
    metric: str | Sequence[str] | MakesMetric = "logit_difference",
    columns: Mapping[str, str] | None = None,
    max_pairs: int | None = None,
    batch_size: int = 16,
    pairs_per_shard: int = 64,
    shard: Part | str | None = None,
    n_workers: int = 1,
    executor: str = "processes",
    threads: int | None = None,
    progress: bool | None = None,
) -> PairTable:
    """Runs an experiment on many pairs of prompts, and opens the table of its results.

    The pairs are cut into shards, each a parquet file with a record of its checksum. The same call resumes an interrupted study:
    shards with a record are not computed again. Several processes may work on one directory, each on its `shard`. When all
    shards are there, they are gathered into one file, `table.parquet`.

    Args:
        pairs: dicts with `clean` and `corrupted` (texts or ids, as many tokens in both), `answer` and `wrong_answer` (a string
            that is one token, an id, or several that are all right or wrong); or a data frame, a data set of Hugging Face or
            its name, or a path: a file, a folder or a pattern of jsonl, parquet or csv; or `Pairs`. They may differ in length.
            Prompts may be conversations: lists of messages, or mappings with "messages" and options of the template, which are
            read up to where the assistant answers. Where that begins a text, answers have no leading space.
        experiment: "sweep" (`patching.sweep`), "attribute" (`analysis.attribute`, without exact checks), "ablate"
            (`patching.ablate` of the clean prompts) or "steer" (`sweep_steering` of the corrupted prompts, with the options
            `vectors` and `coefficients`); or a function with the arguments (model, corrupted, clean, metric=), ids [pair, pos]
            of one length, or a `Chat` of conversations with the same turns, that returns Scores with a number for each pair.
        directory: the study is a folder in it, whose name has the hash of its plan.
        options: keyword arguments of the experiment, such as {"sites": "z", "positions": None, "heads": "each"}. Positions by
            meaning, such as "last_user", are those of each pair, the same in its clean and its corrupted prompt. On a GPU
            `max_memory` is 8 GiB by default, not half of what is free, which would change the bits from run to run.
        metric: "logit_difference", "logit", "probability", "log_probability", "rank", or several, which add an axis; or a
            function of lists of ids, (answers, wrong_answers) of each pair, that returns a metric.
        columns: other names of columns, {"clean": "prompt"}.
        max_pairs: how many pairs are read.
        batch_size: how many pairs of one length run together, which can change the last bits of a value.
        pairs_per_shard: the size of a file.
        shard: (i, n) or "i/n": every n-th shard, from the i-th on. None: in a process of torchrun that of its rank, else all.
        n_workers, executor, threads: as for `harvest`.

    Raises, before anything is written, ValueError that names all pairs that cannot run, ValueError or TypeError for other
    unsuitable arguments, and what the experiment raises on the shortest pair; OSError for a directory that cannot be written;
    ImportError without the package `pyarrow`. Shards that are complete are kept. In the end, warns once of the pairs whose
    answer is better on the corrupted prompt than on the clean one, by number: the two may be swapped.

    >>> import tempfile
    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.studies import study_pairs
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> texts = ("Mary and John left, John", "Mary and John left, Mary")
    >>> pairs = [
    ...     dict(zip(["clean", "corrupted"], texts), answer=" Mary", wrong_answer=" John")
    ... ]
    >>> table = study_pairs(
    ...     model,
    ...     pairs,
    ...     "sweep",
    ...     tempfile.mkdtemp(),
    ...     options={"positions": None},
    ...     progress=False,
    ... )
    >>> table.to_dataframe().columns.tolist()
    ['pair', 'layer', 'value', 'corrupted', 'clean']
    """
    if not isinstance(model, TextMethods):
        raise TypeError(f"a study reads texts, which a {type(model).__name__} does not")
    if find_spec("pyarrow") is None:
        raise ImportError("a study writes parquet with the package pyarrow: pip install 'hooked-lm[corpus]'")
    chosen = part_of(shard)
    check_workers(model, n_workers, executor)
    check_counts(batch_size=batch_size, pairs_per_shard=pairs_per_shard, threads=threads, max_pairs=max_pairs)
    writable_folder(directory)
    on_gpu = next(model.parameters()).is_cuda
    name, function, settings = experiment_of(experiment, options or {}, on_gpu)
    makers = metrics_of(metric)
    read = pairs_of(model, pairs, columns, max_pairs)
    _check_metrics(makers, read)
    check_positions(read, {key: value for key, value in settings.items() if key in POSITIONS and is_named(value)})
    if n_workers > 1 or executor == "ray":
        _check_can_travel(function, makers)
    lengths = [len(pair.clean) for pair in read]
    plan = StudyPlan(
        model=facts_of_model(model),
        data={"pairs": len(read), "tokens": [min(lengths), max(lengths)], "sha256": digest(read)},
        items_per_shard=min(pairs_per_shard, len(read)),
        batch_size=batch_size,
        threads=threads or torch.get_num_threads(),
        versions=versions("pyarrow"),
        experiment={"name": name, "options": _shown(settings), "sha256": _digest(function, makers)},
        metric=list(makers),
    )
    job = StudyJob(plan, plan.folder(directory), model, read, function, makers)
    if not job.folder.exists():
        job.run([lengths.index(min(lengths))])  # what the experiment refuses is refused before the plan is written
    plan.write(directory)
    PairTable(job.folder).check_sizes()  # of shards that are not computed again
    carry_out(job, chosen, n_workers, executor, progress)
    table = PairTable(job.folder)
    if table.is_complete:
        table.gather()
    warn_if_swapped(table, makers, read)
    return table


def _check_metrics(makers: Mapping[str, MakesMetric], pairs: Sequence[Pair]) -> None:
    """Makes each metric once, so that it fails before anything runs."""
    if "logit_difference" in makers and (without := [i for i, pair in enumerate(pairs) if not pair.wrong_answer]):
        message = f"the metric 'logit_difference' needs 'wrong_answer', which pair {without[0]} lacks"
        raise MissingColumns(message, ["wrong_answer"])
    for make in makers.values():
        make([list(pairs[0].answer)], [list(pairs[0].wrong_answer)])


def _digest(experiment: Experiment, makers: Mapping[str, MakesMetric]) -> str:
    try:
        return Digest().of((experiment, dict(makers))).hex()
    except Unknown as error:
        raise ValueError(
            f"the experiment or its metric holds {error}, whose contents cannot be hashed: the study could not tell whether "
            "it resumes the same one"
        ) from None


def _check_can_travel(experiment: Experiment, makers: Mapping[str, MakesMetric]) -> None:
    try:
        pickle.dumps((experiment, dict(makers)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"workers cannot receive the experiment or its metric ({error}): define functions at the top of a module"
        ) from None


def _shown(options: Mapping[str, object]) -> dict[str, object]:
    """Options as they are written into the plan: as JSON, or by type, since their hash is part of that of the experiment."""
    return {name: value if _is_json(value) else f"a {type(value).__name__}" for name, value in options.items()}


def _is_json(value: object) -> bool:
    try:
        return json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        return False
