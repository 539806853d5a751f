"""Decoders whose MLPs are mixtures of experts."""

from tests.families._case import Case

CASES: list[Case] = []
