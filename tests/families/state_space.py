"""Decoders with state-space or linear-attention mixers."""

from tests.families._case import Case

CASES: list[Case] = []
