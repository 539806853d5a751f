"""Arguments and options of several commands."""

from pathlib import Path
from typing import Annotated

import typer


def models_to_complete(incomplete: str) -> list[str]:
    """The names of models that begin so: the bundled one, those in the cache of the hub, short names. Does not import torch.

    For a path there are none, and the shell completes it.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    from hooked_lm.families.short_names import SHORT_NAMES

    cached = (folder.name.split("--", 1)[1].replace("--", "/") for folder in Path(HF_HUB_CACHE).glob("models--*"))
    names = dict.fromkeys(("demo", *sorted(cached), *SHORT_NAMES))
    return [name for name in names if name.startswith(incomplete)]


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A directory, a hub id, a short name such as gpt2, or demo.",
        autocompletion=models_to_complete,
    ),
]
PromptArgument = Annotated[
    str,
    typer.Argument(
        metavar="PROMPT",
        help="A text; @FILE.json with the messages of a conversation; or token ids such as 12,7,3 if the model has no tokenizer.",
    ),
]
SitesOption = Annotated[
    list[str],
    typer.Option(
        "--site",
        "--sites",
        help="A site: a short name (in all layers), such as resid_post; one in a layer, such as resid_post1; a full name or a "
        "glob. May be repeated.",
    ),
]
CleanOption = Annotated[
    list[str] | None,
    typer.Option(help="A prompt that the model answers correctly, or @FILE.json of messages; may be repeated."),
]
CorruptedOption = Annotated[list[str] | None, typer.Option(help="The prompt with a change that reverses the answer.")]
AnswersOption = Annotated[
    list[str] | None, typer.Option(help="The right and a wrong next token, with their spaces: ' Mary, John'.")
]
PairsOption = Annotated[
    str | None,
    typer.Option(
        help="In place of one pair: a file, folder or pattern of jsonl, parquet or csv with the columns clean, corrupted, "
        "answer and wrong_answer; or a data set."
    ),
]
ColumnOption = Annotated[
    list[str] | None,
    typer.Option(help="The name of a column of --pairs, such as clean=prompt; may be repeated."),
]
MaxPairsOption = Annotated[int | None, typer.Option(help="The number of pairs to read.")]
# of the commands whose work is cut into shards
ShardOption = Annotated[
    str | None, typer.Option(help="i/n: compute shards i, i + n, i + 2n, ... alone; counted from 0.")
]
WorkersOption = Annotated[int, typer.Option("--workers", help="The number of processes.")]
ExecutorOption = Annotated[
    str, typer.Option("--executor", "--engine", help="Where they run: processes (of this machine) or ray.")
]
ThreadsOption = Annotated[
    int | None, typer.Option(help="CPU threads of each process, for loading and for forward passes.")
]
