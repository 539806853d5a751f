"""Encoder-decoders."""

from tests.families._case import Case

CASES: list[Case] = []
