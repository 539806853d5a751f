"""Small tokenizers of the kinds that checkpoints have: which special tokens they know, and which they add."""

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

VOCABULARY = {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3, "a": 4, "b": 5, "<s:b>": 6}
BOS, EOS = {"bos_token": "<s>"}, {"eos_token": "</s>"}

KINDS: dict[str, dict[str, Any]] = {
    "one token for all": {**EOS, "bos_token": "</s>"},
    "bos": {**BOS, **EOS},
    "bos and pad": {**BOS, **EOS, "pad_token": "<pad>"},
    "prepends": {**BOS, **EOS, "template": "<s> $A"},
    "prepends and appends": {**BOS, **EOS, "template": "<s> $A </s>"},
    "appends, with bos": {**BOS, **EOS, "template": "$A </s>"},
    "appends": {**EOS, "template": "$A </s>"},
    "eos": EOS,
    "eos and pad": {**EOS, "pad_token": "<pad>"},
    "a colon": {**EOS, "bos_token": "<s:b>"},
    "left": {**BOS, **EOS, "padding_side": "left"},
    "nothing": {},
}


def toy_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of two words, `a` and `b`."""
    options = dict(KINDS[kind])
    words = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template := options.pop("template", None):
        words.post_processor = processors.TemplateProcessing(template, special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", **options)
