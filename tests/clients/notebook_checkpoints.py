"""Checkpoints of random weights under the names that notebooks use, in the layout of the hub's cache.

`RANDOM` says what is written for which names. The layers, heads and vocabularies are those of many real checkpoints, so that what
notebooks index exists; the widths are small.
"""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertForPreTraining,
    PreTrainedTokenizerFast,
    T5ForConditionalGeneration,
)

from hooked_lm import HookedTransformer, HookedTransformerConfig
from hooked_lm.hub.names import hub_id

REVISION = "0" * 40
END = "<|endoftext|>"
SYMBOLS = {
    name: f"[{name[:-6].upper()}]" for name in ("unk_token", "cls_token", "sep_token", "pad_token", "mask_token")
}
NARROW = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 256}
GROUPED = {**NARROW, "num_key_value_heads": 4, "head_dim": 8}
DIGITS = "NeelNanda/gpt-neox-tokenizer-digits"  # the tokenizer of the models that were trained with TransformerLens
TRAINED = {
    "d_model": 64,
    "n_ctx": 1024,
    "d_head": 8,
    "n_heads": 8,
    "d_vocab": 48262,
    "seed": 1,
    "tokenizer_name": DIGITS,
}
STEPS = range(1, 81)
OLDEST = (
    "openai-community/",
    "distilbert/",
    "google-bert/",
    "google-t5/",
)  # their checkpoints had names without an owner


# ---- tokenizers ------------------------------------------------------------------------------------------------------


def byte_tokenizer(words: list[str], size: int = 50257) -> PreTrainedTokenizerFast:
    """A tokenizer like GPT-2's, of `size` tokens: the words are single tokens, and the ids above them are words too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(words, trainer)
    described = json.loads(tokenizer.to_str())
    vocabulary = described["model"]["vocab"]
    vocabulary |= {f"Ġtoken_{i}": i for i in range(len(vocabulary), size)}
    tokenizer = Tokenizer.from_str(json.dumps(described))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, unk_token=END)


def word_tokenizer(words: list[str], special: dict[str, str], *templates: str) -> PreTrainedTokenizerFast:
    """A tokenizer of words, with special tokens around a text, and around a pair of texts, as the templates say."""
    tokenizer = Tokenizer(models.WordPiece(unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    named = list(dict.fromkeys(special.values()))
    tokenizer.train_from_iterator(
        words, trainers.WordPieceTrainer(vocab_size=4000, special_tokens=named, show_progress=False)
    )
    ids = [(token, tokenizer.token_to_id(token)) for token in named]
    pair = dict(zip(("single", "pair"), templates, strict=False))
    tokenizer.post_processor = processors.TemplateProcessing(**pair, special_tokens=ids)
    inputs = ["input_ids", *["token_type_ids"] * len(templates[1:]), "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **special)


# ---- models ----------------------------------------------------------------------------------------------------------

Write = Callable[[Path, list[str]], None]


def decoder(model_type: str, **sizes: Any) -> Write:
    """Writes a decoder of this `model_type`; its vocabulary is as large as the default of its config."""

    def write(folder: Path, words: list[str]) -> None:
        config = AutoConfig.for_model(model_type, **sizes)
        text = byte_tokenizer(words, config.vocab_size)
        config.bos_token_id = config.eos_token_id = text.eos_token_id
        config.pad_token_id = None
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        text.save_pretrained(folder)

    return write


def gpt2(layers: int, heads: int, width: int = 16) -> Write:
    return decoder("gpt2", n_layer=layers, n_head=heads, n_embd=width * heads, n_ctx=1024)


def bert(folder: Path, words: list[str]) -> None:
    pieces = word_tokenizer(words, SYMBOLS, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
    config = AutoConfig.for_model(
        "bert", vocab_size=len(pieces), **NARROW | {"num_hidden_layers": 12, "hidden_size": 96}
    )
    config.num_attention_heads = 12
    model = BertForPreTraining(config)  # the heads of both tasks
    model.save_pretrained(folder)
    config.architectures = ["BertForMaskedLM"]
    config.save_pretrained(folder)
    pieces.save_pretrained(folder)


def t5(folder: Path, words: list[str]) -> None:
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    pieces = word_tokenizer(words, special, "$A </s>")
    ends = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    sizes = {"d_model": 64, "d_kv": 8, "d_ff": 256, "num_layers": 6, "num_heads": 8, "n_positions": 512}
    model = T5ForConditionalGeneration(AutoConfig.for_model("t5", vocab_size=len(pieces), **sizes, **ends))
    with torch.no_grad():  # the end token is likely: notebooks generate until it comes
        ids = torch.randint(len(pieces), (64, 8))
        states = model(input_ids=ids, decoder_input_ids=ids, output_hidden_states=True).decoder_hidden_states[-1]
        model.shared.weight[pieces.eos_token_id] = 20 * states[:, -1].mean(0)
    model.save_pretrained(folder)
    pieces.save_pretrained(folder)


def digits(folder: Path, words: list[str]) -> None:
    AutoConfig.for_model("gpt_neox").save_pretrained(folder)
    byte_tokenizer(words, TRAINED["d_vocab"]).save_pretrained(folder)


def trained(folder: Path, words: list[str]) -> None:
    """Writes a model as those that were trained with TransformerLens, with a checkpoint for each of `STEPS`."""
    name = folder.parents[1].name.lower()
    layers = re.search(r"_(\d+)l", name.replace("-", "_"))
    fields = {**TRAINED, "n_layers": int(layers[1]) if layers else 2, "d_mlp": 256, "attn_only": "attn" in name}
    fields["act_fn"] = "solu_ln" if "solu" in name else "gelu"
    shortformer = "shortformer" in name
    kind = {"positional_embedding_type": "shortformer"} if shortformer else {}
    flat = {key: value for key, value in fields.items() if key != "tokenizer_name"}
    model = HookedTransformer(HookedTransformerConfig(**flat, **kind, normalization_type="LN"))
    config = fields | {"normalization": "LN", "shortformer_pos": shortformer}
    (folder / "config.json").write_text(json.dumps(config))
    torch.save({key: value.clone() for key, value in model.state_dict().items()}, folder / "model_final.pth")
    (folder / "checkpoints").mkdir()
    for step in STEPS:
        (folder / "checkpoints" / f"step_{100 * step:06d}.pth").hardlink_to(folder / "model_final.pth")


def othello(folder: Path, words: list[str]) -> None:
    fields = {"n_layers": 8, "d_model": 512, "n_heads": 8, "d_vocab": 61, "n_ctx": 59, "act_fn": "gelu"}
    model = HookedTransformer(HookedTransformerConfig(**fields, d_head=64, d_mlp=2048, normalization_type="LNPre"))
    for file in ("synthetic_model.pth", "championship_model.pth"):
        torch.save(model.state_dict(), folder / file)


# A pattern of hub ids -> what writes such a checkpoint; the first that fits.
RANDOM: dict[str, Write] = {
    r".*distilgpt2": gpt2(6, 12),
    r".*gpt2-medium.*": gpt2(24, 16),
    r".*gpt2-large": gpt2(36, 20, 4),
    r".*gpt2-xl": gpt2(48, 25, 4),
    r"gpt2|openai-community/gpt2|stanford-crfm/.*": gpt2(12, 12),
    r"EleutherAI/(pythia|gpt-neox).*|stabilityai/stablelm-(base|tuned)-.*": decoder("gpt_neox", **NARROW),
    r"EleutherAI/gpt-neo-.*|roneneldan/TinyStories.*": decoder(
        "gpt_neo", hidden_size=64, num_layers=4, num_heads=8, attention_types=[[["global", "local"], 2]]
    ),
    r"EleutherAI/gpt-j.*": decoder("gptj", n_embd=64, n_layer=6, n_head=4, rotary_dim=8),
    r"facebook/opt-.*": decoder("opt", **NARROW | {"ffn_dim": 256, "word_embed_proj_dim": 64}),
    r"bigscience/bloom.*": decoder("bloom", hidden_size=64, n_layer=24, n_head=16),
    r"Qwen/Qwen(1\.5|2|2\.5)-.*": decoder("qwen2", **GROUPED),
    r"Qwen/Qwen3-.*": decoder("qwen3", **GROUPED),
    r"google/gemma-2-.*": decoder("gemma2", **GROUPED),
    r"google/gemma-\d+b.*": decoder("gemma", **GROUPED),
    r"microsoft/phi-[12].*": decoder("phi", **NARROW),
    r"mistralai/Mistral-.*": decoder("mistral", **GROUPED),
    r".*[Ll]lama.*|01-ai/Yi-.*": decoder("llama", **GROUPED),
    r"(google-bert/)?bert-.*": bert,
    r"(google-t5/)?t5-.*": t5,
    DIGITS: digits,
    r"NeelNanda/Othello.*": othello,
    r"NeelNanda/.*|ArthurConmy/redwood.*": trained,
}


def named(texts: Iterable[str]) -> set[str]:
    """The texts that are names of checkpoints, in all their spellings, and the tokenizer that a model refers to."""
    short = {text for text in texts if re.fullmatch(r"[\w./-]+", text)}
    full = short | {hub_id(name) for name in short}
    found = {name for name in full | {name.removeprefix(owner) for name in full for owner in OLDEST} if writer(name)}
    return found | ({DIGITS} if any(name.startswith(("NeelNanda/", "ArthurConmy/")) for name in found) else set())


def writer(name: str) -> Write | None:
    return next((write for pattern, write in RANDOM.items() if re.fullmatch(pattern, name)), None)


def checkpoints_of(texts: list[str], cache: Path) -> list[str]:
    """Writes a random model for each name of a checkpoint among the texts; their words are what the tokenizers know."""
    written: dict[Write, Path] = {}
    names = sorted(named(text.strip() for text in texts))
    for name in names:
        write = writer(name)
        assert write is not None, name
        home = cache / ("models--" + name.replace("/", "--"))
        (home / "refs").mkdir(parents=True)
        (home / "refs" / "main").write_text(REVISION)
        if write in written and write is not trained:  # such as gpt2 and openai-community/gpt2
            (home / "snapshots").symlink_to(written[write])
            continue
        written[write] = home / "snapshots"
        (folder := home / "snapshots" / REVISION).mkdir(parents=True)
        torch.manual_seed(0)
        write(folder, texts)
    return names
