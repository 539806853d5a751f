"""Comparisons with the original, in the clients' environment alone: `make clients`."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # where `originals` is


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The original announces in every call that it is going away, and PyTorch that it uses what is."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:.* deprecated:DeprecationWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore:FactoredMatrix.Vh has always:DeprecationWarning"))
