"""The token that begins a text, according to its tokenizer."""

import copy

from hooked_lm.callers import warn_caller
from hooked_lm.models.text.tokenizer import Tokenizer


def special_prefix(tokenizer: Tokenizer) -> list[int]:
    """The special tokens that `tokenizer` puts before every text: none, BOS, or (rarely) several."""
    specials = ids_of(tokenizer, [""], specials=True)[0]
    if tokenizer.bos_token_id in specials:
        return specials[: specials.index(tokenizer.bos_token_id) + 1]
    ends = (tokenizer.eos_token_id, getattr(tokenizer, "sep_token_id", None))
    while specials and specials[-1] in ends:
        specials = specials[:-1]
    return specials


def prepends_bos(tokenizer: Tokenizer) -> bool:
    """Whether `tokenizer` puts a special token before every text (Llama and Gemma do, GPT-2 does not).

    >>> from tokenizers import Tokenizer, models, processors
    >>> from transformers import PreTrainedTokenizerFast
    >>> words = Tokenizer(models.WordLevel({"<s>": 0, "a": 1}, unk_token="<s>"))
    >>> prepends_bos(PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>"))
    False
    >>> words.post_processor = processors.TemplateProcessing(
    ...     "<s> $A", special_tokens=[("<s>", 0)]
    ... )
    >>> prepends_bos(PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>"))
    True
    """
    return bool(special_prefix(tokenizer))


def warn_if_eos_is_bos(tokenizer: Tokenizer) -> bool:
    """Warns if a tokenizer has no BOS, so that its EOS begins every text; returns True."""
    if tokenizer.bos_token_id is None:
        eos = tokenizer.decode([tokenizer.eos_token_id], skip_special_tokens=False)
        warn_caller(
            f"the tokenizer has no BOS token, so texts begin with its EOS token {eos!r}, as in TransformerLens, and unlike in "
            "transformers, which begins with none. prepend_bos=False leaves it out, default_prepend_bos=False does so in every "
            "text of a model; prepend_bos=True says that it is meant"
        )
    return True


def ids_of(tokenizer: Tokenizer, texts: list[str], specials: bool) -> list[list[int]]:
    """The ids of each text, with or without the tokenizer's special tokens, never padded or truncated."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer(texts, add_special_tokens=specials, verbose=False)["input_ids"]
    # Calling a fast tokenizer would reset the padding and truncation that another caller has set on it. Its backend
    # only reads these settings, so their effect is removed here.
    encodings = backend.encode_batch(texts, add_special_tokens=specials)
    if any(encoding.overflowing for encoding in encodings):
        backend = copy.deepcopy(backend)
        backend.no_truncation()
        encodings = backend.encode_batch(texts, add_special_tokens=specials)
    return [
        [token for token, real in zip(encoding.ids, encoding.attention_mask, strict=True) if real]
        for encoding in encodings
    ]
