"""The memory of a harvest: that of a few batches, whatever the size of a shard."""

import sys

import pytest

from tests.benchmarks.harvest_memory import MIB, probe


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_a_shard_is_not_kept_in_memory() -> None:
    found = probe(160 * MIB)
    assert found["shards"] == 3
    assert found["shard"] > 150 * MIB
    assert found["growth"] < found["shard"]  # two shards are the bound
