import itertools
import time

import numpy as np
import pytest

from autoshard.cost.permute import exchange, exchange_axes
from autoshard.cost.reshard import _exchanging
from autoshard.ir import layouts, shard_counts
from tests.cost.test_reshard import held


def splitting(rank, sizes):
    """Every pair of layouts of which the second splits each dimension a multiple of times."""
    for source, target in itertools.permutations(layouts(rank, len(sizes)), 2):
        before, after = (shard_counts(layout, rank, sizes) for layout in (source, target))
        if not any(b % a for a, b in zip(before, after, strict=True)):
            yield source, target


@pytest.mark.parametrize(
    "sizes", [(2, 4), (4, 6), (6, 4), (2, 2, 2), (2, 3, 6), (6, 4, 2), (4, 1, 2), pytest.param((2, 2, 2, 2), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("rank", [1, 2])
def test_axes_of_an_exchange_are_those_along_which_its_pairs_differ(rank, sizes):
    """No loop over devices is needed for them, whether or not the axes' sizes have common digits; Shardy's axes contain them."""
    for source, target in splitting(rank, sizes):
        pairs, axes = exchange(source, target, rank, sizes).pairs, exchange_axes(source, target, rank, sizes)
        sender, receiver = (np.array(np.unravel_index(ends, sizes)) for ends in pairs.T)
        assert axes == tuple(np.flatnonzero((sender != receiver).any(axis=1)).tolist()), (source, target)
        sending = np.flatnonzero(_exchanging(np.array(source), np.array(target), sizes)).tolist()
        assert {*axes} <= {*sending}, (source, target)


@pytest.mark.parametrize(("rank", "sizes"), [(2, (2, 2, 2)), (1, (2, 3, 6)), (1, (6, 4))])
def test_each_device_gets_its_piece(rank, sizes):
    """Every sender has what its receiver needs, at the place that it is told to send."""
    for source, target in splitting(rank, sizes):
        whole = np.array(shard_counts(target, rank, sizes))
        has, needs = ([indices for _, indices in held(layout, whole, sizes)] for layout in (source, target))
        found = exchange(source, target, rank, sizes)
        assert sorted(found.pairs[:, 1]) == [*range(np.prod(sizes))]
        for (sender, receiver), start in zip(found.pairs, found.starts, strict=True):
            shard = np.reshape(sorted(has[sender]), whole // shard_counts(source, rank, sizes))
            assert needs[receiver] == {shard[tuple(start)]}, (source, target)


def test_axes_of_an_exchange_take_no_longer_on_more_devices():
    """They are found on a million devices as on eight."""
    began = time.process_time()
    assert exchange_axes((0, -1, 1), (-1, 0, 1), 2, (1024, 1024, 16)) == (0, 1)
    assert time.process_time() - began < 0.1  # a walk over all devices takes seconds
