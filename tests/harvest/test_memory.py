"""The memory of a harvest: that of a few batches, whatever the size of a shard."""

import sys

import pytest

from tests.benchmarks.harvest_memory import MIB, probe


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_a_shard_is_not_kept_in_memory() -> None:
    found = probe(240 * MIB)  # batches take 100 to 170, as they are freed sooner or later
    assert found["shards"] == 3
    assert found["shard"] > 230 * MIB
    assert found["growth"] < found["shard"]  # two shards are the bound
