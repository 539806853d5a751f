"""`python tests/clients/notebooks.py FOLDER`: runs notebooks that were written for TransformerLens, and counts their cells.

Each notebook of the folder runs in a kernel whose `transformer_lens` is this package. The names of checkpoints in the notebooks
lead to small models of random weights in a cache of the hub of their own (`checkpoints_of`), so nothing is downloaded and all
prompts are known words. Of each cell the lines that install packages or change the editor are left out. A cell that raises an
error does not end the notebook: the report names the cell, and its error. The exit status is 1 if a cell of any notebook failed.
"""

import argparse
import ast
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
import torch
from nbclient import NotebookClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from hooked_lm import HookedTransformer, HookedTransformerConfig

SKIPPED = re.compile(r"^\s*(%|!|ip(ython)?\.(magic|run_line_magic|extension_manager)|import google\.colab)")
PRELUDE = """
import importlib.util, os, sys
from unittest.mock import MagicMock
from hooked_lm import compat
compat.install()
for package in ("neel_plotly", "neel_plotly.plot", "pysvelte", "circuitsvis", "torchtyping"):  # what draws, or annotates
    if package.split(".")[0] in sys.modules or importlib.util.find_spec(package) is None:
        sys.modules[package] = MagicMock()
import plotly.io
plotly.io.renderers.default = "json"
"""
REVISION = "0" * 40


def without_setup(source: str) -> str:
    """The cell without lines that install packages or change the editor; `pass` where nothing else was indented."""
    lines = [re.sub(r"\S.*", "pass", line) if SKIPPED.match(line) else line for line in source.splitlines()]
    return re.sub(r"renderers\.default = .*", 'renderers.default = "json"', "\n".join(lines))


def run(path: Path, seconds: int, place: Path) -> list[str]:
    """Runs a notebook in the directory `place`; returns a line for each cell that failed, and prints how many ran."""
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    for cell in cells:
        cell.source, cell.outputs = without_setup(cell.source), []
    notebook.cells = [nbformat.v4.new_code_cell(PRELUDE), *cells]
    options = {"timeout": seconds, "allow_errors": True, "kernel_name": "python3"}
    NotebookClient(notebook, resources={"metadata": {"path": str(place)}}, **options).execute()
    failed = []
    for number, cell in enumerate(notebook.cells):
        errors = [output for output in cell.outputs if output.output_type == "error"]
        failed += [f"  cell {number}: {error.ename}: {error.evalue.splitlines()[0][:300]}" for error in errors]
    print(f"{path.stem}: {len(cells) - len(failed)} of {len(cells)} cells ran", *failed, sep="\n", flush=True)
    return failed


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def words_of(paths: list[Path]) -> list[str]:
    """The texts in the code of notebooks: they are what tokenizers are trained on, so that each of their words is one token."""

    def strings(source: str) -> Iterator[str]:
        try:
            tree = ast.parse(without_setup(source))
        except SyntaxError:
            return
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from (node.value, f" {node.value.strip()}")

    cells = [cell for path in paths for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    return [text for cell in cells for text in strings(cell.source)]


def byte_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer like GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(words, trainer)
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, unk_token=end)


def word_tokenizer(words: list[str], special: dict[str, str], template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of words, with special tokens around a text as the template says."""
    tokenizer = Tokenizer(models.WordPiece(unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    named = list(dict.fromkeys(special.values()))
    tokenizer.train_from_iterator(
        words, trainers.WordPieceTrainer(vocab_size=4000, special_tokens=named, show_progress=False)
    )
    ids = [(token, tokenizer.token_to_id(token)) for token in named]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def checkpoints_of(words: list[str], cache: Path) -> None:
    """Writes random models under the names that notebooks use, in the layout of the hub's cache."""
    torch.manual_seed(0)

    def folder(name: str) -> Path:
        home = cache / ("models--" + name.replace("/", "--"))
        (home / "refs").mkdir(parents=True)
        (home / "refs" / "main").write_text(REVISION)
        (home / "snapshots" / REVISION).mkdir(parents=True)
        return home / "snapshots" / REVISION

    text = byte_tokenizer(words)
    end = {"bos_token_id": text.bos_token_id, "eos_token_id": text.eos_token_id}
    for name in ("gpt2", "openai-community/gpt2"):
        small = GPT2Config(n_embd=96, n_layer=12, n_head=12, **end)
        GPT2LMHeadModel(small).save_pretrained(folder(name))
        text.save_pretrained(cache / ("models--" + name.replace("/", "--")) / "snapshots" / REVISION)
    special = {
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "mask_token": "[MASK]",
    }
    pieces = word_tokenizer(words, special, "[CLS] $A [SEP]")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 64}
    for name in (
        "bert-base-cased",
        "google-bert/bert-base-cased",
        "bert-base-uncased",
        "google-bert/bert-base-uncased",
    ):
        home = folder(name)
        BertForMaskedLM(BertConfig(vocab_size=len(pieces), **sizes)).save_pretrained(home)
        pieces.save_pretrained(home)
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    pieces = word_tokenizer(words, special, "$A </s>")
    ends = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    t5 = T5Config(vocab_size=len(pieces), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, **ends)
    for name in ("t5-small", "google-t5/t5-small"):
        home = folder(name)
        T5ForConditionalGeneration(t5).save_pretrained(home)
        pieces.save_pretrained(home)
    fields = {"n_layers": 8, "d_model": 512, "n_heads": 8, "d_vocab": 61, "n_ctx": 59, "act_fn": "gelu"}
    othello = HookedTransformer(HookedTransformerConfig(**fields, d_head=64, d_mlp=2048, normalization_type="LNPre"))
    torch.save(othello.state_dict(), folder("NeelNanda/Othello-GPT-Transformer-Lens") / "synthetic_model.pth")


def main(arguments: list[str]) -> int:
    """Runs the notebooks of a folder; 1 if a cell failed."""
    parser = argparse.ArgumentParser(prog="python tests/clients/notebooks.py", description=__doc__)
    parser.add_argument("folder", type=Path, help="a folder of .ipynb files")
    parser.add_argument("--seconds", type=int, default=300, help="the longest time of a cell")
    given = parser.parse_args(arguments)
    paths = sorted(given.folder.glob("*.ipynb"))
    if not paths:
        parser.error(f"there are no notebooks in {given.folder}")
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as place:
        checkpoints_of(words_of(paths), Path(home))
        os.environ |= {"HF_HUB_CACHE": home, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        failed = [run(path, given.seconds, Path(place)) for path in paths]
        return int(any(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
