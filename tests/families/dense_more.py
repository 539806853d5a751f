"""More dense decoders."""

from tests.families._case import Case

CASES: list[Case] = []
