"""Which rows a process reads: laws over random meshes, splits and orders of devices, as if these were of several processes."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.data import DataShard, local_index, shard_of
from autoshard.errors import StrategyError

BATCH = 24


@st.composite
def placed(draw):
    """The dim 0 slices of each device of some shardings, and the process of each device, of which a mesh has any order."""
    sizes = draw(st.sampled_from([(8,), (6,), (2, 4), (4, 2), (2, 3), (2, 2, 2), (1, 4), (5,)]))
    names = ("a", "b", "c")[: len(sizes)]
    devices = draw(st.permutations(jax.devices()[: int(np.prod(sizes))]))
    mesh = Mesh(np.array(devices).reshape(sizes), names)
    n_each = draw(st.sampled_from([1, 2, 3, 4, 8]))
    process = {device: device.id // n_each for device in devices}
    specs = draw(st.lists(st.lists(st.sampled_from(names), unique=True).map(tuple), min_size=1, max_size=3))
    slices = []
    for axes in specs:
        if BATCH % int(np.prod([mesh.shape[axis] for axis in axes])) == 0:
            sharding = NamedSharding(mesh, PartitionSpec(axes or None))
            slices.append({device: index[0] for device, index in sharding.devices_indices_map((BATCH,)).items()})
    whole = {device: slice(None) for device in devices}
    return slices or [whole], process


def triples(slices, process):
    return [(process[device], *rows.indices(BATCH)[:2]) for each in slices for device, rows in each.items()]


@given(placed())
@settings(max_examples=200)
def test_processes_read_the_batch_between_them(found):
    """Shards are disjoint, of equal size, and the whole batch together; each process finds the rows of its devices where they are."""
    slices, process = found
    shards = {each: shard_of(triples(slices, process), BATCH, each) for each in set(process.values())}
    by_id = {shard.shard_id: shard for shard in shards.values()}
    assert all(by_id[shard.shard_id] == shard for shard in shards.values())
    assert {shard.num_shards for shard in shards.values()} == {len(by_id)} and sorted(by_id) == list(range(len(by_id)))
    assert sorted(row for shard in by_id.values() for row in shard.rows) == list(range(BATCH))
    assert len({shard.n_rows for shard in by_id.values()}) == 1
    batch = np.arange(BATCH) * 7
    for each in slices:
        for device, rows in each.items():
            own = shards[process[device]].rows
            wanted = slice(*rows.indices(BATCH)[:2])
            np.testing.assert_array_equal(batch[list(own)][local_index(own, wanted)], batch[wanted])


@pytest.mark.parametrize(
    ("needed", "process", "num_shards", "shard_id", "rows"),
    [
        ([(p, 0, 8) for p in range(4)], 2, 1, 0, range(8)),  # replicated over all
        ([(p, 2 * p, 2 * p + 2) for p in range(4)], 2, 4, 2, (4, 5)),  # one process a part
        ([(p, p // 2 * 4, p // 2 * 4 + 4) for p in range(4)], 3, 2, 1, (4, 5, 6, 7)),  # two processes share rows
        ([(0, 0, 2), (1, 2, 4), (0, 4, 6), (1, 6, 8)], 1, 2, 1, (2, 3, 6, 7)),  # devices in turns
        ([(0, 0, 2), (0, 2, 4), (1, 2, 4), (1, 4, 6), (2, 6, 8)], 2, 1, 0, range(8)),  # shards of 6 and 2 rows: none are
        ([(0, 0, 4), (0, 0, 8), (1, 4, 8)], 1, 1, 0, range(8)),  # of two arrays, one is replicated in process 0
    ],
)
def test_known_shards(needed, process, num_shards, shard_id, rows):
    """What each way to split a batch over processes means for one of them."""
    assert shard_of(needed, 8, process) == DataShard(num_shards, shard_id, 8, tuple(rows))


def test_a_process_without_devices_is_told():
    """A mesh may leave out a process's devices."""
    with pytest.raises(StrategyError, match=r"process 3 has no device.*Search for all devices"):
        shard_of([(0, 0, 4)], 4, 3)
