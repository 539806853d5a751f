"""Harvests the activations of a corpus: plans, computes the shards that are missing, and opens the store."""

import os
from collections.abc import Mapping

import torch

from hooked_lm.engine.budget import bytes_of
from hooked_lm.files import writable_folder
from hooked_lm.harvest.documents import documents_of
from hooked_lm.harvest.job import job_of
from hooked_lm.harvest.rows import row_maker
from hooked_lm.harvest.store import ActivationStore
from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.indices import Indices
from hooked_lm.hooks.select import Site
from hooked_lm.hooks.token_labels import Named
from hooked_lm.renamed import renamed
from hooked_lm.shards import Part, carry_out, check_workers, part_of


@renamed(part="shard", engine="executor")
def harvest(
    model: HookedRootModule,
    documents: object,
    sites: Site,
    directory: str | os.PathLike[str],
    *,
    positions: str | Indices | Named = "all",
    dtype: str | torch.dtype = torch.float32,
    reduce: str | None = None,
    context: int | None = None,
    long: str = "truncate",
    chunk: int | str | None = None,
    prepend_bos: bool | None = None,
    template_options: Mapping[str, object] | None = None,
    column: str | None = None,
    max_documents: int | None = None,
    seed: int | None = None,
    batch_size: int = 32,
    shard_size: int | str = "512MB",
    documents_per_shard: int | None = None,
    shard: Part | str | None = None,
    n_workers: int = 1,
    executor: str = "processes",
    threads: int | None = None,
    progress: bool | None = None,
) -> ActivationStore:
    """Writes the activations of a corpus to disk, and opens them.

    The corpus is cut into shards, each a safetensors file with a record of its checksum. The same call resumes an interrupted
    harvest: shards with a record are not computed again. Several processes may work on one directory, each on its `shard`.

    Args:
        documents: a list of texts or of conversations (lists of messages, or a `Chat`), token ids [document, pos], a data set of
            Hugging Face (also streaming) or its name, or a path: a file, a folder or a pattern of jsonl, parquet, csv or txt (a
            line of a txt file is a document). All of them are read once more, to identify the corpus; of a stream those of
            shards that are complete, to compare them.
        sites: names, short names or globs of sites with a vector for each token.
        directory: the harvest is a folder in it, whose name has the hash of its plan.
        positions: "all" tokens, those of the "text" (without special tokens), or indices of positions in each row. Of
            conversations also positions by meaning, such as "assistant" or ("user", -1), in the whole conversation.
        dtype: "float32", "bfloat16", "float16", or "int8" with one scale for each vector; or a dtype of torch.
        reduce: "mean", "max" or "last" of each row's tokens that are kept; None: every token.
        context: the largest number of tokens in a row; the model's n_ctx if None.
        long: what happens to longer documents: "truncate", "split" (into several rows, each with BOS) or "error".
        chunk: read rows in pieces of so many tokens, which takes the memory of one beside keys, values and what is kept; or, in
            place of the number, the memory that a pass may take: "auto" or a size such as "512MB".
        prepend_bos: whether texts begin with a BOS token; the model's default if None.
        template_options: those of the chat template, as `model.chat` takes them, for all conversations.
        column: the column of the documents; by default "text", "input_ids", "tokens" or "messages". Tools that a conversation
            can call are in the column "tools".
        max_documents: how many documents are read.
        seed: of a random order of the documents; None: their own order.
        batch_size: how many rows run together.
        shard_size: the size of a shard's file, about; "512MB", or bytes. `documents_per_shard` gives it in documents instead.
        shard: (i, n) or "i/n": every n-th shard, from the i-th on. None: in a process of torchrun that of its rank, else all.
        n_workers, executor: how many processes compute shards, each with a model of its own: processes of this machine, or with
            "ray" actors of a cluster whose machines share the directory; the shard of an actor that dies goes to another.
            A script that asks for several must make the call under `if __name__ == "__main__":`.
        threads: of each forward pass on a CPU, which can change the last bits of a value; those of torch if None. Weights that
            were folded with another number of threads (`torch.set_num_threads`) may differ in their last bits, too.

    Raises, before anything is computed, ValueError and TypeError for unsuitable arguments or documents; OSError if the disk
    is full; FloatingPointError for activations that are not finite; ValueError with its number for a conversation that the
    template refuses, or whose roles are ambiguous. Shards that are complete are kept.

    >>> import tempfile
    >>> from hooked_lm import HookedTransformer
    >>> model, folder = HookedTransformer.from_pretrained("demo"), tempfile.mkdtemp()
    >>> store = harvest(
    ...     model, ["Mary gave it to John", "John went home"], ("resid_post", 1), folder
    ... )
    >>> store.sites, store[store.sites[0]].shape
    (['blocks.1.hook_resid_post'], (10, 128))
    """
    chosen = part_of(shard)
    check_workers(model, n_workers, executor)
    writable_folder(directory)
    job = job_of(
        model,
        documents_of(documents, column, max_documents, seed),
        sites,
        directory,
        row_maker(model, documents, context, long, positions, prepend_bos, template_options, chunk),
        dtype=dtype_of(dtype),
        reduce=reduce,
        batch_size=batch_size,
        shard_bytes=bytes_of(shard_size, "shard_size"),
        documents_per_shard=documents_per_shard,
        threads=threads,
    )
    ActivationStore(job.folder).check_sizes()  # of shards that are not computed again
    job.check_documents(chosen)
    carry_out(job, chosen, n_workers, executor, progress)
    return ActivationStore(job.folder)


def dtype_of(given: str | torch.dtype) -> torch.dtype:
    """A type of torch, given itself or by its name."""
    found = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype must be 'float32', 'bfloat16', 'float16' or 'int8', got {given!r}")
    return found
