"""`harvest`: the activations of a corpus."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from hooked_lm.cli.command import Result, command
from hooked_lm.cli.inputs import check_writable_folder, load, options_of, positions_of, without_weights
from hooked_lm.cli.options import ExecutorOption, ModelArgument, ShardOption, SitesOption, ThreadsOption, WorkersOption
from hooked_lm.cli.output import say, say_stored, show_table
from hooked_lm.cli.prompts_and_sites import sites_of

PlanOption = Annotated[
    str | None,
    typer.Option(
        help="Show the size instead: sizes (of the model its config alone is read), or time (writes a small shard, too)."
    ),
]
TokensOption = Annotated[
    int | None, typer.Option(help="With --plan, where DATA is a number of documents: the tokens of each.")
]


@command(
    "echo 'Mary and John went to the store.' > hooked_lm_corpus.txt\n"
    "hooked-lm harvest demo hooked_lm_corpus.txt hooked_lm_harvest \\\n"
    "  --site resid_post1",
    interrupt="resumes",
)
def harvest(
    model: ModelArgument,
    documents: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="A file, folder or pattern of jsonl, parquet, csv or txt, of texts or conversations; or a data set.",
        ),
    ],
    output: Annotated[str, typer.Argument(metavar="DIRECTORY", help="The harvest is a folder in this directory.")],
    sites: SitesOption,
    positions: Annotated[
        str,
        typer.Option(
            help="all, text (no special tokens), indices such as 0,-1 or 0-3, or of conversations assistant, user:-1 or "
            "turn=-1,part=content."
        ),
    ] = "all",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or int8.")] = "float32",
    reduce: Annotated[str | None, typer.Option(help="Keep one vector of each row: mean, max or last.")] = None,
    context: Annotated[int | None, typer.Option(help="The most tokens of a row; by default the model's.")] = None,
    long: Annotated[str, typer.Option(help="What to do with longer documents: truncate, split or error.")] = "truncate",
    chunk: Annotated[
        str | None, typer.Option(help="Read rows in pieces of so many tokens, or of so much memory: auto, 512MB.")
    ] = None,
    template_options: Annotated[
        Path | None, typer.Option(help="A JSON file with options of the chat template, for conversations.")
    ] = None,
    column: Annotated[str | None, typer.Option(help="The column that holds the documents.")] = None,
    max_documents: Annotated[int | None, typer.Option(help="The number of documents to read.")] = None,
    seed: Annotated[int | None, typer.Option(help="Read the documents in a random order with this seed.")] = None,
    batch_size: Annotated[int, typer.Option(help="The number of rows that run together.")] = 32,
    shard_size: Annotated[str, typer.Option(help="The approximate size of a file.")] = "512MB",
    documents_per_shard: Annotated[int | None, typer.Option(help="The size of a file in documents instead.")] = None,
    shard: ShardOption = None,
    n_workers: WorkersOption = 1,
    executor: ExecutorOption = "processes",
    threads: ThreadsOption = None,
    plan: PlanOption = None,
    tokens_per_document: TokensOption = None,
) -> Result:
    """Write the activations of a corpus to disk, or say what that will cost.

    After an interruption the same command resumes. It also runs under torchrun --no-python. With --plan nothing is written: it
    shows the tokens, bytes and hours of the same command.
    """
    check_writable_folder(output)
    of_rows: dict[str, Any] = {
        "positions": positions if positions in ("all", "text") else positions_of(positions),
        "chunk": int(chunk) if chunk and chunk.isdecimal() else chunk,
        "template_options": template_options and options_of(template_options),
    }
    of_rows |= {"dtype": dtype, "reduce": reduce, "context": context, "long": long, "column": column}
    of_rows |= {"max_documents": max_documents, "batch_size": batch_size, "shard_size": shard_size}
    if plan is not None:
        return _estimate(model, documents, sites, plan, tokens_per_document, threads, of_rows)
    from hooked_lm.harvest import harvest as run
    from hooked_lm.shards import part_of

    loaded, started = load(model, threads), time.time()
    of_work: dict[str, Any] = {"documents_per_shard": documents_per_shard, "shard": part_of(shard, "shard")}
    of_work |= {"n_workers": n_workers, "executor": executor, "threads": threads}
    store = run(loaded, documents, sites_of(loaded, sites), output, **of_rows, seed=seed, **of_work)
    return {"model": model, **say_stored(store, started, sites=store.sites, tokens=len(store), dtype=dtype)}


def _estimate(
    model: str,
    documents: str,
    sites: list[str],
    plan: str,
    tokens_per_document: int | None,
    threads: int | None,
    settings: dict[str, Any],
) -> Result:
    """The size of a harvest, and its hours."""
    if plan not in ("sizes", "time"):
        raise ValueError(f"--plan must be sizes or time, got {plan!r}")
    from hooked_lm.harvest import estimate_harvest

    loaded = load(model, threads) if plan == "time" else without_weights(model)
    data = int(documents) if documents.isdigit() else documents
    found = estimate_harvest(loaded, data, sites_of(loaded, sites), tokens_per_document=tokens_per_document, **settings)
    say(escape(repr(found)))
    show_table([{"site": name, "bytes": size} for name, size in found.bytes_by_site.items()])
    return {"model": model, **vars(found), "bytes": found.bytes, "hours": found.hours}
