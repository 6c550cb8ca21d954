"""Tables: rows by id on servers, updated as a whole table would be, and a worker's cache of them."""

from __future__ import annotations

import doctest
from collections import OrderedDict

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import AutoshardError
from autoshard.parameter_server import sparse
from autoshard.parameter_server.sparse import Cache, Table, TableShard, summed

WIDTH = 3


def table(optimizer, rows=20, cache_rows=4, lazy=False):
    return Table(rows, WIDTH, lambda ids: np.sin(np.outer(ids, [1, 2, 3])), lambda batch: batch, optimizer, cache_rows, lazy)


# -- optimizers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer", [optax.sgd(0.1), optax.adagrad(0.1), optax.chain(optax.clip(1.0), optax.sgd(0.1)), optax.sign_sgd(0.1)]
)
def test_optimizers_that_leave_rows_without_gradient_alone_are_taken(optimizer):
    """As they are: training by rows is training of the whole table."""
    table(optimizer)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adam(0.1),
        optax.sgd(0.1, momentum=0.9),
        optax.rmsprop(0.1),
        optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
        optax.sgd(optax.exponential_decay(0.1, 10, 0.5)),
    ],
    ids=["adam", "momentum", "rmsprop", "decay", "schedule"],
)
def test_others_are_taken_when_asked_for_only(optimizer):
    """Since a row without a gradient, or its state, would change in training of the whole table."""
    with pytest.raises(AutoshardError, match=r"pass lazy=True"):
        table(optimizer)
    assert table(optimizer, lazy=True).lazy


@pytest.mark.parametrize("change", [{"rows": 0}, {"cache_rows": 0}])
def test_sizes_are_checked(change):
    """There is at least one row, in the table and in the cache."""
    with pytest.raises(AutoshardError, match="at least 1"):
        table(optax.sgd(0.1), **change)


# -- shards ----------------------------------------------------------------------------------------------------------------

PUSHES = st.lists(st.lists(st.lists(st.integers(0, 19), max_size=12), min_size=2, max_size=2), min_size=1, max_size=4)


@settings(max_examples=8)
@given(PUSHES, st.integers(1, 3))
def test_shards_together_are_updated_as_the_whole_table(pushes, servers):
    """By the mean over workers of summed gradients, for ids in any number and order; what is unchanged keeps its version."""
    adagrad = optax.adagrad(0.1)
    shards = [TableShard(table(adagrad), i, servers) for i in range(servers)]
    whole = jnp.asarray(table(adagrad).init(np.arange(20)), jnp.float32)
    state = adagrad.init(whole)
    for step, workers in enumerate(pushes, 1):
        sums = [summed(np.array(ids, int), gradients_of(ids, step)) for ids in workers]
        dense = np.zeros((20, WIDTH), np.float32)
        for ids, rows in sums:
            dense[ids] += rows / len(workers)
        updates, state = adagrad.update(dense, state, whole)
        whole = optax.apply_updates(whole, updates)
        for i, shard in enumerate(shards):
            shard.push(step, [(ids[ids % servers == i], rows[ids % servers == i]) for ids, rows in sums])
            touched = {j for ids in workers for j in ids if j % servers == i}
            assert {j for j in range(i, 20, servers) if shard.versions[j // servers] == step} == touched
    for i, shard in enumerate(shards):
        np.testing.assert_allclose(shard.rows, whole[i::servers], rtol=1e-5, atol=1e-6)


def gradients_of(ids, step):
    return np.cos(np.outer(np.array(ids, int) + step, [1, 2, 3])).astype(np.float32).reshape(len(ids), WIDTH)


def test_each_row_of_a_lazy_table_is_a_parameter_of_its_own():
    """Adam's count and moments of a row are those of the steps that read it."""
    adam = optax.adam(0.1)
    shard = TableShard(table(adam, lazy=True), 0, 1)
    row, state = shard.rows[5].copy(), adam.init(shard.rows[5])
    for step in range(1, 6):
        ids = np.array([5, 7]) if step % 2 else np.array([7])
        gradients = gradients_of(ids, step)
        shard.push(step, [(ids, gradients)])
        if step % 2:
            updates, state = adam.update(gradients[0], state, row)
            row = optax.apply_updates(row, updates)
    np.testing.assert_allclose(shard.rows[5], row, rtol=1e-5)


# -- the cache -------------------------------------------------------------------------------------------------------------


class Servers:
    """Rows that change, with their versions, as servers have them."""

    def __init__(self):
        self.versions = np.zeros(20, np.int64)

    def row(self, i):
        return np.full(WIDTH, 100 * i + self.versions[i], np.float32)

    def pull(self, ids, versions):
        positions = np.flatnonzero(self.versions[ids] != versions)
        rows = np.array([self.row(i) for i in ids[positions]], np.float32).reshape(-1, WIDTH)
        return positions, self.versions[ids[positions]], rows


STEPS = st.lists(
    st.tuples(st.lists(st.integers(0, 19), unique=True, max_size=8), st.lists(st.integers(0, 19), max_size=4)), min_size=1, max_size=12
)


@given(STEPS, st.integers(1, 6), st.integers(0, 3))
def test_a_cache_has_the_rows_read_last_and_none_that_are_too_old(steps, capacity, max_age):
    """With age 0 rows are those of the servers; else as they were at most so many steps ago. What is kept, and the counts, are those of a
    cache of lists."""
    servers, cache, recent = Servers(), Cache(capacity, WIDTH, max_age), OrderedDict()
    history, reads = [], 0
    for step, (ids, changed) in enumerate(steps):
        history.append({i: servers.row(i) for i in range(20)})
        before = cache.use
        rows = cache.read(step, np.array(ids, np.int64), servers.pull)
        assert rows.shape == (len(ids), WIDTH)
        for i, row in zip(ids, rows, strict=True):
            assert any(np.array_equal(row, then[i]) for then in history[max(0, step - max_age) :])
            recent[i] = None
            recent.move_to_end(i)
        evicted = max(0, len(recent) - capacity)
        for _ in range(evicted):
            recent.popitem(last=False)
        reads += len(ids)
        assert set(cache._rows) == set(recent) and cache.use.most_rows <= capacity
        assert cache.use.evictions - before.evictions == evicted and cache.use.hits + cache.use.misses == reads
        servers.versions[changed] += 1


def test_hits_are_rows_that_are_good_or_unchanged():
    """Within their age nobody is asked; after it what has not changed is not sent again."""
    servers, cache, asked = Servers(), Cache(10, WIDTH, 1), []

    def pull(ids, versions):
        asked.append(ids.tolist())
        return servers.pull(ids, versions)

    for step, ids in enumerate([[1, 2], [1, 2, 3], [1, 2], [1]]):
        cache.read(step, np.array(ids), pull)
        servers.versions[2] += 1
    assert asked == [[1, 2], [3], [1, 2]]
    assert (cache.use.hits, cache.use.misses) == (4, 4)
    cache.clear()
    cache.read(4, np.array([1]), pull)
    assert asked[-1] == [1] and cache.use.misses == 5


def test_examples():
    """Those of the docstrings."""
    assert doctest.testmod(sparse, optionflags=doctest.ELLIPSIS).failed == 0
