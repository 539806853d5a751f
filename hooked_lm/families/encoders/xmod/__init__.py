"""X-MOD (Pfeiffer et al. 2022, arXiv:2205.06266): XLM-R with an adapter per language, here that of `default_language`."""

from dataclasses import replace
from typing import Any

from hooked_lm.components.mlp import MLP
from hooked_lm.families._shared import bert_like, classic
from hooked_lm.families._shared.bert_like import IGNORED, NO_EFFECT, RENAMED, ROBERTA
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.encoders import roberta
from hooked_lm.families.encoders.xmod.adapter import AdapterPostNormBlock
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "roberta."


def config(hf: HFConfig) -> EncoderConfig:
    hf.require(pre_norm=False)
    languages, language = tuple(hf.languages), hf.default_language
    if language is None and len(languages) == 1:
        language = languages[0]
    if language not in languages:
        raise ValueError(f"default_language={language!r}: give one of this checkpoint's, {', '.join(languages)}")
    tree = roberta.config(hf)
    width = hf.hidden_size // hf.adapter_reduction_factor
    adapter: dict[str, Any] = {
        "adapter": MLP.Config(hf.hidden_size, width, hf.hidden_act),
        "adapter_ln": bert_like.layer_norm(hf) if hf.adapter_layer_norm else None,
        "reuses_ln2": hf.adapter_reuse_layer_norm and not hf.adapter_layer_norm,
        "adds_normalized": hf.ln_before_adapter,
        "language": language,
        "other_languages": tuple(other for other in languages if other != language),
    }
    return replace(tree, blocks=tuple(AdapterPostNormBlock.Config(**vars(block), **adapter) for block in tree.blocks))


def rows(tree: EncoderConfig) -> list[Row]:
    block, output = tree.blocks[0], PREFIX + "encoder.layer.{l}.output."
    targets = {language: f"other_adapters.{language}." for language in block.other_languages}
    found = classic.norm(output + "adapter_layer_norm", "blocks.{l}.adapter_ln")
    for language, target in {**targets, block.language: "adapter."}.items():
        source = f"{output}adapter_modules.{language}."
        found += classic.into_mlp(source + "dense1", "blocks.{l}." + target)
        found += classic.out_of_mlp(source + "dense2", "blocks.{l}." + target)
    return [*bert_like.rows(tree, ROBERTA, PREFIX), *found]
