"""The language model of Llama 3.2 Vision (Meta 2024, arXiv:2407.21783, section 7): the layers of Llama 3.1, between which others
attend to images. On text alone these are skipped: layers are counted without them, as in Llama 3.1."""

from dataclasses import replace

from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "PREFIX", "config", "rows", "text_names"]

N_SPECIAL = 8  # tokens that are read and not predicted, that of an image among them


def config(hf: HFConfig) -> DecoderConfig:
    hf.ignored_by_transformers(tie_word_embeddings=False)
    n_layers = sum(name is not None for name in text_names(hf).values())
    tree = llama_like.decoder(hf.changed(num_hidden_layers=n_layers), llama_like.attention(hf))
    return replace(tree, embed=replace(tree.embed, d_vocab=hf.vocab_size + N_SPECIAL))


def text_names(hf: HFConfig) -> dict[str, str | None]:
    layers = range(hf.num_hidden_layers)
    kept = [layer for layer in layers if layer not in hf.cross_attention_layers]
    return {rf"\blayers\.{i}\b": f"layers.{kept.index(i)}" if i in kept else None for i in layers}
