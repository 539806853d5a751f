"""Strings of tokens that are part of a character: bytes that are no text by themselves."""

import codecs
import re
from typing import Any

__all__ = ["as_text"]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a byte in vocabularies of SentencePiece
ERRORS = "hooked_lm.shown_bytes"


def _alphabet() -> dict[str, int]:
    """The byte of each character of byte-level vocabularies: printable Latin-1 unchanged, the rest in order from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


ALPHABET = _alphabet()


def _shown(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError), "only bytes are decoded"
    return "".join(f"<0x{byte:02X}>" for byte in error.object[error.start : error.end]), error.end


codecs.register_error(ERRORS, _shown)


def as_text(tokenizer: Any, token: int, decoded: str) -> str:
    """The decoded string of one token, with bytes that are no character written as `<0xE2>`.

    Decoders write all such bytes alike, as U+FFFD, so that different tokens could not be told apart.
    """
    if REPLACEMENT not in decoded:
        return decoded
    piece = tokenizer.convert_ids_to_tokens(token)
    if isinstance(piece, str) and BYTE.fullmatch(piece):
        return piece
    if isinstance(piece, str) and all(character in ALPHABET for character in piece):
        piece = bytes(ALPHABET[character] for character in piece)
    return piece.decode("utf-8", ERRORS) if isinstance(piece, bytes) else decoded
