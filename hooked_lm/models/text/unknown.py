"""Text for which a tokenizer has no token: it becomes an unknown token, or nothing."""

from collections.abc import Sequence

from hooked_lm.callers import warn_caller
from hooked_lm.models.text.bos import ids_of
from hooked_lm.models.text.tokenizer import Tokenizer

RARE = "\N{NAZAR AMULET}"  # a character that only tokenizers with tokens for bytes, or for unknown text, can have


def leaves_out_text(tokenizer: Tokenizer) -> bool:
    """Whether characters without a token become nothing."""
    try:
        [found] = ids_of(tokenizer, [RARE], specials=False)
    except Exception:  # of the tokenizers library: it refuses such text itself
        return False
    return _unknown(tokenizer)[1] not in found and RARE not in tokenizer.decode(found)


def _unknown(tokenizer: Tokenizer) -> tuple[str, int | None]:
    """The token of unknown words, and its id; those of the backend if the tokenizer does not say."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    name = getattr(tokenizer, "unk_token", None) or getattr(getattr(backend, "model", None), "unk_token", None)
    found = getattr(tokenizer, "unk_token_id", None)
    return str(name), backend.token_to_id(name) if found is None and backend is not None and name else found


def _without_added(tokenizer: Tokenizer, text: str) -> str:
    """The text without the tokens that are written in it, such as "<image>"."""
    added = tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else ()
    for token in sorted(added, key=len, reverse=True):
        text = text.replace(token, " ")
    return text


def warn_if_unknown(
    tokenizer: Tokenizer, texts: Sequence[str], rows: Sequence[Sequence[int]], leaves_out: bool
) -> bool:
    """Warns of words, or characters, that are not among the ids of their text; returns whether it did.

    Raises ValueError where the token of unknown words is that of padding: nothing would be read in their place.
    """
    name, unknown = _unknown(tokenizer)
    nothing = ids_of(tokenizer, [RARE], specials=False)[0] if leaves_out else []
    for text, row in zip(texts, rows, strict=True):
        if unknown is not None and list(row).count(unknown) > text.count(name):
            words = [word for word in dict.fromkeys(text.split()) if name not in word]
            lost = [word for word in words if unknown in ids_of(tokenizer, [word], specials=False)[0]]
            becomes = f"{name!r} is read in their place"
        else:
            letters = sorted({*_without_added(tokenizer, text)}) if leaves_out else []
            lost = [of for of in letters if not of.isspace() and ids_of(tokenizer, [of], specials=False)[0] == nothing]
            becomes = "nothing is read in their place"
        if not lost:
            continue
        what = f"the tokenizer has no token for {', '.join(map(repr, lost[:5]))}, in {text[:60]!r}: {becomes}"
        if unknown in row and unknown == tokenizer.pad_token_id:
            raise ValueError(f"{what}, which is padding; use words of its vocabulary, tokenizer.get_vocab()")
        warn_caller(f"{what}. It is said once")
        return True
    return False
