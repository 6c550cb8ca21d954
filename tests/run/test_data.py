"""`Strategy.data` in one process: any source gives the same batches, placed, read ahead, and again after a restart."""

from __future__ import annotations

import gc
import itertools
import json
import threading
import time

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import AutoshardError, StrategyError

B, N = 16, 40
ROWS = np.random.default_rng(0).normal(size=(N, 8)).astype(np.float32)
LABELS = np.arange(N)


def train_step(params, batch, key):
    x = batch["x"] + 0 * jax.random.normal(key, batch["x"].shape)
    return params - jnp.mean((x @ params - batch["y"][:, None]) ** 2)


def two_arguments(params, x, y):
    return params - jnp.mean((x @ params - y[:, None]) ** 2)


@pytest.fixture(scope="module")
def strategy():
    args = jnp.ones((8, 8)), {"x": jnp.ones((B, 8)), "y": jnp.ones(B, int)}, jax.random.key(0)
    return autoshard.search(train_step, *args, cluster="cpu:8", mesh={"data": 8}, pins={"batch*": P("data")})


@pytest.fixture(scope="module")
def of_two():
    args = jnp.ones((8, 8)), jnp.ones((B, 8)), jnp.ones(B, int)
    pins = {"x": P("a", "b"), "y": P("a")}
    return autoshard.search(two_arguments, *args, cluster="cpu:8", mesh={"a": 4, "b": 2}, pins=pins)


def example(row):
    return {"x": ROWS[row], "y": LABELS[row]}


class Examples:
    """A dataset as PyTorch has them."""

    def __repr__(self):
        return "Examples"  # by which Grain's DataLoader tells whether a state is of this data

    def __len__(self):
        return N

    def __getitem__(self, row):
        return example(row)


def batches(n=B):
    """Batches of the rows, the last with what is left."""
    for start in range(0, N, n):
        yield {"x": ROWS[start : start + n], "y": LABELS[start : start + n]}


class Reused:
    """A loader that writes every batch into the same memory, aligned so that JAX's CPU devices would read it in place."""

    def __iter__(self):
        memory = np.empty(B * 8 * 4 + 64, np.uint8)
        start = -memory.ctypes.data % 64
        x, y = memory[start : start + B * 8 * 4].view(np.float32).reshape(B, 8), np.empty(B, int)
        for batch in batches():
            n = len(batch["x"])
            x[:n], y[:n] = batch["x"], batch["y"]
            yield {"x": x[:n], "y": y[:n]}


def of_grain():
    return grain.MapDataset.source(Examples())


SOURCES = {
    "generator": batches,
    "list of batches": lambda: list(batches()),
    "examples": Examples,
    "memory used again": Reused,
    "grain examples": of_grain,
    "grain batches": lambda: of_grain().batch(B),
    "grain iterable": lambda: of_grain().to_iter_dataset().batch(B),
    "grain loader": lambda: grain.DataLoader(
        data_source=Examples(),
        sampler=grain.samplers.IndexSampler(N, shuffle=False, num_epochs=1),
        operations=[grain.transforms.Batch(B)],
        shard_options=grain.sharding.NoSharding(),
    ),
}


def read(found):
    return [np.asarray(batch["y"]).tolist() for batch in found]


WHOLE = [LABELS[:16].tolist(), LABELS[16:32].tolist()]
WRAPPED = [*WHOLE, [*range(32, 40), *range(8)]]


@pytest.mark.sample(6)
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_the_same_batches(strategy, source, prefetch):
    """The last one is filled from the beginning, or left out; all are where the step takes them, in its types."""
    found = list(strategy.data(SOURCES[source](), prefetch=prefetch))
    assert read(found) == WRAPPED
    assert found[0]["x"].sharding == strategy.shardings(1)["x"] and found[0]["y"].dtype == jnp.int32
    for batch, rows in zip(found, WRAPPED, strict=True):
        np.testing.assert_array_equal(batch["x"], ROWS[rows])
    step = strategy.apply(train_step)
    step(jnp.ones((8, 8)), found[0], jax.random.key(0))
    assert read(strategy.data(SOURCES[source](), prefetch=prefetch, at_end="drop")) == WHOLE


def test_several_arguments_in_a_tuple_or_list(of_two):
    """As the loader yields them, told by structure and shapes, or by position; also where another dimension than rows is split."""
    pairs = [(ROWS[:16], LABELS[:16]), [ROWS[16:32], LABELS[16:32]]]
    examples = list(zip(ROWS, LABELS, strict=True))
    for found in (of_two.data(pairs), of_two.data(examples, at_end="drop"), of_two.data(pairs, argnums=(1, -1))):
        for (x, y), expected in zip(found, pairs, strict=True):
            np.testing.assert_array_equal(x, expected[0])
            assert y.sharding == of_two.shardings(2) and x.sharding.spec == P("a", "b")
    shard = of_two.data_shard((1, 2))
    assert (shard.num_shards, shard.shard_id, shard.batch_size, shard.n_rows) == (1, 0, B, B) == (1, 0, of_two.data_shard(-1).n_rows, B)


def test_numbers_and_what_has_no_rows_stay_whole():
    """A batch may have a mask that all rows share, and Python numbers."""

    def step(w, batch):
        return jnp.sum(batch["x"] @ w * batch["mask"]) * batch["rate"]

    batch = {"x": jnp.ones((B, 8)), "mask": jnp.ones(8), "rate": 0.5}
    strategy = autoshard.search(step, jnp.ones((8, 8)), batch, cluster="cpu:8", mesh={"data": 8}, pins={"batch['x']": P("data")})
    (found,) = strategy.data([{"x": ROWS[:16], "mask": np.arange(8.0), "rate": 2.0}])
    assert found["rate"] == 2.0 and found["mask"].tolist() == list(range(8)) and found["x"].sharding.spec == P("data", None)


# -- states ------------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(6)
@pytest.mark.parametrize("taken", [0, 1, 2, 3])
@pytest.mark.parametrize("source", SOURCES)
def test_the_same_batches_follow_after_a_restart(strategy, source, taken):
    """What was read ahead and not taken comes again; a state is JSON."""
    before = strategy.data(SOURCES[source]())
    assert read(itertools.islice(before, taken)) == WRAPPED[:taken]
    state = json.loads(json.dumps(before.get_state()))
    before.close()
    assert list(before) == []
    again = strategy.data(SOURCES[source]())
    again.set_state(state)
    assert read(again) == WRAPPED[taken:]


def test_a_state_may_be_set_at_any_time_but_for_iterators(strategy):
    """Batches are taken back where the loader can be read again."""
    found = strategy.data(Examples())
    state = found.get_state()
    assert read(found) == WRAPPED
    found.set_state(state)
    assert read(found) == WRAPPED
    once = strategy.data(batches())
    next(once)
    once.set_state(state)
    with pytest.raises(AutoshardError, match=r"read once.*Pass what makes it"):
        next(once)
    with pytest.raises(AutoshardError, match="neither"):
        other = strategy.data(batches())
        other.set_state({"batches": 1, "loader": {"next_index": 1}})
        next(other)


@pytest.mark.parametrize("state", [None, {}, {"x": 1}, {"batches": "2"}, {"batches": -1}, {"batches": True}, 3])
def test_what_is_no_state_is_refused(strategy, state):
    """At once, rather than by the first batch."""
    with pytest.raises(StrategyError, match=r"what their get_state\(\) returned.*Pass that one"):
        strategy.data(Examples()).set_state(state)


def test_a_state_of_larger_batches_is_refused(strategy):
    """Its position is counted in batches."""
    found = strategy.data(Examples())
    found.set_state({"batches": 1, "batch_size": 24})
    with pytest.raises(StrategyError, match=r"batches of 24 rows, where the strategy's have 16\. Search with batches of 24"):
        next(found)


# -- threads -----------------------------------------------------------------------------------------------------------------


def readers():
    return [thread for thread in threading.enumerate() if thread.name == "autoshard-data"]


def wait_until(holds, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def endless(count):
    while True:
        count.append(1)
        yield {"x": ROWS[:16], "y": LABELS[:16]}


def test_a_few_batches_are_read_ahead(strategy):
    """No more than asked for, before the step needs them."""
    count = []
    found = strategy.data(endless(count), prefetch=3)
    assert not count
    next(found)
    assert wait_until(lambda: len(count) == 4)
    time.sleep(0.05)
    assert len(count) == 4
    found.close()


def test_no_thread_is_left(strategy):
    """After the last batch, an early break, an error of the loop or the loader, `close`, a with block."""
    for _ in strategy.data(Examples()):
        pass
    assert wait_until(lambda: not readers())
    for _ in strategy.data(endless([])):
        break
    gc.collect()
    assert wait_until(lambda: not readers())
    with pytest.raises(KeyboardInterrupt), strategy.data(endless([])) as found:
        for _ in found:
            raise KeyboardInterrupt
    assert wait_until(lambda: not readers())

    def failing():
        yield from batches()
        raise OSError("the disk is gone")

    for prefetch in (0, 2):
        found = strategy.data(failing(), prefetch=prefetch, at_end="drop")
        with pytest.raises(OSError, match="the disk is gone") as caught:
            list(found)
        assert any(entry.name == "failing" for entry in caught.traceback)
        assert list(found) == [] and wait_until(lambda: not readers())


# -- what is refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loader", "options", "pieces"),
    [
        ([{"x": ROWS[:8], "y": LABELS[:8]}] * 2, {}, ["16 rows", "got one of 8", "data_shard(1).n_rows"]),
        ([{"x": ROWS[:32], "y": LABELS[:32]}], {}, ["got one of 32"]),
        ([{"x": ROWS[:16], "y": LABELS[:8]}], {}, ["16 of batch['x']", "8 of batch['y']"]),
        ([{"x": ROWS[:16]}], {}, ["'train_step'", "batch['x'] (16, 8)"]),
        ([{"x": ROWS[:16], "y": ROWS[:16, 0]}], {}, ["batch['y'] is int32", "float32", "astype('int32')"]),
        ([], {}, ["empty"]),
        (iter([]), {}, ["has none. Pass", "read once"]),
        ([example(row) for row in range(3)], {"at_end": "drop"}, ["fewer rows", "'drop'"]),
        (iter([{"x": ROWS[:3], "y": LABELS[:3]}]), {"at_end": "drop"}, ["fewer rows", "'drop'"]),
        (None, {}, ["got NoneType", "Pass a dataset"]),
        (batches(), {"at_end": "pad"}, ["'pad'", "wrap"]),
        (batches(), {"prefetch": -1}, ["-1", "2 are usual"]),
        (batches(), {"argnums": 3}, ["3 arguments", "got 3"]),
        (batches(), {"argnums": 2}, ["argument 2 has no dimension"]),
        (batches(), {"autotune": True}, ["generator", "MapDataset"]),
        (of_grain().filter(lambda _: False), {}, ["None", "n_rows"]),
    ],
)
def test_what_is_no_batch_is_refused(strategy, loader, options, pieces):
    """With what to do."""
    with pytest.raises(AutoshardError) as caught:
        list(strategy.data(loader, **options))
    assert all(piece in str(caught.value) for piece in pieces), caught.value


def test_a_batch_that_fits_two_arguments_has_to_be_named():
    """Shapes cannot tell them apart."""
    strategy = autoshard.search(lambda a, b: a @ b.T, jnp.ones((B, 8)), jnp.ones((B, 8)), cluster="cpu:8", mesh={"data": 8})
    with pytest.raises(StrategyError, match=r"fits arguments 0 and 1.*argnums=1"):
        next(strategy.data([ROWS[:16]]))
    assert next(strategy.data([ROWS[:16]], argnums=1)).shape == (B, 8)


# -- Grain's autotuning -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_grain_tunes_workers_and_buffers(strategy, monkeypatch):
    """Its picks are used, within this process's share of cores and memory, and the batches are the same."""
    picked, used = [], []
    pick, prefetch = grain.experimental.pick_performance_config, grain.IterDataset.mp_prefetch

    def noted(*args, **options):
        found = pick(*args, **options)
        found.multiprocessing_options.num_workers = min(found.multiprocessing_options.num_workers, 1)
        picked.append(options)
        return found

    monkeypatch.setattr(grain.experimental, "pick_performance_config", noted)
    monkeypatch.setattr(grain.IterDataset, "mp_prefetch", lambda self, options: used.append(options) or prefetch(self, options))
    assert read(strategy.data(Examples(), autotune=True)) == WRAPPED
    assert used[0].num_workers == 1 and picked[0]["max_workers"] >= 1 and picked[0]["ram_budget_mb"] > 0


def test_without_grain_tuning_says_what_to_install(strategy, monkeypatch):
    """And other sources need no Grain."""
    monkeypatch.setattr("autoshard.data.sources.find_spec", lambda _: None)
    with pytest.raises(AutoshardError, match=r"pip install 'autoshard\[data\]'"):
        strategy.data(Examples(), autotune=True)
    assert read(strategy.data(Examples())) == WRAPPED
