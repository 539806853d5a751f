"""Clients from PyPI run in an environment of their own, under the lent name: `make clients`."""

from hooked_lm import compat

compat.install()
